"""How long each rung is expected to take on an H200: the basis of `auto`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches; rounds of blocks of threads, and steps of the
longest one of these; parts of sums that are added up; bytes; and what feature-major rows add. What
a rung does at once, and into how many parts it cuts a sum, is worked out as it does itself, if less
exactly: of a layout only its shape, its blocks and its longest line are asked for.

`times.json` has the factors, which fit 2,898 products that were drawn and timed, 1,676 of them with
rungs of nearly the same time; `python -m numbsparse times` makes it. A fifth at a time predicted by
the others, the choice at the other 1,222 took 1.013 times as long as the fastest rung on average,
and more than 1.05 times at 6.5 %; at 353 of another seed, with kernels that have changed since,
1.021 times, and at 9.9 %. What odd feature-major rows add to k8 in blocks of 32 and more fits 33
others. What counts is the order of the rungs, not their times: on another card it may differ, and
`numbsparse.tune` measures it there.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import product as every
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

from numbsparse.kernels.matmul import rung
from numbsparse.kernels.parts.plans import planned_numbers
from numbsparse.layout import Layout

FILE = Path(__file__).with_name("times.json")
DENSE = "k9_dense_tiles"
LARGER = 32  # blocks than those of rungs for small ones
PLACES = 132  # multiprocessors
BYTES, WORD = 16, 4  # from multiples of which on rows are aligned; and copied by words
A_TILE = 64 * 128  # values of a dense one
# Of k6, by block size: columns of blocks of a large tile of 16 bits, its rows, and how many of
# these tiles each multiprocessor must have for it to be taken; others have 64 rows of one block.
K6_TILES = {32: (8, 256, 1.5), 64: (2, 512, 1.5), 128: (1, 512, 0.5)}
# Blocks of a weight-gradient that k6 takes together, by bytes of a value.
K6_ITEM = {2: {32: 28, 64: 7, 128: 1.75}, 4: {32: 10.5, 64: 3.5, 128: 0.9}}
# By bytes of a value and block size, of k7: what a group of features takes a warp, and each block
# of these; microseconds of a row in a large region; its blocks, and groups that it has room for.
K7_GROUP = {(2, 8): (5, 3), (2, 16): (3.5, 13.1), (4, 8): (60, 37), (4, 16): (8, 67)}
K7_ROW = {(2, 8): 0.04, (2, 16): 0.033, (4, 8): 0.2, (4, 16): 0.16}
K7_REGION = {(2, 8): (370, 26), (2, 16): (112, 27), (4, 8): (450, 36), (4, 16): (122, 36)}
# Where these are few: microseconds of quarters of them until blocks of threads have met, by how
# many share one. Of k9, microseconds of a step, by columns of a tile and its rows in 64s; and by
# blocks of threads that share a sum the part of the multiprocessors that they find at once, and
# microseconds to add it.
K7_MEETING = {1: 0.0, 2: 1.0, 4: 1.6, 8: 2.9}
K9_STEP = {64: (0.185, 0.26, 0.375, 0.45), 128: (0.304, 0.418, 0.582, 0.696)}
K9_SHARED = {1: (1e9, 0.0), 2: (1.0, 0.45), 4: (0.76, 1.1)}
# Of a layout made on a GPU any line may be the longest: k8, which cuts lines, takes little more
# where they are even, and where one was full, of 133 to 530 rows, 0.24 to 0.43 of the time (H200).
# Of more rows lines are shared out.
UNKNOWN, SHARED_ROWS = (1.2, 1.0), 1024
# Its weight-gradients by k6 read more, and do not begin an item before the last one ends: 15 drawn
# ones of up to 128 rows took 1.5 times as long as planned by the host, 1.3 to 2.2, 57 of more rows
# 1.3. By k8, whose plan is the same there, 1.0 to 1.1.
PLANNED_THERE, ROWS_THERE = (1.4, 1.2), 128
# Of 321 drawn products of 16 bits in blocks of 32 and more k5 was the fastest at 3. So it is taken
# where it is expected to be so many times as fast: at worst 1.48 times too slow then, before 2.23.
RARELY = 1.5


class Sizes(NamedTuple):
    """Of a product, what its time depends on."""

    lines: bool  # whether the result is rows, not blocks
    size: int  # of blocks
    itemsize: int
    rows: int
    reads: int  # features of x, or of dy for an input-gradient
    makes: int  # of the other side
    n_blocks: int
    longest: int  # blocks of a line of the result
    across: bool  # feature-major
    tiles: float  # the part of dense tiles that have a block

    @property
    def per_line(self) -> float:
        """Blocks of a line of the result, on average."""
        return self.n_blocks * self.size / self.makes

    def used(self, features: int) -> float:
        """Of these, those whose line of a random layout has a block."""
        n = features / self.size
        return features * (1 - (1 - 1 / n) ** self.n_blocks)

    @property
    def density(self) -> float:
        return self.n_blocks * self.size**2 / (self.reads * self.makes)

    def met(self, blocks: float) -> float:
        """The part of areas of so many places for blocks that has any, in a random layout."""
        return 1.0 - max(1 - self.density, 0.0) ** max(blocks, 1)


def expected(
    product: str,
    block_size: int,
    dtype: Any,
    batch: int,
    precision: str,
    layout: Layout,
    feature_major: bool = False,
) -> dict[str, float]:
    """Microseconds of each rung that was timed.

    `feature_major` says whether the batch is contiguous in what is read, and in what is written.
    """
    if not layout.n_blocks or not batch:
        return {}
    of = sizes_of(product, block_size, dtype, batch, layout, feature_major)
    found, factors = {}, measured()
    for name in OF_RUNG:
        own = factors.get(case_of(name, product, block_size, dtype, precision))
        if own is not None:
            found[name] = sum(f * n for f, n in zip(own, counts(name, of), strict=True))
    if of.itemsize == 2 and of.size >= LARGER and "k5_tensor_core" in found:
        found["k5_tensor_core"] *= RARELY
    if not any(layout.longest) and "k6_hopper" in found:
        there = UNKNOWN[batch > SHARED_ROWS] if of.lines else PLANNED_THERE[batch > ROWS_THERE]
        found["k6_hopper"] *= there
    return found


def sizes_of(
    product: str, block_size: int, dtype: Any, batch: int, layout: Layout, feature_major: bool
) -> Sizes:
    sides = [n * block_size for n in layout.shape]
    reads, makes = sides[::-1] if product == "input_grad" else sides
    numbers = block_size, 4 if str(dtype) == "float32" else 2, batch
    longest = layout.longest[product == "forward"]
    of_layout = reads, makes, layout.n_blocks, longest
    tiles = tiles_met(product, block_size, dtype, layout)
    of = Sizes(product != "weight_grad", *numbers, *of_layout, feature_major, tiles)
    return of if tiles else of._replace(tiles=of.met(A_TILE / block_size**2))


def tiles_met(product: str, block_size: int, dtype: Any, layout: Layout) -> float:
    """The part of dense tiles that have a block, in this layout; 0 where DENSE does not serve."""
    others = product == "weight_grad" or str(dtype) == "float32" or not layout.n_blocks
    if block_size >= LARGER or others:
        return 0.0
    plan = rung(DENSE).kept_of_tiles, product == "input_grad", block_size
    (kept,) = planned_numbers(layout.index, *plan)
    return float(min(layout.n_blocks / (layout.shape[0] * layout.shape[1]) / kept, 1.0))


def case_of(name: str, product: str, block_size: int, dtype: Any, precision: str) -> str:
    """What has factors: bfloat16 takes as long as float16; only float32 has a precision."""
    kind = "weight_grad" if product == "weight_grad" else "lines"
    numbers = f"float32 {precision}" if str(dtype) == "float32" else "float16"
    return f"{name} {kind} {numbers} {block_size}"


@cache
def measured() -> dict[str, list[float]]:
    """What the file holds: factors by case."""
    return json.loads(FILE.read_text(encoding="utf-8"))["factors"]  # type: ignore[no-any-return]


def is_dense(
    product: str, block_size: int, dtype: Any, batch: int, layout: Layout, part: float = 1.0
) -> bool:
    """Whether so much is kept, times `part`, that DENSE takes less time than strips."""
    how = product, block_size, dtype, batch
    return block_size < LARGER and bool(rung(DENSE).suits(*how, layout.index, part))


def counts(name: str, of: Sizes) -> list[float]:
    """What takes time: a launch, what a rung does, megabytes that are read and made, and what
    feature-major rows add, which begin anywhere: copies, and values that are stored one by one."""
    used, made, whole = of.used(of.reads), of.makes, of.reads
    if not of.lines:
        used, made, whole = used + of.used(of.makes), 0, of.reads + of.makes
    a_feature = of.rows * of.itemsize / 1e6
    read = used * a_feature + of.n_blocks * of.size**2 * of.itemsize / 1e6
    copied = of.across and of.rows * of.itemsize % BYTES > 0
    of_bytes = [read, made * a_feature, copied, copied * whole * a_feature]
    return [1.0, *OF_RUNG[name][not of.lines](of), *of_bytes, copied * made * a_feature]


Counts = tuple[float, ...]


def _k5_lines(of: Sizes) -> Counts:
    """Tiles of lines, whose steps several blocks of threads share where they are few."""
    tiles = ceil(of.rows / (64 if of.rows <= 64 or of.itemsize == 4 else 128))
    return _k5(tiles * ceil(of.makes / min(of.size, 64)), of.per_line * of.size / 32)


def _k5_blocks(of: Sizes) -> Counts:
    return _k5(of.n_blocks * max(of.size // 64, 1) ** 2, of.rows / 32)


def _k5(tiles: int, steps: float) -> Counts:
    rounds = tiles / (3 * PLACES)
    parts = min(max(1 / rounds, 1), max((3 * steps) ** 0.5, 1)) if steps > 8 else 1.0
    return ceil(rounds), max(rounds, 1) * steps / parts, rounds * steps, log2(parts)


def _k6_lines(of: Sizes) -> Counts:
    """Tiles of lines, of which each multiprocessor has some."""
    size, halves = of.size, of.itemsize == 2
    deep = max(size * of.itemsize // 128, 1)  # parts of a block along the sum
    rows, columns, at_once = 128, max(64 // size, 1), 1.0  # blocks of a step, of a column
    if halves:
        columns, rows, enough = K6_TILES[size]
        many = ceil(of.rows / rows) * ceil(of.makes / (columns * size)) >= enough * PLACES
        rows = min(rows // 2, 64 * ceil(of.rows / 64)) if many else 64
        columns, at_once = columns if many else 1, 3.0 if size == 32 else 1.0
    elif ceil(of.rows / 256) * ceil(of.makes / 64) >= PLACES:
        rows = 256
    tiles = ceil(of.rows / rows) * ceil(of.makes / (columns * size if halves else 64))
    blocks, met = columns * of.per_line, of.reads / size * of.met(columns)
    steps = max(met / at_once, blocks / 8 * (columns > 1 and halves)) * deep
    chain = max(max(tiles / PLACES, 1) * steps, of.longest / at_once * deep, 1)
    return chain, chain * rows, ceil(tiles / PLACES)


def _k6_blocks(of: Sizes) -> Counts:
    """Items of several blocks, those of the last round in pieces of the batch."""
    items = max(of.n_blocks / K6_ITEM[of.itemsize][of.size], 1)
    whole, rest = divmod(items, PLACES)
    steps = ceil(of.rows / (64 if of.itemsize == 2 and of.size > 32 else 32))
    pieces = max(min(PLACES / max(rest, 1), steps / 2), 1)
    chain = whole * steps + (rest > 0) * steps / pieces
    values = of.n_blocks * of.size**2 / 1e6
    return chain, int(whole) + (rest > 0), steps * items / PLACES, log2(pieces), values


def _k7_lines(of: Sizes) -> Counts:
    """Strips as wide as takes least time; blocks of threads share the sum of one, if few."""
    groups, item = of.reads / 32, of.itemsize
    blocks = of.n_blocks * 1024 / (of.reads * of.makes)  # of a warp in a group
    alone, more = K7_GROUP[item, of.size]
    widest = min(16 if item == 2 else 12, 2 ** max(ceil(log2(of.makes / 32)), 0))
    found = []
    widths = {min(widest, warps) for warps in (4, 8, 16)}
    for rows, warps, parts in every((48, 64, 80), widths, (1, 2, 3, 4)):
        tiles = ceil(of.makes / (32 * warps)) * ceil(of.rows / rows) * parts
        if parts > 1 and tiles > 0.76 * PLACES:
            continue
        high, rounds = rows / 64, ceil(tiles / PLACES)
        group = alone * high + more * blocks * (high if item == 4 else 1)
        time = rounds * groups / parts * group * (warps + 4 if item == 2 else warps**0.5)
        found.append((time + 400 * warps * high * (parts > 1), rounds, high, warps, parts))
    _, rounds, high, warps, parts = min(found)
    each, met = rounds * high / parts, of.met(1024 / of.size**2 * warps)
    met = min(met * of.tiles / of.met(A_TILE / of.size**2), 1)
    adding = warps * high * (parts > 1)
    return each * groups * met, each * groups * blocks * warps, each * of.longest, adding


def _k7_blocks(of: Sizes) -> Counts:
    """Regions of blocks near each other; smaller ones, maybe of clusters, where they are few."""
    item, row = of.itemsize, K7_ROW[of.itemsize, of.size]
    in_region, room = K7_REGION[item, of.size]
    groups = of.reads * of.makes / (128 // item) ** 2 * of.tiles
    large = max(of.n_blocks / in_region, 4 * groups / room**2)
    rounds, small = ceil(large / PLACES), max(4 * of.n_blocks / in_region, groups / 64)
    found = [(rounds * (4.5 + row * of.rows), rounds, 0.0)]
    for many, meeting in K7_MEETING.items() if large < PLACES else ():
        rounds, of_rows = ceil(small * many / PLACES), max(0.3 * row, 0.03) * of.rows
        found.append((rounds * (2.2 + of_rows / many + meeting), rounds, log2(many)))
    return *min(found), large / PLACES * of.rows * row, of.n_blocks * of.size**2 / 1e6


def _k8_units(of: Sizes, features: int) -> tuple[float, float]:
    """Squares of 32 x 32 values, for each warp if there is one share; lines of 128 bytes of x that
    a multiprocessor reads for small blocks of so many features of lines."""
    units, warps = of.n_blocks * of.size / 32 * max(of.size / 32, 1), 8
    if of.size >= 32:
        return units / warps, 0.0
    used = of.used(features) / of.size
    units, warps = max(units + used * (0.5 - of.size / 64), used), 16 if of.itemsize == 2 else 8
    lines = of.size * ceil(of.itemsize * of.rows / 128) if of.across else of.rows
    return units / warps, of.n_blocks * lines / PLACES


def _k8_lines(of: Sizes) -> Counts:
    """Units of each warp in turn; lines that are longer are cut, and added up."""
    units, of_x = _k8_units(of, of.makes)
    tile = 16 if of.rows <= 16 and not of.across else 32
    tiles = ceil(of.rows / tile)
    shares = max(PLACES // tiles, 1)
    each, rounds = ceil(units / shares), ceil(tiles * shares / PLACES)
    parts = max(of.longest * of.size / 32 / each, 1)
    adding = log2(parts), (parts > 1) * min(parts, 40) * tiles
    chain, by_value = each * rounds, of.rows * of.itemsize % WORD > 0
    of_columns = of.across * chain, of.across * by_value * chain
    return chain * tile, rounds, tiles * units * tile, *adding, of_x, *of_columns


def _k8_blocks(of: Sizes) -> Counts:
    """Steps of 32 rows, or two of these at once; several warps share those of a unit, if few."""
    units, of_x = _k8_units(of, of.reads)
    at_once = 2 if of.size >= 32 and 32 < of.rows <= 64 and of.itemsize == 2 else 1
    steps, split = ceil(of.rows / (32 * at_once)), 1
    while 2 * split * units <= PLACES and 2 * split <= min((steps + 1) // 2, 8):
        split *= 2
    chain = ceil(units * split / PLACES) * ceil(steps / split) * at_once
    return chain, log2(split), units * steps * at_once * of.itemsize, of_x


def _k9_lines(of: Sizes) -> Counts:
    """Tiles that take least time; two or four blocks of threads may share the sum of one."""
    steps, found = max(of.reads / 64 * of.tiles, 1), []
    for high, columns, parts in every((1, 2, 3, 4), K9_STEP, K9_SHARED):
        room, adding = K9_SHARED[parts]
        tiles = ceil(of.makes / columns) * ceil(of.rows / (64 * high)) * parts
        chain, rounds = steps / parts * K9_STEP[columns][high - 1], ceil(tiles / PLACES)
        if tiles <= room * PLACES:
            time = rounds * (chain + 4 + 0.1 * high) + adding * high
            found.append((time, rounds, rounds / parts))
    time, rounds, each = min(found)
    return time - 4 * rounds, rounds, each * of.per_line * of.size / 64


OF_RUNG: dict[str, tuple[Callable[[Sizes], Counts], ...]] = {
    "k5_tensor_core": (_k5_lines, _k5_blocks),
    "k6_hopper": (_k6_lines, _k6_blocks),
    "k7_small_blocks": (_k7_lines, _k7_blocks),
    "k8_small_batch": (_k8_lines, _k8_blocks),
    DENSE: (_k9_lines,),
}
"""What a rung does, for results of rows and of blocks."""
