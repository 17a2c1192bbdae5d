"""Layers and their functions."""

import sys
import tracemalloc
from itertools import product

import numpy as np
import pytest
from conftest import HALVES, host, needs_bfloat16

import numbsparse as ns
from numbsparse import nn
from numbsparse.dtypes import as_dtype
from numbsparse.nn import functional as F

pytestmark = pytest.mark.usefixtures("cheap_products")


def test_linear_is_the_dense_one_where_blocks_are_kept(rng, put, place):
    layout = ns.Layout(rng.random((3, 2)) < 0.7)
    linear = nn.Linear(20, 13, layout=layout, block_size=8, seed=0).to(place)
    x = rng.standard_normal((5, 20), dtype=np.float32)
    y = linear(put(x))
    expected = x @ linear.weight.numpy() + host(linear.bias.data)
    np.testing.assert_allclose(host(y.data), expected, atol=1e-5)


BIASED = {  # a layer, the shape of x, and how many arrays of its result it keeps
    "linear": (lambda: nn.Linear(16, 64, block_size=4, seed=0), (512, 16), 1),
    "linear, of more axes": (lambda: nn.Linear(16, 64, block_size=4, seed=0), (8, 64, 16), 1),
    "conv": (lambda: nn.Conv1d(16, 64, 1, block_size=4, seed=0), (8, 64, 16), 1),
    "gated": (lambda: nn.Linear(16, 64, block_size=4, gate=True, seed=0), (512, 16), 1),
    "layer norm": (lambda: nn.LayerNorm(64), (512, 64), 2),
    "batch norm": (lambda: nn.BatchNorm(64), (512, 64), 3),
}


@pytest.mark.parametrize(("make", "shape", "kept"), BIASED.values(), ids=BIASED)
def test_a_layer_keeps_no_array_for_its_bias(make, shape, kept):
    layer, x = make(), ns.Tensor(np.ones(shape, np.float32))
    layer(x)
    tracemalloc.start()
    try:
        y = layer(x)
        assert tracemalloc.get_traced_memory()[0] < (kept + 0.5) * y.values.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("make", "shape", "kept"), BIASED.values(), ids=BIASED)
@pytest.mark.parametrize("run", [lambda f, x: f(x), nn.recompute], ids=["plain", "recompute"])
def test_a_bias_alone_is_trained(rng, put, place, make, shape, kept, run):
    layer = make().to(place).requires_grad_(False)
    layer.bias.requires_grad = True
    x = put(rng.standard_normal((2, *shape[1:]), dtype=np.float32))
    y = run(layer, ns.Tensor(x))
    dy = rng.standard_normal(y.shape, dtype=np.float32)
    y.backward(put(dy))
    np.testing.assert_allclose(host(layer.bias.grad.data), dy.reshape(-1, 64).sum(0), rtol=1e-4)
    assert layer.weight.grad is None


@pytest.mark.parametrize("tensors", list(product((False, True), repeat=3)), ids=str)
def test_a_bias_is_added_to_arrays_and_tensors_alike(rng, put, place, tensors):
    w = ns.BlockSparse(rng.standard_normal((4, 4, 4), np.float32), np.ones((2, 2), bool))
    x, bias = (rng.standard_normal(shape, np.float32) for shape in ((3, 8), 8))
    given = put(x), w.to(place), put(bias)
    x_of, w_of, bias_of = (ns.Tensor(a) if t else a for a, t in zip(given, tensors, strict=True))
    y = F.linear(x_of, w_of, bias_of)
    np.testing.assert_allclose(host(y.data), x @ w.toarray() + bias, rtol=1e-5, atol=1e-5)
    normed = F.layer_norm(x_of, given[2], bias_of)
    exact = F.layer_norm(ns.Tensor(x), bias, None).data + bias
    np.testing.assert_allclose(host(normed.data), exact, rtol=1e-5, atol=1e-5)
    for given_now, before in zip(given[::2], (x, bias), strict=True):  # written to no operand
        np.testing.assert_array_equal(host(given_now), before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.simulator
def test_layers_of_16_bit_floats(rng, dtype):
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    layers = [
        nn.Linear(20, 16, block_size=8, dtype=dtype, seed=0),
        nn.LayerNorm(16, dtype=dtype),
        nn.LSTM(16, 8, block_size=8, dtype=dtype, seed=0),
    ]
    x = ns.Tensor(ns.to_device(rng.standard_normal((3, 2, 20)).astype(as_dtype(dtype))))
    for layer in layers:
        layer.to("cuda")
    y, _ = layers[2](layers[1](layers[0](x)))
    F.mse_loss(y, 0.5).backward()
    for layer in layers:
        for parameter in layer.parameters():
            gradient = parameter.grad.numpy()
            assert gradient.dtype == as_dtype(dtype)
            assert np.isfinite(gradient.astype(float)).all()
            assert gradient.any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("make", "shape", "first"),
    [
        (lambda **how: nn.Linear(8, 8, block_size=8, **how), (2, 8), "weight"),
        (lambda **how: nn.LayerNorm(8, **how), (2, 8), "weight"),
        (lambda **how: nn.LSTM(8, 8, block_size=8, **how), (2, 2, 8), "layers.0.weight_ih"),
        (lambda **how: nn.MultiplicativeLSTM(8, 8, block_size=8, **how), (2, 2, 8), "multiplier"),
        (lambda **how: nn.Conv1d(8, 8, 1, block_size=8, **how), (2, 4, 8), "weight"),
        (lambda **how: nn.BatchNorm(8, **how), (2, 4, 8), "weight"),
    ],
    ids=["Linear", "LayerNorm", "LSTM", "MultiplicativeLSTM", "Conv1d", "BatchNorm"],
)
def test_16_bit_layers_on_the_cpu_are_refused_by_name(make, shape, first, dtype):
    layer = make(dtype=dtype)  # made, moved and saved on the CPU, but not computed with
    x = ns.Tensor(np.ones(shape, as_dtype(dtype)))
    says = rf"{first}\S* is {dtype} on the CPU.*\.to\(\"cuda\"\).*dtype=\"float32\""
    with pytest.raises(TypeError, match="^" + says):
        layer(x)
    with pytest.raises(TypeError, match=rf"^1\.0\.{says}"):
        nn.Sequential(nn.Dropout(0.0), nn.Sequential(layer))(x)


def test_a_16_bit_x_of_a_float32_model_is_refused_as_x():
    x = ns.Tensor(np.ones((2, 8), np.float16))
    with pytest.raises(TypeError, match=r"^x takes float32 .*got float16: .*astype\(\"float32\"\)"):
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, block_size=8))(x)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "function",
    [nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.LayerNorm(4), F.relu, F.elu, F.concat_elu,
     F.glu, F.softplus, F.log_sigmoid, F.logsumexp, F.softmax, F.log_softmax, F.layer_norm, F.sum,
     F.mean, F.transpose, lambda x: F.reshape(x, (4, 2)), lambda x: F.broadcast_to(x, (3, 2, 4)),
     lambda x: F.getitem(x, 1), lambda x: F.split(x, 2)[1], lambda x: F.unbind(x)[0],
     lambda x: F.concatenate([x, x]), lambda x: F.stack([x, x])],
)  # fmt: skip
def test_functions_take_arrays(rng, function, place):
    if place == "cuda" and not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    x = rng.standard_normal((2, 4), dtype=np.float32)
    x = x if place == "cpu" else ns.to_device(x)
    if isinstance(function, nn.Module):
        function.to(place)
    np.testing.assert_array_equal(function(x).numpy(), function(ns.Tensor(x)).numpy())


@pytest.mark.parametrize("layer", ["Linear", "LSTM"])
def test_a_layer_asks_for_its_precision(rng, monkeypatch, layer):
    said = []

    def noting(run):
        def noted(*operands, **how):
            said.append(how["precision"])
            return run(*operands, **how)

        return noted

    for name in ("matmul", "sddmm"):
        monkeypatch.setattr(ns.ops, name, noting(getattr(ns.ops, name)))
    monkeypatch.setattr(sys.modules["numbsparse.ops.lstm"], "matmul", ns.ops.matmul)
    module = getattr(nn, layer)(8, 8, block_size=8, precision="high", seed=0)
    x = ns.Tensor(rng.standard_normal((2, 9, 8), dtype=np.float32), requires_grad=True)
    y = module(x)
    (y if layer == "Linear" else y[0]).sum().backward()
    assert len(said) == (3 if layer == "Linear" else 4)  # but for those of an LSTM's steps
    assert set(said) == {"high"}


@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
def test_cast_and_its_gradient(rng, put, place, dtype):
    if place == "cuda" and dtype == "float64":
        pytest.skip("float64 is for the CPU")
    x = ns.Tensor(put(rng.standard_normal((3, 4), dtype=np.float32)), requires_grad=True)
    y = x.astype(dtype)
    assert y.dtype == as_dtype(dtype)
    expected = host(x.data).astype(as_dtype(dtype))
    np.testing.assert_array_equal(host(y.data), expected)
    dy = rng.standard_normal((3, 4)).astype(as_dtype(dtype))
    y.backward(put(dy))
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(host(x.grad.data), dy.astype(np.float32))
    assert x.astype("float32") is x


@needs_bfloat16
def test_a_bfloat16_product_of_float32_weights(rng, put):
    # Mixed precision: the parameter and its gradient stay float32.
    layout = ns.Layout([[1, 0], [1, 1]])
    w = put(ns.BlockSparse(rng.standard_normal((3, 8, 8), dtype=np.float32), layout))
    weight = ns.Tensor(w, requires_grad=True)
    x = put(rng.standard_normal((5, 16)).astype(as_dtype("bfloat16")))
    y = F.matmul(x, F.cast(weight, "bfloat16"))
    assert y.dtype == as_dtype("bfloat16")
    exact = host(x).astype(float) @ host(w.astype("bfloat16")).astype(float)
    assert (abs(y.numpy().astype(float) - exact) <= 2.0**-8 * abs(exact) + 1e-5).all()
    dy = rng.standard_normal(y.shape).astype(as_dtype("bfloat16"))
    y.backward(put(dy))
    assert (weight.grad.dtype, weight.grad.place) == (np.float32, w.place)
    dense = host(x).astype(float).T @ dy.astype(float)
    kept = ns.BlockSparse.from_dense(dense, layout, block_size=8).toarray()
    assert (abs(weight.grad.numpy() - kept) <= 2.0**-8 * abs(kept) + 1e-5).all()


def test_linear_without_a_layout_keeps_all(rng):
    linear = nn.Linear(20, 13, block_size=8, seed=0, bias=False)
    assert linear.weight.data.density == 1
    assert linear.bias is None


def test_dropout(rng, put):
    dropout = nn.Dropout(0.25, seed=3)
    x = ns.Tensor(put(np.ones((100, 40), np.float32)))
    first, second = host(dropout(x).data), host(dropout(x).data)
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert abs((first == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / first.size)
    assert (first != second).any()
    again = nn.Dropout(0.25, seed=3)
    assert (host(again(x).data) == first).all()
    state = again.state_dict()
    resumed = nn.Dropout(0.25)
    resumed.load_state_dict(state)
    assert (host(resumed(x).data) == second).all()
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("integer", [np.uint8, np.int16, np.int64, np.uint64])
def test_numbers_of_numpy_are_seeds_and_counts(integer):
    x = np.ones((4, 5), np.float32)
    first, second = nn.Dropout(seed=3), nn.Dropout(seed=integer(3))
    np.testing.assert_array_equal(second(x).numpy(), first(x).numpy())
    second.load_state_dict({"seed": integer(3), "calls": integer(1)})
    np.testing.assert_array_equal(second(x).numpy(), first(x).numpy())
    assert all(type(value) is int for value in second.state_dict().values())


@pytest.mark.parametrize("integer", [np.uint8, np.int8, np.uint64])
@pytest.mark.parametrize("make", [
    nn.Linear, lambda n, m: nn.Conv1d(n, m, 1), lambda n, m: nn.ConvTranspose1d(n, m, 1), nn.LSTM,
    nn.MultiplicativeLSTM,
], ids=["Linear", "Conv1d", "ConvTranspose1d", "LSTM", "MultiplicativeLSTM"])  # fmt: skip
def test_numbers_of_numpy_are_sizes(integer, make, rng):
    """Such as labels.max() + 1: 8 bits that do not hold what is computed of them."""
    for n, m in rng.integers(33, 128, (3, 2)).tolist():
        layer, right = make(integer(n), integer(m)), make(n, m)
        shapes = [p.shape for p in right.parameters()]
        assert [p.shape for p in layer.parameters()] == shapes, (n, m)
        y, shape = layer(np.ones((2, 3, n), np.float32)), (2, 3, m)
        assert (y[0] if isinstance(y, tuple) else y).shape == shape
        assert layer.n_parameters() == right.n_parameters()


def test_loops_take_arrays(rng):
    x, z, gain = rng.standard_normal((2, 8)), rng.standard_normal((2, 4, 8)), rng.standard_normal(8)
    w = nn.init.uniform([[1]], 8, dtype="float64", seed=0)

    def results(of):
        norm = F.repeated_norm(of(gain), of(gain))
        yield F.repeated_product(of(w))(of(x))
        yield norm(of(x), "times", of(x))
        yield from F.repeated_cell()(of(z), of(x))

    for y, right in zip(results(lambda a: a), results(ns.Tensor), strict=True):
        np.testing.assert_array_equal(y.numpy(), right.numpy())


def test_layer_norm_and_embedding(rng, put, place):
    norm, table = nn.LayerNorm(6).to(place), nn.Embedding(5, 6, seed=0).to(place)
    codes = put(np.array([[0, 4], [2, 2]], np.int32))
    rows = table(codes)
    np.testing.assert_array_equal(host(rows.data), host(table.weight.data)[[[0, 4], [2, 2]]])
    y = host(norm(rows).data)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(-1), 1, atol=1e-4)


def test_forms_of_gelu(put):
    x = ns.Tensor(put(np.float32([-2.0, 0.5, 3.0])))
    exact, tanh = (host(nn.GELU(form)(x).data) for form in ("none", "tanh"))
    np.testing.assert_array_equal(host(F.gelu(x).data), exact)
    np.testing.assert_array_equal(host(F.gelu(x, approximate="tanh").data), tanh)
    assert 1e-5 < abs(exact - tanh).max() < 5e-4
    assert (repr(nn.GELU()), repr(nn.GELU("tanh"))) == ("GELU()", "GELU(approximate='tanh')")
    for make in (nn.GELU, lambda form: F.gelu(x, form)):
        with pytest.raises(ValueError, match=r"approximate takes .*, got 'erf'"):
            make("erf")


def test_dropout_takes_arrays():
    x = np.ones(8, np.float32)
    layer = nn.Dropout(0.5, seed=0)
    assert set(layer(x).data) == {0, 2}
    np.testing.assert_array_equal(layer.eval()(x).data, x)


class TestInit:
    layout = ns.Layout([[1, 1, 0], [1, 0, 0], [1, 0, 1]])

    def test_fan_in_counts_only_kept_blocks(self):
        w = ns.BlockSparse(np.zeros((5, 4, 4)), self.layout, shape=(10, 11))
        np.testing.assert_array_equal(nn.init.fan_in(w), [10] * 4 + [4] * 4 + [2] * 3)

    @pytest.mark.parametrize("make", [nn.init.uniform, nn.init.normal])
    def test_variance_of_the_output_is_the_same_in_every_column(self, make, rng):
        layout = ns.patterns.barabasi_albert(30, 2, seed=0)
        gain = np.sqrt(3) if make is nn.init.uniform else 1
        w = make(layout, 16, gain=gain, dtype=np.float64, seed=0)
        y = rng.standard_normal((400, w.shape[0])) @ w
        variance = (y**2).reshape(400, 30, 16).mean((0, 2))
        np.testing.assert_allclose(variance, 1, atol=0.25)

    def test_identity(self, rng):
        x = rng.standard_normal((2, 12))
        w = nn.init.identity(ns.patterns.dense(3, 3), 4, scale=2.0, dtype=np.float64)
        np.testing.assert_array_equal(x @ w, 2 * x)
        wide = nn.init.identity(ns.patterns.dense(1, 3), 4, dtype=np.float64)
        np.testing.assert_array_equal(x[:, :4] @ wide, np.tile(x[:, :4], 3))

    def test_orthogonal(self):
        w = nn.init.orthogonal(self.layout, 4, gain=2.0, dtype=np.float64, seed=0).toarray()
        for column in range(3):
            block_column = w[:, 4 * column : 4 * column + 4]
            np.testing.assert_allclose(block_column.T @ block_column, 4 * np.eye(4), atol=1e-12)

    @pytest.mark.parametrize("make", [nn.init.uniform, nn.init.normal, nn.init.orthogonal])
    def test_an_empty_column_is_no_trouble(self, make):
        assert make([[1, 0]], 4, seed=0).n_blocks == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nn.Linear(64, 64, layout=np.ones((3, 2))), "layout takes 2 x 2 blocks.*got 3 x 2"),
        (lambda: nn.Linear(0, 64), "in_features"),
        (lambda: nn.Linear(64, -6), "out_features takes an integer of at least 1, got -6"),
        (lambda: nn.LSTM(64, 64, layout=np.ones((3, 2))), "layout"),
        (lambda: nn.LSTM(4, 8, block_size=8)(np.zeros((3, 2, 5), np.float32)), "x takes"),
        (lambda: nn.LSTM(4, 8, block_size=8)(np.zeros((0, 2, 4), np.float32)), "x takes"),
        *(
            (
                lambda make=make: make(8, 8, block_size=8, precision="best"),
                "precision takes.*'best'",
            )
            for make in (nn.Linear, nn.LSTM, nn.MultiplicativeLSTM)
        ),
        (lambda: nn.Conv2d(8, 8, 3, block_size=8, precision="best"), "precision takes.*'best'"),
        (lambda: nn.Dropout(1.0), "p takes"),
        (lambda: nn.Embedding(0, 3), "num_embeddings"),
        (lambda: nn.LayerNorm(0), "features"),
        (lambda: nn.Linear(8, 8, block_size=8).to("gpu"), "place"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("features", [6.5, True])
def test_features_are_integers(features):
    with pytest.raises(TypeError, match=f"out_features takes an integer .* got {features}"):
        nn.Linear(64, features)
