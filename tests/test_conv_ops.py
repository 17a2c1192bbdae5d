"""ns.conv and its two relations: beside torch and SciPy, their gradients, what they refuse.

Products of every size, order and place are in test_drawn_conv.
"""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from conftest import host
from conv_helpers import ConvCase, ConvProblem
from drawn import draws
from hypothesis import example, given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.testing import check_grads

CASES = [
    ConvCase(2, (5, 4), 9, 7, 4, (3, 3), padding=1),
    ConvCase(1, (8,), 8, 4, 4, (4,), stride=3, padding=2, dilation=2),
    ConvCase(2, (4, 3, 2), 4, 8, 8, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1)),
    ConvCase(3, (1, 1), 8, 8, 8, (3, 3), padding=1),
    ConvCase(2, (3, 4), 6, 5, 4, (1, 1)),
    ConvCase(1, (6, 7), 4, 4, 4, (2, 3), padding="same", dilation=(1, 2)),
    ConvCase(2, (9,), 8, 4, 4, (3,), stride=2, padding=1, dilation=4),
]


def assert_near(result, expected):
    np.testing.assert_allclose(host(result), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("case", CASES[1:3] + CASES[4:6], ids=str)
def test_gradients_are_the_other_products(put, case):
    p = ConvProblem(case)
    x, w = (ns.Tensor(put(a), requires_grad=True) for a in (p.x, p.w))
    y = ns.conv(x, w, **case.sizes)
    y.backward(put(p.dy))
    assert_near(x.grad.data, p.exact("input_grad"))
    assert_near(w.grad.data.data, p.exact("weight_grad"))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beside_torch(case):
    torch = pytest.importorskip("torch")
    p, axes = ConvProblem(case), len(case.space)
    functional = torch.nn.functional

    def channels_first(a):
        return torch.tensor(np.moveaxis(a, -1, 1).astype(np.float64))

    w = torch.tensor(np.moveaxis(p.dense, (-1, -2), (0, 1)))
    how = {"stride": case.stride, "dilation": case.dilation}
    conv = getattr(functional, f"conv{axes}d")
    y = conv(channels_first(p.x), w, padding=case.padding, **how).numpy()
    assert_near(ns.conv(p.x, p.w, **case.sizes), np.moveaxis(y, 1, -1))
    if case.padding == "same":  # torch's transpose knows no words
        return
    transpose = getattr(functional, f"conv_transpose{axes}d")
    most = np.maximum(np.broadcast_to(case.stride, axes), case.dilation)
    extra = tuple(int(n) for n in most - 1)
    dx = transpose(channels_first(p.dy), w, padding=case.padding, output_padding=extra, **how)
    got = ns.conv_transpose(
        p.dy, p.w, output_padding=extra, out_features=case.in_features, **case.sizes
    )
    assert_near(got, np.moveaxis(dx.numpy(), 1, -1))


@pytest.mark.slow
def test_beside_scipy_signal(rng, put):
    from scipy import signal  # a second, which collection need not take

    w = ns.BlockSparse(rng.standard_normal((6, 4, 4)).astype("f4"), np.ones((6, 1)))
    x = rng.standard_normal((1, 7, 6, 4)).astype(np.float32)
    y = host(ns.conv(put(x), put(w), kernel_size=(2, 3)))
    taps = w.toarray().reshape(2, 3, 4, 4)
    for k in range(4):
        expected = sum(
            signal.correlate2d(x[0, :, :, c], taps[:, :, c, k], mode="valid") for c in range(4)
        )
        np.testing.assert_allclose(y[0, :, :, k], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_gradients_of_gradients(case):
    p = ConvProblem(case, "float64")
    w = p.w.with_values(np.where(p.inside, p.w.values, 0))
    check_grads(lambda x, w: ns.conv(x, w, **case.sizes), p.x, w, order=2)
    features = {"out_features": case.in_features}
    check_grads(lambda x, w: ns.conv_transpose(x, w, **case.sizes, **features), p.dy, w, order=2)
    check_grads(lambda x, dy: ns.conv_weight_grad(x, dy, w, **case.sizes), p.x, p.dy)


def test_same_padding_of_a_kernel_larger_than_the_image(rng, put):
    w = ns.BlockSparse(rng.standard_normal((5, 4, 4)).astype("f4"), np.ones((5, 1)))
    x = rng.standard_normal((1, 1, 4)).astype(np.float32)
    sizes = {"kernel_size": 5, "padding": "same"}
    assert_near(ns.conv(put(x), put(w), **sizes), x @ w.values[2])
    assert_near(ns.conv_transpose(put(x), put(w), **sizes), x @ w.values[2].T)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_keeps_or_divides_the_size(rng, stride):
    w = ns.BlockSparse(rng.standard_normal((12, 4, 4)).astype("f4"), np.ones((12, 1)))
    x = rng.standard_normal((1, 7, 5, 4)).astype(np.float32)
    sizes = {"kernel_size": (3, 4), "stride": stride, "padding": "same"}
    y = ns.conv(x, w, **sizes)
    assert y.shape == (1, -(-7 // stride), -(-5 // stride), 4)
    up = ns.conv_transpose(y, w, **sizes)
    assert up.shape == (1, y.shape[1] * stride, y.shape[2] * stride, 4)


# (pixels, stride) of an axis that keeps its length: what the stride leaves out is padding behind.
KEPT = [(n, s) for n in range(1, 5) for s in range(1, 5) if (n - 1) * (s - 1) <= n]


@draws(20, "one tap")
@given(st.lists(st.sampled_from(KEPT), min_size=1, max_size=3), st.sampled_from([4, 8]))
@example([(2, 2)], 4)
@example([(1, 3), (4, 1)], 4)
def test_one_tap_that_keeps_the_size_of_images(axes, block_size):
    space, stride = zip(*axes, strict=True)
    padding = tuple((0, (n - 1) * (s - 1)) for n, s in axes)
    kernel = (1,) * len(axes)
    case = ConvCase(2, space, 5, 9, block_size, kernel, stride, padding)
    assert case.out_space == space
    p = ConvProblem(case, "float64")
    features = {"out_features": case.in_features}
    assert_near(ns.conv(p.x, p.w, **case.sizes), p.exact("forward"))
    dx = ns.conv_transpose(p.dy, p.w, **case.sizes, **features)
    assert_near(dx, p.exact("input_grad"))
    dw = ns.conv_weight_grad(p.x, p.dy, p.w, **case.sizes)
    assert_near(dw.data, p.exact("weight_grad"))


@pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
def test_numpy_images_meet_a_weight_on_the_gpu(rng):
    w = ns.BlockSparse(rng.standard_normal((3, 4, 4)).astype("f4"), np.ones((3, 1))).to("cuda")
    x = rng.standard_normal((2, 5, 4)).astype(np.float32)
    y = ns.conv(x, w, kernel_size=3)
    assert isinstance(y, np.ndarray)
    assert_near(y, ns.conv(x, w.to("cpu"), kernel_size=3))
    with pytest.raises(ValueError, match=r'w\.to\("cuda"\)'):
        ns.conv(ns.to_device(x), w.to("cpu"), kernel_size=3)
    with pytest.raises(ValueError, match="x and dy take one device"):
        ns.conv_weight_grad(ns.to_device(x), y, w, kernel_size=3)


def test_more_pixels_than_kernels_count_are_refused():
    from numbsparse.ops.conv_operands import as_pixels

    for shape, dtype in (((2**16, 2**15, 1), "float16"), ((2**10, 2**20, 16), "float16")):
        huge = ns.DeviceArray(0, shape, dtype)  # no memory behind it
        with pytest.raises(ValueError, match=r"2\^31 pixels and 2\^35 bytes.*batch in parts"):
            as_pixels(huge)


@pytest.mark.parametrize("case", CASES[:3] + CASES[4:5], ids=str)
def test_calls_that_come_again(case):
    """What is kept of a call knows shapes and dtypes: values, strides and places are looked up."""
    p = ConvProblem(case)
    padded = np.zeros((*p.x.shape[:-1], p.x.shape[-1] + 3), p.x.dtype)
    inside = padded[..., 1 : 1 + p.x.shape[-1]]
    shifted = np.zeros(p.x.nbytes + 1, np.uint8)[1:].view(p.x.dtype).reshape(p.x.shape)
    calls = (
        lambda x, dy, **how: ns.conv(x, p.w, **case.sizes, **how),
        lambda x, dy, **how: ns.conv_weight_grad(x, dy, p.w, **case.sizes, **how).values,
    )
    for number, x in enumerate((p.x.copy(), inside, shifted, p.x[::-1], p.x.copy())):
        if number < 3:
            x[...] = p.x * (1 + number)
        p.w.values[...] *= -1
        dy = p.dy * (2 + number)
        for call in calls:
            assert_near(call(x, dy) / 10, call(x, dy, kernel="k0_reference") / 10)


@pytest.mark.parametrize("case", [replace(CASES[0], batch=1, space=(2, 3)), *CASES[1:3]], ids=str)
def test_what_is_kept_of_a_call_are_no_operands(put, case):
    p = ConvProblem(case)
    x, dy, w = (put(a) for a in (p.x, p.dy, p.w))
    for _ in range(4):
        ns.conv(x, w, **case.sizes)
        ns.conv_weight_grad(x, dy, w, **case.sizes)
    layout = w.layout
    owners = [weakref.ref(a if isinstance(a, np.ndarray) else a.owner) for a in (x, dy, w.values)]
    del x, dy, w, p
    gc.collect()
    assert layout.index.calls
    assert [owner() for owner in owners] == [None] * 3


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_is_refused_is_refused_after_a_call_that_was_not(place):
    if place == "cuda" and not device.is_available():
        pytest.skip("no GPU and no simulator")
    put = ns.to_device if place == "cuda" else np.asarray
    w, x = W.to(place), put(X[:, :3, :3].copy())
    dy, how = put(np.ones((1, 1, 1, 4), np.float32)), {"kernel_size": 3}
    for _ in range(3):
        ns.conv(x, w, stride=1, **how)
        ns.conv_transpose(x, w, out_features=4, **how)
        ns.conv_weight_grad(x, dy, w, **how)
    for call, error in (
        (lambda: ns.conv(x, w, stride=True, **how), TypeError),
        (lambda: ns.conv(x, w, stride=1.0, **how), TypeError),
        (lambda: ns.conv(x, w, padding=(0, False), **how), TypeError),
        (lambda: ns.conv(x, w.T, **how), ValueError),
        (lambda: ns.conv(x, w, kernel=0, **how), ValueError),
        (lambda: ns.conv(x, w, precision="low", **how), ValueError),
        (lambda: ns.conv(put(X[..., :3]), w, kernel_size=(1, 9)), ValueError),
        (lambda: ns.conv_transpose(x, w, out_features=4.0, **how), TypeError),
        (lambda: ns.conv_transpose(x, w, out_features=True, **how), TypeError),
        (lambda: ns.conv_weight_grad(x, put(np.ones((1, 1, 1, 5), "f4")), w, **how), ValueError),
        (lambda: ns.conv_weight_grad(x, put(np.ones((2, 1, 1, 4), "f4")), w, **how), ValueError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                call()


W = ns.BlockSparse(np.ones((9, 4, 4), np.float32), np.ones((9, 1)))
X = np.ones((1, 5, 5, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ns.conv(X, X, kernel_size=3), TypeError, "BlockSparse, got ndarray"),
        (lambda: ns.conv(X, W.T, kernel_size=3), ValueError, "conv_transpose"),
        (lambda: ns.conv(X.astype("f8"), W, kernel_size=3), TypeError, "float64 and float32"),
        (lambda: ns.conv(X[0, 0], W, kernel_size=3), ValueError, r"batch, \*space.*\(5, 4\)"),
        (lambda: ns.conv(X[:, :0], W, kernel_size=3), ValueError, "one pixel.*0"),
        (lambda: ns.conv(X, W, kernel_size=0), ValueError, "kernel_size.*0"),
        (lambda: ns.conv(X, W, kernel_size=(3,)), TypeError, "kernel_size.*2 axes"),
        (lambda: ns.conv(X, W, kernel_size=3.0), TypeError, "kernel_size.*3.0"),
        (lambda: ns.conv(X, W, kernel_size=3, stride=0), ValueError, "stride.*0"),
        (lambda: ns.conv(X, W, kernel_size=3, padding=1, stride=2**31), ValueError, r"2\^31"),
        (lambda: ns.conv(X, W, kernel_size=3, padding="same", dilation=2**30), ValueError, "2.31"),
        (lambda: ns.conv(X, W, kernel_size=3, dilation=(1, 0)), ValueError, "dilation"),
        (lambda: ns.conv(X, W, kernel_size=3, dilation=3), ValueError, r"spans \(7, 7\).*\(5, 5\)"),
        (lambda: ns.conv(X, W, kernel_size=3, padding=6), ValueError, "length of the image, 5"),
        (lambda: ns.conv(X, W, kernel_size=3, padding=-1), ValueError, "padding.*-1"),
        (lambda: ns.conv(X, W, kernel_size=3, padding="full"), ValueError, "'full'"),
        (lambda: ns.conv(X, W, kernel_size=3, padding=((1, 1),)), TypeError, "pair for each of 2"),
        (lambda: ns.conv(X, W, kernel_size=2), ValueError, "4 taps, got 9 block rows"),
        (lambda: ns.conv(X[..., :3], W, kernel_size=(1, 3)), ValueError, "9 to 12 features"),
        (lambda: ns.conv(X, W, kernel_size=3, kernel="fast"), ValueError, "'fast'"),
        (lambda: ns.conv(X, W, kernel_size=3, kernel=["k0_cpu"]), ValueError, "kernel takes"),
        (lambda: ns.conv(X, W, kernel_size=3, kernel="k1_naive"), ValueError, "runs on a GPU"),
        (lambda: ns.conv_transpose(X, W, kernel_size=3, padding=4), ValueError, "would become"),
        (
            lambda: ns.conv_transpose(X, W, kernel_size=3, output_padding=1),
            ValueError,
            "stride or the",
        ),
        (
            lambda: ns.conv_transpose(X, W, kernel_size=3, out_features=5),
            ValueError,
            "out_features",
        ),
        (lambda: ns.conv_transpose(X[..., :3], W, kernel_size=3), ValueError, "x takes 4 features"),
        (
            lambda: ns.conv_transpose(X, W, kernel_size=3, out_features=2.5),
            TypeError,
            "out_features.*2.5",
        ),
        (
            lambda: ns.conv_transpose(X[:, :1, :1], W, kernel_size=3, padding=((0, 2), (0, 2))),
            ValueError,
            "length of the result, 1 on axis 0",
        ),
        (lambda: ns.conv(ns.Tensor(X[0, 0]), W, kernel_size=3), ValueError, r"space.*\(5, 4\)"),
        (lambda: ns.conv_transpose(ns.Tensor(X[:0, :0]), W, kernel_size=3), ValueError, "pixel"),
        (lambda: ns.conv(X.tolist(), ns.Tensor(W), kernel_size=3), TypeError, "one dtype"),
        (lambda: ns.conv_weight_grad(X, X, X, kernel_size=3), TypeError, "BlockSparse"),
        (lambda: ns.conv_weight_grad(X, X, W, kernel_size=3), ValueError, r"\(1, 3, 3, 4\)"),
        (
            lambda: ns.conv_weight_grad(ns.Tensor(X), ns.Tensor(X), W, kernel_size=3),
            ValueError,
            r"dy takes \(1, 3, 3, 4\).*\(1, 5, 5, 4\)",
        ),
        (
            lambda: ns.conv_weight_grad(X, np.ones((1, 3, 3, 4)), W, kernel_size=3),
            TypeError,
            "x and dy take one dtype",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_from_bck_is_the_convolution_of_the_lists(rng):
    # Blocks of openai/blocksparse: any channels, overlapping, with gaps; one channel in none.
    bck = [([9, 1, 4, 0], [3, 5, 0, 2]), ([2, 3, 5, 6, 9, 1, 4, 0], [7, 1, 4, 6])]
    found = ns.patterns.from_bck(bck, 11, 8)
    assert found.block_size == 4
    np.testing.assert_array_equal(np.sort(found.in_order), np.arange(11))
    joined = np.zeros((11, 8), bool)
    for c, k in bck:
        joined[np.ix_(c, k)] = True
    assert (found.pattern.sum(), found.pattern.shape) == (3, (3, 2))
    kept = np.kron(found.pattern, np.ones((4, 4), bool))[:11]
    np.testing.assert_array_equal(kept, joined[np.ix_(found.in_order, found.out_order)])
    layer = nn.Conv1d(11, 8, 3, layout=found.pattern, block_size=4, bias=False, seed=0)
    x = rng.standard_normal((1, 5, 11)).astype(np.float32)
    y = layer(x[..., found.in_order]).numpy()[..., np.argsort(found.out_order)]
    dense = np.zeros((3, 11, 8))
    of_tap = layer.weight.numpy().reshape(3, 12, 8)[:, :11]
    dense[:, found.in_order[:, None], found.out_order] = of_tap
    expected = sum(x[:, t : t + 3] @ dense[t] for t in range(3))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("bck", "error", "says"),
    [
        ([], ValueError, "at least one block"),
        ([([0, 1, 2, 3], [0, 1, 2, 8])], ValueError, r"bck\[0\]\[1\].*0 to 7, got 8"),
        ([([0, -1], [0])], ValueError, r"bck\[0\]\[0\].*got -1"),
        ([([0, 0, 1, 2], [0, 1, 2, 3])], ValueError, r"bck\[0\]\[0\].*each channel once"),
        ([([], [0])], ValueError, r"bck\[0\]\[0\].*at least one"),
        ([([0.5], [0])], TypeError, r"bck\[0\]\[0\].*0.5"),
        ([([0, 1, 2, 3],)], TypeError, r"bck\[0\].*pair"),
        ([(3, [0])], TypeError, r"bck\[0\]\[0\].*list.*3"),
        (None, TypeError, "bck takes.*None"),
        ([([0, 1, 2], [0, 1, 2, 3])], ValueError, r"groups of \[3, 4\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_bck_refuses(bck, error, says):
    with pytest.raises(error, match=says):
        ns.patterns.from_bck(bck, 8, 8)


def test_from_bck_names_the_group_that_does_not_fit():
    with pytest.raises(ValueError, match=r"group of 4 in-channels.*channel 0.*blocks of 8"):
        ns.patterns.from_bck([([0, 1, 2, 3], range(8))], 8, 8, block_size=8)


def test_patterns_of_taps():
    pattern = np.array([[1, 0], [1, 1]], bool)
    full = ns.patterns.taps(pattern, (2, 3))
    np.testing.assert_array_equal(full.reshape(6, 2, 2), np.broadcast_to(pattern, (6, 2, 2)))
    kept = ns.patterns.causal((3, 3))
    some = ns.patterns.taps(pattern, (3, 3), kept=kept).reshape(9, 2, 2)
    np.testing.assert_array_equal(some.any(axis=(1, 2)), kept.reshape(-1))
    np.testing.assert_array_equal(ns.patterns.causal((3,), centre=False), [1, 0, 0])
    with pytest.raises(ValueError, match="odd"):
        ns.patterns.causal((2, 3))
    with pytest.raises(TypeError, match="kernel_size"):
        ns.patterns.taps(pattern, 3)
    with pytest.raises(ValueError, match=r"kept.*\(3,\)"):
        ns.patterns.taps(pattern, (3,), kept=[1, 1])
