"""Gates that stay as they are: what a captured step takes as known, and when it no longer does."""

import gc
import weakref

import numpy as np
import pytest
from conftest import host
from gate_helpers import pattern, spread

import numbsparse as ns
from numbsparse import device, edits, nn, ops
from numbsparse.nn import functional as F

pytestmark = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
cheap = pytest.mark.usefixtures("cheap_products")
SIZE = 8


@pytest.fixture
def weight(rng):
    kept = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    values = rng.standard_normal((int(kept.sum()), SIZE, SIZE), np.float32)
    return ns.BlockSparse(values, kept).to("cuda")


@pytest.fixture
def blocks(monkeypatch):
    """How many blocks each product was left."""
    seen, select = [], ops.gates.select_gated

    def spied(w, gates):
        kept = select(w, gates)
        seen.append(kept.layout.n_blocks if kept.is_known else "any")
        return kept

    monkeypatch.setattr(ops.gates, "select_gated", spied)
    return seen


class Foreign:
    """An array of a library whose arrays nobody can refer to weakly."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def numbers(*gates):
    return np.float32(gates)


@cheap
def test_gates_that_settled_are_known_within_a_captured_step(weight, blocks, rng):
    gates = ns.to_device(numbers(1, 0, 1, 0, 1, 0))
    x = rng.standard_normal((3, weight.shape[0]), np.float32)
    step = ns.graph(lambda x: ns.matmul(x, weight, gate=gates))
    right = x.astype(float) @ (host(weight) * spread(host(gates), weight))
    for _ in range(2):
        np.testing.assert_allclose(host(step(x)), right, atol=1e-4)
    assert blocks == [3, 3]


@cheap
def test_what_the_step_or_its_caller_writes_is_not_known(weight, blocks, rng):
    gates, others = (ns.to_device(numbers(1, 0, 1, 0, 1, 0)) for _ in range(2))
    x = rng.standard_normal((3, weight.shape[0]), np.float32)

    def before(x, source):
        ops.copy_into(gates, source)
        return ns.matmul(x, weight, gate=gates)

    def after(x, source):
        y = ns.matmul(x, weight, gate=others)
        ops.copy_into(others, source)
        return y

    for step, as_argument in ((before, False), (after, False), (ns.matmul, True)):
        blocks.clear()
        captured = ns.graph(lambda x, g, step=step: step(x, weight, gate=g))
        captured = captured if as_argument else ns.graph(step)
        for _ in range(2):
            captured(x, numbers(1, 0, 1, 0, 1, 0))
        assert blocks == [3, "any"], step


@cheap
def test_gates_that_the_host_does_not_know_may_settle(weight, blocks, monkeypatch):
    """Those that were written between two calls; what a step computes never does."""
    awaited = []
    monkeypatch.setattr(edits.Settled, "wait_for", lambda _, array: awaited.append(array.address))
    gates, ones = (ns.to_device(numbers(*[n, 1] * 3)) for n in (0, 1))

    @ns.graph
    def step(x):
        y = ns.matmul(x, weight, gate=gates)
        return y, ns.matmul(x, weight, gate=ops.multiply(gates, ones))

    x = np.ones((2, 16), np.float32)
    step(x)
    ops.copy_into(gates, ones)
    step(x)
    assert (blocks, awaited) == ([3, 3, "any", "any"], [gates.address])


@cheap
def test_another_capture_knows_no_gates(weight, blocks):
    gates, x = ns.to_device(numbers(1, 0, 1, 0, 1, 0)), ns.to_device(np.ones((2, 16), np.float32))
    ns.matmul(x, weight, gate=gates)
    with device.Capture().under_way():
        ns.matmul(x, weight, gate=gates)
    assert blocks == [3, "any"]


@cheap
def test_gates_that_were_lent_are_looked_at_each_time(weight, blocks):
    """Another library writes to them unseen, captured or not."""
    gates, x = ns.to_device(numbers(1, 0, 1, 0, 1, 0)), ns.to_device(np.ones((2, 16), np.float32))
    step = ns.graph(lambda x: ns.matmul(x, weight, gate=gates))
    step(x)
    lent = gates.__cuda_array_interface__
    assert lent["data"][0] == gates.address
    step(x)
    foreign = Foreign(gates)
    ns.graph(lambda x: ns.matmul(x, weight, gate=foreign))(x)
    with device.Capture().under_way(), edits.Settled().taking():
        ns.matmul(x, weight, gate=foreign)
    assert blocks == [3, "any", 3, "any"]
    device.refill(gates, numbers(1, 1, 1, 1, 1, 0))  # which is not noted, as by another library
    right = np.ones((2, 16)) @ (host(weight) * spread(host(gates), weight))
    np.testing.assert_allclose(host(ns.matmul(x, weight, gate=gates)), right, atol=1e-4)


class Memory:
    is_lent = False


def taken(settled, memory):
    with settled.taking():
        assert edits.settling() is settled
        return [settled.take(array) for array in memory]


def test_settled_values_change_once_written_lent_or_let_go_of():
    def changes(how, replays=edits.Settled.LEAST):
        settled, memory = edits.Settled(), [Memory(), Memory()]
        edits.note(memory[0], "before")
        assert all(taken(settled, memory))
        assert edits.settling() is None
        assert not any(settled.is_stale() for _ in range(replays))
        how(memory)
        gc.collect()
        stale = settled.is_stale()
        again = taken(settled, memory)
        assert not settled.is_stale()
        return stale, again

    def write(memory):
        edits.note(memory[0], "after")

    def lend(memory):
        memory.append(memory[1])
        memory[1] = Memory()
        memory[2].is_lent = True

    def drop(memory):
        memory[1] = Memory()

    assert changes(lambda memory: None) == (False, [True, True])
    assert changes(write) == (True, [True, True])
    assert changes(write, edits.Settled.LEAST - 1) == (True, [False, True])
    assert changes(lend, 0) == (True, [True, True, False])
    assert changes(drop) == (True, [True, True])


@pytest.mark.parametrize("changed", [True, False], ids=["changed", "not known"])
def test_what_stays_by_now_is_taken_as_known_once_more(changed, monkeypatch):
    monkeypatch.setattr(edits.Settled, "LEAST", 3)
    settled, memory = edits.Settled(), [Memory()]
    with settled.taking():
        if changed:
            assert settled.take(memory[0])
        else:
            settled.wait_for(memory[0])
    if changed:
        edits.note(memory[0], "a test")
        assert settled.is_stale()
    for _ in range(2):  # an edit begins the count anew, and so does a capture
        assert taken(settled, memory) == [False]
        assert not any(settled.is_stale() for _ in range(3))
        edits.note(memory[0], "a test")
    assert not any(settled.is_stale() for _ in range(4))
    edits.note(memory[0], "a test")
    assert not settled.is_stale()
    for _ in range(2):
        settled.wait_for(memory[0])
        assert taken(settled, memory) == [False]
        assert [settled.is_stale() for _ in range(4)] == [False] * 3 + [True]
        settled.wait_for(memory[0])
        edits.note(memory[0], "a test")
        assert not settled.is_stale()
    settled.wait_for(memory[0])
    assert len(settled._awaited) == 1
    memory[0].is_lent = True
    assert not any(settled.is_stale() for _ in range(4))
    memory[0].is_lent = False
    assert [settled.is_stale() for _ in range(6)] == [False, False, False, True, False, False]
    assert taken(settled, memory) == [True]


@cheap
def test_what_captured_work_uses_stays_though_others_are_remembered(weight, monkeypatch):
    monkeypatch.setattr(ops.gates, "MOST_SELECTIONS", 1)
    masks = [ns.to_device(numbers(1, 0, 1, 0, 1, n)) for n in (0, 1)]
    seen, select = [], ops.gates.select_gated

    def spied(w, gates):
        kept = select(w, gates)
        seen.append(weakref.ref(kept.places))
        return kept

    monkeypatch.setattr(ops.gates, "select_gated", spied)
    step = ns.graph(lambda x: [ns.matmul(x, weight, gate=mask) for mask in masks])
    for _ in range(2):
        step(np.ones((2, 16), np.float32))
    gc.collect()
    assert [places() is not None for places in seen] == [False, False, True, True]


@pytest.mark.gpu(reason="the simulator captures nothing")
def test_replays_follow_a_mask_that_changes(weight, rng, monkeypatch):
    monkeypatch.setattr(edits.Settled, "LEAST", 3)
    layer = nn.Linear(16, 32, layout=weight.layout, block_size=SIZE, seed=0).to("cuda")
    mask = ns.to_device(numbers(1, 1, 1, 1, 1, 1))
    x = rng.standard_normal((3, 16), np.float32)
    ran = []

    @ns.graph
    def step(x):
        ran.append(1)
        y = F.linear(x, layer.weight, layer.bias, gate=mask)
        layer.zero_grad()
        F.sum(y * y).backward()
        return y, layer.weight.grad.data

    dense, bias = host(layer.weight.data).astype(float), host(layer.bias.data).astype(float)
    for i, calls in ((0, 6), (1, 6), (2, 2), (3, 3), (4, 6), (5, 6)):
        kept = rng.permutation(numbers(1, 1, 0, 0, 1, 0) if i else numbers(1, 1, 1, 1, 1, 1))
        ops.copy_into(mask, ns.to_device(kept))
        for _ in range(calls):
            y, grad = step(x)
            right = x.astype(float) @ (dense * spread(kept, weight)) + bias
            np.testing.assert_allclose(host(y.data), right, atol=1e-4)
            of_w = 2 * x.T.astype(float) @ right * spread(kept, weight)
            np.testing.assert_allclose(host(grad), of_w, atol=1e-3)
    # Two runs for each of the first masks, and where three replays more found one as it was.
    assert len(ran) == 13


@pytest.mark.simulator
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("gates", [(1, 1, 1), (1, 0, 1), (0.5, 0, 1)])
def test_the_gradient_of_a_weight_under_a_mask_takes_no_copy(gates, known, rng, monkeypatch):
    monkeypatch.setattr(ops.gates, "_known_of", ops.gates._known_of if known else lambda *of: None)
    values = rng.standard_normal((3, SIZE, SIZE)).astype(np.float16)
    w = ns.Tensor(ns.BlockSparse(values, pattern()).to("cuda"), requires_grad=True)
    x, dy = (ns.to_device(rng.standard_normal((4, SIZE * n)).astype(np.float16)) for n in (2, 3))
    found, sddmm, launches = [], ops.sddmm, []
    scale = ops.gates.kernels.gates.scale_blocks
    monkeypatch.setattr(
        ops.gates.kernels.gates, "scale_blocks", lambda *of: launches.append(1) or scale(*of)
    )
    monkeypatch.setattr(
        ops, "sddmm", lambda *of, **how: found.append(sddmm(*of, **how)) or found[0]
    )
    ns.matmul(x, w, gate=ns.to_device(numbers(*gates)), kernel="k8_small_batch").backward(dy)
    exact = host(x).T.astype(float) @ host(dy).astype(float)
    right = exact * spread(np.array(gates), w.data)
    np.testing.assert_allclose(host(w.grad.data).astype(float), right, rtol=2e-3, atol=2e-3)
    assert w.grad.data.values.address == found[0].values.address
    assert len(launches) == (0 if known and set(gates) == {1} else 1)
