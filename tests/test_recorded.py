"""Each step and rung recorded once: y is right, nothing races, the counts are those of the formula,
and the trace has the stages and warps of its idea."""

import xml.etree.ElementTree as xml
from itertools import pairwise

import pytest

from numbsparse import device
from numbsparse.bench.problem import matrices
from numbsparse.kernels import ladder
from numbsparse.kernels.matmul.k6_hopper import swapped
from numbsparse.layout import Layout
from numbsparse.pages.reads import reads
from numbsparse.pages.trace import KEPT, RUNGS, trace_of
from numbsparse.testing import Case, check_rung, count, races, record, trace

pytestmark = [
    pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator"),
    pytest.mark.usefixtures("no_garbage"),
]

TRACED = {  # warps that compute, warps that fetch for them, stages of a ring, others
    "s01_naive": (8, 0, 0, 0),
    "s07_double_buffer": (4, 0, 2, 0),
    "s08_tensor_core": (4, 0, 2, 0),
    "s09_copy_engine": (4, 0, 4, 0),
    "s10_wgmma": (8, 0, 4, 0),
    "s11_producer": (8, 1, 4, 0),
    "s12_grouped": (16, 1, 4, 0),
    "s15_store": (16, 1, 4, 1),  # where y waits for the copy engine
    "k1_naive": (4, 0, 0, 0),
    "k3_registers": (2, 0, 1, 0),
    "k5_tensor_core": (4, 0, 4, 0),
    "k6_hopper": (4, 2, 2, 1),
    "k7_small_blocks": (4, 4, 2, 3),  # of a ring x, and beside it w in parts, which lanes copy
    "k8_small_batch": (2, 0, 4, 1),  # a ring of two stages for each warp; where they add their sums
    "k9_dense_tiles": (12, 0, 1, 6),  # fetchers read, too: what is where, the first stage here
}
# The traces of these are as those of s01, k3 and s15, whose blocks form clusters and stay.
ALIKE = {"s02_constants", "s03_shared", "s04_thread_tile", "s05_square_tile", "s06_wide"}
ALIKE |= {"s13_persistent", "s14_cluster"}
SMALLER = {  # than what the command draws: one step more than stages, one tile
    "k5_tensor_core": {"inputs": 160},
    "k6_hopper": {"inputs": 192, "batch": 128},
    "k7_small_blocks": {"inputs": 256, "batch": 65},
}
PRODUCERS = {"s11_producer", "s12_grouped", "s15_store"}


def case_of_step(name):
    """One step more than there are buffers: what the last one overwrites has been read."""
    step = ladder.step(name)
    rows = step.BM * getattr(step, "CLUSTER", 1)
    if name < "s09":
        blocks = 3 if name in ("s07_double_buffer", "s08_tensor_core") else 2
        return Case(rows, blocks * 32, 32, 32, 1)
    if name < "s10":  # of four stages the fifth one
        return Case(rows, 5 * 32, 32, 32, 1)
    return Case(rows, 5 * 64, 128, 64, 1)  # four stages there are for blocks of 64


@pytest.mark.parametrize("name", ladder.NAMES)
def test_a_step(name):
    case, dtype = case_of_step(name), "float32" if name < "s08" else "float16"
    recording = record(
        lambda: check_rung(ladder.step(name), "forward", case, dtype, "cuda", contiguous=True)
    )
    assert races(recording) == []
    if name < "s09":
        check_counts(count(recording), name, case, dtype)
    if name not in ALIKE:
        check_trace(trace(recording)[-1], name)


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung(name, monkeypatch):
    monkeypatch.setattr(swapped, "MOST_ROWS", 0)  # of as few rows as here the tiles of many
    dtype, inputs, outputs, batch, size = RUNGS[name]
    of = {"inputs": inputs, "batch": batch} | SMALLER.get(name, {})
    features = of["inputs"], outputs
    problem = matrices(features, size, KEPT.get(name, 1), of["batch"], dtype)
    check_trace(trace_of(name, problem), name)


def check_counts(counts, name, case, dtype):
    """As the formula says: from shared memory to the value; from global memory index arrays come
    in addition."""
    (counted,) = counts
    steps, y = case.in_features // 32, counted.global_writes.nbytes
    found = reads(name, Layout([[1]] * steps), 32, case.batch, dtype)
    assert y == case.batch * 32 * (4 if dtype == "float32" else 2)
    assert counted.shared_reads.nbytes == found.from_shared * y
    index_reads = counted.global_reads.nbytes - found.from_global * y
    assert 0 <= index_reads <= 8 * (1 + steps) * counted.grid[0] * counted.block[0]
    assert counted.shared_reads.excess == 0  # no bank conflicts
    assert counted.unseen == ()


def check_trace(traced, name):
    computing = [row for row in traced.warps if kinds(row) & {"write", "copy out"}]
    uses = [row for row in traced.warps if kinds(row) & {"read", "multiply"}]
    ring = [stage for stage in traced.stages if stage.nbytes == traced.stages[0].nbytes]
    found = (len(uses or computing), len(traced.warps) - len(uses or computing))
    assert (*found, len(ring), len(traced.stages) - len(ring)) == TRACED[name]
    for stage in traced.stages:
        assert_in_order(stage.spans)
    for row in traced.warps:
        assert_without_gaps(row)
    if name in PRODUCERS:
        *consumers, producer = traced.warps
        assert {"copy", "signal"} <= kinds(producer)
        assert not {"read", "multiply", "write"} & kinds(producer)
        waited = {span.number for span in consumers[0] if span.what == "wait"}
        released = {span.number for span in consumers[0] if span.what == "signal"}
        assert waited - {None} <= {*range(len(ring))} == released
    whole(traced)


def kinds(spans):
    return {span.what for span in spans}


def assert_in_order(spans):
    """A stage is filled, then read, and only then filled again."""
    assert kinds(spans) >= {"filled", "read"}
    following = {"filled": ("full", "read"), "full": ("read",), "read": ("filled",)}
    for one, other in pairwise(spans):
        assert other.what in following[one.what]
        assert other.begin >= one.end
        assert other.number == one.number + (other.what == "filled")


def assert_without_gaps(spans):
    assert spans[0].begin == 0
    assert all(one.end == other.begin for one, other in pairwise(spans))


def whole(traced):
    """The picture is XML, and all of it is within its borders."""
    root = xml.fromstring(traced.svg())
    wide, high = float(root.get("width")), float(root.get("height"))
    boxes = [box for box in root if box.tag.endswith("rect") and box.get("x")]
    assert boxes
    for box in boxes:
        x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= wide + 0.1
        assert 0 <= y <= y + h <= high
