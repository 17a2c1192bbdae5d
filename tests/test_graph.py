"""Captured steps: the results of uncaptured ones bit for bit, and refusals where that cannot be."""

from collections import namedtuple

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.device import runtime
from numbsparse.nn import functional as F
from numbsparse.nn import optim

pytestmark = [
    pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator"),
    pytest.mark.usefixtures("cheap_products"),
]
on_a_gpu = pytest.mark.gpu(reason="the simulator captures nothing")

CALLS = 2 if device.SIMULATED else 5


class Model(nn.Module):
    """Layers with everything that a captured step has to follow."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.embedding = nn.Embedding(5, 4, seed=rng)
        self.lstm = nn.LSTM(4, 8, layout=[[1, 1], [0, 1]], block_size=4, seed=rng)
        self.dropout = nn.Dropout(0.25, seed=1)
        self.output = nn.Linear(8, 5, block_size=4, seed=rng)

    def forward(self, codes, state):
        y, state = self.lstm(self.embedding(codes), state)
        return self.output(self.dropout(y)), state


def make_step(make_optimizer):
    model = Model().to("cuda")
    optimizer = make_optimizer(model.parameters())

    def step(codes, targets, state):
        logits, state = model(codes, state)
        loss = F.cross_entropy(logits, targets)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss, "norm": norm}, state

    return model, optimizer, step


def train(make_optimizer, calls, captured):
    """Losses, norms, the state at the end, and the model's and the optimizer's state."""
    rng = np.random.default_rng(1)
    model, optimizer, step = make_step(make_optimizer)
    step = ns.graph(step) if captured else step
    state = tuple(ns.Tensor(ns.to_device(np.zeros((1, 2, 8), np.float32))) for _ in "hc")
    seen = []
    for i in range(calls):
        codes = rng.integers(0, 5, (3, 2)).astype(np.int32)
        optimizer.lr = 0.01 * (i + 1)
        arrays = codes[:-1], codes[1:]
        if not captured:
            arrays = map(ns.to_device, arrays)
        numbers, state = step(*arrays, state)
        state = tuple(part.detach() for part in state)
        seen += [numbers["loss"], numbers["norm"], *state]  # read at the end: each is its own
    states = {**model.state_dict(), **optimizer.state_dict()}
    return [host(tensor.data) for tensor in seen] + [host(value) for value in states.values()]


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "Nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: optim.Adam(p),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
}


@pytest.mark.parametrize("name", ["AdamW"] if device.SIMULATED else OPTIMIZERS)
def test_a_captured_training_is_the_uncaptured_one_bit_for_bit(name):
    expected = train(OPTIMIZERS[name], CALLS, captured=False)
    results = train(OPTIMIZERS[name], CALLS, captured=True)
    for got, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got, right)


def test_each_sort_of_arguments_is_a_capture():
    calls = []

    @ns.graph
    def step(x, factor, name=None):
        calls.append(x.shape)
        return ns.Tensor(x) * factor

    x = np.arange(6, dtype=np.float32)
    for _ in range(4):
        np.testing.assert_array_equal(host(step(x, 2.0).data), 2 * x)
    for _ in range(3):
        np.testing.assert_array_equal(host(step(x[:4], 2.0).data), 2 * x[:4])
        np.testing.assert_array_equal(host(step(x, 3.0, name="three").data), 3 * x)
        for zero in (0.0, -0.0, np.float32(0), -np.float32(0)):
            assert (np.signbit(host(step(x[1:], zero).data)) == np.signbit(zero)).all()
        assert np.isnan(host(step(x, float("nan")).data)).all()
    assert len(step._recordings) == 8
    if not device.SIMULATED:
        assert len(calls) == 16
        assert step.captures == 8


def test_beyond_the_most_graphs_calls_run_as_they_are():
    step = ns.graph(lambda x, i: x * float(i))
    x = ns.Tensor(np.ones(3, np.float32))
    for i in range(20):
        for _ in range(1 if device.SIMULATED else 3):
            np.testing.assert_array_equal(host(step(ns.Tensor(x.numpy()), i).data), np.full(3, i))
    assert step.captures <= 16


def test_arguments_of_all_kinds():
    Pair = namedtuple("Pair", "w x")
    w = ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1, 1]]).to("cuda")

    @ns.graph
    def step(pair, others, matrix, *, scale):
        x = ns.Tensor(pair.x) + others["bias"][0]
        return Pair(matrix, [ns.matmul(x, pair.w) * scale, None]), x.data.T

    for i in range(4):
        x = ns.to_device(np.full((4, 3), i, np.float32)).T  # strided: copied all the same
        bias = np.full(4, 0.5, np.float32)
        pair, transposed = step(Pair(w, x), {"bias": [bias]}, w.T, scale=2.0)
        np.testing.assert_array_equal(host(pair.x[0].data), np.full((3, 8), 8 * (i + 0.5)))
        np.testing.assert_array_equal(transposed.numpy(), np.full((4, 3), i + 0.5))
        np.testing.assert_array_equal(pair.w.toarray(), np.ones((8, 4)))
        assert pair.x[1] is None


def test_the_caller_owns_what_it_gets():
    step = ns.graph(lambda x: (x, ns.Tensor(x) + 1.0))
    results = [step(np.full(2, i, np.float32)) for i in range(4)]
    for i, (x, y) in enumerate(results):
        assert (x.numpy() == i).all()
        assert (host(y.data) == i + 1).all()


def twice(step, *args):
    for _ in range(2):
        step(*args)


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        (lambda x: x.numpy(), "copy to the host .* return the array"),
        (lambda x: float(x[0]), "copy to the host"),
        (lambda x: ns.Tensor(x).item(), "copy to the host"),
        (lambda x: ns.to_device([1.0]), "copy to the GPU .* argument of the step"),
        (lambda x: ns.synchronize(), "synchronize"),
    ],
    ids=["numpy", "float", "item", "to_device", "synchronize"],
)
def test_what_needs_the_host_is_refused_and_nothing_is_lost(inside, says):
    parameter = nn.Parameter(ns.to_device(np.ones(1, np.float32)))
    optimizer = optim.Adam([parameter])

    @ns.graph
    def step(x):
        loss = (parameter * ns.Tensor(x)).sum()
        loss.backward()
        optimizer.step()
        inside(x)
        return loss

    x = np.ones(1, np.float32)
    step(x)
    before = parameter.numpy().copy(), optimizer.steps
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            step(x)
    if not device.SIMULATED:
        assert (parameter.numpy(), optimizer.steps) == before
    assert runtime.capture is None
    assert float(ns.to_device(2.5)) == 2.5
    assert host(ns.graph(lambda x: ns.Tensor(x) * 2.0)(x).data) == 2


def test_state_that_the_step_replaces_is_refused():
    class Counter:
        total = ns.Tensor(ns.to_device(np.zeros(2, np.float32)))

    def step(x):
        Counter.total = Counter.total + x
        return Counter.total

    with pytest.raises(RuntimeError, match=r"replaces an array .* argument and a result"):
        twice(ns.graph(step), ns.Tensor(np.ones(2, np.float32)))

    parameter = nn.Parameter(ns.to_device(np.ones(2, np.float32)))

    def descend(x):
        parameter.data = (parameter * x).data
        return parameter

    with pytest.raises(RuntimeError, match="replaces an array"):
        twice(ns.graph(descend), ns.Tensor(np.ones(2, np.float32)))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="step takes a function, got int"):
        ns.graph(3)


@pytest.mark.parametrize("result", [3, 2.0, "x", np.ones(2)], ids=lambda r: type(r).__name__)
def test_results_that_replays_cannot_give_are_refused(result):
    with pytest.raises(TypeError, match=f"returns arrays on the GPU.* got {type(result).__name__}"):
        ns.graph(lambda: result)()


def test_loading_a_checkpoint_captures_anew():
    model, optimizer, step = make_step(OPTIMIZERS["Adam"])
    saved = model.state_dict(), optimizer.state_dict()
    captured = ns.graph(step)
    codes = np.ones((3, 2), np.int32)
    state = tuple(np.zeros((1, 2, 8), np.float32) for _ in "hc")

    def losses():
        return [
            host(captured(codes[:-1], codes[1:], tuple(map(ns.Tensor, state)))[0]["loss"].data)
            for _ in range(CALLS)
        ]

    first = losses()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    np.testing.assert_array_equal(losses(), first)


def test_settings_outside_of_the_step_are_followed():
    dropout = nn.Dropout(0.5, seed=0)
    x = ns.Tensor(np.ones(64, np.float32))
    step = ns.graph(lambda x: dropout(x))
    for _ in range(CALLS):
        assert (host(step(x).data) == 0).any()
    dropout.eval()
    for _ in range(CALLS):
        assert (host(step(x).data) == 1).all()
    assert (host(step(x).data) == 1).all()
    dropout.train()
    assert (host(step(x).data) == 0).any()


def test_what_was_captured_in_a_mode_is_current_in_that_mode():
    model, other = Model(), nn.Dropout(0.5)

    def after(change):
        change()
        return device.generation()

    training = after(lambda: model.train())
    evaluating = after(model.eval)
    for _ in range(2):
        assert after(model.train) == training
        assert after(model.eval) == evaluating
    model.dropout.train()
    assert after(model.train) not in (training, evaluating)  # not all were switched
    known = {training, evaluating, device.generation()}
    assert after(model.eval) not in known
    known |= {after(device.forget_captures)}
    assert after(model.train) not in known  # something else was replaced meanwhile
    known |= {after(other.eval)}
    assert after(model.eval) not in known
    with pytest.raises(TypeError, match="mode takes a bool, got 'eval'"):
        model.train("eval")


@on_a_gpu
def test_training_and_evaluation_by_turns_are_captured_once_each():
    dropout, calls = nn.Dropout(0.5, seed=0), []

    def step(x):
        calls.append(dropout.training)
        return dropout(x)

    train, evaluate = ns.graph(step), ns.graph(step)
    x = ns.Tensor(np.ones(64, np.float32))
    for _ in range(4):
        for _ in range(2):
            assert (host(train(x).data) == 0).any()
        dropout.eval()
        for _ in range(2):
            assert (host(evaluate(x).data) == 1).all()
        dropout.train()
    assert sorted(calls) == [False, False, True, True]


def test_a_masked_array_is_refused():
    step = ns.graph(lambda x: ns.Tensor(x["x"]) * 2.0)
    with pytest.raises(TypeError, match="an argument takes no masked array"):
        step({"x": np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0])})


def test_a_captured_step_within_another_is_part_of_it():
    inner = ns.graph(lambda x: ns.Tensor(x) * 2.0)
    outer = ns.graph(lambda x: inner(x) + 1.0)
    for i in range(3):
        assert host(outer(np.full(1, i, np.float32)).data) == 2 * i + 1


@on_a_gpu
def test_python_runs_twice():
    calls = []

    @ns.graph
    def step(x):
        calls.append(x)
        return ns.Tensor(x) * 2.0

    for i in range(5):
        assert host(step(np.full(3, i, np.float32)).data)[0] == 2 * i
    assert len(calls) == 2


@on_a_gpu
def test_replays_keep_the_order_with_other_libraries():
    torch = pytest.importorskip("torch")
    step = ns.graph(lambda x: ns.Tensor(x) * 2.0)
    x = torch.zeros(2**22, device="cuda")
    for i in range(10):
        x.fill_(i)
        y = torch.as_tensor(step(x).data, device="cuda") + 1
        assert (y == 2 * i + 1).all()


@on_a_gpu
def test_memory_within_a_capture_serves_again():
    def step(x):
        for _ in range(50):
            x = (ns.Tensor(x) + 1.0).data
        return x

    captured = ns.graph(step)
    with ns.no_grad():
        for _ in range(3):
            assert captured(np.zeros(10, np.float32)).numpy()[0] == 50
    (recording,) = captured._recordings.values()
    assert len(recording._capture.arena._buffers) <= 3
