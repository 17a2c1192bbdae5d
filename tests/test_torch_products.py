"""The products as torch's operators: values and gradients of any order, as of a masked matrix."""

import contextlib
import copy
import dataclasses
import gc
import operator
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import needs_bfloat16
from torch_helpers import drawn, grads, layout, ns, nst, torch

from numbsparse import device
from numbsparse.device import memory
from numbsparse.ops import choice
from numbsparse.torch import dispatch, kinds, operators

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

OPS = torch.ops.numbsparse
LAYOUT = layout(3, 4)  # of blocks of 4
SHAPES = [(12, 16), (10, 13)]
BATCHES = [(), (0,), (1,), (5,), (2, 0, 3), (2, 3)]


def matrix(shape=(12, 16), dtype=torch.float64, of=LAYOUT):
    return nst.BlockSparse(drawn(of.n_blocks, 4, 4, dtype=dtype), of, shape=shape)


def test_a_matrix_moves_as_its_values_do():
    w = matrix((10, 13), torch.float32)
    for of, dense in ((w, w.to_dense()), (w.T, w.to_dense().T)):
        wide = of.to(torch.float64)
        assert (wide.shape, wide.layout, wide.dtype) == (of.shape, of.layout, torch.float64)
        assert torch.equal(wide.to_dense(), dense.double())
        assert of.to("meta").device.type == "meta"
    wide.to_dense().sum().backward()
    assert w.values.grad.any()
    with pytest.raises(TypeError, match=r"got torch.int32"):
        w.to(torch.int32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradients_of_both_orders(shape, batch, transposed):
    w = matrix(shape)
    w = w.T if transposed else w
    x = drawn(*batch, w.shape[0], seed=1)
    inputs, y, expected = [x, w.values], x @ w, x @ w.to_dense()
    torch.testing.assert_close(y, expected)
    first = grads(y, inputs, create_graph=True)
    of_dense = grads(expected, inputs, create_graph=True)
    torch.testing.assert_close(first, of_dense)
    torch.testing.assert_close(grads(first, inputs), grads(of_dense, inputs))


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_features_first(batch, transposed):
    w = matrix((10, 13))
    w = w.T if transposed else w
    x = drawn(w.shape[1], *batch, seed=1)
    y, expected = w @ x, w.to_dense() @ x
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(y, [x, w.values]), grads(expected, [x, w.values]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_sddmm_and_gradients_of_both_orders(shape, rows):
    like = matrix(shape)
    a, b = drawn(shape[0], rows), drawn(rows, shape[1], seed=1)
    for of in (like, LAYOUT):
        s = nst.sddmm(a, b, of, block_size=4)
        mask = nst.BlockSparse(torch.ones_like(like.values), LAYOUT, shape=shape).to_dense()
        expected = (a @ b) * mask
        torch.testing.assert_close(s.to_dense(), expected)
    inside = torch.isfinite(s.values).all() and s.values.count_nonzero() == expected.count_nonzero()
    assert inside  # zero beyond the edge
    first = grads(s.values, [a, b], create_graph=True)
    of_dense = grads(expected, [a, b], create_graph=True)
    torch.testing.assert_close(first, of_dense)
    torch.testing.assert_close(grads(first, [a, b]), grads(of_dense, [a, b]))


def test_sddmm_of_a_transposed_layout():
    w, a, b = matrix((10, 13)).T, drawn(13, 5), drawn(5, 10)
    s = nst.sddmm(a, b, w)
    assert s.layout == w.layout
    kept = nst.BlockSparse(torch.ones_like(w.values), LAYOUT, shape=(10, 13)).to_dense().T
    torch.testing.assert_close(s.to_dense(), (a @ b) * kept)


def test_finite_differences():
    x, values = drawn(3, 10), drawn(LAYOUT.n_blocks, 4, 4)

    def product(x, values):
        return x @ nst.BlockSparse(values, LAYOUT, shape=(10, 13))

    assert torch.autograd.gradcheck(product, (x, values))
    assert torch.autograd.gradgradcheck(product, (x, values))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.library.opcheck itself
def test_operators_are_what_torch_asks_of_them():
    x, y, values = drawn(2, 3, 10), drawn(2, 3, 13), drawn(LAYOUT.n_blocks, 4, 4)
    how = (matrix().handle.word, 10, 13, 4, "highest")
    torch.library.opcheck(OPS.matmul.default, (x, values, *how))
    torch.library.opcheck(OPS.matmul_transposed.default, (y, values, *how))
    torch.library.opcheck(OPS.sddmm.default, (x, y, *how))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=needs_bfloat16), torch.float32],
    ids=str,
)
def test_dtypes(dtype):
    w, x = matrix(dtype=dtype), drawn(5, 12, dtype=dtype)
    y = x @ w
    assert y.dtype == dtype
    exact, dense = x.double(), w.to_dense().double()
    size = exact.abs() @ dense.abs()
    bound = 14 * 2.0**-23 * size + torch.finfo(dtype).eps * (exact @ dense).abs()
    assert ((y.double() - exact @ dense).abs() <= bound).all()
    assert {g.dtype for g in grads(y, [x, w.values])} == {dtype}


def test_strided_and_expanded_operands():
    w, base = matrix(), drawn(24, 10)
    x = base.T[:, ::2]
    torch.testing.assert_close(x @ w, x @ w.to_dense())
    (got,) = torch.autograd.grad((x @ w).sum(), w.values)  # of a gradient that is one number
    (expected,) = torch.autograd.grad((x @ w.to_dense()).sum(), w.values)
    torch.testing.assert_close(got, expected)


def test_no_copies_on_the_cpu():
    x, values = drawn(5, 12), drawn(LAYOUT.n_blocks, 4, 4)
    assert nst.operators.lent(x).ctypes.data == x.data_ptr()
    assert nst.BlockSparse(values, LAYOUT).values is values
    array = np.ones((2, 3))
    assert nst.operators.given_back(array, x).data_ptr() == array.ctypes.data


@pytest.mark.parametrize("enabled", [False, True])
@needs_bfloat16
def test_autocast(enabled):
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        y = x @ w
        s = nst.sddmm(x.T, drawn(5, 16, dtype=torch.bfloat16 if enabled else x.dtype), LAYOUT)
        called = torch.ops.numbsparse.matmul(x, w.values, *w.form, "highest")
    assert {y.dtype, s.dtype} == {torch.bfloat16 if enabled else torch.float32}
    torch.testing.assert_close(called, y, rtol=0, atol=0)
    narrow = [a.detach().to(y.dtype).requires_grad_() for a in (x, w.values)]
    torch.testing.assert_close(y, narrow[0] @ nst.BlockSparse(narrow[1], LAYOUT), rtol=0, atol=0)
    first = grads(y, [x, w.values])
    assert {g.dtype for g in first} == {torch.float32}
    torch.testing.assert_close(grads(called, [x, w.values]), first, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert (drawn(5, 12) @ matrix()).dtype == torch.float64  # as torch's own products
        for dtype in (torch.int64, torch.complex64):
            for call in (lambda a: a @ w, lambda a: nst.sddmm(a.T, x.detach(), LAYOUT)):
                with pytest.raises(TypeError, match="take one dtype, got torch"):
                    call(x.detach().to(dtype))


def test_precision_of_a_gradient_is_that_of_its_product(monkeypatch):
    seen = []
    sddmm = nst.operators.ops.sddmm
    monkeypatch.setattr(
        nst.operators.ops,
        "sddmm",
        lambda *a, **how: seen.append(how["precision"]) or sddmm(*a, **how),
    )
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32)
    with ns.set_precision("high"):
        y = x @ w
    y.sum().backward()
    nst.matmul(x, w, precision="highest").sum().backward()
    assert seen == ["high", "highest"]


def test_a_layout_lives_as_long_as_who_needs_it():
    pattern = ns.patterns.random(5, 3, 0.5, seed=9)
    w, x = nst.BlockSparse(drawn(int(pattern.sum()), 4, 4), pattern), drawn(2, 20)
    word, values, expected = w.handle.word, w.values, x @ w.to_dense()
    y = x @ w
    del w
    gc.collect()
    y.sum().backward()  # the tape has it
    del y
    gc.collect()
    with pytest.raises(LookupError, match=f"no layout here has the handle '{word}'"):
        OPS.matmul(x, values, word, 20, 12, 4, "highest")
    again = nst.BlockSparse(values, pattern)
    assert again.handle.word == word
    torch.testing.assert_close(x @ again, expected)
    for copied in (copy.deepcopy(again.handle), pickle.loads(pickle.dumps(again.handle))):
        del again
        gc.collect()
        again = nst.BlockSparse(values, copied)
        torch.testing.assert_close(x @ again, expected)
        del copied
        gc.collect()


def test_equal_layouts_keep_the_one_that_is_known():
    first, second = layout(6, 5, seed=8), layout(6, 5, seed=8)
    word = nst.handles.Handle(first).word
    assert nst.handles.Handle(second).word == word
    del first
    gc.collect()
    assert nst.handles.layout_of(word) == second
    del second
    gc.collect()
    with pytest.raises(LookupError):
        nst.handles.layout_of(word)


X, W = drawn(2, 12), matrix()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nst.BlockSparse(np.ones((5, 4, 4)), LAYOUT), TypeError, "values takes a tensor"),
        (lambda: nst.BlockSparse(torch.ones(5, 4, 4).int(), LAYOUT), TypeError, "got torch.int32"),
        (lambda: nst.BlockSparse(torch.ones(3, 4, 4), LAYOUT), ValueError, r"takes the shape \(5,"),
        (lambda: matrix((8, 16)), ValueError, r"shape takes at most \(12, 16\) and less than a bl"),
        (lambda: X[:, :8] @ W, ValueError, r"x takes the shape \(\.\.\., 12\) with this w"),
        (lambda: X.float() @ W, TypeError, "x and w take one dtype, got torch.float32"),
        (lambda: nst.matmul(X, X), TypeError, "w takes a BlockSparse of numbsparse.torch"),
        (lambda: nst.matmul(W, W), TypeError, "w takes a tensor of torch"),
        (lambda: nst.matmul(5, W), TypeError, "x takes a tensor of torch"),
        (lambda: X.detach().numpy() @ W, TypeError, "x takes a tensor of torch, got numpy.ndarray"),
        (lambda: np.asarray(W), TypeError, r"not made dense silently: call .* \.to_dense\(\)"),
        (lambda: ns.matmul(X, W), TypeError, "takes one BlockSparse, .* a numbsparse.torch.Block"),
        (lambda: nst.matmul(X.to("meta"), W), ValueError, "x and w take one device, got meta"),
        (lambda: nst.matmul(X, W, precision="low"), ValueError, "precision takes one of"),
        (lambda: nst.sddmm(X, X, LAYOUT), ValueError, r"take the shapes \(in_features, batch\)"),
        (lambda: nst.sddmm(X.T, X.float(), LAYOUT), TypeError, "a and b take one dtype"),
        (lambda: nst.sddmm(X.T, X, W, block_size=8), ValueError, "block_size takes that of layout"),
        (lambda: nst.sddmm(X.T[:10], X[:, :10], LAYOUT), ValueError, "block_size is needed: fea"),
        (lambda: nst.sddmm(X.T, X, LAYOUT, block_size=2), ValueError, r"a @ b, in blocks of 2, t"),
    ],
)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()
    if "dtype" not in says:  # which autocast makes one of
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(error, match=says):
            call()


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
    array = operators.lent(x)
    np.testing.assert_array_equal(array, x.numpy())
    assert array.dtype == x.numpy().dtype
    whole += 1
    del whole
    gc.collect()
    np.testing.assert_array_equal(array, x.numpy())


def test_matrices_are_not_compared_by_identity():
    w, other = matrix(), matrix()
    for compare in (operator.eq, operator.ne):
        with pytest.raises(TypeError, match="compare their values and layouts"):
            compare(w, other)
    assert w != "a word"
    assert len({w, other}) == 2
