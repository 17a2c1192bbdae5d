"""BlocksparseMatMul and BlocksparseConv against sums in float64, written as their classes say."""

import pickle
import re
from importlib.util import find_spec
from math import prod

import numpy as np
import pytest
from arguments_helpers import ODD, what_is_said
from conftest import host

import numbsparse as ns
from numbsparse.compat.blocksparse import BlocksparseConv, BlocksparseMatMul

pytestmark = pytest.mark.usefixtures("cheap_products")

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
LAYOUT = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]])  # an empty row, and column


def dense(bsmm, w, gate=None):
    """The matrix, (C, K), put together by block_coord."""
    whole, size = np.zeros((bsmm.C, bsmm.K)), bsmm.bsize
    for b, block in enumerate(host(w).astype(np.float64)):
        c, k = bsmm.block_coord(b)
        number = 1.0 if gate is None else host(gate)[b]
        whole[c * size : (c + 1) * size, k * size : (k + 1) * size] = block * number
    return whole


def drawn(rng, bsmm, batch=7, dtype=np.float64):
    """x, w and a gate, some of whose numbers are 0."""
    gate = rng.standard_normal(bsmm.g_shape) * (np.arange(bsmm.blocks) % 3 > 0)
    x, w = (rng.standard_normal(shape) for shape in (bsmm.i_shape(batch), bsmm.w_shape))
    return [array.astype(dtype) for array in (x, w, gate)]


def product(bsmm, x, w, gate=None):
    x, w = host(x).astype(np.float64), dense(bsmm, w, gate)
    return x @ w if bsmm.axis else w.T @ x


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [4, 16])
def test_product(rng, put, place, size, axis, gated):
    bsmm = BlocksparseMatMul(LAYOUT, size, axis)
    x, w, gate = map(put, drawn(rng, bsmm, dtype=np.float32))
    y = bsmm(x, w, gate=gate if gated else None)
    assert type(y) is type(x)
    assert y.shape == bsmm.o_shape(7)
    right = product(bsmm, x, w, gate if gated else None)
    np.testing.assert_allclose(host(y), right, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(host(bsmm.matmul(ns.Tensor(x), w, gate if gated else None).data),
                                  host(y))  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_are_those_of_the_product(rng, axis):
    bsmm = BlocksparseMatMul(LAYOUT, 4, axis)
    x, w, gate = drawn(rng, bsmm, 3)
    ns.testing.check_grads(bsmm, x, w, order=2)
    ns.testing.check_grads(lambda *a: bsmm(*a, gate_grad=True), x, w, gate, order=2)


LIBRARIES = ["ours", pytest.param("torch", marks=needs_torch)]


def tensors(library, *arrays):
    if library == "ours":
        return [ns.Tensor(a, requires_grad=True) for a in arrays]
    import torch

    return [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("gate_grad", "dw_gated"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_what_a_gate_does_to_gradients(rng, library, axis, gate_grad, dw_gated):
    bsmm = BlocksparseMatMul(LAYOUT, 4, axis)
    arrays = drawn(rng, bsmm)
    x, w, gate = tensors(library, *arrays)
    y = bsmm(x, w, gate, bool(gate_grad), bool(dw_gated))
    assert type(y) is type(x)
    right = product(bsmm, *arrays)
    np.testing.assert_allclose(y.detach().numpy(), right, rtol=0, atol=1e-12)
    dy = rng.standard_normal(right.shape)
    y.backward(tensors(library, dy)[0].detach())
    of_batch = (lambda a: a) if axis else np.transpose
    whole = of_batch(arrays[0]).T @ of_batch(dy)  # (C, K)
    size = bsmm.bsize
    dw = np.empty(bsmm.w_shape)
    for b in range(bsmm.blocks):
        c, k = bsmm.block_coord(b)
        dw[b] = whole[c * size : (c + 1) * size, k * size : (k + 1) * size]
    expected = dw * arrays[2][:, None, None] if gate_grad or dw_gated else dw
    np.testing.assert_allclose(w.grad.numpy(), expected, rtol=0, atol=1e-12)
    dx = dy @ dense(bsmm, *arrays[1:]).T if axis else dense(bsmm, *arrays[1:]) @ dy
    np.testing.assert_allclose(x.grad.numpy(), dx, rtol=0, atol=1e-12)
    if gate_grad:
        np.testing.assert_allclose(gate.grad.numpy(), (dw * arrays[1]).sum((1, 2)), atol=1e-11)
    else:
        assert gate.grad is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_infinite_weight_stays_infinite_with_a_gate(library):
    bsmm = BlocksparseMatMul([[1]], 4)
    values = np.ones(bsmm.w_shape)
    values[0, 0, 1], values[0, 1, 2] = np.inf, -np.inf
    x, w, gate = tensors(library, np.ones((2, 4)), values, np.float64([0.5]))
    y = bsmm(x, w, gate)
    np.testing.assert_array_equal(y.detach().numpy(), [[2, np.inf, -np.inf, 2]] * 2)
    y.backward(tensors(library, np.ones((2, 4)))[0].detach())
    np.testing.assert_array_equal(w.grad.numpy()[np.isfinite(values)], 2)


@needs_torch
def test_tensors_of_torch_come_out_as_they_came_in(rng):
    import torch

    bsmm, conv = BlocksparseMatMul(LAYOUT, 4), BlocksparseConv([(range(4), range(8))], (3,), (5,))
    x, w, gate = (torch.from_numpy(a) for a in drawn(rng, bsmm))
    f, images = (
        torch.from_numpy(rng.standard_normal(s)) for s in (conv.f_shape(), conv.i_shape(2))
    )
    for call, arrays in (
        (bsmm, (x, w, gate.numpy())),
        (bsmm.l2_normalize, (w,)),
        (conv, (f, images)),
        (conv.l2_normalize, (f,)),
    ):
        y = call(*arrays)
        assert type(y) is torch.Tensor
        np.testing.assert_array_equal(y.numpy(), call(*map(np.asarray, arrays)))
        if call is not bsmm:
            with pytest.raises(TypeError, match="torch's tape does not see this"):
                call(arrays[0].clone().requires_grad_(), *arrays[1:])


@pytest.mark.parametrize("gained", [False, True])
def test_columns_of_length_one_or_gain(rng, put, gained):
    bsmm = BlocksparseMatMul(LAYOUT, 8)
    w = rng.standard_normal(bsmm.w_shape)
    gain = rng.standard_normal(bsmm.K) if gained else None
    given = [put(w.astype(np.float32)), put(gain.astype(np.float32)) if gained else None]
    got = bsmm.l2_normalize(*given, epsilon=0.5)
    assert type(got) is type(given[0])
    whole = dense(bsmm, w)
    right = whole / np.sqrt(0.5 + (whole**2).sum(0)) * (gain if gained else 1)
    np.testing.assert_allclose(dense(bsmm, got), right, rtol=0, atol=1e-5)
    if gained:
        ns.testing.check_grads(bsmm.l2_normalize, w, gain)


@pytest.mark.parametrize("z_order", [False, True])
def test_weights_that_were_trained_elsewhere(rng, z_order):
    """Each block holds its own place; theirs are sorted as text, bit by bit."""
    layout = rng.random((5, 19)) < 0.6
    bsmm = BlocksparseMatMul(layout, 4, z_order=z_order)

    def key(place):
        bits = [f"{n:08b}" for n in place]
        return "".join(k + c for c, k in zip(*bits, strict=True)) if z_order else place[::-1]

    places = sorted(((int(c), int(k)) for c, k in np.argwhere(layout)), key=key)
    theirs = np.zeros(bsmm.w_shape, int) + np.array([100 * c + k for c, k in places])[:, None, None]
    ours = bsmm.from_blocksparse(theirs)[:, 0, 0]
    assert [divmod(int(n), 100) for n in ours] == [bsmm.block_coord(b) for b in range(bsmm.blocks)]


def test_first_values_and_attributes():
    bsmm = BlocksparseMatMul(np.eye(4, dtype=int) + np.eye(4, k=1, dtype=int), 8, name="gates")
    w = bsmm.identity_init(scale=3)(bsmm.w_shape)
    assert w.dtype == np.float32
    np.testing.assert_array_equal(dense(bsmm, w), 3 * np.eye(32))
    q = dense(bsmm, bsmm.ortho_init()(bsmm.w_shape, "float64"))[:, 8:16]
    np.testing.assert_allclose(q.T @ q, np.eye(8), atol=1e-12)
    assert (bsmm.blocks, bsmm.bsize, bsmm.axis, bsmm.name) == (7, 8, 1, "gates")
    assert (bsmm.CB, bsmm.KB, bsmm.C, bsmm.K, bsmm.sparsity) == (4, 4, 32, 32, 0.438)
    with pytest.raises(ValueError, match=r"shape takes \(7, 8, 8\), got \(6, 8"):
        bsmm.identity_init()((6, 8, 8))
    again = pickle.loads(pickle.dumps(bsmm))
    assert again.w_shape == bsmm.w_shape
    np.testing.assert_array_equal(again.layout, bsmm.layout)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: BlocksparseMatMul([[1, 2]]), ValueError, "layout takes"),
        (lambda: BlocksparseMatMul([[1, 0]], 12), ValueError, "block_size takes one of"),
        (lambda: BlocksparseMatMul([[1, 0]], feature_axis=2), ValueError, "from 0 to 1, got 2"),
        (lambda: of_ones(i=(4, 7)), ValueError, r"x takes.*\(4, 8\), got \(4, 7\); f"),
        (lambda: of_ones(i=(8, 4), axis=1), ValueError, r"\(8, 8\), got.*; feature_axis is 1"),
        (lambda: of_ones(i=(4, 8), axis=0), ValueError, r"\(8, 8\), got.*; feature_axis is 0"),
        (lambda: of_ones(i=()), ValueError, r"x takes an array of shape \(0, 8\), got \(\)"),
        (lambda: of_ones(w=(2, 4, 4)), ValueError, r"w takes an array of shape \(1, 4, 4\), got"),
        (lambda: of_ones(gate=(2,)), ValueError, r"gate takes an array of shape \(1,\), got \(2,"),
        (lambda: of_ones(i_dtype=np.float32), TypeError, "x and w take one dtype|dtype"),
    ],
)  # fmt: skip
def test_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


ODD_CALLS = {  # of each argument that is odd
    "matmul": (BlocksparseMatMul, {
        "layout": [[1]], "block_size": 4, "feature_axis": 1, "z_order": True}),
    "call": (lambda **how: of_ones(**how), {"gate_grad": False, "dw_gated": False}),
    "first values": (BlocksparseMatMul([[1]], 4).ortho_init(), {"shape": (1, 4, 4)}),
    "place": (BlocksparseMatMul([[1]], 4).block_coord, {"block": 0}),
    "conv": (BlocksparseConv, {
        "BCK": [(range(4), range(4))], "TRS": (3, 3), "DHW": (5, 5), "MPQ": None,
        "strides": (1,), "dilates": (1,), "padding": "VALID"}),
    "filter": (BlocksparseConv([(range(4), range(4))], (3,), (5,)).f_shape, {"block": 0}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_arguments_are_taken_or_named(name):
    call, right = ODD_CALLS[name]
    for argument in right:
        for odd in ODD:
            said = what_is_said(call, right | {argument: odd})
            named = rf"(?i)\b({argument}|kernel_size)\b.* takes? "
            assert said is None or re.search(named, said), (argument, odd, said)


def of_ones(i=(4, 8), w=(1, 4, 4), gate=(1,), axis=1, i_dtype=np.float64, **how):
    bsmm = BlocksparseMatMul([[1], [0]], 4, axis)
    return bsmm(np.ones(i, i_dtype), np.ones(w), np.ones(gate), **how)


def lists(blocks, c_step, c_size, k_step, k_size):
    """Channels of each block, those in from b * c_step on."""
    return [
        (range(b * c_step, b * c_step + c_size), range(b * k_step, b * k_step + k_size))
        for b in range(blocks)
    ]


def shuffled(bck, seed=0):
    """The same with the channels in other places, in another order."""
    rng = np.random.default_rng(seed)
    c, k = (rng.permutation(1 + max(map(max, side))) for side in zip(*bck, strict=True))
    return [(rng.permutation(c[list(i)]), rng.permutation(k[list(o)])) for i, o in bck]


APART, OVERLAPPING = lists(3, 8, 8, 12, 12), lists(3, 4, 8, 8, 16)
UNEQUAL = [(range(4), range(4)), (range(4, 12), range(16)), (range(12, 16), range(12, 16))]
CONVS = {
    "one tap": {"BCK": APART, "TRS": (1,), "DHW": (6,), "padding": "VALID"},
    "strides": {"BCK": shuffled(APART), "TRS": (3,), "DHW": (9,), "strides": (2,)},
    "an even filter": {"BCK": APART, "TRS": (4,), "DHW": (9,), "MPQ": (10,)},
    "channels in common": {"BCK": OVERLAPPING, "TRS": (3, 3), "DHW": (5, 4)},
    "in other orders": {"BCK": shuffled(OVERLAPPING), "TRS": (3, 2), "DHW": (5, 4)},
    "of unequal sizes": {"BCK": shuffled(UNEQUAL), "TRS": (3, 3), "DHW": (5, 4), "padding": (1, 0)},
    "dilated": {"BCK": APART, "TRS": (1, 2, 3), "DHW": (2, 5, 9), "dilates": (1, 2, 3)},
    "in three axes": {"BCK": OVERLAPPING, "TRS": (3, 3, 3), "DHW": (3, 4, 5), "strides": (1, 2, 3)},
}


def split(conv, filters):
    """Each block's filter, with three axes of taps."""
    sizes = [prod(conv.f_shape(b)) for b in range(conv.blocks)]
    parts = np.split(host(filters).astype(np.float64).reshape(-1), np.cumsum(sizes)[:-1])
    return [
        part.reshape(*conv.f_shape(b)[:2], *conv.TRS) for b, part in enumerate(parts)
    ]  # fmt: skip


def convolved(conv, filters, images):
    """The sum over blocks, taps and channels of padded images."""
    room = [(0, 0), (0, 0), *((p, p) for p in conv.padding)]
    padded, y = np.pad(host(images).astype(np.float64), room), np.zeros(conv.o_shape(len(images)))
    for (cs, ks), f in zip(conv.BCK, split(conv, filters), strict=True):
        for tap in np.ndindex(*conv.TRS):
            first = np.multiply(tap, conv.dilates)
            seen = tuple(
                slice(a, a + (n - 1) * s + 1, s)
                for a, n, s in zip(first, conv.MPQ, conv.strides, strict=True)
            )
            y[:, ks] += np.einsum("kc,nc...->nk...", f[(..., *tap)], padded[:, cs][(..., *seen)])
    return y


@pytest.mark.parametrize("name", CONVS)
def test_convolution(rng, name):
    conv = BlocksparseConv(**CONVS[name])
    f, x = (rng.standard_normal(s) for s in (conv.f_shape(), conv.i_shape(2)))
    y = conv(f, x)
    assert type(y) is np.ndarray
    assert list(y.shape) == conv.o_shape(2)
    np.testing.assert_allclose(y, convolved(conv, f, x), rtol=0, atol=1e-11)


def test_convolution_where_the_operands_are(rng, put):
    conv = BlocksparseConv(shuffled(lists(2, 4, 4, 4, 4)), (2,), (3,), padding="VALID")
    f, x = (rng.standard_normal(s).astype(np.float32) for s in (conv.f_shape(), conv.i_shape(1)))
    for call, right in ((conv, convolved(conv, f, x)), (conv.l2_normalize, None)):
        y = call(*map(put, (f, x)[: 1 + (call is conv)]))
        assert type(y) is type(put(x))
        right = conv.l2_normalize(f) if right is None else right
        np.testing.assert_allclose(host(y), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["strides", "in other orders", "of unequal sizes"])
def test_gradients_of_a_convolution(rng, name):
    conv = BlocksparseConv(**CONVS[name])
    f, x = rng.standard_normal(conv.f_shape()), rng.standard_normal(conv.i_shape(2))
    ns.testing.check_grads(conv, f, x, order=2)


@pytest.mark.parametrize("name", ["channels in common", "of unequal sizes"])
@pytest.mark.parametrize("gained", [False, True])
def test_filters_of_length_one_or_gain(rng, name, gained):
    conv = BlocksparseConv(**CONVS[name])
    f = rng.standard_normal(conv.f_shape())
    gain = rng.standard_normal(sum(len(ks) for _, ks in conv.BCK)) if gained else None
    got, at = split(conv, conv.l2_normalize(f, gain, epsilon=0.5)), 0
    for part, whole in zip(got, split(conv, f), strict=True):
        right = whole / np.sqrt(0.5 + (whole**2).sum((1, 2, 3, 4), keepdims=True))
        if gained:
            right = right * gain[at : at + len(whole), None, None, None, None]
        np.testing.assert_allclose(part, right, rtol=0, atol=1e-12)
        at += len(whole)
    ns.testing.check_grads(conv.l2_normalize, f, *[gain] * gained)


def test_sizes_of_a_convolution():
    conv = BlocksparseConv(APART, (3, 3), (8, 6), strides=(1, 2))
    assert (conv.C, conv.K, conv.blocks, conv.sizeF) == (24, 36, 3, 3 * 8 * 12 * 9)
    assert (conv.TRS, conv.DHW, conv.MPQ) == ([1, 3, 3], [1, 8, 6], [1, 8, 3])
    assert (conv.f_shape(), conv.f_shape(2)) == ([3, 12, 8, 3, 3], [12, 8, 3, 3])
    assert BlocksparseConv(**CONVS["of unequal sizes"]).f_shape() == [(16 + 128 + 16) * 9]
    assert BlocksparseConv(**CONVS["of unequal sizes"]).padding == [0, 1, 0]
    assert BlocksparseConv(**CONVS["dilated"]).padding == [0, 1, 3]
    assert BlocksparseConv(**CONVS["one tap"]).padding == [0, 0, 0]
    as_array = CONVS["of unequal sizes"] | {"padding": np.array([1, 0])}
    assert BlocksparseConv(**as_array).padding == [0, 1, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"BCK": lists(2, 8, 8, 6, 6)}, "groups of .*no block size"),
        ({"BCK": [(range(4),)]}, "BCK takes pairs of lists of channels, got"),
        ({"BCK": [([0, 1, 2, 9], range(4))]}, "channels from 0 to 3, got 9"),
        ({"MPQ": (7,)}, r"MPQ takes \[1, 1, 6\] with these sizes, got \(7,\)"),
        ({"TRS": (9,), "padding": "VALID"}, "kernel_size takes at most the padded image"),
        ({"strides": (0,)}, "strides takes"),
    ],
)
def test_refused_convolutions(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        BlocksparseConv(**{"BCK": APART, "TRS": (3,), "DHW": (6,), **options})


@pytest.mark.parametrize(
    ("f", "x", "says"),
    [
        ([3, 12, 8, 2], [2, 24, 1, 1, 6], r"f takes an array of shape \(3, 12, 8, 3\), got"),
        ([3, 12, 8, 3], [2, 24, 6], r"x takes an array of shape \(2, 24, 1, 1, 6\), got \(2, 24"),
        ([3, 12, 8, 3], [], r"x takes an array of shape \(0, 24, 1, 1, 6\), got \(\)"),
    ],
)
def test_refused_operands_of_a_convolution(f, x, says):
    with pytest.raises(ValueError, match=says):
        BlocksparseConv(APART, (3,), (6,))(np.ones(f), np.ones(x))
