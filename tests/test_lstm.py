"""The LSTM as one operation: beside torch's, beside itself step by step, and in training."""

import copy

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.lstm import normed
from numbsparse.nn import functional as F
from numbsparse.testing import check_grads, races

STEPS, BATCH, INPUTS, B = 2, 3, 5, 8


pytestmark = pytest.mark.usefixtures("cheap_products")


def gates_first(a, block_size):
    """Columns (blocks, 4, B) of a weight or bias as (..., 4, width)."""
    *rows, columns = a.shape
    blocks = a.reshape(*rows, -1, 4, block_size)
    return np.moveaxis(blocks, -2, -3).reshape(*rows, 4, columns // 4)


def as_torch(a, block_size, units):
    """A parameter or its gradient as torch's: (4 * units, inputs), or (4 * units,)."""
    gates = gates_first(host(a.data), block_size)[..., :units]
    return gates.reshape(*gates.shape[:-2], 4 * units).T


@pytest.mark.parametrize(("layers", "hidden"), [(1, 16), (2, 13)], ids=["one layer", "two, cut"])
def test_it_is_torchs(rng, put, place, layers, hidden):
    torch = pytest.importorskip("torch")
    ours = nn.LSTM(INPUTS, hidden, layers, block_size=B, seed=0).to(place)
    theirs = torch.nn.LSTM(INPUTS, hidden, layers)
    for i, layer in enumerate(ours.layers):
        for name, value in (
            ("weight_ih", layer.weight_ih),
            ("weight_hh", layer.weight_hh),
            ("bias_ih", layer.bias),
        ):
            values = np.ascontiguousarray(as_torch(value, B, hidden))
            getattr(theirs, f"{name}_l{i}").data[:] = torch.from_numpy(values)
        getattr(theirs, f"bias_hh_l{i}").data[:] = 0
    shapes = [(STEPS, BATCH, INPUTS), (layers, BATCH, hidden), (layers, BATCH, hidden)]
    given = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    x, h, c = (ns.Tensor(put(a), requires_grad=True) for a in given)
    tx, th, tc = (torch.tensor(a, requires_grad=True) for a in given)
    y, (h_end, c_end) = ours(x, (h, c))
    ty, (th_end, tc_end) = theirs(tx, (th, tc))
    pairs = [(y, ty), (h_end, th_end), (c_end, tc_end)]
    total, theirs_total = ns.Tensor(put(np.zeros((), np.float32))), 0
    for ours_, theirs_ in pairs:
        dy = rng.standard_normal(ours_.shape, dtype=np.float32)
        total = total + (ours_ * put(dy)).sum()
        theirs_total = theirs_total + (theirs_ * torch.from_numpy(dy)).sum()
    total.backward()
    theirs_total.backward()
    pairs += [(x.grad, tx.grad), (h.grad, th.grad), (c.grad, tc.grad)]
    for ours_, theirs_ in pairs:
        np.testing.assert_allclose(host(ours_.data), theirs_.detach().numpy(), atol=1e-5)
    for i, layer in enumerate(ours.layers):
        for name in ("weight_ih", "weight_hh", "bias"):
            gradient = as_torch(getattr(layer, name).grad, B, hidden)
            theirs_ = getattr(theirs, f"{'bias_ih' if name == 'bias' else name}_l{i}").grad
            np.testing.assert_allclose(gradient, theirs_.numpy(), atol=1e-5)


def draw(rng, dtype, hidden, block_size, batch, norm, drop):
    """Arguments of F.lstm on the CPU, of float64 but representable in `dtype`; and options."""
    blocks = -(-hidden // block_size)
    columns = 4 * blocks * block_size
    layout = ns.Layout(np.repeat(np.triu(np.ones((blocks, blocks), bool)), 4, axis=1))
    dense = ns.Layout(np.ones((-(-INPUTS // block_size), 4 * blocks), bool))

    def numbers(*shape):
        return (rng.standard_normal(shape) / 2).astype(as_dtype(dtype)).astype(float)

    def weight(features, kept):
        values = numbers(kept.n_blocks, block_size, block_size)
        return ns.BlockSparse(values, kept, shape=(features, columns))

    arguments = [
        numbers(STEPS, batch, INPUTS), weight(INPUTS, dense), weight(hidden, layout),
        numbers(columns), numbers(batch, hidden), numbers(batch, hidden),
    ]  # fmt: skip
    if norm:
        arguments.append(numbers(columns))
    kept = ops.dropout_mask((STEPS, batch, hidden), 0.5, 1, 2, "float64", "cpu") if drop else None
    return arguments, kept


def outcome(function, arguments, kept):
    """y, h, c and the gradients of all arguments, of sums that weigh every value."""
    tensors = [ns.Tensor(a, requires_grad=True) for a in arguments]
    *first, gain = tensors if len(tensors) == 7 else (*tensors, None)
    results = function(*first, gain=gain, kept=kept)
    y, h, c = results
    (y * 0.5).sum().backward()
    (h * 0.25).sum().backward()
    (c * c).sum().backward()
    return [host(result.data) for result in results] + [host(a.grad.data) for a in tensors]


OPTIONS = {
    "plain": (False, False),
    "dropout": (False, True),
    "layer norm": (True, False),
    "layer norm, dropout": (True, True),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_one_operation_is_the_steps(rng, options):
    exact, kept = draw(rng, "float64", 13, B, BATCH, *OPTIONS[options])
    expected = outcome(F.lstm_step_by_step, exact, kept)
    for a, b in zip(outcome(F.lstm, exact, kept), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("drop", [False, True], ids=["plain", "dropout"])
def test_gradients_and_their_gradients(rng, drop):
    arguments, kept = draw(rng, "float64", 6, 4, 2, False, drop)

    def run(*tensors):
        parts = F.lstm(*tensors, kept=kept)
        return F.concatenate([part.reshape(-1) for part in parts])

    check_grads(run, *arguments, order=2)


def test_gradients_with_layer_norm(rng):
    arguments, _ = draw(rng, "float64", 6, 4, 2, True, False)

    def run(*tensors):
        parts = F.lstm(*tensors[:6], gain=tensors[6])
        return F.concatenate([part.reshape(-1) for part in parts])

    check_grads(run, *arguments, order=2)


NORMED = {  # units, block size, batch; blocks of threads of a row, units of a thread, rows in turn
    "a cluster for each row": ((70, 8, 3), (8, 2, 12)),
    "rows in turn": ((13, 8, 5), (1, 2, 3)),
    "fewer units than gates": ((2, 8, 3), (1, 1, 1)),
}


@pytest.mark.simulator
@pytest.mark.parametrize("case", NORMED)
@pytest.mark.parametrize("drop", [False, True], ids=["plain", "dropout"])
def test_norm_and_gates_in_one_launch(rng, case, drop):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    (units, size, batch), (blocks, of_thread, in_turn) = NORMED[case]
    if device.SIMULATED:
        assert normed.shares(batch, units)[::2] == (blocks, of_thread)
        assert normed.shares(batch, units)[3] == in_turn
    exact, kept = draw(rng, "float32", units, size, batch, True, drop)
    single = [a if a is None else a.astype(np.float32) for a in (*exact, kept)]
    *there, factors = (
        a.to("cuda") if isinstance(a, ns.BlockSparse) else a if a is None else ns.to_device(a)
        for a in single
    )
    expected = outcome(F.lstm, exact, kept)
    for a, b in zip(outcome(F.lstm, there, factors), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(abs(b).max(), 1))


def test_what_a_block_of_a_cluster_shows_stays_until_all_have_read_it(rng):
    if not device.SIMULATED:
        pytest.skip("races are found in the simulator")
    units, size, batch = 32, 8, 2  # no thread is idle, and reads what another one writes
    assert normed.shares(batch, units) == (2, 8, 2, batch)

    def some(*shape):
        return ns.to_device(rng.standard_normal(shape, dtype=np.float32))

    gates, recurrent, bias, gain = (some(*rows, 4 * units) for rows in [(batch,)] * 2 + [()] * 2)
    c_before, c, h, dy, dh, dc = (some(batch, units) for _ in range(6))
    scales, dbias, dgain = some(batch, 4), some(1, 4 * units), some(1, 4 * units)

    def run():
        cell = bias, None, c_before, c
        normed.forward(gates, recurrent, *cell, h, size, gain, 1e-5, scales)
        gradients = dy, dh, dc, gates, dbias, size
        normed.backward(gates, *cell, *gradients, gain, scales, dgain)

    assert races(run) == []


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "layer norm"])
@pytest.mark.parametrize("batch", [1, 9], ids=["a row", "rows"])
def test_what_units_beyond_the_last_hold_reaches_no_gradient(rng, norm, batch):
    hidden = 13
    exact, _ = draw(rng, "float64", hidden, B, batch, norm, False)

    def beyond(value):
        arguments = copy.deepcopy(exact)
        for a in arguments:
            if isinstance(a, ns.BlockSparse):
                index, rows = a.layout.index, a.shape[0]
                a.values[index.block_rows == rows // B, rows % B :] = value
                a.values[index.block_columns // 4 == hidden // B, :, hidden % B :] = value
            elif a.ndim == 1:  # bias and gain
                a.reshape(-1, 4, B)[-1, :, hidden % B :] = value
        return outcome(F.lstm, arguments, None)

    for a, b in zip(beyond(0), beyond(np.nan), strict=True):
        np.testing.assert_array_equal(a, b)


def test_backward_again_after_one_that_failed(rng, put, place, monkeypatch):
    lstm = nn.LSTM(INPUTS, 13, block_size=B, seed=0).to(place)
    x = put(rng.standard_normal((STEPS, BATCH, INPUTS), dtype=np.float32))
    total, right = lstm(x)[0].sum(), ops.lstm_grad

    def fails(trace, *args, **how):
        right(trace, *args, **how)
        raise MemoryError

    monkeypatch.setattr(ops, "lstm_grad", fails)
    with pytest.raises(MemoryError):
        ns.grad(total, lstm.parameters())
    monkeypatch.setattr(ops, "lstm_grad", right)
    got = ns.grad(total, lstm.parameters())
    expected = ns.grad(lstm(x)[0].sum(), lstm.parameters())
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(host(a.data), host(b.data))


def test_state_carries_on(rng, put, place):
    lstm = nn.LSTM(INPUTS, 13, 2, block_size=B, seed=0).to(place)
    x = rng.standard_normal((STEPS, BATCH, INPUTS), dtype=np.float32)
    whole, (h, c) = lstm(put(x))
    first, state = lstm(put(x[:1]))
    second, (h_, c_) = lstm(put(x[1:]), [part.detach() for part in state])
    joined = np.concatenate([host(first.data), host(second.data)])
    for a, b in ((whole, joined), (h, host(h_.data)), (c, host(c_.data))):
        np.testing.assert_allclose(host(a.data), b, atol=1e-6)


def make(place="cpu", **options):
    return nn.LSTM(INPUTS, 16, 2, layout=np.eye(2), block_size=B, seed=0, **options).to(place)


def test_the_forget_bias_and_each_layers_layout():
    lstm = make(forget_bias=2.0)
    bias = gates_first(lstm.layers[1].bias.data, B)
    np.testing.assert_array_equal(bias[1], 2)
    assert not bias[[0, 2, 3]].any()
    assert [layer.weight_hh.data.density for layer in lstm.layers] == [0.5, 0.5]
    assert [layer.weight_ih.data.density for layer in lstm.layers] == [1, 0.5]
    lstm = nn.LSTM(
        INPUTS, 16, 2, block_size=B, layout=[np.eye(2), None], input_layout=[None, np.eye(2)]
    )
    assert [layer.weight_hh.data.density for layer in lstm.layers] == [0.5, 1]
    assert [layer.weight_ih.data.density for layer in lstm.layers] == [1, 0.5]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "layer norm"])
def test_only_what_is_trained_counts_as_a_parameter(rng, norm):
    """Nothing beyond the last unit: blocks are whole, and a gradient there is 0."""
    lstm = nn.LSTM(INPUTS, 13, 2, block_size=B, layer_norm=norm, dtype="float64", seed=0)
    vectors = 1 + norm
    counts = [4 * 13 * (features + 13 + vectors) for features in (INPUTS, 13)]
    assert lstm.n_parameters() == sum(counts)
    y, _ = lstm(rng.standard_normal((3, BATCH, INPUTS)))
    (y * rng.standard_normal(y.shape)).sum().backward()
    gradients = [np.count_nonzero(parameter.grad.values) for parameter in lstm.parameters()]
    assert lstm.n_parameters() == sum(gradients)
    lstm.layers[1].weight_ih.requires_grad = False
    assert lstm.n_parameters() == sum(counts) - 4 * 13 * 13


def test_dropout_of_the_update_is_for_training_and_goes_on_after_a_load(rng):
    x = rng.standard_normal((STEPS, BATCH, INPUTS), dtype=np.float32)
    lstm, other = make(update_dropout=0.5), make(update_dropout=0.5)
    first, second = lstm(x)[0].data, lstm(x)[0].data
    assert abs(first - second).max() > 0.01
    other(x)
    other.load_state_dict(lstm.state_dict())
    np.testing.assert_array_equal(other(x)[0].data, lstm(x)[0].data)
    lstm.eval()
    np.testing.assert_array_equal(lstm(x)[0].data, lstm(x)[0].data)
    np.testing.assert_array_equal(lstm(x)[0].data, make()(x)[0].data)


@pytest.mark.slow
@pytest.mark.simulator
def test_a_captured_training_is_the_uncaptured_one_bit_for_bit(rng):
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    x = rng.standard_normal((3, 2, BATCH, INPUTS), dtype=np.float32)
    ends = []
    for captured in (False, True):
        lstm = nn.LSTM(INPUTS, 8, block_size=B, layer_norm=True, update_dropout=0.25, seed=0)
        lstm.to("cuda")
        optimizer, state = nn.optim.SGD(lstm.parameters(), lr=0.1), lstm.zero_state(BATCH)

        def step(x, state, lstm=lstm, optimizer=optimizer):
            y, state = lstm(x, state)
            lstm.zero_grad()
            F.mse_loss(y, 0.5).backward()
            optimizer.step()
            return tuple(part.detach() for part in state)

        step = ns.graph(step) if captured else step
        for part in x:
            state = step(ns.to_device(part), state)
        ends.append([host(a.data) for a in (*lstm.parameters(), *state)])
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)


X = np.zeros((STEPS, BATCH, INPUTS), np.float32)
H = np.zeros((2, BATCH, 16), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: make()(X[0]), ValueError, "x takes the shape"),
        (lambda: make()(X[:0]), ValueError, "one step at least"),
        (lambda: make()(X.astype(float)), TypeError, "x takes float32"),
        (lambda: make()(X, (H[:1], H)), ValueError, r"h takes the shape \(2, 3, 16\)"),
        (lambda: make()(X, (H, H[:, :1])), ValueError, r"c takes the shape \(2, 3, 16\)"),
        (lambda: make()(X, (H, H.astype(float))), TypeError, "c takes float32"),
        (lambda: make()(X, H), TypeError, "state takes"),
        (lambda: make()(X, (H, ns.to_device(H))), ValueError, "c takes the device of the weights"),
        (lambda: make()(ns.to_device(X)), ValueError, "x takes the device of the weights, cpu"),
        (lambda: make(update_dropout=1.0), ValueError, "from 0 to below 1"),
        (lambda: nn.LSTM(4, 8, 0), ValueError, "num_layers"),
        (lambda: nn.LSTM(8, 8, 2, layout=[np.eye(1)] * 3, block_size=8), ValueError, "2 layers"),
    ],
    ids=[
        "axes of x", "no steps", "dtype of x", "layers of h", "batch of c", "dtype of c",
        "no pair", "place of c", "place of x", "dropout", "layers", "layouts",
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, error, says):
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({1: 3}, TypeError, "weight_ih takes a BlockSparse"),
        ({2: "other width"}, ValueError, "weight_hh takes four gates of whole blocks"),
        ({1: "other width"}, ValueError, "weight_ih takes 64 columns"),
        ({3: np.zeros(3)}, ValueError, r"bias takes the shape \(64,\)"),
        ({4: np.zeros((1, 16))}, ValueError, r"h takes the shape \(3, 16\)"),
        ({5: np.zeros((3, 16), np.float32)}, TypeError, "c takes float64"),
    ],
    ids=["dense", "gates", "columns", "bias", "h", "c"],
)
def test_the_function_refuses_by_name(rng, change, error, says):
    arguments, _ = draw(rng, "float64", 16, 8, 3, False, False)
    for i, value in change.items():
        if value == "other width" if isinstance(value, str) else False:
            w = arguments[i]
            layout = ns.Layout(np.ones((w.layout.shape[0], 9), bool))
            value = ns.BlockSparse(np.ones((layout.n_blocks, 8, 8)), layout, shape=(w.shape[0], 72))
        arguments[i] = value
    for function in (F.lstm, F.lstm_step_by_step):
        with pytest.raises(error, match=says):
            function(*arguments)


def test_the_function_refuses_an_eps_below_zero(rng):
    arguments, _ = draw(rng, "float64", 16, 8, 3, False, False)
    with pytest.raises(ValueError, match="eps takes a number of at least 0, got -1"):
        F.lstm(*arguments, eps=-1.0)
