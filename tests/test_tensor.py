"""A Tensor as Python and NumPy see it: a number, a condition, a text, an array, rows."""

import copy
import itertools
import operator
import pickle
from types import ModuleType

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device, edits
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
def test_several_values_are_not_a_number(convert, shape):
    with pytest.raises(ValueError, match=f"takes a Tensor of one value, got the shape .{shape[0]}"):
        convert(ns.Tensor(np.ones(shape)))


def test_a_condition_on_several_values_says_why_not():
    with pytest.raises(ValueError, match=r"bool\(\) takes .* has several: .* or all, or any\?"):
        bool(ns.Tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"float\(\) takes .* \(0,\), which has none"):
        float(ns.Tensor([]))
    with pytest.raises(ValueError, match=r"bool\(\) takes a Tensor of one value"):
        bool(ns.Tensor(ns.BlockSparse(np.ones((1, 4, 4)), [[1]])))


def test_numpy_takes_the_values():
    values = np.arange(6.0).reshape(2, 3)
    x = ns.Tensor(values)
    assert np.shares_memory(np.asarray(x), values)
    assert not np.shares_memory(np.array(x), values)
    assert np.asarray(x, np.float32).dtype == np.float32
    np.testing.assert_array_equal(x, values)
    with ns.no_grad():
        assert np.shares_memory(np.asarray(ns.Tensor(values, requires_grad=True)), values)


@pytest.mark.parametrize("of", [np.sum, np.mean], ids=["sum", "mean"])
def test_numpy_sums_and_averages_on_the_tape(of, put):
    x = ns.Tensor(put(np.arange(6, dtype=np.float32).reshape(2, 3)), requires_grad=True)
    y = of(x, axis=1, keepdims=True)
    assert y.shape == (2, 1)
    np.testing.assert_array_equal(y.numpy(), of(x.numpy(), axis=1, keepdims=True))
    of(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), 1 if of is np.sum else 1 / 6)
    for other in ({"out": np.zeros(2)}, {"dtype": "float64"}, {"axes": 0}):
        with pytest.raises(TypeError, match=rf"^{of.__name__} takes .*\b{next(iter(other))}\b"):
            x.sum(**other) if of is np.sum else x.mean(**other)


def test_numpy_does_not_cut_the_tape(put, place):
    with pytest.raises(RuntimeError, match=r"requires a gradient.*\.numpy\(\)"):
        np.asarray(ns.Tensor([1.0], requires_grad=True))
    with pytest.raises(TypeError, match=r"block-sparse Tensor is not an array.*\.numpy\(\)"):
        np.asarray(ns.Tensor(W))
    with pytest.raises(TypeError, match=r"\.toarray\(\)"):
        np.asarray(W)
    if place == "cuda":
        with pytest.raises(TypeError, match=r"a Tensor on the CPU.*\.numpy\(\)"):
            np.asarray(ns.Tensor(put(np.ones(2, np.float32))))


def test_other_libraries_take_the_values():
    """By DLPack, in whose form torch.tensor, as_tensor and from_dlpack take them."""
    values = np.arange(6.0).reshape(2, 3)
    got = np.from_dlpack(ns.Tensor(values.T))
    assert np.shares_memory(got, values)
    np.testing.assert_array_equal(got, values.T)
    x = ns.Tensor(values, requires_grad=True)
    assert x.__dlpack_device__() == (1, 0)
    with pytest.raises(RuntimeError, match=r"requires a gradient.*\.numpy\(\)"):
        np.from_dlpack(x)
    with pytest.raises(TypeError, match="block-sparse Tensor is not an array"):
        np.from_dlpack(ns.Tensor(W))
    with ns.no_grad():
        assert np.shares_memory(np.from_dlpack(x), values)


@pytest.mark.parametrize("how", ["tensor", "as_tensor", "asarray", "from_dlpack"])
def test_torch_takes_the_values(how):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    for values in (np.arange(6.0).reshape(2, 3).T, np.float32(2.5), np.array([1, 2])):
        got = getattr(torch, how)(ns.Tensor(values))
        np.testing.assert_array_equal(got.numpy(), values, strict=True)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        getattr(torch, how)(ns.Tensor([1.0], requires_grad=True))


def test_functions_of_arrays_take_no_tensor(put):
    """It lends its values to others, but here its tape would be forgotten."""
    x = ns.Tensor(put(np.ones((2, 4), np.float32)))
    assert not device.is_device_operand(x)
    with pytest.raises(TypeError, match=r"got .*Tensor"):
        ns.ops.exp(x)


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
    assert 3.0 in x
    assert 5.0 not in x


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_are_of_each_value(put, rng, name):
    compare = getattr(operator, name)
    a, b = rng.integers(0, 3, (2, 4, 3)).astype(np.float32)
    x = ns.Tensor(put(a), requires_grad=True)
    for other, values in (
        (ns.Tensor(put(b)), b),
        (b, b),
        (put(b[0]), b[0]),
        (1, 1),
        ([0, 1, 2],) * 2,
    ):
        found = compare(x, other)
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, compare(a, values))
    with pytest.raises(ValueError, match=r"takes shapes that broadcast, got \(4, 3\) and \(2,\)"):
        compare(x, b[0, :2])
    for other in (None, "a", object()):
        if name in ("eq", "ne"):
            assert compare(x, other) is (name == "ne")
        else:
            with pytest.raises(TypeError, match="not supported between instances of 'Tensor'"):
                compare(x, other)


def test_sets_and_dicts_know_tensors_themselves(put):
    x, same = (ns.Tensor(put(np.float32([1, 2]))) for _ in range(2))
    assert len({x, same, x}) == 2
    assert {x: 1, same: 2}[same] == 2
    assert not (ns.Tensor(W) != ns.Tensor(W)).toarray().any()
    assert (ns.Tensor(W) == 1).toarray().all()


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


def test_a_copy_in_another_process_was_not_changed_there(monkeypatch):
    """Where fewer tensors were made, so that numbers are lower."""
    weight = ns.nn.Parameter(np.ones(2))
    weight.data = np.full(2, 3.0)
    pickled = pickle.dumps((weight, weight))
    monkeypatch.setattr(edits, "serial", itertools.count(1).__next__)
    weight, same = pickle.loads(pickled)
    assert weight is same
    assert type(weight) is ns.nn.Parameter
    loss = (weight * weight).sum()
    loss.backward()
    np.testing.assert_array_equal(weight.grad.data, [6, 6])
    loss = (weight * weight).sum()
    weight.data = np.ones(2)
    with pytest.raises(RuntimeError, match=r"was changed by an assignment to \.data"):
        loss.backward()


def test_what_was_computed_is_copied_without_its_way_back():
    x = ns.Tensor(np.ones(2), requires_grad=True)
    for copied in (lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy):
        assert copied(x).requires_grad
        np.testing.assert_array_equal(copied((x * 2).detach()).data, [2, 2])
        with pytest.raises(TypeError, match=r"computed .*\.detach\(\)"):
            copied(x * 2)
