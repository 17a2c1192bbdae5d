"""What blocks hold beyond the edge of their matrix is NaN here, and never seen."""

import numpy as np
import pytest
from conftest import HALVES, host
from numpy.testing import assert_allclose, assert_array_equal

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import matmul
from numbsparse.nn import functional as F
from numbsparse.nn.init import fan_in
from numbsparse.testing import check_grads

B = 4
EDGES = [(6, 8), (8, 5), (7, 9)]  # in the rows, in the columns, in both
LAYOUTS = {(2, 2): [[1, 0], [1, 1]], (2, 3): [[1, 0, 1], [1, 1, 1]]}


def edged(rng, shape, dtype="float32", beyond=np.nan):
    """A matrix with `beyond` where its blocks reach over the edge."""
    layout = ns.Layout(LAYOUTS[tuple(-(-n // B) for n in shape)])
    whole = np.full([n * B for n in layout.shape], beyond)
    whole[: shape[0], : shape[1]] = rng.standard_normal(shape)
    w = ns.BlockSparse.from_dense(whole, layout, block_size=B)
    return ns.BlockSparse(w.values.astype(as_dtype(dtype)), layout, shape=shape)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("shape", [*EDGES, (8, 8)], ids=str)
def test_inside(rng, put, shape, dtype):
    w = edged(rng, shape, dtype)
    there = put(w)
    for view in (there, there.T):
        assert_array_equal(host(ops.inside(view)), edged_again(w).values)
    if shape == (8, 8):
        assert ops.inside(there) is there.values


def edged_again(w):
    return ns.BlockSparse.from_dense(w.toarray(), w.layout, block_size=B)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "highest"), ("float32", "high"), ("float16", "highest")]
)
@pytest.mark.parametrize("kernel", [*matmul.RUNGS])
def test_products(rng, kernel, dtype, precision):
    """By each rung, in both directions: neither rows nor columns beyond the edge are read."""
    size = 8 if kernel[:2] in ("k7", "k9") else 32
    put = ns.to_device if matmul.RUNGS[kernel] == "cuda" else np.asarray
    if put is ns.to_device and not device.is_available():
        pytest.skip(device.why_unavailable())
    layout = ns.Layout([[1, 0], [1, 1]])
    values = rng.standard_normal((layout.n_blocks, size, size)).astype(dtype)
    values[layout.index.block_rows == 1, -5:] = np.nan
    values[layout.index.block_columns == 1, :, -3:] = np.nan
    w = ns.BlockSparse(values, layout, shape=(2 * size - 5, 2 * size - 3))
    there = w.to("cuda") if put is ns.to_device else w
    how = {"kernel": kernel, "precision": precision}
    for one, other in ((w, there), (w.T, there.T)):
        x = rng.standard_normal((70, one.shape[0])).astype(dtype)
        try:
            y = ns.matmul(put(x), other, **how)
        except (TypeError, ValueError) as refused:
            pytest.skip(str(refused))
        exact = x.astype(float) @ one.toarray().astype(float)
        assert_allclose(host(y), exact, rtol=0, atol=0.01 * abs(exact).max())


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_norms_and_clipping(rng, put, shape):
    w, b = edged(rng, shape), rng.standard_normal(3).astype(np.float32)
    p, q = (nn.Parameter(put(a.copy())) for a in (w, b))
    p.grad, q.grad = (ns.Tensor(put(a.copy())) for a in (w, b))
    expected = np.sqrt((w.toarray() ** 2).sum() + (b**2).sum())
    assert nn.utils.clip_grad_norm([p, q], 0.5).item() == pytest.approx(expected, rel=1e-6)
    assert_allclose(p.grad.numpy(), w.toarray() * 0.5 / expected, rtol=1e-5)
    scaler = nn.optim.LossScaler(4.0)
    optimizer = nn.optim.SGD([p, q], lr=1.0)
    scaler.step(optimizer)
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 1}
    assert_allclose(p.numpy(), w.toarray() * (1 - 0.125 / expected), rtol=1e-4)


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_columns(rng, put, shape):
    v, dw = edged(rng, shape), edged(rng, shape)
    g = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    dense, slope = v.toarray().astype(float), dw.toarray().astype(float)
    norms = np.sqrt((dense**2).sum(axis=0))

    w = ns.Tensor(put(v), requires_grad=True)
    found = F.column_norms(w)
    assert_allclose(host(found.data), norms, rtol=1e-5)
    found.backward(put(g))
    assert_allclose(w.grad.numpy(), dense / norms * g, rtol=1e-4, atol=1e-6)

    for normalises in (False, True):
        w, by = (ns.Tensor(put(a), requires_grad=True) for a in (v, g))
        y = (F.normalise_columns if normalises else F.scale_columns)(w, by)
        lengths = norms if normalises else 1.0
        assert_allclose(y.numpy(), dense * g / lengths, rtol=1e-4, atol=1e-6)
        y.backward(ns.Tensor(put(dw)))
        dg = (dense * slope).sum(axis=0) / lengths
        assert_allclose(host(by.grad.data), dg, rtol=1e-4, atol=1e-5)
        along = dense * dg / lengths if normalises else 0
        assert_allclose(w.grad.numpy(), (slope - along) * g / lengths, rtol=1e-4, atol=1e-5)
        total = np.sqrt((w.grad.numpy().astype(float) ** 2).sum())
        assert host(ops.global_norm([w.grad.data])) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_gradients(rng, shape):
    w, g = edged(rng, shape, "float64"), rng.uniform(0.5, 2, shape[1])
    x = rng.standard_normal((3, shape[0]))
    check_grads(F.column_norms, w, order=2)
    check_grads(lambda w, g: F.scale_columns(w, g) * 2.0 + w, w, g, order=2)
    check_grads(lambda x, w, g: x @ F.normalise_columns(w, g, 1e-12), x, w, g, order=2)
    check_grads(F.linear, x, w, g, order=2)


def test_a_column_of_zeros_has_a_length_without_a_slope(rng, put):
    v = edged(rng, (7, 9), beyond=0.0)
    v.values[:, :, 1] = 0
    w = ns.Tensor(put(v), requires_grad=True)
    F.column_norms(w).sum().backward()
    gradient = w.grad.numpy()
    assert np.isfinite(gradient).all()
    assert not gradient[:, 1::B].any()


def beyond_is_zero(w, tap_features=None):
    assert_array_equal(ops.inside(w, tap_features), w.values)
    assert w.values.any()


@pytest.mark.parametrize("make", [nn.init.uniform, nn.init.normal, nn.init.identity])
@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_initialisers_leave_zeros_there(make, shape):
    beyond_is_zero(make(np.ones((2, -(-shape[1] // B))), B, shape=shape))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(5, 6, block_size=B),
        nn.LSTM(5, 6, 2, block_size=B),
        nn.MultiplicativeLSTM(5, 6, block_size=B),
        nn.Conv2d(5, 6, 2, block_size=B),
        nn.ConvTranspose1d(5, 6, 3, block_size=B),
        nn.Conv1d(9, 3, 1, block_size=B),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_begin_with_zeros_there(layer):
    for _, module in layer.named_modules():
        for parameter in vars(module).values():
            if isinstance(parameter, nn.Parameter) and isinstance(parameter.data, ns.BlockSparse):
                beyond_is_zero(parameter.data, module.tap_features)


def test_weight_norm_of_a_linear_layer_is_the_dense_one(rng, put, place):
    layer = nn.Linear(5, 6, block_size=B, bias=False, seed=0)
    layer.weight.data = w = edged(rng, (5, 6))
    dense = w.toarray()
    nn.utils.weight_norm(layer).to(place)
    assert_allclose(host(layer.weight_g.data), np.linalg.norm(dense, axis=0), rtol=1e-6)
    assert_allclose(layer.weight.numpy(), dense, rtol=1e-5)


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_weight_norm_of_a_convolution_reads_no_rows_between_the_taps(rng, put, place, make):
    layer = make(5, 6, 2, block_size=B, bias=False, seed=0)
    w = layer.weight.data
    assert layer.n_parameters() == 5 * 6 * 4
    assert fan_in(w, layer.tap_features).sum() == 5 * 6 * 4
    rows = (np.arange(w.shape[0]) % 8 >= layer.tap_features)[:, None]
    dense = w.toarray()
    with_nan = ns.BlockSparse.from_dense(np.where(rows, np.nan, dense), w.layout, block_size=B)
    layer.weight.data = with_nan
    nn.utils.weight_norm(layer).to(place)
    assert layer.n_parameters() == 5 * 6 * 4 + dense.shape[1]
    assert_allclose(host(layer.weight_g.data), np.linalg.norm(dense, axis=0), rtol=1e-5)
    x = put(rng.standard_normal((2, 4, 4, 5)).astype(np.float32))
    y = layer(x)
    y.backward(put(np.ones(y.shape, np.float32)))
    assert np.isfinite(host(y.data)).all()
    for parameter in layer.parameters():
        assert np.isfinite(host(parameter.grad.values)).all()


def test_an_lstm(rng, put, place):
    layer = nn.LSTM(5, 6, block_size=B, seed=0)
    x = rng.standard_normal((3, 2, 5)).astype(np.float32)
    results = []
    for beyond in (0.0, np.nan):
        for weight in (layer.layers[0].weight_ih, layer.layers[0].weight_hh):
            w = weight.data.to("cpu")
            values = np.where(ops.inside(w.with_values(np.ones_like(w.values))), w.values, beyond)
            weight.data = w.with_values(values.astype(np.float32))
        layer.to(place)
        y, _ = layer(put(x))
        y.sum().backward()
        results.append([host(y.data), *(host(p.grad.values) for p in layer.parameters())])
    for without, with_nan in zip(*results, strict=True):
        assert_array_equal(with_nan, without)
