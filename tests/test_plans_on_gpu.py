"""Plans made on the GPU, of the tiles that real cards get: their kernels alone run here."""

from importlib import import_module
from itertools import chain, pairwise

import numpy as np
import pytest
from numba import cuda, uint32

import numbsparse as ns
from numbsparse import Layout, device, ops
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k6_hopper import (
    plan,
    plan_on_gpu,
    weight_grad_on_gpu,
    weight_grad_shares,
)
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.gated import thinning
from numbsparse.kernels.matmul.k6_hopper.plan import line_tiles, steps_of
from numbsparse.kernels.matmul.k6_hopper.plan_on_gpu import RUN, steps_wanted
from numbsparse.kernels.matmul.k8_small_batch import plan_on_gpu as k8_plan_on_gpu
from numbsparse.kernels.matmul.k8_small_batch.plan import lines_of, plan_lines
from numbsparse.kernels.parts import pieces_of_blocks
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.plans import Sent, planned

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes kernels")
weight_grad = import_module("numbsparse.kernels.matmul.k6_hopper.weight_grad")
PATTERNS = {
    "random": (3, 35, 0.4),
    "tall": (35, 3, 0.4),
    "full": (9, 5, 1.0),
    "none": (3, 9, 0.0),
    "few": (9, 3, 0.5),
}
STAIRS = np.tril(np.ones((12, 12), bool))


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """No layout that is gone lends its plans, which other numbers made."""
    monkeypatch.setattr(ops.made, "_spare", {})


def both(name, rng, more=3):
    """(the pattern's index made on the GPU, that of the host)"""
    rows, columns, density = PATTERNS[name]
    pattern = rng.random((rows, columns)) < density
    places = (ns.to_device(lines) for lines in np.nonzero(pattern))
    made = Layout.on_device(*places, pattern.shape, capacity=int(pattern.sum()) + more)
    return made.device_index, Layout(pattern).index


def tiles_of(size, monkeypatch):
    """Of 16 bits, as a card gets them, and of float32."""
    monkeypatch.setattr(plan, "SIMULATED", False)
    return line_tiles(size, 8192, 8192) + line_tiles(size, 64, 64, itemsize=4)


@pytest.mark.parametrize(
    ("name", "size"), [("random", 32), ("tall", 64), ("full", 128), ("none", 32)]
)
def test_records_are_those_of_the_host_without_its_grouping(name, size, rng, monkeypatch):
    def neighbours(walk, n_inputs, count):
        lines = np.arange(len(walk.indptr) - 1)
        return np.append(lines, np.full(-lines.size % count, -1)).reshape(-1, count)

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
        values = ns.to_device(np.zeros((layout.n_blocks, 32, 32), "f2"))
        again, x = n % 2, ns.to_device(np.zeros(9, "f2"))
        monkeypatch.setattr(plan_on_gpu, "CACHED", 18 * again)
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


@pytest.mark.parametrize(
    ("rows", "units", "together"), [(1, 4, 1), (6, 3, 2), (5, 4, 1), (2, 99, 1)]
)
def test_every_tile_is_dealt_once_and_evenly(rows, units, together):
    places = (ns.to_device(lines) for lines in np.nonzero(STAIRS))
    made, tile = Layout.on_device(*places, STAIRS.shape).device_index, plan.TILES[64]
    _, _, lengths = planned(made, steps_of, False, tile, False)
    tiles, starts = (a.numpy() for a in planned(made, schedule, lengths, rows, units, together))
    first, steps = lengths.starts.numpy(), lengths.steps.numpy()
    n = rows * steps.size
    assert sorted(map(tuple, tiles[:, :2])) == [
        (g, r) for g in range(steps.size) for r in range(rows)
    ]
    np.testing.assert_array_equal(tiles[:, 2], first[tiles[:, 0]])
    np.testing.assert_array_equal(tiles[:, 3], (first + steps)[tiles[:, 0]])
    assert (starts[0], starts[-1], starts.size) == (0, n, min(units, n) + 1)
    check_dealt(tiles, starts)


def check_dealt(tiles, starts):
    """To all units alike, and down the rows."""
    assert (np.diff(np.diff(starts)) <= 1).all()
    steps = tiles[:, 3] - tiles[:, 2]
    longest = [steps[a:b].sum() for a, b in pairwise(starts)]
    least = steps.min() if (np.diff(starts) == starts[1]).all() else 0  # as many tiles each
    assert max(longest) - min(longest) <= steps.max() - least
    assert all((np.diff(tiles[a:b, 1]) >= 0).all() for a, b in pairwise(starts))


def slots_of(loads, n_loads, cluster, panels):
    """What is in each slot of each block of threads of a cluster: (operand, panel)."""
    slots = [{} for _ in range(cluster)]
    for rank in range(cluster):
        for panel, code in loads[rank][: n_loads[rank]]:
            operand = code >> 8 & 0xFF
            assert 0 <= panel < panels[operand]
            for other in range(cluster):
                if code >> 16 >> other & 1:
                    assert code & 0xFF not in slots[other]
                    slots[other][code & 0xFF] = operand, panel
    return slots


def products_16_bit(tile, places, outs, slots):
    """{what is made: (panels of x, panels of dy)} of a block of threads."""
    step, found = tile.PANEL_BYTES >> 4, {}
    for group, (number, *where) in enumerate(places.tolist()):
        if tile.B == 32:
            for unit in range(number):
                dy, x = where[2 * unit] & 0xFFFF, where[2 * unit + 1]
                seconds = dy + (where[2 * unit] >> 16)
                for out, at in zip(outs[group, 2 * unit :], (dy, seconds), strict=False):
                    if out >= 0:
                        found[out] = [slots[x // step]], [slots[at // step]]
        else:
            for unit in range(number):
                left, right = where[2 * unit : 2 * unit + 2]
                assert right >> 16 == step
                first = (right & 0xFFFF) // step
                columns = [slots[first + p] for p in range(tile.B // 64)]
                rows, others = found.get(outs[group, unit], ([], columns))
                assert others == columns
                found[outs[group, unit]] = [*rows, slots[left // step]], columns
        assert (outs[group, 2 * number if tile.B == 32 else number :] == -1).all()
    return found


def products_of_float32(tile, places, outs, slots):
    """The same; what is made are parts of 32 x 32."""
    across, flat = tile.N // 32, outs.reshape(-1)
    x = 2 * np.arange(places.shape[0] * tile.UNITS).reshape(-1, tile.UNITS) | 1 << 16
    np.testing.assert_array_equal(places[:, 1::2], x)
    assert (places[:, 2::2] == tile.X_PANELS).all()
    made = {int(out): i for i, out in enumerate(flat) if out >= 0}
    return {
        out: ([slots[i // across]], [slots[tile.X_PANELS + i % across]]) for out, i in made.items()
    }


CASES = [("random", "float16 dy", 32), ("none", "float16", 64), ("tall", "float32", 32)]
CASES += [(name, "float16", n) for name in ("random", "full") for n in (32, 64, 128)]
CASES += [("random", "float16 short", 64), ("full", "float16 short", 128)]
CASES += [(name, "float16 few", n) for name in ("random", "full") for n in (32, 64, 128)]
CASES += [("none", "float32", 64), ("few", "float32", 128), ("few", "float32", 64)]
CASES += [("full", "float32", 64)]
SWAPPED = [("random", "float32", 32), ("few", "float32", 64), ("full", "float32", 128)]


@pytest.mark.parametrize(
    ("name", "dtype", "size", "swapped"),
    [(*case, False) for case in CASES] + [(*case, True) for case in SWAPPED],
)
@pytest.mark.parametrize("many", [False, True], ids=["few rounds", "many rounds"])
def test_every_block_of_a_weight_gradient_is_made_once(
    name, dtype, size, swapped, many, rng, monkeypatch
):
    monkeypatch.setattr(weight_grad_on_gpu, "FEW_ROUNDS", 0 if many else 1000)
    monkeypatch.setattr(weight_grad_on_gpu, "MOST", 0)
    monkeypatch.setattr(weight_grad_on_gpu, "WINDOW", 1)
    made, on_host = both(name, rng)
    for module in (weight_grad, plans):
        monkeypatch.setattr(module, "SIMULATED", False)
    kept, lines = on_host.block_rows.size, PATTERNS[name][:2]
    if dtype == "float32":
        tile, parts, more = weight_grad_on_gpu.way_on_gpu(made, size)[1], size // 32, (swapped,)
    else:
        blocks = 1000 if dtype.endswith("few") else -1
        monkeypatch.setattr(weight_grad, "most_blocks", lambda *of: blocks)
        batch, dy = 1 if dtype.endswith("short") else 1000, dtype.endswith("dy")
        tile, more = weight_grad.tile_of(size, (False, dy), made, batch, False), ()
        parts = size // tile.PANEL
    make = plans.plan if dtype == "float32" else weight_grad_shares.plan
    panels = [n * parts for n in (lines[::-1] if swapped else lines)]
    for steps, places in ((8, 4), (500, 6), (500, 300)):
        *tables, cut, numbers, sums = planned(made, make, tile, *more, steps, places)
        heads, loads, where, outs, cut, numbers = (a.numpy() for a in (*tables, cut, numbers))
        together = numbers[pieces_of_blocks.STEP]
        assert together * numbers[pieces_of_blocks.PIECES] <= sums
        whole = heads[:: tile.CLUSTER][heads[:: tile.CLUSTER, 1] == steps, 3]
        assert many or (np.diff(whole) <= 0).all()  # longest first
        done = {}  # of each block or part, its steps
        for first in range(0, len(heads), tile.CLUSTER):
            of = np.s_[first : first + tile.CLUSTER]
            slots = slots_of(loads[of].tolist(), heads[of, 2], tile.CLUSTER, panels)
            for rank in range(tile.CLUSTER):
                begin, count, _, arriving, left = heads[first + rank, :5].tolist()
                assert arriving == len(slots[rank])
                if not count:
                    assert (outs[first + rank] == -1).all()
                    assert not arriving
                    continue
                how = products_of_float32 if dtype == "float32" else products_16_bit
                for out, (rows, columns) in how(
                    tile, where[first + rank], outs[first + rank], slots[rank]
                ).items():
                    if swapped:
                        rows, columns = ([(1 - a, b) for a, b in of] for of in (columns, rows))
                    if left:
                        piece, out = divmod(out, together)
                        assert begin == piece * steps // numbers[0]
                        out = cut[out]
                    done.setdefault(int(out), []).append((begin, begin + count))
                    check_panels(int(out), rows, columns, on_host, parts, dtype == "float32")
        assert sorted(done) == list(range(kept * (parts**2 if dtype == "float32" else 1)))
        for spans in done.values():
            ends = sorted(spans)
            assert (ends[0][0], ends[-1][1]) == (0, steps)
            assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert max(map(len, done.values()), default=0) == max(numbers[0], min(kept, 1))
        few = dtype.endswith("few") and steps > 10
        assert dtype == "float32" or bool(sums) == few  # of many blocks nothing is cut
        of_float32 = name, dtype, places, swapped
        if (few and kept and places == 300) or of_float32 == ("full", "float32", 6, False):
            assert numbers[0] > 1


@pytest.mark.parametrize("few", [0, 160])
def test_items_that_run_together_meet_few_lines(few, rng):
    """Of many rounds those of a part of the grid follow each other, longest first in each."""
    groups, each = 40, 4
    n, near, many = groups * each, weight_grad_on_gpu.NEAR, weight_grad_on_gpu.PARTS
    counts = np.zeros((n, 2), np.int32)
    counts[:, 1] = rng.integers(20, 30, n)
    group, nth = np.divmod(np.arange(n), each)
    slots = rng.permutation(n)
    found, numbers = np.stack([slots, group], 1), np.arange(0, n + 1, each)
    cut, order = np.zeros(5), ns.to_device(np.full(n, -1, np.int32))
    cut[weight_grad_on_gpu.ITEMS] = n
    tables = (ns.to_device(a.astype(np.int32)) for a in (counts, found, numbers))
    last = ns.to_device(cut.astype(np.int32)), order
    launch(weight_grad_on_gpu.order_kernel(1), n, 32, *tables, few, *last)
    parts = (many * (group // near) + many * nth // each) * (few == 0)
    right = np.lexsort((np.arange(n), -counts[slots, 1], parts))
    np.testing.assert_array_equal(order.numpy(), slots[right])


def check_panels(out, rows, columns, on_host, parts, in_parts):
    block, part = divmod(out, parts**2) if in_parts else (out, None)
    row, column = on_host.block_rows[block] * parts, on_host.block_columns[block] * parts
    if in_parts:
        assert (rows, columns) == ([(0, row + part // parts)], [(1, column + part % parts)])
    else:
        assert rows == [(0, row + p) for p in range(parts)]
        assert columns == [(1, column + p) for p in range(parts)]


FEW_ROWS = [
    ("random", True, 32),
    ("random", False, 128),
    ("tall", False, 32),
    ("full", True, 128),
    ("none", True, 32),
]


@pytest.mark.parametrize(("name", "transposed", "size"), FEW_ROWS)
@pytest.mark.parametrize("more", [0, 2, 12], ids=["cut", "some", "whole"])
def test_warps_of_few_rows_have_every_unit_once(name, transposed, size, more, rng, monkeypatch):
    """Runs of a share's warps, and the parts of lines that shares cut; see `k8_small_batch`."""
    monkeypatch.setattr(k8_plan_on_gpu, "TOGETHER", more)
    made, on_host = both(name, rng)
    shares, warps = 5, 3
    plan, each, begin, lines, _, tickets = planned(
        made, plan_lines, transposed, size, shares, warps, 1, 0, 2
    )
    indptr, xs, places = lines_of(on_host, transposed, size)
    filled, cuts, empty = np.split(plan.numpy(), begin)[1:]
    units = plan.numpy()[: begin[0]].reshape(-1, 4)
    none = np.flatnonzero(np.diff(indptr) == 0)
    assert set(empty[:lines]) - {lines} == set(none)
    runs = abs(filled).reshape(shares, warps)
    assert runs.sum() == xs.size
    fair, lengths = max(-(-xs.size // shares), 1), np.diff(indptr)
    longest = np.argsort(-lengths, kind="stable")
    dealt = np.full((-(-lines // shares), shares), -1)
    dealt.flat[:lines] = longest
    dealt[1::2] = dealt[1::2, ::-1]
    of_shares = [own[own >= 0] for own in dealt.T]
    loads = np.array([lengths[own].sum() for own in of_shares])
    is_whole = loads.max() <= fair + more
    if is_whole:
        np.testing.assert_array_equal(runs.sum(1), loads)
        assert (units[:, 2] >= 0).all()
    assert runs.sum(1).max() <= fair + (max(more, 0) if is_whole else 0)
    assert (np.diff(runs, axis=1) <= 0).all()
    assert (runs.max(1) - runs.sum(1) // warps <= 1).all()
    numbers = np.arange(xs.size)  # in the order in which they are taken
    if is_whole:
        of_lines = [numbers[indptr[line] : indptr[line + 1]] for own in of_shares for line in own]
        numbers = np.concatenate(of_lines, dtype=np.int64)
    ends, nth, parts = np.cumsum(runs.sum(1)), 0, {}
    for run, own in enumerate(filled):
        share = run // warps
        for k in range(abs(own)):
            at, number = run * each + k, numbers[nth]
            line = int(np.searchsorted(indptr, number, "right")) - 1
            first = max(nth - (number - indptr[line]), ends[share] - runs[share].sum())
            last = min(nth + (indptr[line + 1] - number), ends[share])
            assert tuple(units[at, :2]) == (places[number], xs[number])
            assert units[at, 3] >= at + 1
            assert k or (own < 0) == (first < nth)
            name_of = units[at, 2]
            assert (name_of < 0) == (last - first < lengths[line])
            if name_of < 0:
                part = -1 - name_of
                assert cuts[3 * part] == line
                parts.setdefault((line, *cuts[3 * part + 1 : 3 * part + 3]), set()).add(part)
            else:
                assert name_of == line
            if nth + 1 == last:
                assert np.count_nonzero(units[:, 3] == at + 1) == last - first
            nth += 1
    for (_, first, many), found in parts.items():
        assert found == set(range(first, first + many))
        assert tickets.size >= 2 * (first + many)
    assert sum(len(found) for found in parts.values()) == len(set().union(*parts.values(), ()))
    assert not tickets.numpy().any()
    for run, own in enumerate(filled):
        assert not units[run * each + abs(own) : (run + 1) * each].any()
