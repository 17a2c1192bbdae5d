"""Plans: no line of Python runs once for each block, and compiled ones do as plain ones would."""

import sys

import numpy as np
import pytest

from numbsparse.kernels.conv import walks
from numbsparse.kernels.conv.window import cut
from numbsparse.kernels.lstm.deal import deal
from numbsparse.kernels.matmul.k6_hopper import plan as k6
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32 as float32
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as shares
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import Tile
from numbsparse.kernels.matmul.k7_small_blocks import region_slots, strip_plan
from numbsparse.kernels.matmul.k8_small_batch import plan as k8
from numbsparse.kernels.matmul.k8_small_batch.blocks import plan_blocks
from numbsparse.kernels.parts import groups
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.regions import regions
from numbsparse.kernels.parts.strip import Region, Strip
from numbsparse.layout import Layout
from numbsparse.ops import conv_window

TILES = {
    "regions": Tile(32, 4, 4, 32, 32, 3, 37, 1),
    "regions of 64": Tile(64, 2, 6, 64, 64, 3, 9, 1),
    "pairs of rows": Tile(64, 2, 4, 64, 64, 3, 9, 1),
    "rows": Tile(128, 2, 2, 128, 64, 4, 6, 2),
}


def lines(index):
    _, _, lengths = k6.steps_of(index, False, k6.TILES[32], False)
    schedule(index, lengths, 8, 132)


def split(index):
    tile = Tile(32, 3, 2, 32, 32, 5, 0, 1, 4, ITEM=4, STRIPS=4)
    float32.plan(index, tile, 128, 132)


def strips(index):
    strip = Strip(8, 64, 16, 32, 14, 200, 3)
    groups.steps_in_strips(index, 8, True, 512, 32, 2)
    strip_plan.plan_strips(index, True, 8 * (index.columns.indptr.size - 1), strip)


def small_regions(index):
    region = Region(14, 17, 26, 32, 2, 2)
    widths = (8 * (walk.indptr.size - 1) for walk in (index.rows, index.columns))
    region_slots.plan_boxes(index, 8, tuple(widths), region)


def convolution(index):
    window = conv_window((32, 32), (3, 3), 1, 1, 1)
    for product, plan, more in (
        ("forward", walks.line_items, (64, 132, 1)),
        ("weight_grad", walks.block_items, (4, 1, 4)),
    ):
        of = window.whole(product)
        (how, chunks), product = cut(of, 4, 256, 9, 640), (product,) * (product == "forward")
        plan(index, window.taps, *product, of, how.box, chunks, *more)


PLANS = {
    "conv": convolution,
    "k6 lines": lines,
    "k6 weight_grad float32": split,
    "k7 lines": strips,
    "k7 weight_grad": small_regions,
    "k8 lines": lambda index: k8.plan_lines(index, True, 32, 132, 8, 64),
    "k8 weight_grad": lambda index: plan_blocks(index, 32),
    "lstm": lambda index: deal(index, 264, False, 4, 64),
} | {
    f"k6 {name}": lambda index, tile=tile: shares.plan(index, tile, 128, 132)
    for name, tile in TILES.items()
}


def lines_run(plan, index):
    """How many lines of this library's Python, compiled ones apart."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "numbsparse" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan(index)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", PLANS)
def test_no_line_of_python_runs_for_each_block(name, rng):
    """Nor for each line, group or step: those of the larger layout are ten times as many.

    It may be planned in another way, by some more lines.
    """
    *first, few, many = (  # what two plans of a layout have in common is worked out once
        Layout(np.tile(np.repeat(rng.random((n, n // 4)) < 0.3, 4, axis=1), (9, 1))).index
        for n in (16, 64, 16, 64)
    )
    for index in first:
        PLANS[name](index)  # compiled
    assert lines_run(PLANS[name], many) < 3 * lines_run(PLANS[name], few) < 4500


def grown(pattern, slots, most, pair):
    """The region of each block, as `regions` says it: a line at a time, from scratch."""
    left, found, number = pattern.copy(), np.full(pattern.shape, -1), 0
    n = len(left)
    while left.any():
        counts = np.concatenate([left.sum(1), left.sum(0)])
        inside = np.zeros(counts.size, bool)
        for room in range(slots, 0, -1):
            rows, columns = inside[:n], inside[n:]
            held = np.concatenate([left[:, columns].sum(1), left[rows].sum(0)])
            products = -(-held[:n] // pair)
            even = rows & (held[:n] % pair == 0)
            opens = np.concatenate([products, left[even].sum(0)])
            free = most - products[rows].sum()
            fits = ~inside & (held > 0) & (opens <= free)
            line = np.where(fits, 21 * held - counts, -np.inf).argmax()  # 1.05 to 0.05
            if not fits[line]:
                apart = np.where(rows | (held[:n] > 0), 0, counts[:n])
                line = apart.argmax()
                if not apart[line] or not free or room < 2:
                    break
            inside[line] = True
        here = np.ix_(inside[:n], inside[n:])
        found[here] = np.where(left[here], number, found[here])
        left[here] = False
        number += 1
    return found


@pytest.mark.parametrize("name", ["regions", "regions of 64"])
@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
def test_regions_take_the_best_line_again_and_again(name, density, rng):
    tile, pattern = TILES[name], rng.random((60, 150)) < density
    most = tile.GROUPS * tile.UNITS
    expected = grown(pattern, tile.SLOTS, most, tile.PAIR)[pattern]
    (items,) = regions(Layout(pattern).index, tile.SLOTS, tile.PAIR, [most])
    found = np.empty_like(expected)
    found[items.order] = np.arange(items.lines.size).repeat(np.diff(items.starts))
    np.testing.assert_array_equal(found, expected)
