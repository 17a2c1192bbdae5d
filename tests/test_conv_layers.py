"""nn's convolutions, weight_norm and BatchNorm, beside torch's meaning written in NumPy."""

import copy
import pickle

import numpy as np
import pytest
from conftest import HALVES, host

import numbsparse as ns
from numbsparse import nn
from numbsparse.dtypes import as_dtype
from numbsparse.testing import check_grads


def tap_weights(layer):
    """(*kernel, in, out) of a Conv; zeros where there is no block."""
    taps = int(np.prod(layer.kernel_size))
    return layer.weight.numpy().reshape(taps, -1, layer.weight.shape[1])


@pytest.mark.pairs
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_layers_by_torchs_names(rng, put, place, axes, kind):
    layer = getattr(nn, f"{kind}{axes}d")(
        6, 10, 3, 2, 1, dilation=1, layout=[[1, 0, 1], [0, 1, 1]], block_size=4, seed=0
    )
    batch = 3 - axes if axes < 3 else 1
    x = rng.standard_normal((batch, *((5,), (4, 3), (1, 2, 2))[axes - 1], 6)).astype(np.float32)
    expected = layer(x)
    y = layer.to(place)(put(x))
    assert y.shape == expected.shape
    np.testing.assert_allclose(host(y.data), expected.numpy(), rtol=0, atol=1e-5)
    space = tuple((n - 1) // 2 + 1 if kind == "Conv" else 2 * n - 1 for n in x.shape[1:-1])
    assert y.shape == (batch, *space, 10)
    (y * y).sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape
    assert layer.bias.grad.shape == (10,)
    assert f"6, 10, kernel_size={(3,) * axes}" in repr(layer)


def test_padded_rows_of_a_tap_are_zero_and_stay_so(rng):
    layer = nn.Conv2d(5, 8, 3, padding="same", block_size=4, seed=0)
    rows = tap_weights(layer)[:, 5:]
    assert not rows.any()
    optimizer = nn.optim.Adam(layer.parameters(), lr=0.1)
    (layer(rng.standard_normal((2, 4, 4, 5)).astype("f4")) ** 2).sum().backward()
    optimizer.step()
    assert not tap_weights(layer)[:, 5:].any()
    assert tap_weights(layer)[:, :5].any()


def test_first_values_follow_from_the_kept_inputs():
    pattern = np.array([[1, 1], [0, 1]])
    layer = nn.Conv1d(128, 128, 3, layout=pattern, block_size=64, seed=0)
    weights = tap_weights(layer)
    for half, fan_in in ((slice(0, 64), 192), (slice(64, 128), 384)):
        bound = 1 / np.sqrt(fan_in)
        assert 0.99 * bound < abs(weights[:, :, half]).max() <= bound
        assert 0.8 * bound < abs(layer.bias.data[half]).max() <= bound


def test_masked_taps_see_only_what_came_before(rng):
    layer = nn.Conv2d(
        4, 4, 3, padding="same", block_size=4, taps=ns.patterns.causal((3, 3), centre=False), seed=0
    )
    assert layer.weight.data.n_blocks == 4
    x = rng.standard_normal((1, 5, 5, 4)).astype(np.float32)
    y = layer(x).numpy()
    changed = x.copy()
    changed[0, 2, 3] += 1
    differs = (layer(changed).numpy() != y).any(axis=-1)[0]
    assert not differs.reshape(-1)[: 2 * 5 + 4].any()
    assert differs[2, 4]
    assert differs[3, 2:].all()


def test_a_layout_for_each_tap():
    pattern = np.zeros((3 * 2, 3), bool)
    pattern[1, 2] = pattern[4, 0] = True
    layer = nn.Conv1d(8, 12, 3, layout=pattern, block_size=4)
    assert layer.weight.data.layout == ns.Layout(pattern)
    transposed = nn.ConvTranspose1d(8, 12, 3, layout=pattern, block_size=4)
    expected = np.zeros((3 * 3, 2), bool)
    expected[0 * 3 + 2, 1] = expected[2 * 3 + 0, 0] = True
    assert transposed.weight.data.layout == ns.Layout(expected)


def test_checkpoints_of_convolutions(tmp_path, rng):
    layer, other = (nn.Conv2d(8, 8, 3, block_size=4, seed=seed) for seed in (0, 1))
    ns.save(tmp_path / "conv.npz", layer.state_dict())
    other.load_state_dict(ns.load(tmp_path / "conv.npz"))
    x = rng.standard_normal((1, 4, 4, 8)).astype(np.float32)
    np.testing.assert_array_equal(layer(x).numpy(), other(x).numpy())


def test_weight_norm(rng, put, place):
    layer = nn.Conv2d(8, 10, 3, layout=[[1, 0, 1], [0, 0, 1]], block_size=4, bias=False, seed=0)
    before = layer.weight.numpy()
    assert nn.utils.weight_norm(layer) is layer
    layer.to(place)
    np.testing.assert_allclose(layer.weight.numpy(), before, rtol=0, atol=1e-6)
    norms = np.linalg.norm(before, axis=0)
    np.testing.assert_allclose(host(layer.weight_g.data), norms, rtol=0, atol=1e-5)
    assert (host(layer.weight_g.data)[4:8] < 1e-5).all()  # no block: no length
    layer.weight_g.data = put(2 * norms)
    np.testing.assert_allclose(layer.weight.numpy(), 2 * before, rtol=0, atol=2e-6)
    (layer(put(rng.standard_normal((1, 3, 3, 8)).astype("f4"))) ** 2).sum().backward()
    # The gradient for the direction is at right angles to it.
    dots = (layer.weight_v.grad.numpy() * before).sum(axis=0)
    np.testing.assert_allclose(dots, 0, rtol=0, atol=1e-4)
    assert repr(layer).startswith("Conv2d(8, 10, kernel_size=(3, 3)")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_layer_with_weight_norm_is_copied_and_pickled(copied, rng):
    layer, x = nn.utils.weight_norm(nn.Linear(8, 8, block_size=4, seed=0)), rng.random((2, 8))
    layer.eval()
    other = copied(layer)
    assert isinstance(other, nn.Linear)
    assert not other.training
    np.testing.assert_array_equal(other(np.float32(x)).data, layer(np.float32(x)).data)
    other.weight_g.data[:] = 0
    assert layer.weight_g.data.all()


def test_weight_norm_gradients(rng):
    w = ns.BlockSparse(rng.standard_normal((3, 4, 4)), [[1, 0], [1, 1]], shape=(8, 7))
    g, x = rng.standard_normal(7), rng.standard_normal((3, 8))

    def product(x, v, g):
        norms = nn.functional.column_norms(v, 1e-12)
        return x @ nn.functional.scale_columns(v, g / norms)

    def normalised(x, v, g):
        return x @ nn.functional.normalise_columns(v, g, 1e-12)

    for function in (product, normalised):
        check_grads(function, x, w, g, order=2)


COLUMN_CASES = [((3, 4), 4), ((5, 2), 8), ((2, 3), 16), ((1, 1), 4)]


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(("shape", "size"), COLUMN_CASES, ids=str)
def test_normalised_columns(rng, put, place, shape, size, dtype):
    """And both gradients, against float64; the last features are within a block."""
    if place == "cpu" and dtype != "float32":
        pytest.skip(f"{dtype} is not trained in there")
    layout = ns.Layout(rng.random(shape) < 0.7)
    n = shape[1] * size - 1
    values, slopes = (rng.standard_normal((layout.n_blocks, size, size)).astype(as_dtype(dtype))
                      for _ in range(2))  # fmt: skip
    v, dw = (ns.BlockSparse(a, layout, shape=(shape[0] * size, n)) for a in (values, slopes))
    g = rng.uniform(0.5, 2, n).astype(as_dtype(dtype))
    tensors = [ns.Tensor(put(a), requires_grad=True) for a in (v, g)]
    w = nn.functional.normalise_columns(*tensors, 1e-12)
    w.backward(ns.Tensor(put(dw)))
    dense, slope, lengths = (a.astype(float) for a in (host(v), host(dw), g))
    norms = np.sqrt((dense**2).sum(axis=0) + 1e-12)
    dg = (dense * slope).sum(axis=0) / norms
    dv = (slope - dense * dg / norms) * lengths / norms
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    found = w.numpy(), tensors[0].grad.numpy(), tensors[1].grad.numpy()
    for got, expected in zip(found, (dense * lengths / norms, dv, dg), strict=True):
        assert got.dtype == as_dtype(dtype)
        scale = np.abs(expected).max(initial=1)
        np.testing.assert_allclose(got.astype(float), expected, rtol=0, atol=tolerance * scale)


def test_column_functions_refuse():
    w = ns.Tensor(ns.BlockSparse(np.ones((1, 4, 4)), [[1]]))
    with pytest.raises(ValueError, match=r"scale takes the shape \(4,\).*\(3,\)"):
        nn.functional.scale_columns(w, ns.Tensor(np.ones(3)))
    with pytest.raises(ValueError, match=r"g takes the shape \(4,\).*\(3,\)"):
        nn.functional.normalise_columns(w, ns.Tensor(np.ones(3)))
    with pytest.raises(TypeError, match=r"BlockSparse, got one of numpy\.ndarray"):
        nn.functional.column_norms(ns.Tensor(np.ones((4, 4))))


def test_weight_norm_refuses():
    with pytest.raises(ValueError, match=r"eps.*-1"):
        nn.utils.weight_norm(nn.Linear(8, 8, block_size=4), eps=-1)
    layer = nn.utils.weight_norm(nn.Linear(8, 8, block_size=4))
    for module in (nn.LayerNorm(8), layer, nn.ReLU()):
        with pytest.raises(TypeError, match="block-sparse parameter `weight`"):
            nn.utils.weight_norm(module)
    layer = nn.Linear(8, 8, block_size=4)
    layer.weight.data = layer.weight.data.T
    with pytest.raises(ValueError, match="w takes a matrix that is not a transposed view"):
        nn.utils.weight_norm(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_batch_norm(rng, put, place):
    x = rng.normal(2, 3, (4, 3, 2, 5)).astype(np.float32)
    layer = nn.BatchNorm(5, momentum=0.25).to(place)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    y = host(layer(put(x)).data)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5), rtol=0, atol=1e-5)
    state = layer.state_dict()
    np.testing.assert_allclose(state["running_mean"], 0.25 * mean, rtol=0, atol=1e-5)
    expected = 0.75 + 0.25 * variance * 24 / 23
    np.testing.assert_allclose(state["running_variance"], expected, rtol=0, atol=1e-4)
    layer.eval()
    running = state["running_mean"], state["running_variance"]
    expected = (x - running[0]) / np.sqrt(running[1] + 1e-5)
    np.testing.assert_allclose(host(layer(put(x)).data), expected, rtol=0, atol=1e-5)
    assert layer.n_parameters() == 10
    optimizer = nn.optim.SGD(layer.parameters(), lr=1.0)
    (layer(put(x)) ** 2).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(layer.state_dict()["running_mean"], running[0])


def test_batch_norm_gradients(rng):
    layer = nn.BatchNorm(3, dtype=np.float64)
    check_grads(lambda x: nn.functional.tanh(layer(x)), rng.standard_normal((4, 2, 3)), order=2)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nn.Conv2d(8, 8, 3, stride=0), ValueError, "stride"),
        (lambda: nn.Conv2d(8, 8, (3, 3, 3)), TypeError, "kernel_size.*2 axes"),
        (lambda: nn.Conv2d(0, 8, 3), ValueError, "in_channels"),
        (lambda: nn.Conv2d(8, "8", 3), TypeError, "out_channels"),
        (lambda: nn.Conv2d(8, 8, 3, padding=-1), ValueError, "padding.*-1"),
        (lambda: nn.Conv2d(8, 8, 3, padding="full"), ValueError, "'full'"),
        (lambda: nn.ConvTranspose2d(8, 8, 3, output_padding=1), ValueError, "the stride or"),
        (lambda: nn.Conv2d(8, 8, 3, groups=2), TypeError, "groups"),
        (lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, 2), TypeError, "positional"),
        (lambda: nn.Conv2d(8, 8, 3, layout=[[1, 1]], block_size=4), ValueError, "layout takes 2 x"),
        (lambda: nn.Conv2d(8, 8, 3, taps=[[1, 1]]), ValueError, r"taps.*\(3, 3\)"),
        (
            lambda: nn.Conv1d(4, 4, 2, layout=[[1], [1]], taps=[1, 0], block_size=4),
            ValueError,
            "taps",
        ),
        (lambda: nn.Conv2d(8, 8, 3)(np.ones((1, 8, 8), "f4")), ValueError, r"4 axes.*\(1, 8, 8\)"),
        (
            lambda: nn.Conv2d(8, 8, 1)(np.ones((1, 2, 2, 8))),
            TypeError,
            "x and w take one dtype, got",
        ),
        (
            lambda: nn.Conv1d(5, 8, 3, block_size=4)(np.ones((1, 8, 6), "f4")),
            ValueError,
            r"5 channels.*\(1, 8, 6\)",
        ),
        (lambda: nn.BatchNorm(0), ValueError, "features"),
        (lambda: nn.BatchNorm(2.5), TypeError, "features.*2.5"),
        (lambda: nn.BatchNorm(4, momentum=2), ValueError, "momentum.*2"),
        (lambda: nn.BatchNorm(4)(np.ones((2, 3), "f4")), ValueError, r"\(\.\.\., 4\)"),
        (lambda: nn.BatchNorm(4)(np.ones((1, 4), "f4")), ValueError, "two values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()
