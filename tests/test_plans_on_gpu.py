"""Plans made on the GPU, of the tiles that real cards get: their kernels alone run here."""

from itertools import chain

import numpy as np
import pytest
from numba import cuda, uint32
from plans_helpers import both, check_dealt

import numbsparse as ns
from numbsparse import Layout, device, ops
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k6_hopper import (
    gated,
    plan,
)
from numbsparse.kernels.matmul.k6_hopper.gated import RUN, steps_wanted, thinning
from numbsparse.kernels.matmul.k6_hopper.plan import line_tiles, steps_of
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.plans import Sent, planned

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes kernels")


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """No layout that is gone lends its plans, which other numbers made."""
    monkeypatch.setattr(ops.made, "_spare", {})


def tiles_of(size, monkeypatch):
    """Of 16 bits, as a card gets them, and of float32."""
    monkeypatch.setattr(plan, "SIMULATED", False)
    return line_tiles(size, 8192, 8192) + line_tiles(size, 64, 64, itemsize=4)


@pytest.mark.parametrize(
    ("name", "size"), [("random", 32), ("tall", 64), ("full", 128), ("none", 32)]
)
def test_records_are_those_of_the_host_without_its_grouping(name, size, rng, monkeypatch):
    def neighbours(walk, n_inputs, count):
        lines = np.arange(len(walk.indptr) - 1, dtype=np.int32)
        return np.append(lines, np.full(-lines.size % count, -1, np.int32)).reshape(-1, count)

    monkeypatch.setattr(plan, "grouped", neighbours)
    monkeypatch.setattr(plan, "multiprocessors", lambda: 132)
    made, on_host = both(name, rng)
    for n, tile in enumerate(tiles_of(size, monkeypatch)):
        transposed, ragged = n % 2 == 0, n % 3 == 0
        records, strips, lengths = planned(made, steps_of, transposed, tile, ragged)
        right, lines, of = steps_of(on_host, transposed, tile, ragged)
        np.testing.assert_array_equal(strips.numpy(), lines)
        np.testing.assert_array_equal(lengths.steps.numpy(), of.steps)
        starts, records = lengths.starts.numpy(), records.numpy()
        counts, inputs = tile.SHARES, tile.SHARES + 1
        assert (np.diff(starts) >= of.steps[:-1]).all()
        for group, steps in enumerate(of.steps):
            for k in range(steps):
                got, wanted = records[starts[group] + k], right[of.starts[group] + k]
                end, blocks = inputs + tile.INPUTS, wanted[counts] >> 8
                np.testing.assert_array_equal(got[:inputs], wanted[:inputs])
                there = np.s_[inputs : inputs + (wanted[counts] & 255)]
                np.testing.assert_array_equal(got[there], wanted[there])
                np.testing.assert_array_equal(got[end : end + blocks], wanted[end : end + blocks])


def blocks_of(record, tile):
    """[(strip of the group, tile of x, kept block)] of a step, and whether it is the last."""
    found, end = [], tile.SHARES + 1 + tile.INPUTS
    inputs, blocks = record[tile.SHARES] & 255, record[tile.SHARES] >> 8
    for share in range(tile.SHARES):
        mask = int(record[share])
        own = [b for b in range(tile.INPUTS * tile.SHARE) if mask >> b & 1]
        assert mask >> plan.BEFORE & plan.MOST == len(found)
        for bit in own:
            place, strip = divmod(bit, tile.SHARE)
            assert place < inputs
            x, block = record[tile.SHARES + 1 + place], record[end + len(found)]
            found.append((share * tile.SHARE + strip, x, block))
    assert len(found) == blocks
    assert len({x for _, x, _ in found}) == inputs  # none that no block needs
    return found, bool(record[0] & plan.LAST)


def thin_all(tile):
    """A kernel: the records of all steps, thinned, with gates, and which have anything to do."""
    thin, RECORD, ALL = thinning(tile), tile.RECORD, tile.RECORD + tile.BLOCKS

    @cuda.jit
    def kernel(records, gates, thinned, wanted):
        own = cuda.local.array(ALL, uint32)
        i = cuda.grid(1)
        if i < wanted.size:
            for e in range(RECORD):
                own[e] = records[i, e]
            wanted[i] = 1 if thin(own, records[i, 0] >> 31 != 0, gates) else 0
            for e in range(ALL):
                thinned[i, e] = own[e]

    return kernel


def gated_layout(rng):
    """A layout, and gates of its blocks: a column of zeros, NaN, and a zero that is negative."""
    layout = Layout(rng.random((40, 12)) < np.linspace(0, 1, 12))
    gates = (rng.integers(3, size=layout.n_blocks) * (layout.index.block_columns < 11)).astype("f4")
    gates[0], gates[1] = np.nan, -0.0
    return layout, gates


@pytest.mark.parametrize("size", [32, 64, 128])
def test_records_are_thinned_by_gates(size, rng, monkeypatch):
    """Bits, numbers of blocks before, blocks and gates are of those left, in the order of all."""
    monkeypatch.setattr(plan, "multiprocessors", lambda: 132)
    layout, gates = gated_layout(rng)
    for n, tile in enumerate(tiles_of(size, monkeypatch)):
        records, _, lengths = steps_of(layout.index, n % 2 == 0, tile, n % 3 == 0)
        records = records.view(np.uint32)[: lengths.starts[-1]]
        counts, first = tile.SHARES, tile.RECORD - tile.BLOCKS
        for record in records:  # as in memory that was not zero
            record[first + (record[counts] >> 8) :] = 0xFFFFFFFF
        found = ns.to_device(np.zeros((len(records), tile.RECORD + tile.BLOCKS), np.uint32))
        wanted = ns.to_device(np.full(len(records), 7, np.int32))
        args = ns.to_device(records), ns.to_device(gates), found, wanted
        launch(thin_all(tile), len(records), 1, *args)
        for before, got, some in zip(records, found.numpy(), wanted.numpy(), strict=True):
            blocks, last = blocks_of(before, tile)
            own = [gates[number(block, tile)] for block in blocks]
            kept = [k for k, gate in enumerate(own) if gate != 0]
            assert some == (kept != [] or last)
            assert got[counts] >> 8 == sum(1 << k for k in kept)
            assert got[counts] & 255 == sum(
                1 << e
                for e in range(before[counts] & 255)
                if any(blocks[k][1] == before[counts + 1 + e] for k in kept)
            )
            there = tile.RECORD if len(blocks) == tile.BLOCKS else first + len(blocks)
            np.testing.assert_array_equal(got[counts + 1 : there], before[counts + 1 : there])
            if tile.ITEM == 2:
                behind = got[tile.RECORD :][: len(own)].view(np.float32)
                np.testing.assert_array_equal(behind, own)
            for share in range(tile.SHARES):
                mask, was = int(got[share]), int(before[share])
                bits = [b for b in range(tile.INPUTS * tile.SHARE) if was >> b & 1]
                begin = was >> plan.BEFORE & plan.MOST
                mine = [k for k in kept if begin <= k < begin + len(bits)]
                assert mask & (1 << tile.INPUTS * tile.SHARE) - 1 == sum(
                    1 << bits[k - begin] for k in mine
                )
                assert mask >> plan.BEFORE & plan.MOST == len([k for k in kept if k < begin])
                assert mask & plan.LAST == was & plan.LAST
                scaled = tile.ITEM == 2 and any(own[k] != 1 for k in mine)
                assert (mask & plan.TO_SCALE != 0) == scaled


def number(block, tile):
    return (block[2] & (plan.SCALED - 1)) // tile.PARTS // tile.ACROSS


ALL_LEFT = 0  # the tile of which no gate is zero


@pytest.mark.parametrize("size", [32, 64, 128])
def test_steps_of_gated_blocks_are_without_those_of_zero(size, rng, monkeypatch):
    """In as few steps as fit, in the order of all: of more steps than there are threads."""
    monkeypatch.setattr(plan, "multiprocessors", lambda: 132)
    layout, drawn = gated_layout(rng)
    not_zero = np.where(drawn == 0, np.float32(-1.5), drawn)
    for n, tile in enumerate(tiles_of(size, monkeypatch)[:-1]):  # of 16 bits
        gates = not_zero if n == ALL_LEFT else drawn
        transposed, rows = n % 2 == 0, 2
        index = Sent(layout.index)
        records, strips, lengths = planned(index, steps_of, transposed, tile, n % 3 == 0)
        tiles, starts = planned(index, schedule, lengths, rows, 5)
        own = plan.Plan(records, strips, tiles, starts)
        values = ns.to_device(np.zeros((layout.n_blocks, 8, 8), "f2"))  # which are not looked at
        again, x = n % 2, ns.to_device(np.zeros(9, "f2"))
        monkeypatch.setattr(gated, "CACHED", 18 * again)
        found, of_w = steps_wanted(own, tile, index, values, ns.to_device(gates), x, rows, 5)
        assert len(of_w) == 2
        records, left, tiles, ending = (
            a.numpy() for a in (records, found.records, tiles, found.tiles)
        )
        assert {*map(tuple, ending[:, :3])} == {*map(tuple, tiles[:, :3])}
        if again:
            check_dealt(ending, found.tile_starts.numpy())
        else:
            np.testing.assert_array_equal(ending[:, :3], tiles[:, :3])
            assert found.tile_starts is starts
        for group, _, first, end in ending:
            all_of_them, last = steps(records, lengths.starts[group], lengths.steps[group], tile)
            kept = [[b for b in step if gates[number(b, tile)] != 0] for step in all_of_them]
            packed, last = steps(left, first, end - first, tile)
            for step in packed:
                for nth, (strip, x, block) in enumerate(step):
                    from_w, is_one = not block & plan.SCALED, gates[number(step[nth], tile)] == 1
                    assert from_w == is_one
                    step[nth] = strip, x, block & ~np.uint32(plan.SCALED)
            assert sorted(chain(*kept)) == sorted(chain(*packed))
            assert last == [False] * (end - first - 1) + [True]
            some = [chain(*kept[k : k + RUN]) for k in range(0, len(kept), RUN)]
            right = [len(step) for blocks in some for step in fewest([*blocks], tile)]
            assert [len(step) for step in packed] == (right or [0])


def steps(records, first, count, tile):
    """What each step has, and whether it is the last."""
    of = [blocks_of(r.view(np.uint32), tile) for r in records[first : first + count]]
    return [found for found, _ in of], [last for _, last in of]


def fewest(blocks, tile):
    """Those of one input after the other, while they fit."""
    found = []
    for x in sorted({x for _, x, _ in blocks}):
        own = [b for b in blocks if b[1] == x]
        inputs = {x for _, x, _ in found[-1]} if found else ()
        full = len(inputs) == tile.INPUTS or not found
        if full or len(found[-1]) + len(own) > tile.BLOCKS:
            found.append([])
        found[-1] += own
    return found
