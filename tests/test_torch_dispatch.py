"""What torch's dispatcher, modes, transforms and streams see of the products."""

import contextlib
import dataclasses
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from torch_helpers import drawn, layout, nst, torch

from numbsparse import device
from numbsparse.device import memory
from numbsparse.ops import choice
from numbsparse.torch import dispatch, kinds, operators

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

OPS = torch.ops.numbsparse
LAYOUT = layout(3, 4)  # of blocks of 4


def matrix(shape=(12, 16), dtype=torch.float64, of=LAYOUT):
    return nst.BlockSparse(drawn(of.n_blocks, 4, 4, dtype=dtype), of, shape=shape)


def test_operators_work_on_the_stream_of_torch(monkeypatch):
    numbers, on_a_gpu = {"first": 0x100, "then": 0}, SimpleNamespace(get_device=lambda: 0)
    seen = []

    def kernel(x, y):
        seen.append(device.current_stream())

    for number in numbers.values():
        monkeypatch.setattr(dispatch, "raw_stream", lambda torch, n=number: lambda index: n)
        dispatch.in_order(kernel)(on_a_gpu, 2)
        with device.streams.at(0x200, device=0):  # made up: it must not be asked for its GPU
            dispatch.in_order(kernel)(on_a_gpu, 2)
    assert [stream.handle for stream in seen] == [0x100, 0x100, 1, 1]
    assert [stream.of_torch for stream in seen] == [True, True, False, False]
    assert device.current_stream().handle == 1


class FakeStream(contextlib.nullcontext):
    handle, is_captured = 1, False


def test_what_came_before_on_a_gpu_is_started_and_nothing_else(monkeypatch):
    """By tensors of the CPU, in the place of those that a GPU has."""
    w, x, began, worked = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32), [], []
    index = dataclasses.replace(w.layout.index, replays={})
    monkeypatch.setattr(w.layout, "device_index", index, raising=False)
    stream, out, known = FakeStream(), torch.full((5, 16), torch.nan), {}
    monkeypatch.setattr(kinds.streams, "several", True)
    monkeypatch.setattr(kinds.streams, "of_torch", lambda handle, device: stream)
    monkeypatch.setattr(kinds, "_stream_of", lambda device: 0)
    monkeypatch.setattr(kinds, "new_empty", lambda x, shape: out[: shape[0]])
    monkeypatch.setattr(memory, "note", lambda *of: None)

    def kernel(x, values, *rest, out):
        worked.append(None)
        assert not torch.is_grad_enabled()
        if (record := device.runtime.recording()) is not None:
            record.add(lambda: began.append(None) or (0,))

    started = kinds.started(kernel, lambda x, values, *rest: (len(x), 16))

    def is_started(x, values, how):
        kind = kinds.kind_of(known, (x, values), how)
        kind = kind or kinds.new_kind(known, (x, values), how)
        before = len(began), len(worked)
        y = started(kind, (x, values), how)
        assert (y.data_ptr(), y.shape) == (out.data_ptr(), (len(x), 16))
        after = len(began) - before[0], len(worked) - before[1]
        assert after in ((1, 0), (0, 1))
        return after == (1, 0)

    how = (*w.form, "highest")
    plain = x, w.values, how
    assert [is_started(*plain) for _ in range(5)] == [False, False, True, True, True]
    odd = [
        (x[:4], w.values, how), (x.view(torch.int32), w.values, how),
        (x.as_strided((5, 12), (1, 5)), w.values, how), (torch._neg_view(x), w.values, how),
        (x.detach(), w.values, how), (x.clone(), w.values, how), (x, w.values.mT, how),
        (x, w.values.clone(), how), (x, torch._neg_view(w.values), how),
        (x, w.values, (*w.form, "high")),
    ]  # fmt: skip
    monkeypatch.setattr(kinds, "KEPT", len(odd) + 1)  # none is forgotten for others
    assert [is_started(*of) for of in odd] == len(odd) * [False]
    assert is_started(*plain)
    with torch.no_grad():
        assert not is_started(*plain)
    with torch.inference_mode():
        assert not is_started(*plain)
    for thing, name, value in (
        (stream, "handle", 0x100), (stream, "is_captured", True), (choice, "era", choice.era + 1),
        (device.runtime, "several_devices", True), (w.layout, "device_index", None),
    ):  # fmt: skip
        known.clear()
        kind = kinds.new_kind(known, plain[:2], how)
        assert [is_started(*plain) for _ in range(3)] == [False, False, True]
        with monkeypatch.context() as changed:
            changed.setattr(thing, name, value)
            if thing is w.layout:
                kind.index = lambda: None
            assert not is_started(*plain), name


def test_few_kinds_of_tensors_are_known():
    known, how, x = {}, ("a",), torch.ones(9, 2)
    made = [kinds.new_kind(known, (x[:n],), how) for n in range(9)]
    assert known == {how: made[: -kinds.KEPT - 1 : -1]}
    assert kinds.kind_of(known, (x[:8],), how) is made[8]
    assert kinds.kind_of(known, (x[:1],), how) is None
    for n in range(kinds.REMEMBERED):
        kinds.new_kind(known, (x,), (n,))
    assert len(known) < 2 * len(made)


class Seen(TorchDispatchMode):
    """Which operators the dispatcher calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "_opname", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_modes_of_torch_see_what_goes_round_its_dispatcher_otherwise(grad):
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32, grad=grad)
    w.values.requires_grad_(grad)
    plain = x @ w
    assert plain.requires_grad == grad
    for mode in (Seen(), Functions()):
        with mode:
            torch.testing.assert_close(x @ w, plain, rtol=0, atol=0)
        assert "matmul" in mode.names
    with torch.profiler.profile(acc_events=True) as profile:
        _ = x @ w
    assert "numbsparse::matmul" in {event.name for event in profile.events()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(x @ w, plain.detach(), rtol=0, atol=0)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # of torch's parts
def test_forward_derivatives():
    w, x = matrix(), drawn(3, 12)
    values, y = w.values.detach().requires_grad_(), drawn(3, 16)
    pixels, taps = drawn(1, 4, 3, 3), nst.Conv2d(4, 4, 2, block_size=4, dtype=torch.float64)
    for multiply, operands in (
        (lambda x, v: x @ nst.BlockSparse(v, w.layout), (x, values)),
        (lambda y, v: y @ nst.BlockSparse(v, w.layout).T, (y, values)),
        (lambda x, y: nst.sddmm(x.T, y, w.layout).values, (x, y)),
        (lambda x, v: torch.func.functional_call(taps, {"weight": v}, (x,)), (pixels, taps.weight)),
    ):
        how = {"check_forward_ad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(lambda *of: multiply(*of).tanh(), operands, **how)  # noqa: B023
        assert torch.autograd.gradgradcheck(multiply, operands, check_fwd_over_rev=True)
    sparse, dense = (
        torch.func.hessian(lambda x: times(x).tanh().sum())(x.detach())  # noqa: B023
        for times in (lambda x: x @ w, lambda x: x @ w.to_dense())
    )
    torch.testing.assert_close(sparse, dense)
    lstm = nst.LSTM(4, 4, block_size=4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jacfwd(lambda x: lstm(x)[0])(drawn(2, 1, 4).detach())


def test_transforms_of_functions_are_those_of_a_dense_product():
    w, x, func = matrix(), drawn(5, 12).detach(), torch.func
    kept = nst.BlockSparse(torch.ones_like(w.values), w.layout).to_dense()

    def ours(x, values):
        own = nst.BlockSparse(values, w.layout)
        return nst.sddmm(x.mT, (own.T @ x.mT).mT, own).values.square().sum()

    def dense(x, values):
        whole = nst.BlockSparse(values, w.layout).to_dense()
        return (x.mT @ (x @ whole) * kept).square().sum()

    twice = lambda f: func.grad(lambda *of: func.grad(f, 1)(*of).square().sum())  # noqa: E731
    each = lambda f: func.vmap(func.grad(f, 1), (0, None))  # noqa: E731
    for transform, a in ((func.grad, x), (twice, x), (each, x[:, None])):
        got, expected = (transform(f)(a, w.values.detach()) for f in (ours, dense))
        torch.testing.assert_close(got, expected)


def batch_of(a, axis, count):
    """`count` different tensors like one, along an axis; the one itself where that is None."""
    if axis is None:
        return a
    return (a[None] * torch.arange(1, count + 1).view(-1, *a.dim() * [1])).movedim(0, axis)


@pytest.mark.parametrize("axes", [(0, None), (-1, None), (-2, 0), (None, 1), (0, -1)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_vmap_is_one_product_unless_weights_differ(axes, count, transposed):
    w = matrix((10, 13)).T if transposed else matrix((10, 13))
    x, values = drawn(2, w.shape[0], grad=False), w.values.detach()

    def like_w(values):
        own = nst.BlockSparse(values, LAYOUT, shape=(10, 13))
        return own.T if transposed else own

    batches = [batch_of(a, axis, count) for a, axis in zip((x, values), axes, strict=True)]
    with Seen() as seen:
        got = torch.vmap(lambda x, values: nst.matmul(x, like_w(values)), axes)(*batches)
    assert sum("matmul" in name for name in seen.names) == (1 if axes[1] is None else count)
    expected = torch.vmap(lambda x, values: x @ like_w(values).to_dense(), axes)(*batches)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_vmap_of_convolutions(count):
    conv = nst.Conv2d(5, 7, 3, padding=1, block_size=4, dtype=torch.float64)
    images = batch_of(drawn(2, 5, 4, 3, grad=False), 1, count)
    with Seen() as seen:
        got = torch.vmap(conv, 1)(images)
    assert seen.names.count("conv") == 1
    torch.testing.assert_close(got, conv(images.movedim(1, 0).flatten(0, 1)).view_as(got))


def test_odd_tensors_go_through_the_dispatcher():
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32, grad=False)
    w.values.requires_grad_(False)

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "_opname", ""))
            return super().__torch_function__(function, types, args, kwargs or {})

    seen = []
    _ = operators.matmul((x.as_subclass(Named), w.values), (*w.form, "highest"))
    assert "matmul" in seen
    meta = operators.matmul((x.to("meta"), w.values.to("meta")), (*w.form, "highest"))
    assert (meta.device.type, tuple(meta.shape)) == ("meta", (5, 16))
    negative = torch._neg_view(x)  # the same memory, with another sign to be
    torch.testing.assert_close(negative @ w, -(x @ w), rtol=0, atol=0)


@pytest.mark.parametrize("make", ["empty", "transposed", "sliced", "repeated", "one number"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_lent_tensors_share_their_memory(make, dtype):
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    x = {
        "empty": whole[:0],
        "transposed": whole.T,
        "sliced": whole[1::2, ::3],
        "repeated": whole[:1].expand(3, 6),
        "one number": whole[2, 3],
    }[make]
    array = operators.lent(x, "x")
    np.testing.assert_array_equal(array, x.numpy())
    assert array.dtype == x.numpy().dtype
    whole += 1
    del whole
    gc.collect()
    np.testing.assert_array_equal(array, x.numpy())


def test_numbers_that_the_dispatcher_gives_in_a_list_name_a_kind():
    seen = []
    run = kinds.by_dispatcher(lambda *of: seen.append(of), 2)
    of = torch.zeros(3), torch.zeros(4)
    for numbers in ([1, 2], [1, 2], [1, 3]):
        run(*of, "a layout", numbers, "highest")
    (first, _, rest), (again, *_), (other, *_) = seen
    assert rest == ("a layout", (1, 2), "highest")
    assert first is again is not other
