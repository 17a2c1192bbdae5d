"""Clocks, graphs of calls, values that nobody writes, and the limits of a card."""

import numpy as np
import pytest

from numbsparse import device
from numbsparse.bench import timing
from numbsparse.bench.measure import largest
from numbsparse.kernels import limits
from numbsparse.kernels.elementwise import fill

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def test_the_clock_runs_from_idle_to_idle(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "synchronize", lambda: order.append("idle"))
    timing._time(timing.Graph(lambda: order.append("call"), 1, None), 2)
    assert order == ["idle", "call", "call", "idle"]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_recorded_graph_is_timed_by_the_gpu(recorded, monkeypatch):
    """Two replays took it 6 ms, whatever the host's clock says."""
    order = []

    class Driver:
        def cuEventRecord(self, event, stream):
            order.append((event, stream))

        def cuEventElapsedTime(self, begin, end):
            return 0, 6.0

    monkeypatch.setattr(timing, "SIMULATED", False)
    monkeypatch.setattr(timing, "synchronize", lambda: order.append("idle"))
    monkeypatch.setattr(timing, "_events", lambda: ("begin", "end"))
    monkeypatch.setattr(timing.runtime, "driver", Driver)
    graph = timing.Graph(lambda: order.append("call"), 1, None, recorded)
    seconds = timing._time(graph, 2)
    begin, end = ([(of, timing.LEGACY)] if recorded else [] for of in ("begin", "end"))
    assert order == ["idle", *begin, "call", "call", *end, "idle"]
    assert (seconds == 3e-3) == recorded


def test_replays_take_turns():
    order = []
    graphs = {name: timing.Graph(lambda name=name: order.append(name), 10, None) for name in "ab"}
    assert timing.seconds_of(graphs, seconds=0.0).keys() == {"a", "b"}
    turns = [a for a, b in zip(order, [*order[1:], None], strict=True) if a != b]
    assert turns == ["a", "b"] * (1 + timing.TURNS)


@pytest.mark.parametrize(("call", "calls"), [(2e-3, 1), (1e-4, 10), (1e-7, timing.MOST)])
def test_a_graph_holds_about_a_millisecond(monkeypatch, call, calls):
    monkeypatch.setattr(timing, "_time", lambda graph, count: graph.replay())
    slow_host = 1.0  # which says nothing of a replay
    recorded = timing.graph_of(lambda _, count: lambda: count * call, lambda: slow_host)
    assert recorded.calls == pytest.approx(calls, abs=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_is_put_in_and_found(dtype):
    values = np.array([0, 1, -np.inf, np.inf, -2], np.float32)
    if dtype == "bfloat16":
        values = values.astype(pytest.importorskip("ml_dtypes").bfloat16)
    array = device.to_device(values.astype(dtype))
    assert not np.isnan(largest(array).item())
    more = device.to_device(np.r_[array.numpy(), np.float32(np.nan)])
    assert np.isnan(largest(more).item())
    fill(array, np.nan)
    assert np.isnan(array.numpy().astype(np.float32)).all()


def test_the_reading_kernel_reads_everything(rng):
    grid = 2
    x = rng.standard_normal(2 * 4 * limits.AT_ONCE * limits.THREADS * grid, dtype=np.float32)
    out = device.empty((limits.THREADS * grid,), np.float32)
    assert limits.read(device.to_device(x), grid, 3, out) == 3 * x.nbytes
    np.testing.assert_allclose(out.numpy().sum(), 3 * x.sum(dtype=np.float64), rtol=1e-4)


def test_operations_are_counted():
    out = device.empty((limits.THREADS,), np.float32)
    assert limits.multiply_add(1, 3, out) == 2 * 3 * limits.CHAINS * limits.THREADS
    t = np.arange(limits.THREADS)[:, None] + np.arange(limits.CHAINS)
    for _ in range(3):
        t = t * (1 + limits.FACTOR)
    np.testing.assert_allclose(out.numpy(), t.sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("dtype", limits.TENSOR_CORES)
def test_tensor_cores_multiply(dtype):
    out = device.empty((limits.THREADS,), np.float32)
    fill(out, np.nan)
    warps, products = limits.THREADS // 32, limits.TENSOR_CORES[dtype][1]
    assert limits.tensor_core(dtype, 1, 1, out) == 2 * warps * limits.SQUARES * products
    assert np.isfinite(out.numpy()).all()
    assert np.ptp(out.numpy()) > 0


@pytest.mark.parametrize("dtype", limits.KINDS)
def test_warpgroups_multiply(dtype):
    if not device.SIMULATED and device.compute_capability() != (9, 0):
        pytest.skip("wgmma takes compute capability 9.0")
    out = device.empty((128 * limits.WARPGROUPS,), np.float32)
    fill(out, np.nan)
    products = limits.SIDE**2 * limits.DEPTH * limits.TIMES
    assert limits.warpgroup(dtype, 1, 2, out) == 2 * 2 * limits.WARPGROUPS * products
    assert np.isfinite(out.numpy()).all()
    assert np.ptp(out.numpy()) > 0
