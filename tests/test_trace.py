"""A trace shows the stages and warps that a rung has, and its picture is whole."""

import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, float32, uint64

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT
from numbsparse.pages import trace as tracing
from numbsparse.simulator.actions import LATENCY
from numbsparse.simulator.tracing import Span
from numbsparse.testing import count, races, record, trace

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")


@cuda.jit
def late_kernel(x, out):
    """The second warp waits for what the first one loads and stores."""
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    if t < 32:
        for i in range(4):
            tile[4 * t + i] = x[32 * i + t]
    cuda.syncthreads()
    if t >= 32:
        out[t - 32] = tile[4 * (t - 32)]


def numbers(n):
    return ns.to_device(np.arange(n, dtype=np.float32))


def test_a_warp_waits_as_long_as_what_it_waits_for_takes():
    call = lambda: launch(late_kernel, 1, 64, numbers(128), numbers(32))  # noqa: E731
    (traced,) = trace(call)
    first, second = traced.warps
    assert first[:2] == [Span(0, 1, "load"), Span(1, LATENCY, "wait")]
    end = 4 * (LATENCY + 1)  # each store waits for its load
    assert first[-1] == Span(end - 1, end, "store", 0)
    assert second[0] == Span(0, end, "wait")
    assert second[1:] == [Span(end, end + 1, "read", 0), Span(end + 1, end + 2, "write")]
    (stage,) = traced.stages
    assert stage.spans[-1] == Span(end, end + 1, "read", 0)
    assert stage.nbytes == 512


def test_requests_are_those_that_are_counted():
    """And one recording of them serves both, and `races`."""
    recording = record(lambda: launch(late_kernel, 1, 64, numbers(128), numbers(32)))
    (traced,), (counted,) = trace(recording), count(recording)
    assert record(recording) is recording
    assert races(recording) == []
    stores, reads = traced.banks
    assert stores.text == ("tile[4 * t + i]" if sys.version_info >= (3, 11) else "")
    assert (stores.units, stores.least, stores.times) == (4, 1, 4)
    assert counted.shared_writes.units == stores.units * stores.times
    assert (reads.writes, reads.units) == (False, counted.shared_reads.units)
    loads, writes = traced.sectors
    assert loads.units * loads.times == counted.global_reads.units
    assert writes.units == counted.global_writes.units
    assert stores.lanes == [*range(32)]


def test_lanes_that_meet_in_a_bank_have_other_colours():
    (traced,) = trace(lambda: launch(late_kernel, 1, 64, numbers(128), numbers(32)))
    drawn = xml.fromstring(traced.svg())
    said = {}
    for box in drawn:
        title = next(iter(box), None)
        if title is not None and "bank" in title.text:
            said.setdefault(title.text, box.get("fill"))
    colours = [said[f"lane {lane}, bank 0"] for lane in (0, 8, 16, 24)]
    assert len(set(colours)) == 4


@cuda.jit
def engine_kernel(x, out):
    tile = cuda.shared.array(64, float32, ALIGNMENT)
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_expect(bars, 0, 256)
        ptx.bulk_load(tile, 0, x, 0, 256, bars, 0)
    cuda.syncthreads()
    ptx.mbarrier_wait(bars, 0, 0)
    out[t] = tile[t]


def test_a_wait_for_a_copy_names_its_stage():
    (traced,) = trace(lambda: launch(engine_kernel, 1, 32, numbers(64), numbers(32)))
    (row,), (stage,) = traced.warps, traced.stages
    (copy,) = (span for span in row if span.what == "copy")
    (wait,) = (span for span in row if span.what == "wait")
    assert (wait.number, wait.end) == (0, copy.begin + LATENCY)
    assert stage.spans[0] == Span(copy.begin, wait.end, "filled", 0)
    assert traced.sectors[0].units == 8  # 256 bytes


@cuda.jit
def refilled_kernel(x, out):
    """The second filling is half as long."""
    tile = cuda.shared.array(64, float32, ALIGNMENT)
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    for turn in range(2):
        if t == 0:
            ptx.mbarrier_expect(bars, 0, 256 - 128 * turn)
            ptx.bulk_load(tile, 0, x, 0, 256 - 128 * turn, bars, 0)
        ptx.mbarrier_wait(bars, 0, turn)
        out[t] = tile[t]
        cuda.syncthreads()


def test_what_one_mbarrier_waits_for_is_one_stage():
    (traced,) = trace(lambda: launch(refilled_kernel, 1, 32, numbers(64), numbers(32)))
    (stage,) = traced.stages
    assert stage.nbytes == 256
    assert [(span.what, span.number) for span in stage.spans] == [
        ("filled", 0),
        ("read", 0),
        ("filled", 1),
        ("read", 1),
    ]


def test_the_command_writes_a_picture(tmp_path, capsys, monkeypatch):
    file = tmp_path / "trace.svg"
    command_line.main(["trace", "s09_copy_engine", "--svg", str(file)])
    assert xml.parse(file).getroot().tag.endswith("svg")
    assert "warps: 4, stages of shared memory: 4" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    command_line.main(["trace", "k3_registers"])
    assert (tmp_path / "k3_registers.svg").exists()
    with pytest.raises(SystemExit, match=r"RUNG takes one of s01_naive, .*, got 's99'"):
        command_line.main(["trace", "s99"])
    with pytest.raises(SystemExit, match=r"path takes a name that ends in .svg, got .*\.png"):
        command_line.main(["trace", "s01_naive", "--svg", "picture.png"])


def test_the_command_starts_the_simulator(monkeypatch):
    started = []

    def run(command, env):
        started.append((command[-4:], env["NUMBA_ENABLE_CUDASIM"]))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(tracing, "SIMULATED", False)
    monkeypatch.setattr(tracing.subprocess, "run", run)
    with pytest.raises(SystemExit, match="3"):
        command_line.main(["trace", "k1_naive", "--svg", "here.svg"])
    assert started == [(["trace", "k1_naive", "--svg", "here.svg"], "1")]
