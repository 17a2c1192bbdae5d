"""The state of optimizers and averages: whose it is, what refuses it, and what then stays."""

import copy
import pickle
import re

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn import optim

HERE = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]], bool)
THERE = np.array([[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], bool)  # as many blocks
SHAPE = (10, 15)

OPTIMISERS = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, 0.1),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
}


def on_gpu(a):
    return ns.to_device(a) if isinstance(a, np.ndarray) else a.to("cuda")


def matrix(rng, pattern, dtype=np.float32):
    """A matrix of that pattern; beyond its edge it holds zeros."""
    dense = rng.standard_normal(SHAPE).astype(dtype)
    return ns.BlockSparse.from_dense(dense, pattern, block_size=4)


def grown(rng, put, make, steps=3):
    """An optimizer and an average of one parameter, after some steps."""
    parameter = nn.Parameter(put(matrix(rng, HERE)))
    optimizer, average = make([parameter]), optim.ExponentialMovingAverage([parameter], 0.5)
    for _ in range(steps):
        parameter.grad = ns.Tensor(put(matrix(rng, HERE)))
        optimizer.step()
        average.step()
    return parameter, optimizer, average


def dense(state):
    """Its arrays, made dense: those of blocks that are gone read as zeros."""
    return {k: host(v) for k, v in state.items() if isinstance(v, ns.BlockSparse)}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
def test_another_layout_is_refused_until_remapped(rng, put, name, is_transposed):
    parameter, optimizer, average = grown(rng, put, OPTIMISERS[name])
    before, averages = optimizer.state_dict(), average.state_dict()
    data = matrix(rng, THERE)
    if is_transposed:  # the same matrix, as a view of its transpose
        data = ns.BlockSparse(data.T.data, data.layout.T, shape=SHAPE[::-1]).T
    parameter.data = put(data)
    parameter.grad = ns.Tensor(put(data.with_values(np.ones_like(data.values))))
    refused = pytest.raises(ValueError, match=r"parameters\[0\] has another layout .* remap\(\)")
    for call in (optimizer.step, average.step, lambda: average.applied().__enter__()):
        with refused:
            call()
    np.testing.assert_array_equal(host(parameter.data), data.toarray())
    optimizer.remap()
    average.remap()
    kept = ns.BlockSparse(np.ones((3, 4, 4)), HERE & THERE, shape=SHAPE).toarray() > 0
    new = ns.BlockSparse(np.ones((1, 4, 4)), THERE & ~HERE, shape=SHAPE).toarray() > 0
    after = dense(optimizer.state_dict())
    assert after.keys() == dense(before).keys() != set()
    for key, values in after.items():
        np.testing.assert_array_equal(values, np.where(kept, host(before[key]), 0), err_msg=key)
    first = np.where(new, data.toarray(), 0)
    expected = np.where(kept, host(averages["0"]), first)
    np.testing.assert_array_equal(host(average.state_dict()["0"]), expected)
    optimizer.step()
    average.step()


def test_a_gradient_of_another_layout_is_refused(rng, put):
    parameter = nn.Parameter(put(matrix(rng, HERE)))
    (parameter @ put(np.ones((15, 2), np.float32))).sum().backward()
    parameter.data = put(matrix(rng, THERE))
    with pytest.raises(ValueError, match=r"parameters\[0\]\.grad has another layout .*\(0, 3\)"):
        optim.SGD([parameter], 0.1).step()
    np.testing.assert_array_equal(np.argwhere(HERE != THERE)[0], (0, 3))


def test_a_plain_step_follows_any_layout(rng, put):
    """Without state there is nothing to belong to a layout."""
    parameter = nn.Parameter(put(matrix(rng, HERE)))
    optimizer = optim.SGD([parameter], 0.5)
    for pattern in (HERE, THERE):
        data, gradient = matrix(rng, pattern), matrix(rng, pattern)
        parameter.data, parameter.grad = put(data), ns.Tensor(put(gradient))
        expected = data.toarray() - np.float32(0.5) * gradient.toarray()
        optimizer.step()
        np.testing.assert_allclose(host(parameter.data), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_state_of_another_layout_is_refused(rng, put, name):
    _, optimizer, average = grown(rng, put, OPTIMISERS[name])
    states = optimizer.state_dict(), average.state_dict()
    other, fresh, fresh_average = grown(np.random.default_rng(7), put, OPTIMISERS[name])
    other.data = put(matrix(rng, THERE))
    fresh.remap()
    fresh_average.remap()
    for part, state in zip((fresh, fresh_average), states, strict=True):
        before = part.state_dict()
        with pytest.raises(
            ValueError, match=r"state\['0.*'\] has another layout .* block \(0, 3\)"
        ):
            part.load_state_dict(state)
        assert_same(part.state_dict(), before)


def test_a_state_fits_a_transposed_view_of_the_same_matrix(rng, put):
    parameter, optimizer, average = grown(rng, put, OPTIMISERS["Adam"])
    data = parameter.data.to("cpu")
    view = ns.BlockSparse(data.T.data, data.layout.T, shape=SHAPE[::-1]).T
    other = nn.Parameter(put(view))
    parts = OPTIMISERS["Adam"]([other]), optim.ExponentialMovingAverage([other])
    for part, from_ in zip(parts, (optimizer, average), strict=True):
        part.load_state_dict(from_.state_dict())
        for key, value in dense(from_.state_dict()).items():
            np.testing.assert_array_equal(host(part.state_dict()[key]), value)


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_training_goes_on_in_a_copy(rng, put, name, is_transposed, copied):
    """Bit for bit, with what is kept in the order of the weights, and in memory of its own."""
    first = matrix(rng, HERE)
    data = ns.BlockSparse(first.T.data, first.layout.T, shape=SHAPE[::-1]).T
    parameter = nn.Parameter(put(data if is_transposed else first))
    own = OPTIMISERS[name]([parameter]), optim.ExponentialMovingAverage([parameter], 0.5)

    def train(parameter, parts, seed):
        values = np.random.default_rng(seed).standard_normal(parameter.values.shape)
        values = put(values.astype(np.float32))
        parameter.grad = ns.Tensor(parameter.data.with_values(values))
        for part in parts:
            part.step()

    train(parameter, own, 1)
    other, *others = copied((parameter, *own))
    for weight, parts in ((parameter, own), (other, others)):
        train(weight, parts, 2)
    np.testing.assert_array_equal(host(other.data), host(parameter.data))
    for part, its in zip(own, others, strict=True):
        assert_same(its.state_dict(), part.state_dict())
    train(other, others, 3)
    assert (host(other.data) != host(parameter.data)).any()


def test_remapping_another_block_size_is_refused(rng):
    parameter, optimizer, average = grown(rng, lambda a: a, OPTIMISERS["Adam"])
    before = optimizer.state_dict()
    parameter.data = ns.BlockSparse(np.ones((4, 8, 8), np.float32), np.ones((2, 2)), shape=SHAPE)
    for part in (optimizer, average):
        with pytest.raises(
            ValueError, match=r"parameters\[0\] takes a layout of the same features"
        ):
            part.remap()
    assert_same(optimizer.state_dict(), before)


@pytest.mark.simulator
def test_a_captured_step_follows_a_remapped_layout(rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    same = copy.deepcopy(rng)
    parameter, optimizer, _ = grown(rng, lambda w: w.to("cuda"), OPTIMISERS["Adam"])
    other, eager, _ = grown(same, lambda w: w.to("cuda"), OPTIMISERS["Adam"])
    x = rng.standard_normal((15, 2), dtype=np.float32)

    def step_of(p, o):
        def step(x):
            p.grad = None
            (p @ ns.Tensor(x)).sum().backward()
            o.step()

        return step

    captured, plain = ns.graph(step_of(parameter, optimizer)), step_of(other, eager)
    for i in range(5):
        if i == 2:
            data = matrix(rng, THERE)
            for p in (parameter, other):
                p.data = data.to("cuda").copy()
            with pytest.raises(ValueError, match="another layout"):
                captured(x)
            optimizer.remap()
            eager.remap()
        captured(x)
        plain(ns.to_device(x))
    np.testing.assert_array_equal(host(parameter.data), host(other.data))
    assert_same(optimizer.state_dict(), eager.state_dict())


def adam(gradients, lr, betas=(0.9, 0.999), eps=1e-8):
    """Where a weight goes from 0, in float64; a gradient of None is no step."""
    p = m = v = t = 0.0
    for g in gradients:
        if g is not None:
            t += 1
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            p -= lr * m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


@pytest.mark.parametrize("scaled", [False, True], ids=["step", "scaled step"])
@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
def test_each_parameter_counts_its_own_steps(rng, put, place, scaled, captured):
    """One that was frozen for 199 steps goes lr in its first."""
    if captured and place == "cpu":
        pytest.skip("steps are captured on a GPU")
    always, late = (nn.Parameter(put(np.zeros(1, np.float32))) for _ in range(2))
    optimizer, scaler = optim.Adam([always, late], 0.1), optim.LossScaler(1.0)
    gradients = rng.uniform(0.5, 1.5, 202).astype(np.float32)

    def step(g):
        always.grad = ns.Tensor(g)
        scaler.step(optimizer) if scaled else optimizer.step()

    both = lambda g: setattr(late, "grad", ns.Tensor(g)) or step(g)  # noqa: E731
    alone, together = (ns.graph(step), ns.graph(both)) if captured else (step, both)
    for i in range(202):
        late.grad = None
        (together if i >= 199 else alone)(put(gradients[i : i + 1]))
        if i == 199:
            np.testing.assert_allclose(host(late.data), -0.1, rtol=1e-5)
    np.testing.assert_allclose(host(late.data), adam(gradients[199:], 0.1), rtol=1e-4)
    np.testing.assert_allclose(host(always.data), adam(gradients, 0.1), rtol=1e-4)
    state = optimizer.state_dict()
    assert [state[key] for key in ("steps", "0.steps", "1.steps")] == [202, 202, 3]


def test_skipped_steps_are_counted_for_those_that_would_have_stepped(put):
    first, second = (nn.Parameter(put(np.zeros(1, np.float32))) for _ in range(2))
    optimizer, scaler = optim.Adam([first, second], 0.1), optim.LossScaler(1.0, interval=None)
    for own, other in ((1, None), (np.inf, None), (1, None), (1, 1), (np.nan, 1), (1, 1)):
        for p, g in ((first, own), (second, other)):
            p.grad = None if g is None else ns.Tensor(put(np.full(1, g, np.float32)))
        scaler.step(optimizer)
    state = optimizer.state_dict()
    wanted = {"steps": 6, "skipped": 2, "0.steps": 4, "1.steps": 2}
    assert {key: state[key] for key in wanted} == wanted
    first.grad = second.grad = ns.Tensor(put(np.ones(1, np.float32)))
    optimizer.step()  # without the scaler, after its skips
    np.testing.assert_allclose(host(first.data), adam([1] * 5, 0.1), rtol=1e-5)
    np.testing.assert_allclose(host(second.data), adam([1] * 3, 0.1), rtol=1e-5)
    assert optimizer.state_dict()["1.steps"] == 3


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_state_goes_on_from_a_file(tmp_path, rng, put, name):
    parameter, optimizer, average = grown(rng, put, OPTIMISERS[name])
    nn.save(tmp_path / "c.npz", {"o": optimizer.state_dict(), "a": average.state_dict()})
    other = nn.Parameter(put(parameter.data.to("cpu").copy()))
    parts = OPTIMISERS[name]([other]), optim.ExponentialMovingAverage([other], 0.5)
    loaded = nn.load(tmp_path / "c.npz")
    for part, key in zip(parts, "oa", strict=True):
        part.load_state_dict(loaded[key])
    gradient = matrix(rng, HERE)
    for p, *both in ((parameter, optimizer, average), (other, *parts)):
        p.grad = ns.Tensor(put(gradient))
        for part in both:
            part.step()
    np.testing.assert_array_equal(host(parameter.data), host(other.data))
    for mine, theirs in zip((optimizer, average), parts, strict=True):
        assert_same(theirs.state_dict(), mine.state_dict())
    for key, state in nn.load(tmp_path / "c.npz").items():
        assert_same(loaded[key], state)  # steps leave what was taken as it is


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_state_without_counts_or_layouts_is_refused(rng, put, name):
    _, optimizer, average = grown(rng, put, OPTIMISERS[name])
    state, averages = optimizer.state_dict(), average.state_dict()
    key = next(key for key, value in state.items() if isinstance(value, ns.BlockSparse))
    without = {name: value for name, value in state.items() if name != "0.steps"}
    for part, odd, message in (
        (optimizer, without, "state lacks '0.steps'"),
        (optimizer, state | {key: state[key].data}, f"state['{key}'] takes a BlockSparse"),
        (average, averages | {"0": averages["0"].data}, "state['0'] takes a BlockSparse"),
    ):
        before = part.state_dict()
        with pytest.raises(ValueError, match=re.escape(message)):
            part.load_state_dict(odd)
        assert_same(dense(part.state_dict()), dense(before))


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(host(got[key]), host(value), err_msg=key)


def test_what_does_not_fit_is_refused_after_steps_that_fitted(rng, put):
    """What is looked at again is all that was asked of what fitted."""
    parameter, optimizer, _ = grown(rng, put, OPTIMISERS["momentum"])
    matrix_, dense_ = parameter.data, nn.Parameter(put(np.ones(4, np.float32)))
    optimizer.add_param_group({"params": [dense_]})
    for _ in range(3):
        dense_.grad = ns.Tensor(put(np.ones(4, np.float32)))
        optimizer.step()
    state = optimizer.state_dict()
    other = matrix(rng, THERE)
    wrong = [
        (parameter, ns.Tensor(put(other)), ValueError),
        (parameter, ns.Tensor(put(matrix(rng, HERE).T)), ValueError),
        (parameter, ns.Tensor(put(np.ones(SHAPE, np.float32))), ValueError),
        (parameter, put(matrix(rng, HERE)), TypeError),
        (dense_, ns.Tensor(put(np.ones(5, np.float32))), ValueError),
        (dense_, ns.Tensor(put(np.ones(4, np.float32))[None]), ValueError),
        (dense_, 1.0, TypeError),
    ]
    if matrix_.place == "cpu":
        wrong.append((dense_, ns.Tensor(np.ones(4)), TypeError))
        if device.is_available():
            wrong.append((dense_, ns.Tensor(ns.to_device(np.ones(4, np.float32))), ValueError))
    for one, grad, error in wrong:
        optimizer.zero_grad()
        one.grad = grad
        with pytest.raises(error, match=r"^parameters\[\d\]"):
            optimizer.step()
    dense_.grad, parameter.grad = ns.Tensor(put(np.ones(4, np.float32))), None
    for key, value in (("lr", -1), ("lr", True), ("momentum", 1)):
        before = optimizer.param_groups[1][key]
        optimizer.param_groups[1][key] = value
        with pytest.raises((TypeError, ValueError), match=key):
            optimizer.step()
        optimizer.param_groups[1][key] = before
    if matrix_.place == "cpu":
        dense_.data.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            optimizer.step()
        dense_.data.flags.writeable = True
    for name, value in state.items():
        if not isinstance(value, list):
            np.testing.assert_array_equal(host(value), host(optimizer.state_dict()[name]))
    optimizer.step()
    optimizer.momentum = 0.0  # nothing is kept then
    with pytest.raises(ValueError, match=r"parameters\[1\].*make a new optimizer"):
        optimizer.step()


@pytest.mark.parametrize("name", [*OPTIMISERS, "nesterov"])
def test_steps_on_the_same_memory_follow_what_it_holds(rng, name, monkeypatch):
    """Gradients, weights and settings change between steps whose launches are started again."""
    if not device.is_available() or device.runtime.several_devices:
        pytest.skip("launches are started again on one GPU")
    makes = OPTIMISERS | {"nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True)}
    here, there = (
        [nn.Parameter(put(a)) for a in (matrix(rng_, HERE), np.ones(5, np.float32))]
        for put, rng_ in (
            (lambda a: a, np.random.default_rng(1)),
            (on_gpu, np.random.default_rng(1)),
        )
    )
    one, other = makes[name](here), makes[name](there)
    gradients = [ns.Tensor(on_gpu(a)) for a in (matrix(rng, HERE), np.ones(5, np.float32))]
    numbers, seen, update = [], [], type(other)._update
    monkeypatch.setattr(type(other), "_update", lambda *of: seen.append(of) or update(*of))
    empty = device.capture.empty
    monkeypatch.setattr(  # memory that is free again
        device.capture,
        "empty",
        lambda *of: numbers[0] if numbers else numbers.append(empty(*of)) or numbers[0],
    )
    for i in range(8):
        for p, q, g in zip(here, there, gradients, strict=True):
            fresh = rng.standard_normal(g.values.shape).astype(np.float32)
            device.refill(g.values, ns.to_device(fresh))
            q.grad, p.grad = g, ns.Tensor(g.data.to("cpu"))
        if i == 5:
            one.lr = other.lr = 0.02
        one.step()
        other.step()
        for p, q in zip(here, there, strict=True):
            np.testing.assert_allclose(host(q.data), host(p.data), rtol=0, atol=1e-5)
    on_cpu = sum(isinstance(of[2], np.ndarray) for of in seen)
    assert len(seen) - on_cpu < 2 * 8 == on_cpu
