"""Gradients of gradients of nn.LSTM: of one layer and of more, through whatever follows them."""

from importlib.util import find_spec

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import functional as F

pytestmark = pytest.mark.usefixtures("cheap_products")

WEIGHTS = np.cos(np.arange(2.0 * 64)).reshape(64, 2)
STEPS, BATCH, INPUTS, UNITS, B = 3, 2, 5, 6, 4

ENDS = {
    "sum": lambda y: y * 2.0,
    "tanh": F.tanh,
    "square": lambda y: y**2,
    "logsumexp": F.logsumexp,
    "product": lambda y: y[0] * y[2],
}
OPTIONS = {
    "plain": {},
    "dropout": {"update_dropout": 0.4},
    "layer norm": {"layer_norm": True},
    "masked": {"layout": [[1, 0], [1, 1]]},
}
CASES = [
    *((1, end, "plain") for end in ENDS),
    *((2, end, "plain") for end in ENDS),
    *((2, "tanh", option) for option in list(OPTIONS)[1:]),
    (3, "square", "masked"),
]
IDS = [f"{layers} - {end} - {option}" for layers, end, option in CASES]


def made(layers, option, dtype="float64", place="cpu"):
    options = OPTIONS[option]
    if "update_dropout" in options:
        options = options | {"update_dropout": 0.4}
    lstm = nn.LSTM(INPUTS, UNITS, layers, block_size=B, dtype=dtype, seed=0, **options)
    return lstm.to(place)


def penalty(lstm, x, end):
    """The squared length of the gradients of x and of all weights, that of a loss."""
    for _, module in lstm.named_modules():
        if hasattr(module, "calls"):
            module.calls = 0
    y, (h, c) = lstm(x)
    loss = ENDS[end](y).sum() + (h * c).sum()
    inputs = [x, *lstm.parameters()]
    total = None
    for gradient in ns.grad(loss, inputs, create_graph=True):
        values = seen(gradient) if sparse(gradient) else gradient
        part = (values * values).sum()
        total = part if total is None else total + part
    return total


def seen(gradient):
    """Two weighted sums of each row of a block-sparse gradient."""
    weights = WEIGHTS[: gradient.shape[1]].astype(gradient.dtype)
    return gradient @ (ns.to_device(weights) if gradient.place == "cuda" else weights)


def sparse(tensor):
    return isinstance(tensor.data, ns.BlockSparse)


def gradients_of(lstm, x, end):
    """Of the penalty, as dense arrays."""
    found = ns.grad(penalty(lstm, x, end), [x, *lstm.parameters()])
    return [host(gradient.data) for gradient in found]


@pytest.mark.parametrize(("layers", "end", "option"), CASES, ids=IDS)
def test_numerically(rng, layers, end, option):
    lstm = made(layers, option)
    x = ns.Tensor(rng.standard_normal((STEPS, BATCH, INPUTS)), requires_grad=True)
    tensors = [x, *lstm.parameters()]
    slopes = gradients_of(lstm, x, end)
    ways = [rng.standard_normal(t.values.shape) for t in tensors]
    expected, first, eps = 0.0, [t.values.copy() for t in tensors], 1e-5
    for t, slope, way in zip(tensors, slopes, ways, strict=True):
        whole = t.data.with_values(way).toarray() if sparse(t) else way
        expected += (slope * whole).sum()

    def at(distance):
        for t, values, way in zip(tensors, first, ways, strict=True):
            t.values[...] = values + distance * way
        return penalty(lstm, x, end).item()

    got = (8 * (at(eps) - at(-eps)) - at(2 * eps) + at(-2 * eps)) / (12 * eps)
    # A rounding of the penalty over eps; the differences themselves are off by eps^4.
    assert abs(got - expected) <= 1e-9 * (1 + abs(expected)) * 100


@pytest.mark.parametrize("option", ["plain", "layer norm"])
def test_what_units_beyond_the_last_hold_reaches_none(rng, put, place, option):
    dtype, ends = "float64" if place == "cpu" else "float32", []
    lstm = made(1, option, dtype, place)
    numbers = rng.standard_normal((STEPS, BATCH, INPUTS)).astype(dtype)
    x = ns.Tensor(put(numbers), requires_grad=True)
    for beyond in (0, np.nan):
        for p in filter(sparse, lstm.parameters()):
            values = host(p.values).copy()
            values[p.data.layout.index.block_columns // 4 == 1, :, UNITS % B :] = beyond
            p.data.values = put(values)
        ends.append(gradients_of(lstm, x, "tanh"))
    for without, with_nan in zip(*ends, strict=True):
        np.testing.assert_array_equal(without, with_nan)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_as_torch(rng, layers, end):
    import torch

    ends = {
        "sum": lambda y: y * 2.0,
        "tanh": torch.tanh,
        "square": lambda y: y**2,
        "logsumexp": lambda y: torch.logsumexp(y, -1),
        "product": lambda y: y[0] * y[2],
    }
    lstm = made(layers, "masked")
    x = ns.Tensor(rng.standard_normal((STEPS, BATCH, INPUTS)), requires_grad=True)
    tensors = [x, *lstm.parameters()]
    place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
    theirs = [torch.tensor(host(t.data), requires_grad=True) for t in tensors]
    masks = [torch.tensor(mask_of(t)) for t in tensors]
    y, end_h, end_c = theirs[0], [], []
    for i in range(layers):
        of_layer = [theirs[place_of[id(p)]] for p in lstm.layers[i].parameters()]
        named = dict(zip([n for n, _ in lstm.layers[i].named_parameters()], of_layer, strict=True))
        h = c = torch.zeros(BATCH, UNITS, dtype=torch.float64)
        outputs = []
        for x_t in y:
            z = x_t @ named["weight_ih"] + h @ named["weight_hh"] + named["bias"]
            gates = z.reshape(BATCH, -1, 4, B).transpose(1, 2).reshape(BATCH, 4, -1)[..., :UNITS]
            a, f, g, o = gates.unbind(1)
            c = torch.sigmoid(f) * c + torch.sigmoid(a) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        y = torch.stack(outputs)
        end_h.append(h)
        end_c.append(c)
    loss = ends[end](y).sum() + (torch.stack(end_h) * torch.stack(end_c)).sum()
    first = torch.autograd.grad(loss, theirs, create_graph=True)
    total = 0
    for t, g, m in zip(tensors, first, masks, strict=True):
        g = (g * m) @ torch.tensor(WEIGHTS[: g.shape[1]]) if sparse(t) else g
        total = total + (g * g).sum()
    expected = torch.autograd.grad(total, theirs)
    for got, right, mask in zip(gradients_of(lstm, x, end), expected, masks, strict=True):
        right = (right * mask).numpy()
        np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-11 * abs(right).max())


def mask_of(tensor):
    """1 where it keeps blocks."""
    if not sparse(tensor):
        return np.ones(tensor.shape)
    return tensor.data.with_values(np.ones(tensor.values.shape)).toarray()


@pytest.mark.parametrize(("layers", "end"), [(2, "square")])
def test_on_a_gpu_as_in_float64(rng, layers, end):
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    values = rng.standard_normal((2, 1, INPUTS), dtype=np.float32)
    wide, narrow = made(layers, "plain"), made(layers, "plain", "float32", "cuda")
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        a.values[...] = host(b.values)
    ends = [
        gradients_of(lstm, ns.Tensor(x, requires_grad=True), end)
        for lstm, x in ((wide, values.astype(float)), (narrow, ns.to_device(values)))
    ]
    for right, got in zip(*ends, strict=True):
        # Some hundred roundings in a row, of terms no larger than the largest result.
        np.testing.assert_allclose(got, right, rtol=0, atol=500 * 2.0**-24 * abs(right).max())


def test_a_third_time(rng):
    """Deeper still, and through the gradient of the gradient."""
    lstm = made(1, "plain")
    x = ns.Tensor(rng.standard_normal((2, 1, INPUTS)), requires_grad=True)

    def second(x):
        total = penalty(lstm, x, "tanh")
        return ns.grad(total, [x], create_graph=True)[0]

    way, eps = rng.standard_normal(x.shape), 1e-5
    (slope,) = ns.grad((second(x) * second(x)).sum(), [x])
    sides = []
    for side in (-eps, eps):
        moved = ns.Tensor(x.data + side * way, requires_grad=True)
        sides.append((second(moved).data ** 2).sum())
    np.testing.assert_allclose((slope.data * way).sum(), np.diff(sides)[0] / (2 * eps), rtol=1e-6)


def multiplicative(dtype, place, **options):
    how = {"internal_steps": 3, "block_size": B, "seed": 0, **options}
    return nn.MultiplicativeLSTM(INPUTS, UNITS, dtype=dtype, **how).to(place)


def test_of_a_multiplicative_lstm_gradients_on_the_tape_are_those_without(rng, place):
    dtype = "float64" if place == "cpu" else "float32"
    model = multiplicative(dtype, place, dropout=0.4)
    model.gates.weight.requires_grad = False
    values = rng.standard_normal((STEPS, BATCH, INPUTS)).astype(dtype)
    x = ns.Tensor(values if place == "cpu" else ns.to_device(values), requires_grad=True)
    inputs, found = [x, *(p for p in model.parameters() if p.requires_grad)], []
    for again in (False, True):
        model.dropout.calls = 0
        y, (h, c) = model(x)
        loss = (y * y).sum() + (h * c).sum()
        found.append(ns.grad(loss, inputs, create_graph=again))
    bound = 1e-12 if place == "cpu" else 1e-4
    for got, right in zip(*found, strict=True):
        got, right = (host(a.data.values if sparse(a) else a.data) for a in (got, right))
        np.testing.assert_allclose(got, right, rtol=0, atol=bound * max(1, abs(right).max()))


def test_gradients_of_gradients_of_a_multiplicative_lstm(rng):
    model = multiplicative("float64", "cpu")
    start, way = rng.standard_normal((2, STEPS, BATCH, INPUTS))

    def penalty(x):
        y, (h, c) = model(x)
        loss = (F.tanh(y)).sum() + (h * c).sum()
        parts = [(g * g).sum() for g in ns.grad(loss, [x, *model.parameters()], create_graph=True)]
        return sum(parts[1:], parts[0])

    x = ns.Tensor(start, requires_grad=True)
    (slope,) = ns.grad(penalty(x), [x])
    sides = [penalty(ns.Tensor(start + e * way, requires_grad=True)).item() for e in (-1e-6, 1e-6)]
    np.testing.assert_allclose((slope.data * way).sum(), np.diff(sides)[0] / 2e-6, rtol=1e-6)
