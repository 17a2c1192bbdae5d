"""What is dealt on the GPU to the units of a real card: tiles, items of weight-gradients, warps."""

from itertools import pairwise

import numpy as np
import pytest
from plans_helpers import PATTERNS, both, check_dealt

import numbsparse as ns
from numbsparse import Layout, device, ops
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k6_hopper import (
    plan,
    plan_on_gpu,
    weight_grad_float32,
)
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.plan import steps_of
from numbsparse.kernels.matmul.k8_small_batch import plan_on_gpu as k8_plan_on_gpu
from numbsparse.kernels.matmul.k8_small_batch.plan import lines_of, plan_lines
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.plans import planned

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes kernels")
STAIRS = np.tril(np.ones((12, 12), bool))


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """No layout that is gone lends its plans, which other numbers made."""
    monkeypatch.setattr(ops.made, "_spare", {})


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


CASES = [(*case, False) for case in CASES] + [(*case, True) for case in SWAPPED]
# Of many rounds, which only items of several lines, those of 16 bits and of 32, are ordered by.
MANY = [case for case in CASES if "float16" in case[1] and case[2] == 32]


@pytest.mark.parametrize(
    ("name", "dtype", "size", "swapped", "many"),
    [(*case, False) for case in CASES] + [(*case, True) for case in MANY],
)
def test_every_block_of_a_weight_gradient_is_made_once(
    name, dtype, size, swapped, many, rng, monkeypatch
):
    monkeypatch.setattr(plan_on_gpu, "FEW_ROUNDS", 0 if many else 1000)
    monkeypatch.setattr(plan_on_gpu, "MOST", 0)
    monkeypatch.setattr(plan_on_gpu, "WINDOW", 1)
    made, on_host = both(name, rng)
    for module in (weight_grad_float32, plans):
        monkeypatch.setattr(module, "SIMULATED", False)
    kept, lines = on_host.block_rows.size, PATTERNS[name][:2]
    if dtype == "float32":
        tile, parts = (
            weight_grad_float32.way_of(made, size)[0]._replace(SWAPPED=swapped),
            size // 32,
        )
    else:
        blocks = 1000 if dtype.endswith("few") else -1
        monkeypatch.setattr(plans, "most_blocks", lambda *of: blocks)
        batch, dy = 1 if dtype.endswith("short") else 1000, dtype.endswith("dy")
        tile = plans.tile_of(size, (False, dy), made, batch, False)
        parts = size // tile.PANEL
    make = (weight_grad_float32 if dtype == "float32" else plans).plan
    panels = [n * parts for n in (lines[::-1] if swapped else lines)]
    for steps, places in ((8, 4), (500, 6), (500, 300)):
        *tables, cut, numbers, sums = planned(made, make, tile, steps, places)
        heads, loads, where, outs, cut, numbers = (a.numpy() for a in (*tables, cut, numbers))
        together = numbers[pieces.STEP]
        assert together * numbers[pieces.PIECES] <= sums
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
    n, near, many = groups * each, plan_on_gpu.NEAR, plan_on_gpu.PARTS
    counts = np.zeros((n, 2), np.int32)
    counts[:, 1] = rng.integers(20, 30, n)
    group, nth = np.divmod(np.arange(n), each)
    slots = rng.permutation(n)
    found, numbers = np.stack([slots, group], 1), np.arange(0, n + 1, each)
    cut, order = np.zeros(5), ns.to_device(np.full(n, -1, np.int32))
    cut[plan_on_gpu.ITEMS] = n
    tables = (ns.to_device(a.astype(np.int32)) for a in (counts, found, numbers))
    last = ns.to_device(cut.astype(np.int32)), order
    launch(plan_on_gpu.order_kernel(1), n, 32, *tables, few, *last)
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
    monkeypatch.setattr(k8_plan_on_gpu, "units_beyond", lambda warps, unit: more)
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
