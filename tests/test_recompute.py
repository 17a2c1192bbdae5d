"""Recomputed activations: the same gradients bit for bit, from less memory."""

import tracemalloc
from collections import namedtuple

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.nn import functional as F

on_a_gpu = pytest.mark.gpu(reason="the simulator captures nothing")
State = namedtuple("State", "h c")


class Layer(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        self.linear = nn.Linear(width, width, block_size=4, layout=np.eye(width // 4), seed=seed)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.3, seed=seed)

    def forward(self, x):
        return self.dropout(F.gelu(self.norm(self.linear(x))))


def chain(place, how, x, width=8, n=3):
    """The gradients of x and of all parameters of n layers, how often each dropped, and y."""
    layers = [Layer(width, i).to(place) for i in range(n)]
    x = ns.Tensor(x, requires_grad=True)
    y = x
    for layer in layers:
        y = how(layer, y)
    (y * y).sum().backward()
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    calls = [layer.dropout.calls for layer in layers]
    return [y, x.grad, *gradients], calls


def run(function, *inputs):
    return function(*inputs)


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(host(a.values), host(b.values))


def test_gradients_are_the_same_bit_for_bit(rng, put, place):
    x = put(rng.standard_normal((3, 8), dtype=np.float32))
    expected, calls = chain(place, run, x)
    got, counted = chain(place, nn.recompute, x)
    same(got, expected)
    assert counted == calls == [1, 1, 1]
    assert (host(got[0].data) == 0).any()


def test_keyword_arguments(rng):
    """Their gradients too; and what was changed since is refused."""
    layer = Layer(8, 0).eval()

    def scaled(x, *, scale, others):
        return layer(x) * scale + others["shift"]

    def gradients(how):
        x, scale, shift = (ns.Tensor(a, requires_grad=True) for a in arrays)
        y = how(x, scale=scale, others={"shift": shift})
        (y * y).sum().backward()
        return [y, x.grad, scale.grad, shift.grad]

    arrays = rng.standard_normal((3, 2, 8), dtype=np.float32)
    same(gradients(lambda *x, **named: nn.recompute(scaled, *x, **named)), gradients(scaled))
    x, scale, shift = (ns.Tensor(a, requires_grad=True) for a in arrays)
    y = nn.recompute(scaled, x, scale=scale, others={"shift": shift.detach()})
    scale.data = scale.data * 2
    with pytest.raises(RuntimeError, match="changed"):
        y.sum().backward()


def test_within_one_another(rng):
    x = rng.standard_normal((3, 8), dtype=np.float32)

    def twice(layer, x):
        return nn.recompute(lambda x: nn.recompute(layer, F.tanh(nn.recompute(layer, x))), x)

    same(chain("cpu", twice, x)[0], chain("cpu", lambda f, x: f(F.tanh(f(x))), x)[0])


def test_states_and_tensors_from_around(rng):
    def gradients(how):
        lstm = nn.MultiplicativeLSTM(4, 8, block_size=4, internal_steps=2, dropout=0.2, seed=0)
        x, h, c, scale = (
            ns.Tensor(
                np.random.default_rng(1).standard_normal(shape).astype("f"), requires_grad=i > 0
            )
            for i, shape in enumerate([(3, 2, 4), (2, 8), (2, 8), (8,)])
        )
        factor = F.exp(scale)  # has a past of its own

        def cell(x, state, note):
            y, (h, c) = lstm(x, (state.h, state.c))
            return {"y": y * factor, "state": State(h, c), "note": note}

        out = how(cell, x, State(h, c), "kept")
        assert out["note"] == "kept"
        assert isinstance(out["state"], State)
        (out["y"].sum() + (out["state"].c * h).sum()).backward()
        assert x.grad is None
        return [h.grad, c.grad, scale.grad, *(p.grad for p in lstm.parameters())]

    for got, right in zip(gradients(nn.recompute), gradients(run), strict=True):
        # h is met within and without, and the two are added in another order.
        np.testing.assert_allclose(host(got.values), host(right.values), rtol=1e-5, atol=1e-6)


def test_what_a_result_does_not_depend_on_has_zeros_for_a_gradient():
    x, z = (ns.Tensor(np.ones(2), requires_grad=True) for _ in range(2))
    y, _, same_x = nn.recompute(lambda x: (x * 2.0, F.exp(z), x), x)
    (y + same_x).sum().backward()
    np.testing.assert_array_equal(x.grad.data, [3, 3])
    np.testing.assert_array_equal(z.grad.data, [0, 0])


def test_grad_of_chosen_inputs(rng):
    linear = nn.Linear(4, 4, block_size=4, seed=0)
    y = nn.recompute(linear, rng.standard_normal((2, 4), dtype=np.float32))
    (dw,) = ns.grad(y.sum(), [linear.weight])
    (expected,) = ns.grad(linear(np.ones((1, 4), np.float32)).sum(), [linear.weight])
    assert dw.shape == expected.shape
    assert linear.weight.grad is None


def test_without_a_tape_it_is_the_function_itself():
    x = ns.Tensor(np.ones(2), requires_grad=True)
    with ns.no_grad():
        assert not nn.recompute(F.exp, x).requires_grad
    assert not nn.recompute(F.exp, x.detach()).requires_grad


def peak_memory(how):
    """The most bytes that NumPy held at a time."""
    width, n = 256, 12
    x = np.ones((64, width), np.float32)
    chain("cpu", how, x, width, 1)
    tracemalloc.start()
    try:
        chain("cpu", how, x, width, n)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_falls():
    # Of a layer about 8 activations are kept without, one with; weights are small beside them.
    assert peak_memory(nn.recompute) < 0.5 * peak_memory(run)


@on_a_gpu
def test_memory_of_a_graph_falls():
    held = []
    for how in (run, nn.recompute):
        layers = [Layer(256, i).to("cuda") for i in range(8)]

        @ns.graph
        def step(x, how=how, layers=layers):
            x = y = ns.Tensor(x, requires_grad=True)
            for layer in layers:
                y = how(layer, y)
                layer.zero_grad()
            (y * y).sum().backward()
            return x.grad

        for _ in range(3):
            step(np.ones((512, 256), np.float32))
        (recording,) = step._recordings.values()
        held.append(sum(buffer.size for buffer in recording._capture.arena._buffers))
    assert held[1] < 0.5 * held[0]


@pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
@pytest.mark.slow
def test_a_captured_step_repeats_its_masks(rng):
    seen = []
    for how in (run, nn.recompute):
        layers = [Layer(8, i).to("cuda") for i in range(2)]
        optimizer = nn.optim.SGD([p for layer in layers for p in layer.parameters()], 0.1)

        @ns.graph
        def step(x, how=how, layers=layers, optimizer=optimizer):
            y = x
            for layer in layers:
                y = how(layer, ns.Tensor(y) if isinstance(y, ns.DeviceArray) else y)
            optimizer.zero_grad()
            (y * y).sum().backward()
            optimizer.step()
            return y

        x = np.ones((2, 8), np.float32)
        seen.append([host(step(x).data) for _ in range(2 if device.SIMULATED else 5)])
        assert layers[0].dropout.calls == len(seen[-1])
    np.testing.assert_array_equal(*seen)


def test_gradients_of_gradients_go_through_it(rng):
    """Also of several results, of one within another, with dropout, and a third time."""
    start = rng.standard_normal((4, 8))

    def third(how):
        layers = [nn.Linear(8, 8, block_size=4, dtype="float64", seed=i) for i in range(2)]
        dropout, x = nn.Dropout(0.3, seed=2), ns.Tensor(start, requires_grad=True)
        h = how(lambda x: F.gelu(dropout(layers[0](x))), x * 2.0)
        a, b = how(lambda h: (F.tanh(layers[1](h)), h * h), h)
        y = how(lambda a, b: how(lambda a: F.tanh(a * a), a) + b, a, b)
        found = [y]
        for _ in range(3):
            (slope,) = ns.grad((found[-1] * found[-1]).sum(), [x], create_graph=True)
            found.append(slope)
        (found[-1] * 1e-6).sum().backward()
        parameters = [p for layer in layers for p in layer.parameters()]
        assert dropout.calls == 1
        return [*found, x.grad, *(p.grad for p in parameters)]

    for got, expected in zip(third(nn.recompute), third(run), strict=True):
        right = host(expected.values)
        np.testing.assert_allclose(host(got.values), right, rtol=0, atol=1e-10 * abs(right).max())


def test_without_tensors_among_its_results_it_is_the_function_itself():
    x = ns.Tensor(np.ones(2), requires_grad=True)
    assert nn.recompute(lambda x: (x * 2).sum().item(), x) == 4
    assert nn.recompute(lambda x: (x * 2, None)[1], x) is None


def test_products_have_the_precision_that_they_had():
    seen = []

    def function(x):
        seen.append(ops.checked_precision(None))
        return x * 2

    with ns.set_precision("high"):
        y = nn.recompute(function, ns.Tensor(np.ones(2), requires_grad=True))
    y.sum().backward()
    assert (seen, ops.checked_precision(None)) == (["high", "high"], "highest")


def test_refuses():
    x = ns.Tensor(np.ones(2), requires_grad=True)
    results = [x.reshape(1, 2), x]
    y = nn.recompute(lambda x: F.exp(x).reshape(*results.pop().shape), x)
    with pytest.raises(RuntimeError, match="other shapes or dtypes the second time"):
        y.sum().backward()
    masks = []

    def more(x):
        masks.append(0)
        for _ in masks:
            x = F.dropout(x, 0.5, seed=0)
        return x

    y = nn.recompute(more, x)
    with pytest.raises(RuntimeError, match="more dropout masks"):
        y.sum().backward()
    layer = nn.Linear(8, 8, block_size=4, seed=0)
    nn.utils.HardConcrete(layer, 0.5, seed=0)
    for random in (nn.Dropout(0.5, seed=0), layer):  # in training, and then no longer
        y = nn.recompute(random, ns.Tensor(np.ones((2, 8), np.float32), requires_grad=True))
        random.eval()
        with pytest.raises(RuntimeError, match="fewer dropout masks"):
            y.sum().backward()
