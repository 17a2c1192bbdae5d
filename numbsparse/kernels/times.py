"""How long each rung is expected to take on an H200: the basis of `auto`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches; rounds of blocks of threads, and steps of the
longest one of these; parts of sums that are added up; bytes, and those that L2 has no room for; and
what feature-major rows add. What a rung does at once, and into how many parts it cuts a sum, its
own plan says where numbers are all that it takes; else it is worked out as there, if less exactly:
of a layout only its shape, its blocks, its longest line and how small blocks are spread are asked
for.

`times.json` has the factors, with which the choice loses least (`bench.times`) at products that
were drawn and timed; `python -m numbsparse times` makes it. These began with factors of 5,638
older ones, 561 of a map of k5 and k8 and 258 of the published tables, and were fitted again, as
near to those as they may be, to 1,433 by all rungs that might be the fastest, 264 of the tables and
2,881 of the published map, 178 of these by two rungs; k7's, k9's and k8's weight-gradients anew, as
they count otherwise since. What counts is the order of the rungs, not their times:
`numbsparse.tune` measures it on another card.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from math import ceil, inf, log, log2, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.parts.plans import planned_numbers
from numbsparse.kernels.parts.shares import longest_run
from numbsparse.layout import Index, Layout

FILE = Path(__file__).with_name("times.json")
DENSE = "k9_dense_tiles"
LARGER = 32  # blocks than those of rungs for small ones
PLACES = 132  # multiprocessors
BYTES, WORD = 16, 4  # from multiples of which on rows are aligned; and copied by words
L2, SECTOR = 32, 32  # megabytes that stay in it; bytes that it is read by
A_TILE, A_SQUARE = 64 * 128, 64 * 64  # values of a dense one
STRIPS = (128, 256, 384, 512)  # features of the result
K5_BESIDE = 3  # blocks of threads of a multiprocessor
# Of k6: blocks of a weight-gradient that it takes together, of 16 bits; and of few, which are as
# many for each multiprocessor, and up to SHORT rows of blocks of 64.
K6_ITEM = {32: 28, 64: 7, 128: 1.75}
K6_FEW, K6_ARE_FEW, SHORT = {32: 7, 64: 2.33, 128: 0.9}, {32: 8, 64: 4, 128: 1}, 224
# Of k8: warps of a multiprocessor; squares for each warp up to which words are loaded of small
# blocks, by bytes of a value; and units of each from which 16-bit weight-gradients have twice as
# many warps: of small blocks half as many, of all steps.
K8_WARPS, K8_BY_WORDS, K8_FEW = 8, {2: 16, 4: 8}, 8
# Its larger blocks where lanes load them, as before Hopper: with these, by bytes of a value, the
# choice between it and k5 misses by 5 % at 22 of 384 products of 2,048 features, else at 29 (H200).
BY_LANES = {2: 1.3, 4: 1.1}
# Of a layout made on a GPU any line may be the longest: k8, which cuts lines, takes little more
# where they are even, and where one was full, of 133 to 530 rows, 0.24 to 0.43 of the time (H200).
# Of more rows lines are shared out.
UNKNOWN, SHARED_ROWS = (1.2, 1.0), 1024
# Its weight-gradients by k6 read more, and do not begin an item before the last one ends: 15 drawn
# ones of up to 128 rows took 1.5 times as long as planned by the host, 1.3 to 2.2, 57 of more rows
# 1.3. By k8, whose plan is the same there, 1.0 to 1.1. Of 48 others, five in float32 took 1.1 to
# 1.8 times as long by k5, expected to be as fast as if no line were longer than another.
PLANNED_THERE, ROWS_THERE, K5_THERE = (1.4, 1.2), 128, 1.5


class Spread(NamedTuple):
    """How near each other the small blocks of a layout are; larger ones are not asked."""

    tiles: float = 1.0  # the part of dense tiles that have a block
    squares: float = 1.0  # the same of their halves
    uneven: tuple[float, ...] = (1.0,) * len(STRIPS)  # of strips, how many times the mean is in one
    units: int = 0  # of up to 32 features of one block row; 0: not known


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
    spread: Spread

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

    @property
    def apart(self) -> float:
        """Dense tiles that have a block, of those in a random layout: where blocks are together
        there are fewer."""
        return min(self.spread.tiles / self.met(A_TILE / self.size**2), 1.0)

    @property
    def short(self) -> float:
        """How much of a line of 128 bytes the rows of feature-major x leave."""
        return self.across * max(1.0 - self.rows * self.itemsize / 128, 0.0)

    def apart_in(self, columns: int) -> float:
        """The same of wider ones: of several squares."""
        met = 1.0 - (1.0 - self.spread.squares) ** (columns / 64)
        return min(met / self.met(64 * columns / self.size**2), 1.0)


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
    found = of_rungs(product, dtype, precision, of)
    if not any(layout.longest):
        there = UNKNOWN[batch > SHARED_ROWS] if of.lines else PLANNED_THERE[batch > ROWS_THERE]
        of_k5 = K5_THERE if of.size >= LARGER and not of.lines else 1.0
        for name, more in (("k6_hopper", there), ("k5_tensor_core", of_k5)):
            if name in found:
                found[name] *= more
    return found


def of_rungs(product: str, dtype: Any, precision: str, of: Sizes) -> dict[str, float]:
    """The same of sizes."""
    found, factors = {}, measured()
    for name in OF_RUNG:
        own = factors.get(case_of(name, product, of.size, dtype, precision))
        if own is not None:
            found[name] = of_few_rows(name, of) or sum(
                f * n for f, n in zip(own, counts(name, of), strict=True)
            )
    if of.size >= LARGER and "k8_small_batch" in found and not copy_engine():
        found["k8_small_batch"] *= BY_LANES[of.itemsize]
    return found


def of_few_rows(name: str, of: Sizes) -> float:
    """Microseconds where k6 swaps operands, by the model that cuts the batch there, so by none of
    these factors; 0 elsewhere, and where nobody knows the longest line."""
    if name != "k6_hopper" or not of.lines or not of.longest or of.across:
        return 0.0
    rung(name)  # which says what is missing where it cannot be loaded
    from numbsparse.kernels.matmul.k6_hopper import swapped

    if not swapped.suits(of.size, of.itemsize, of.rows, of.makes, PLACES):
        return 0.0
    across = of.size // swapped.SIDE
    steps = of.longest * across, of.n_blocks * across**2
    return float(swapped.in_parts(of.rows, of.makes // swapped.SIDE, *steps, PLACES)[0])


def in_random(
    product: str, size: int, dtype: Any, rows: int, reads: float, makes: int, n_blocks: int
) -> Sizes:
    """Sizes of a product of a random layout, of which the numbers are all that is known."""
    numbers = product != "weight_grad", size, 4 if str(dtype) == "float32" else 2, rows
    makes = max(makes, size)
    lines, room = makes / size, ceil(n_blocks * size**2 / makes)  # for so many blocks
    reads = max(round(reads), room, size)
    longest = min(ceil(longest_line(n_blocks / lines, lines)), ceil(reads / size))
    of = Sizes(*numbers, reads, makes, n_blocks, longest, False, Spread())
    if size >= LARGER:
        return of
    tiles, squares = (of.met(n / size**2) for n in (A_TILE, A_SQUARE))
    strips = [(n_blocks / ceil(makes / n), ceil(makes / n)) for n in STRIPS]
    uneven = tuple(longest_line(mean, n) / mean for mean, n in strips)
    return of._replace(spread=Spread(tiles, squares, uneven))


def longest_line(mean: float, lines: float) -> float:
    """Blocks of the longest one of so many lines, in a random layout."""
    return mean + sqrt(2 * mean * log(lines))


def sizes_of(
    product: str, block_size: int, dtype: Any, batch: int, layout: Layout, feature_major: bool
) -> Sizes:
    sides = [n * block_size for n in layout.shape]
    reads, makes = sides[::-1] if product == "input_grad" else sides
    numbers = block_size, 4 if str(dtype) == "float32" else 2, batch
    longest = layout.longest[product == "forward"]
    of_layout = reads, makes, layout.n_blocks, longest
    spread = spread_of(product, block_size, layout)
    across = feature_major and batch > 1  # of one row both orders are the same
    return Sizes(product != "weight_grad", *numbers, *of_layout, across, spread)


def spread_of(product: str, block_size: int, layout: Layout) -> Spread:
    """That of this layout, for lines of the result."""
    if block_size >= LARGER or not layout.n_blocks:
        return Spread()
    numbers = planned_numbers(layout.index, _spread, product == "input_grad", block_size)
    return Spread(*numbers)


def _spread(index: Index, transposed: bool, B: int) -> tuple[Any, ...]:
    """The numbers of a spread."""
    shape = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    density, how = index.block_rows.size / (shape[0] * shape[1]), (index, transposed)
    kept = [rung(DENSE).kept_of_tiles(*how, B, columns)[0] for columns in (128, 64)]
    plan = rung("k7_small_blocks").strip_plan
    uneven = tuple(plan.uneven(*how, max(features // B, 1))[0] for features in STRIPS)
    units = -(-np.diff(index.rows.indptr) // (LARGER // B))
    return *(float(min(density / part, 1.0)) for part in kept), uneven, int(units.sum())


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
    """What takes time: a launch, what a rung does, products of values in all, megabytes that are
    read and made, those that L2 has no room for, and what feature-major rows add, which begin
    inside sectors, or anywhere: copies, and values that are stored one by one."""
    used, made, whole = of.used(of.reads), of.makes, of.reads
    if not of.lines:
        used, made, whole = used + of.used(of.makes), 0, of.reads + of.makes
    a_feature, values = of.rows * of.itemsize / 1e6, of.n_blocks * of.size**2 / 1e6
    read, work = used * a_feature + values * of.itemsize, values * of.rows
    odd = of.across and of.rows * of.itemsize % BYTES > 0
    by_feature = of.across or (name == "k8_small_batch" and any(_k8_copied(of)))
    thin = by_feature and ceil(of.rows * of.itemsize / BYTES) % (SECTOR // BYTES) > 0
    copied = odd and not (name == "k8_small_batch" and _k8_in_place(of))
    stored = made * a_feature
    beyond = max(read + stored - L2, 0)
    sectors = thin * values / of.size * of.rows * of.itemsize, thin * stored
    of_odd = odd, copied, copied * whole * a_feature, odd * stored
    own = OF_RUNG[name][not of.lines](of)
    return [1.0, *own, work, log2(1 + work), read, stored, beyond, *sectors, *of_odd]


Counts = tuple[float, ...]


def _k5_lines(of: Sizes) -> Counts:
    """Tiles of strips, and their steps."""
    tiles = ceil(of.rows / (64 if of.rows <= 64 and of.itemsize == 2 else 128))
    tiles, steps = tiles * ceil(of.makes / min(of.size, 64)), of.per_line * of.size / 32
    rounds, longest = tiles / (K5_BESIDE * PLACES), ceil(of.longest * of.size / 32)
    chain = max(rounds, 1) * max(ceil(steps), 0.5)
    return ceil(rounds), max(longest, chain), rounds * steps


def _k5_blocks(of: Sizes) -> Counts:
    """Blocks, or 64 x 64 of each, in pieces of the batch where these are few."""
    side = min(of.size, 64)
    sums, steps = of.n_blocks * (of.size // side) ** 2, ceil(of.rows * side / 2048)
    pieces = rung("k5_tensor_core").of_blocks.pieces_of_equal(steps, sums, PLACES)
    rounds, each = sums * pieces / (K5_BESIDE * PLACES), ceil(steps / pieces)
    beside = K5_BESIDE * ceil(rounds) if rounds > 1 else ceil(K5_BESIDE * rounds)
    values = of.n_blocks * of.size**2 / 1e6
    return ceil(rounds), max(rounds, 1) * each, beside * each, log2(pieces), values


def _k6_lines(of: Sizes) -> Counts:
    """Tiles of lines, of which each multiprocessor has some; of 16 bits small ones apart."""
    plan, is_16_bit = rung("k6_hopper").plan, of.itemsize == 2
    tile = plan.line_tiles(of.size, of.rows, of.makes, of.itemsize, of.per_line)[0]
    small = is_16_bit and tile.ROWS == 64 and tile.COLUMNS == tile.SPLIT == 1
    tiles = ceil(of.rows / (tile.ROWS * tile.CLUSTER)) * tile.CLUSTER * tile.SPLIT
    tiles *= ceil(of.makes / (tile.COLUMNS * tile.N))
    inputs, kept = (1, 1) if small else (tile.INPUTS, tile.BLOCKS)  # of a step
    met, parts = of.reads / of.size * of.met(tile.COLUMNS) / inputs, tile.PARTS / tile.SPLIT
    steps = max(met, tile.COLUMNS * of.per_line / kept) * parts
    longest, turns = of.longest / inputs * parts, ceil(tiles / PLACES)
    chain = max(max(tiles / PLACES, 1) * steps, longest, 1)
    own = chain, chain * tile.ROWS, turns * tile.ROWS, max(longest - steps, 0)
    images = of.n_blocks * of.size**2 / 1e6 * (not is_16_bit)
    return *(small * part for part in own), *((not small) * part for part in own), images


def _k6_blocks(of: Sizes) -> Counts:
    """Items of several blocks, those of the last round in pieces of the batch."""
    values = of.n_blocks * of.size**2 / 1e6
    if of.itemsize == 4:
        return *_k6_float32(of), values
    few = of.n_blocks <= K6_ARE_FEW[of.size] * PLACES
    short = of.size == 64 and of.rows <= SHORT
    item = 4.67 if short else (K6_FEW if few else K6_ITEM)[of.size]
    depth = 32 if short or (of.size == 32 and not few) else 64
    items, steps = max(of.n_blocks / item, 1), ceil(of.rows / depth)
    whole, rest = divmod(items, PLACES)
    pieces = max(min(PLACES / max(rest, 1), steps / 2), 1)
    chain = (whole * steps + (rest > 0) * steps / pieces) * depth
    return chain, int(whole) + (rest > 0), steps * items / PLACES, log2(pieces), values


def _k6_float32(of: Sizes) -> Counts:
    """Items of products of 64 features of the longer side by 32 or 64 of the other one; or, where
    that ends first, a product each, maybe two of them on a multiprocessor."""
    k6, columns = rung("k6_hopper").weight_grad_plan, min(of.size, 64)
    lines = min(of.used(of.makes), of.used(of.reads)) / columns
    products = of.n_blocks * of.size**2 / (64 * columns) + (columns < 64) * lines / 4
    items = max(products / (6 if columns < 64 else 4), lines / (4 if columns < 64 else 3))
    ways = [(ceil(items), PLACES, k6.STEP_IN_US, items / products)]
    for many, step in enumerate(k6.STEP_OF_ONE, 1):
        if products <= len(k6.STEP_OF_ONE) * PLACES:
            ways.append((ceil(products), many * PLACES, step, 1.0))
    found = []
    for n, places, step, part in ways:
        (whole, rest), few, steps = divmod(n, places), 2 * n <= places, ceil(of.rows / 32)
        rate = (k6.SUMS_IN_US_OF_FEW if few else k6.SUMS_IN_US) * part / (64 * columns)
        least = k6.SHORTEST_OF_FEW if few else k6.SHORTEST
        for pieces in k6.PIECES_OF_FEW if few else k6.PIECES_OF_MANY:
            if pieces > max(steps // least, 1) or (few and pieces * rest > max(places, rest)):
                break
            turns, adding = ceil(rest * pieces / places), 1 + rest * pieces / rate
            chain, adding = (whole + turns / pieces) * steps * step, adding * (pieces > 1)
            time = chain + (whole + turns) * k6.TO_START + adding
            found.append((time, chain, whole + turns, adding))
    return min(found)[1:]


def _k7_lines(of: Sizes) -> Counts:
    """Strips, in groups of features; blocks of threads share the sum of one, if few."""
    plan, sizes = rung("k7_small_blocks").strip_plan, (of.rows, of.reads, of.makes)
    case = of.size, of.itemsize, of.n_blocks
    warps, parts, rows = plan.shared_out(sizes, *case, PLACES, True)
    high, blocks = rows / 64, of.n_blocks * 1024 / (of.reads * of.makes)  # of a warp in a group
    each = ceil(ceil(of.makes / (32 * warps)) * ceil(of.rows / rows) * parts / PLACES) / parts
    groups = each * of.reads / 32
    met = of.met(1024 / of.size**2 * warps) * of.apart_in(32 * warps)
    mean = groups * blocks  # of a warp; one of the longest strip, whose longest line may be longer
    uneven = of.spread.uneven[min(max(round(warps / 4), 1), len(STRIPS)) - 1]
    longest = max(of.reads / 32 / parts * blocks * uneven, of.longest / parts)
    adding, packed = warps * high * (parts > 1), plan.is_packed(sizes, *case)
    of_groups = groups * high, groups * met * high, groups * met, groups * met * of.short
    of_blocks = mean * warps * high, mean * warps, max(mean, longest) * high
    of_w = of.n_blocks * of.size**2 * of.itemsize / 1e6
    return *of_groups, *of_blocks, max(longest - mean, 0), adding, packed, of_w


def _k7_blocks(of: Sizes) -> Counts:
    """Regions as they are chosen, of which each multiprocessor has some, maybe with others of a
    cluster or in pieces. Slots of float32 that are left over take no time."""
    choice = rung("k7_small_blocks").region_plan
    arithmetic = "highest" if of.itemsize == 4 else "float16"
    ways = choice.ways_for(of.density, of.size, arithmetic, of.across)
    sizes = partial(regions_of, of)
    region, pieces = choice.fastest(lambda each: sizes(each)[0], of.size, of.rows, ways, PLACES)
    (n, height, groups), slots = sizes(region)
    whole, left = divmod(n * region.SPLIT, PLACES) if pieces == 1 else divmod(n, PLACES)
    turns = whole + ceil(left * pieces / PLACES)
    thousands = (whole + ceil(left * pieces / PLACES) / pieces) * of.rows / region.SPLIT / 1e3
    adding = pieces > 1, left * pieces * region.CODES * of.size / 1e6 * (pieces > 1)
    fetched = height + groups / n
    each = slots / n, region.CODES - slots / n, region.GROUPS, fetched, of.across * fetched
    values = of.n_blocks * of.size**2 / 1e6
    return *(thousands * part for part in each), turns, log2(region.SPLIT), *adding, values


def regions_of(of: Sizes, region: Any, taps: float = 1) -> tuple[tuple[int, int, int], float]:
    """What `region_plan.size_of` finds, of blocks that are random where there are any; slots.

    `taps` may see a group of x at once.
    """
    in_group, kept = region.FEATURES // of.size, min(of.density / of.apart, 1)
    down, across = of.reads / (region.FEATURES * taps), of.makes / region.FEATURES * of.apart
    found = []
    for height in range(1, min(region.GROUPS * 3 // 4, ceil(down)) + 1):
        side = min(height * in_group * taps, of.reads / of.size)  # blocks of a column
        odd = 0.25 * (1 - (1 - 2 * kept) ** side) if of.size == 8 and kept < 0.5 else 0.0
        slots = down / height * across * in_group * (side * kept * of.size / 16 + odd)
        met = down / height * across * (1 - (1 - kept) ** (in_group * side))  # groups of dy
        wide, panels = met / (region.GROUPS - height), down / height * min(1.5 * of.apart, 1)
        n = ceil(max(1.08 * slots / region.CODES, wide, panels, 1))
        groups = ceil(met + n / 2)
        cost = n * region.CODES * (of.size / 8 + 4.5) + (groups + n * height) * 32
        found.append((cost, (n, height, groups), min(slots, n * region.CODES)))
    return min(found)[1:]


def _k8_units(of: Sizes, features: int) -> tuple[float, int, float]:
    """Squares of 32 x 32 values; warps of a multiprocessor; and lines of 128 bytes of x that one
    reads for small blocks of so many features of lines."""
    if of.size >= LARGER:
        return of.n_blocks * (of.size // 32) ** 2, K8_WARPS, 0.0
    used = of.used(features) / of.size
    units = max(of.n_blocks * of.size / 32 + used * (0.5 - of.size / 64), used)
    lines = of.size * ceil(of.itemsize * of.rows / 128) if of.across else of.rows
    return units, K8_WARPS * 4 // of.itemsize, of.n_blocks * lines * of.apart / PLACES


def _k8_in_place(of: Sizes) -> bool:
    """Whether x, whose features begin anywhere, is not copied: a slab, boxes, or few blocks."""
    if of.size >= LARGER:
        return of.lines or of.rows <= 64
    few = of.n_blocks * ceil(of.rows / 32) <= K8_BY_WORDS[of.itemsize] * K8_WARPS * PLACES
    return of.rows <= 16 or (few and (of.lines or of.itemsize == 4))


def _k8_copied(of: Sizes) -> list[bool]:
    """Whether lanes read small blocks of x, and of dy, in a feature-major copy."""
    pays, small = rung("k8_small_batch").launch.copy_pays, of.size * of.itemsize <= SECTOR
    small = small and not of.across and (of.itemsize == 2 or (of.lines and of.rows > 16))
    sides, how = (of.reads,) if of.lines else (of.reads, of.makes), (of.n_blocks, of.size)
    return [small and pays(of.rows, n, *how, of.itemsize, of.lines) for n in sides]


def _k8_lines(of: Sizes) -> Counts:
    """Tiles of the batch, and shares of the units; a line too long for a share is cut. Of a line
    that several warps have the first one adds up what the others leave."""
    k8, whole, size = rung("k8_small_batch").launch, of.itemsize == 4, of.size
    (copied,), wide = _k8_copied(of), min(size, 32)
    across = of.across or copied
    units, warps, of_x = _k8_units(of._replace(across=across), of.makes)
    form, squares = k8.Form("float32" if whole else "float16", whole), of.n_blocks * size**2 // 1024
    longest = ceil(of.longest * size / 32)
    rows = k8.tile_rows(of.rows, ceil(of.makes / wide), squares, size, form, across, longest)
    tiles, lines = ceil(of.rows / rows), of.used(of.makes) / wide
    unit, a_tile = k8.unit_of(form, size, rows), rows
    if size >= LARGER and not whole and not of.across:
        rows = ceil(of.rows / tiles)  # as many in each
    shares = max(PLACES // tiles, 1)
    more = min(-lines / shares % 1, 0.5) * units / lines
    each, others, parts = longest_run(units, longest, shares, warps, unit, more)
    chain, adding = each * ceil(tiles * shares / PLACES), (parts > 1, log2(parts), others * rows)
    by_value, late = of.across and of.rows * of.itemsize % WORD > 0, 1.0 if of.rows > 32 else 0.125
    a_share = ceil(tiles * shares / PLACES) / shares * of.itemsize
    read, written = a_share * units * (rows + 32), a_share * of.makes * rows * PLACES / 1e6
    of_bytes = read, written, *adding, of_x, by_value * chain, copied * late
    return chain, chain * a_tile, *of_bytes


def _k8_blocks(of: Sizes) -> Counts:
    """Steps of 32 rows, or two of these at once; several warps share those of a unit, if few. Small
    ones of 16 bits read a copy of an operand, if that pays; of dy 32 features at once."""
    k8, item, size = rung("k8_small_batch"), of.itemsize, of.size
    units, small = of.spread.units or _k8_units(of, of.reads)[0], size < LARGER
    at_once = 2 if not small and 32 < of.rows <= 64 and item == 2 else 1
    steps = ceil(of.rows / (32 * at_once))
    split, cuts = k8.blocks.split_of(steps, ceil(units), K8_WARPS * PLACES)
    each = K8_FEW if not small else K8_FEW / 2 / steps if split == 1 else inf
    warps = K8_WARPS * (2 if item == 2 and units >= each * K8_WARPS * PLACES else 1)
    chain = ceil(units * split * cuts / (PLACES * warps)) * ceil(steps / (split * cuts)) * at_once
    copied, lines, near = 0.0, 0.0, max(of.apart, size / 32)
    sides = (of.reads, units, 1.0), (of.makes, of.n_blocks, near)
    for copies, (features, n, part) in zip(_k8_copied(of), sides, strict=True):
        copied += copies * features * of.rows * item / 1e6
        across = of.across or copies
        lines += small * n * (size * ceil(item * of.rows / 128) if across else of.rows * part)
    adding = split > 1, split - 1, cuts > 1
    busiest = ceil(units * cuts / PLACES) / cuts / units  # of the units, what a multiprocessor has
    read = units * steps * at_once * item
    return chain, *adding, read, lines * busiest, of.across * chain, copied > 0, copied


def _k9_lines(of: Sizes) -> Counts:
    """Tiles that take least time; two or four blocks of threads may share the sum of one."""
    plan, full = rung(DENSE).plan, of.reads / 64
    high, parts, columns = plan.shape_of(of.rows, of.makes, full, PLACES)
    tiles = ceil(of.makes / columns) * ceil(of.rows / (64 * high)) * parts / PLACES
    rounds, met = ceil(tiles), of.spread.tiles if columns > 64 else of.spread.squares
    steps = max(full * met, 1)
    each, time = rounds / parts, plan.OF_STEP[columns][high - 1] + plan.OF_ROWS[columns] * high
    late = max(min(of.longest * of.size / 64, full) - steps, 0) / parts * time
    chain, of_blocks = each * steps * time, each * of.per_line * of.size / 64
    adding = high * log2(parts), min(tiles, 1)
    return chain, late, chain * of.short, rounds, *adding, of_blocks, each * full, of.across


OF_RUNG: dict[str, tuple[Callable[[Sizes], Counts], ...]] = {
    "k5_tensor_core": (_k5_lines, _k5_blocks),
    "k6_hopper": (_k6_lines, _k6_blocks),
    "k7_small_blocks": (_k7_lines, _k7_blocks),
    "k8_small_batch": (_k8_lines, _k8_blocks),
    DENSE: (_k9_lines,),
}
"""What a rung does, for results of rows and of blocks."""
