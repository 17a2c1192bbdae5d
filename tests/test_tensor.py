"""A Tensor as Python and NumPy see it: a number, a condition, a text, an array, rows."""

from types import ModuleType

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.dtypes import type_name

W = ns.BlockSparse(np.ones((1, 4, 4)), [[1]])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_value_is_a_number(put, shape):
    x = ns.Tensor(put(np.full(shape, 2.5, np.float32)), requires_grad=True)
    assert (float(x), int(x), x.item(), bool(x)) == (2.5, 2, 2.5, True)
    assert bool(ns.Tensor(put(np.zeros(shape, np.float32)))) is False


def test_a_number_is_formatted(put):
    loss = ns.Tensor(put(np.float32(2.71828)), requires_grad=True)
    assert f"{loss:.3f} {loss:>8.1e}" == "2.718  2.7e+00"
    assert f"{loss}" == str(loss)
    with pytest.raises(TypeError, match=r"'\.3f' takes a Tensor without axes, got \(2,\)"):
        f"{ns.Tensor([1.0, 2.0]):.3f}"


@pytest.mark.parametrize("convert", [float, int, bool, lambda x: x.item()])
@pytest.mark.parametrize("shape", [(2,), (0,), (1, 2)], ids=str)
def test_several_values_are_no_number(convert, shape):
    with pytest.raises(ValueError, match="takes a Tensor of one value, got the shape"):
        convert(ns.Tensor(np.ones(shape)))


def test_numpy_takes_the_values():
    values = np.arange(6.0).reshape(2, 3)
    x = ns.Tensor(values)
    assert np.shares_memory(np.asarray(x), values)
    assert not np.shares_memory(np.array(x), values)
    assert np.asarray(x, np.float32).dtype == np.float32
    np.testing.assert_array_equal(x, values)
    with ns.no_grad():
        assert np.shares_memory(np.asarray(ns.Tensor(values, requires_grad=True)), values)


def test_numpy_does_not_cut_the_tape(put, place):
    with pytest.raises(RuntimeError, match=r"requires a gradient.*\.numpy\(\)"):
        np.asarray(ns.Tensor([1.0], requires_grad=True))
    with pytest.raises(TypeError, match=r"dense Tensor on the CPU.*\.numpy\(\)"):
        np.asarray(ns.Tensor(W))
    with pytest.raises(TypeError, match=r"\.toarray\(\)"):
        np.asarray(W)
    if place == "cuda":
        with pytest.raises(TypeError, match=r"dense Tensor on the CPU.*\.numpy\(\)"):
            np.asarray(ns.Tensor(put(np.ones(2, np.float32))))


def test_rows(put):
    x = ns.Tensor(put(np.float32([[1, 2], [3, 4]])), requires_grad=True)
    first, second = x
    (first * second * second).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[9, 16], [6, 16]])
    assert len(x) == 2
    for call in (len, list):
        with pytest.raises(TypeError, match="Tensor with axes"):
            call(ns.Tensor(1.0))
    with pytest.raises(TypeError, match="dense Tensor"):
        list(ns.Tensor(W))
    with pytest.raises(TypeError, match="not a container"):
        1.0 in x  # noqa: B015


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    for call in (
        ns.Tensor,
        ns.to_device,
        ns.ops.exp,
        lambda x: ns.Tensor([1.0, 2.0]) + x,
        lambda x: ns.BlockSparse(x.reshape(2, 1, 1), [[1, 1]]),
        lambda x: ns.Layout(x[None]),
        lambda x: ns.matmul(x[:, None], ns.BlockSparse(np.ones((1, 1, 1)), [[1]])),
        lambda x: ns.nn.functional.embedding(ns.Tensor(np.ones((3, 2))), x.astype(int)),
    ):
        with pytest.raises(TypeError, match=r"no masked array, .*\.filled"):
            call(masked)


def test_a_subclass_of_array_is_taken_as_an_array():
    x = ns.Tensor(np.ones((2, 2)).view(np.matrix))
    assert type(x.data) is np.ndarray
    assert (x * x).sum().item() == 4


def test_types_are_called_what_users_call_them():
    foreign = type("Tensor", (), {"__module__": "torch.nn"})()
    assert type_name(foreign) == "torch.Tensor"
    assert type_name(ModuleType("m")) == "module"
    for call in (
        lambda: ns.Tensor([1.0]) + foreign,
        lambda: ns.ops.exp(foreign),
        lambda: ns.ops.take_rows(np.ones((2, 2)), foreign),
        lambda: ns.nn.functional.power(ns.Tensor([1.0]), foreign),
        lambda: ns.matmul(foreign, foreign),
    ):
        with pytest.raises(TypeError, match=r"got .*\btorch\.Tensor"):
            call()
