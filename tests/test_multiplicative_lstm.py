"""The multiplicative LSTM against its formula in NumPy, and the parts that loops are made of."""

import numpy as np
import pytest
from conftest import host
from ops_helpers import assert_close, in_all_homes, numeric_grad

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype
from numbsparse.nn import functional as F
from numbsparse.testing import check_grads

pytestmark = pytest.mark.usefixtures("cheap_products")

needs_a_gpu = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normalized(z, gain, bias, eps):
    centred = z - z.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * gain + bias


def textbook(cell, x, h, c, kept=1.0):
    """The formula of the docstring in float64, dense."""

    def layer(part, a):
        z = a @ part.weight.numpy().astype(float)
        gain, bias = (host(p.data).astype(float) for p in (part.gain, part.bias))
        if gain.ndim == 2:
            z = z.reshape(len(a), len(gain), -1)[:, :, : gain.shape[1]]
        return normalized(z, gain, bias, part.eps)

    ys = []
    for t, x_t in enumerate(x.astype(float)):
        m, a = layer(cell.multiplier, x_t), layer(cell.addend, x_t)
        s = layer(cell.internal[0], h) * m
        s = np.maximum(layer(cell.internal[1], s) + a, 0)
        for part in cell.internal[2:]:
            s = np.maximum(layer(part, s), 0)
        i, f, g, o = np.moveaxis(layer(cell.gates, s), 1, 0)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g) * (kept[t] if np.ndim(kept) else kept)
        h = sigmoid(o) * np.tanh(c)
        ys.append(h)
    return np.stack(ys), h, c


def make(hidden=8, dtype="float32", **options):
    """A small cell whose every parameter is drawn at random."""
    blocks = -(-hidden // 4)
    rng = np.random.default_rng(0)
    options.setdefault("internal_steps", 3)
    options.setdefault("layout", lambda i: np.eye(blocks) + rng.random((blocks, blocks)) > 0.6)
    cell = nn.MultiplicativeLSTM(5, hidden, block_size=4, dtype=dtype, seed=0, **options)
    for parameter in cell.parameters():
        values = parameter.values
        values += rng.uniform(-0.3, 0.3, values.shape).astype(values.dtype)
    return cell


def tensors(rng, hidden, dtype, place, time=3, batch=2):
    def put(a):
        return ns.Tensor(ns.to_device(a) if place == "cuda" else a)

    c_dtype = ops.state_dtype(as_dtype(dtype))
    arrays = [
        rng.standard_normal((time, batch, 5)).astype(as_dtype(dtype)),
        rng.uniform(-1, 1, (batch, hidden)).astype(as_dtype(dtype)),
        rng.standard_normal((batch, hidden)).astype(c_dtype),
    ]
    return arrays, [put(a) for a in arrays]


@pytest.mark.parametrize("hidden", [8, 7])
def test_gradients(rng, hidden):
    cell = make(hidden, "float64")
    (x, h, c), _ = tensors(rng, hidden, "float64", "cpu")
    slots = [
        (module, name)
        for _, module in cell.named_modules()
        for name in ("weight", "gain", "bias")
        if hasattr(module, name)
    ]
    assert len(slots) == len(cell.parameters()) == 18

    def function(x, h, c, *parameters):
        for (module, name), parameter in zip(slots, parameters, strict=True):
            setattr(module, name, parameter)
        y, (_, c) = cell(x, (h, c))
        return (y * y).sum() + c.sum()

    check_grads(function, x, h, c, *(getattr(module, name).data for module, name in slots))


def test_the_state_carries_on(rng):
    cell = make(dropout=0.5).eval()
    x = rng.standard_normal((4, 3, 5), dtype=np.float32)
    whole, _ = cell(x)
    first, state = cell(x[:2])
    second, _ = cell(x[2:], state)
    np.testing.assert_array_equal(np.concatenate([first.data, second.data]), whole.data)


def test_dropout_leaves_updates_out(rng):
    cell = make(dropout=0.5)
    (x, h, c), there = tensors(rng, 8, "float32", "cpu")
    kept = ops.dropout_mask((3, 2, 8), 0.5, cell.dropout.seed, 1, "float32", "cpu")
    y, _ = cell(there[0], there[1:])
    np.testing.assert_allclose(host(y.data), textbook(cell, x, h, c, kept)[0], atol=1e-5)
    assert cell.dropout.calls == 1


@needs_a_gpu
def test_a_captured_step_is_the_uncaptured_one_bit_for_bit(rng):
    arrays = tensors(rng, 8, "float32", "cuda", time=1 if device.SIMULATED else 4)[1]
    seen = []
    for captured in (False, True):
        cell = make(internal_steps=2, dropout=0.3).to("cuda")
        optimizer = nn.optim.AdamW(cell.parameters())

        def step(x, h, c, cell=cell, optimizer=optimizer):
            y, state = cell(ns.Tensor(x), (ns.Tensor(h), ns.Tensor(c)))
            loss = F.mse_loss(y, 0.5)
            cell.zero_grad()
            loss.backward()
            optimizer.step()
            return loss, *state

        step = ns.graph(step) if captured else step
        x, h, c = (a.data for a in arrays)
        for _ in range(2 if device.SIMULATED else 5):
            loss, h, c = step(x, h, c)
            h, c = h.data, c.data
        seen.append([host(loss.data), host(h), host(c)])
    for got, right in zip(*seen, strict=True):
        np.testing.assert_array_equal(got, right)


def test_layouts_one_by_one_by_a_function_or_one_for_all():
    patterns = [np.eye(2), np.ones((2, 2)), ns.Layout([[1, 1], [0, 1]]), None]

    def kept(layout):
        cell = nn.MultiplicativeLSTM(4, 16, internal_steps=3, layout=layout, block_size=8)
        return [w.data.n_blocks for w in (*(s.weight for s in cell.internal), cell.gates.weight)]

    assert kept(patterns) == [2, 4, 3, 16]
    assert kept(lambda i: patterns[i]) == [2, 4, 3, 16]
    assert kept([[1, 1], [0, 1]]) == [3, 3, 3, 12]
    assert kept(None) == [4, 4, 4, 16]


def test_recurrent_weights_begin_as_the_identity():
    cell = nn.MultiplicativeLSTM(4, 13, block_size=8)
    for part in cell.internal:
        np.testing.assert_array_equal(part.weight.numpy(), np.eye(13))
    for gate in np.split(cell.gates.weight.numpy(), 4, axis=1):
        np.testing.assert_array_equal(gate[:, :13], np.eye(13))
    np.testing.assert_array_equal(cell.gates.bias.data, np.eye(4)[1][:, None] * np.ones(13))


def test_only_what_is_trained_counts_as_a_parameter():
    """No columns of the gates beyond the last unit."""
    cell = nn.MultiplicativeLSTM(5, 13, internal_steps=3, block_size=8)
    of_inputs, internal, gates = 2 * 13 * (5 + 2), 3 * 13 * (13 + 2), 4 * 13 * (13 + 2)
    assert cell.n_parameters() == of_inputs + internal + gates
    half = np.array([[1, 0], [0, 1]])
    cell = nn.MultiplicativeLSTM(5, 13, internal_steps=3, layout=half, block_size=8)
    without = 2 * 8 * 5 * (3 + 4)
    assert cell.n_parameters() == of_inputs + internal + gates - without


def test_checkpoints(tmp_path, rng):
    cell = make()
    nn.save(tmp_path / "c.npz", cell.state_dict())
    other = make(dropout=0.1)
    other.load_state_dict(nn.load(tmp_path / "c.npz"))
    x = rng.standard_normal((2, 1, 5), dtype=np.float32)
    np.testing.assert_array_equal(other.eval()(x)[0].data, cell(x)[0].data)


CELL = nn.MultiplicativeLSTM(4, 8, block_size=8, seed=0)
X = np.zeros((2, 3, 4), np.float32)
H = np.zeros((3, 8), np.float32)
Z = np.zeros((3, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "call", "says"),
    [
        (ValueError, lambda: nn.MultiplicativeLSTM(4, 8, internal_steps=1), "internal_steps takes"),
        (ValueError, lambda: nn.MultiplicativeLSTM(4, 8, eps=-1.0), "eps takes"),
        (ValueError, lambda: nn.MultiplicativeLSTM(4, 8, dropout=1.0), "dropout takes"),
        (ValueError, lambda: nn.MultiplicativeLSTM(4, 8, layout=np.ones((2, 2))), "layout takes 1"),
        (
            ValueError,
            lambda: nn.MultiplicativeLSTM(4, 8, layout=[np.ones((1, 1))] * 5),
            "layout takes 6 layouts, one for each internal step and one for the gates, got 5",
        ),
        (ValueError, lambda: CELL(X[0]), r"x takes the shape \(time, batch, 4\)"),
        (ValueError, lambda: CELL(X[:0]), "of one step at least"),
        (TypeError, lambda: CELL(X.astype(float)), "x takes float32"),
        (TypeError, lambda: CELL(X, H), r"state takes \(h, c\)"),
        (ValueError, lambda: CELL(X, (H, H[:2])), r"c takes the shape \(3, 8\), got \(2, 8\)"),
        (TypeError, lambda: CELL(X, (H.astype(float), H)), "h takes float32"),
        (ValueError, lambda: ops.affine_norm("tanh", X[0], *X[0, :2], 0.0), "kind takes one of"),
        (ValueError, lambda: ops.affine_norm("times", X[0], *X[0, :2], 0.0), "other takes"),
        (
            ValueError,
            lambda: ops.affine_norm("plain", X[0], H[0], H[0], 0.0),
            r"gain takes \(4,\) of",
        ),
        (ValueError, lambda: ops.cell(X, H), r"z takes the shape \(batch, 4, units\)"),
        (ValueError, lambda: ops.cell(np.zeros((3, 4, 7), "f"), H), "c_before takes the shape"),
        (TypeError, lambda: ops.cell(np.zeros((3, 4, 8)), H), "c_before takes float64"),
        (ValueError, lambda: ops.cell_grad(Z, H, None, H, H[:1], H), r"dh takes the shape \(3, 8"),
        (TypeError, lambda: ops.cell_grad(Z, H, None, H, H, H.astype(float)), "dc takes float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(error, call, says):
    with pytest.raises(error, match=says):
        call()


KINDS = {
    "plain": lambda v, other: v,
    "relu": lambda v, other: np.maximum(v, 0),
    "times": lambda v, other: v * other,
    "plus_relu": lambda v, other: np.maximum(v + other, 0),
}


# The last has more rows than a kernel sums together.
SHAPES = [(3, 11), (2, 4, 5), (9, 3) if device.SIMULATED else (130, 3)]


@in_all_homes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_affine_norm(home, kind, shape, rng):
    x, other, dy = (rng.standard_normal(shape) for _ in range(3))
    gain, bias = rng.uniform(0.5, 2, shape[1:]), rng.standard_normal(shape[1:])
    form = "slice" if len(shape) == 2 else "C"
    sent = tuple(home.send(a, form=form) for a in (x, gain, bias))
    has_other = kind in ("times", "plus_relu")
    beside = home.send(other, form=form) if has_other else None
    y, kept = ops.affine_norm(kind, *sent, 1e-3, beside)
    x, other, gain, bias, dy_ = (home.rounded(a) for a in (x, other, gain, bias, dy))
    assert_close(home, home.fetch(y), KINDS[kind](normalized(x, gain, bias, 1e-3), other),
                 steps=8 * shape[-1], magnitude=20)  # fmt: skip

    rounding = {"float16": 2e-2, "bfloat16": 1.5e-1, "float32": 1e-4, "float64": 1e-6}[home.dtype]

    def check(got, function, at):
        expected = numeric_grad(function, at, dy_)
        np.testing.assert_allclose(home.fetch(got), expected, atol=rounding, rtol=rounding)

    dx, dv, dother = ops.affine_norm_grad(kind, kept, *sent[1:], beside, y, home.send(dy))
    terms = [(kept, dv), (kept, dv)]
    dgain, dbias = ops.affine_norm_sums(terms, sent[1])
    check(dx, lambda a: KINDS[kind](normalized(a, gain, bias, 1e-3), other), x)
    if has_other:
        check(dother, lambda a: KINDS[kind](normalized(x, gain, bias, 1e-3), a), other)
    check(dgain, lambda a: 2 * KINDS[kind](normalized(x, a, bias, 1e-3), other), gain)
    check(dbias, lambda a: 2 * KINDS[kind](normalized(x, gain, a, 1e-3), other), bias)


@in_all_homes
@pytest.mark.parametrize("drops", [False, True], ids=["whole", "dropout"])
def test_cell(home, drops, rng):
    z, c, dh, dc = (rng.standard_normal(s) for s in ((3, 4, 5), (3, 5), (3, 5), (3, 5)))
    kept = 2.0 * rng.integers(0, 2, (3, 5)) if drops else np.ones((3, 5))
    wide = home.compute_dtype

    def formula(z, c):
        i, f, o = (sigmoid(z[:, k]) for k in (0, 1, 3))
        after = f * c + i * np.tanh(z[:, 2]) * kept
        return o * np.tanh(after), after

    there = home.send(z), home.send(c, wide), home.send(kept) if drops else None
    h, after = ops.cell(*there)
    z, dh_ = home.rounded(z), home.rounded(dh)
    expected = formula(z, c)
    assert_close(home, home.fetch(h), expected[0], steps=16, magnitude=4)
    np.testing.assert_allclose(home.fetch(after, wide), expected[1], atol=1e-5)
    dz, dc_before = ops.cell_grad(*there, after, home.send(dh), home.send(dc, wide))

    def total(z, c):
        h, after = formula(z, c)
        return h * dh_ + after * dc

    rounding = max(home.eps * 4, 2e-5)
    expected = numeric_grad(lambda a: total(a, c), z, 1.0)
    np.testing.assert_allclose(home.fetch(dz), expected, atol=rounding, rtol=rounding)
    expected = numeric_grad(lambda a: total(z, a), c, 1.0)
    np.testing.assert_allclose(home.fetch(dc_before, wide), expected, atol=2e-5)


def test_weights_of_a_loop_have_one_product_and_gradients_of_gradients(rng, monkeypatch):
    w = ns.BlockSparse(0.3 * rng.standard_normal((3, 4, 4)), [[1, 1], [0, 1]])
    products = []
    one = ops.sddmm
    monkeypatch.setattr(ops, "sddmm", lambda *a, **how: products.append(a) or one(*a, **how))

    def loop(h, w):
        times_w = F.repeated_product(w)
        for _ in range(3):
            h = F.tanh(times_w(h))
        return h

    h = rng.standard_normal((5, 8))
    check_grads(loop, h, w)
    assert len(products) == 1
    check_grads(loop, h, w, order=2)


@needs_a_gpu
@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_loop_of_other_lengths_than_expected(rng, calls):
    """Steps whose arrays are adjacent, and more steps than were expected."""
    arrays = [rng.standard_normal(s).astype("f") for s in ((1, 4, 4), (4,), (4,), (2, 4))]
    arrays[0] = ns.BlockSparse(arrays[0], [[1]])
    seen = []

    def there(a):
        return a.to("cuda") if isinstance(a, ns.BlockSparse) else ns.to_device(a)

    for put in (lambda a: a, there):
        w, gain, bias, h = (ns.Tensor(put(a), requires_grad=True) for a in arrays)
        product = F.repeated_product(w, calls=calls)
        norm = F.repeated_norm(gain, bias, calls=calls)
        y, others = h, []
        for i in range(3):
            others.append(y * (0.1 + i))
            y = norm(product(y), ("times", "plus_relu", "relu")[i], *others[i:][: i < 2])
        (y * y).sum().backward()
        seen.append([host(y.data), *(host(a.grad.values) for a in (w, gain, bias, h))])
    for got, expected in zip(*reversed(seen), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
