"""How long each rung is expected to take on an H200: the basis of `chosen`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size. A rung is asked how it would cut the outputs, and what its
busiest multiprocessor does follows from that; of the layout only the number of blocks is known, so
it is taken as random. What rung 2 unfolds is a product of the ladder: it takes what `kernels.times`
says, and what is copied. What older cards take, k3, k5, and rung 2 by the ladder's k5, goes by what
tiles of 64 x 64 do: of 32 products the faster one of k3 and the last took 1.024 times as long so,
always the last 1.16 times (H200).

FILE has the factors, fitted by `bench.times` to 1,220 times of 480 products that were drawn, and
150 of `k6_strips` with and without boxes; those for older cards are older. At 112 products of a
seed that had no part in it the choice took 1.008 times as long as the fastest rung on average, over
1.05 times at 6; before rungs were asked 1.033, and 13. What counts is the order of the rungs.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from math import ceil, exp, inf, prod
from pathlib import Path
from typing import Any, NamedTuple

from numbsparse.kernels import matmul, times
from numbsparse.kernels.conv.window import Pass, Window
from numbsparse.kernels.times import longest_line

FILE = Path(__file__).with_name("costs.json")
UNFOLDED = "k2_unfolded"
MULTIPLIERS = ("k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch")
OLDER = "k5_tensor_core"  # which older cards take
LARGEST = 64  # block that was measured: larger ones are taken as several
TILE, PLACES = 64, 132  # outputs, and features; multiprocessors
LEAST = 1024  # outputs of a part of a sum
IN_CACHE = 1 << 25  # bytes of what is unfolded at once
of_rungs = lru_cache(1024)(times.of_rungs)  # who multiplies, and how long that takes, both ask
MOST_OUTPUTS = {"k8_small_batch": 4096}  # for which it was measured: it takes them 64 at a time


@cache
def measured() -> dict[str, list[float]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["factors"]


class Sizes(NamedTuple):
    """Of a convolution, what its time depends on."""

    product: str
    size: int  # of blocks
    itemsize: int
    batch: int
    window: Window
    in_features: int
    out_features: int
    n_blocks: int

    @property
    def lines(self) -> bool:
        return self.product != "weight_grad"

    @property
    def reads(self) -> int:
        """Features of a pixel that is seen."""
        return self.out_features if self.product == "input_grad" else self.in_features

    @property
    def makes(self) -> int:
        return self.in_features if self.product == "input_grad" else self.out_features

    @property
    def seeing(self) -> Pass:
        """Without the taps that see no pixel, unless none does."""
        seeing = self.window.seeing(self.product) if self.lines else self.whole
        return seeing if seeing.taps else self.whole

    @property
    def whole(self) -> Pass:
        return self.window.whole(self.product)

    @property
    def unfolded(self) -> tuple[int, int, int, int]:
        """The rows of what is unfolded, its features and those of the result, and blocks."""
        whole = self.whole
        features = self.reads * len(whole.seen[0]), self.makes * len(whole.reached[0])
        return self.batch * prod(whole.view.counts), *features, self.n_blocks

    @property
    def outputs(self) -> int:
        return self.batch * prod(self.seeing.view.counts)

    @property
    def values(self) -> int:
        return self.n_blocks * self.size**2

    @property
    def density(self) -> float:
        return min(self.values / (self.reads * self.makes * self.window.taps), 1.0)

    def met(self, blocks: float) -> float:
        """The part of places for so many blocks that have any."""
        return 1.0 - (1.0 - self.density) ** max(blocks, 1.0)

    def megabytes(self, values: float) -> float:
        return self.itemsize * values / 1e6


def sizes_of(
    product: str,
    block_size: int,
    dtype: Any,
    batch: int,
    window: Window,
    in_features: int,
    out_features: int,
    n_blocks: int,
) -> Sizes:
    """Where there is no image, or no block, those of one."""
    itemsize, numbers = 4 if str(dtype) == "float32" else 2, (in_features, out_features)
    return Sizes(product, block_size, itemsize, max(batch, 1), window, *numbers, max(n_blocks, 1))


def microseconds(
    rung: str, product: str, block_size: int, dtype: Any, precision: str, *sizes: Any
) -> float:
    """Of a convolution of these `Sizes`, from the batch on; inf where none was timed.

    rung : of k2 with a slash and the rung that multiplies
    """
    factors = measured().get(case_of(rung, product, block_size, dtype, precision))
    if factors is None:
        return inf
    found = counts(rung, product, block_size, dtype, precision, *sizes)
    return sum(factor * count for factor, count in zip(factors, found, strict=True))


def case_of(rung: str, product: str, block_size: int, dtype: Any, precision: str) -> str:
    """What shares factors."""
    kind = "weight_grad" if product == "weight_grad" else "lines"
    numbers = f"float32 {precision}" if str(dtype) == "float32" else "float16"  # as bfloat16
    name = rung if rung.endswith(OLDER) else rung.partition("/")[0]
    return f"{name} {kind} {numbers} {min(block_size, LARGEST)}"


def counts(
    rung: str, product: str, block_size: int, dtype: Any, precision: str, *sizes: Any
) -> Sequence[float]:
    """What takes time: a launch, and what a rung does."""
    name, _, by = rung.partition("/")
    of = sizes_of(product, block_size, dtype, *sizes)
    if name == UNFOLDED and by != OLDER:
        return 1.0, *_unfolded(of, by, dtype, precision)
    if name in OF_RUNG:
        return 1.0, *OF_RUNG[name][not of.lines](of)
    return _tiles(of, by == OLDER)


Counts = tuple[float, ...]


def _unfolded(of: Sizes, by: str, dtype: Any, precision: str) -> Counts:
    """What the ladder's rung takes; what is written for it, and of squares of pixels read again."""
    view, (offsets, _) = of.whole.view, of.whole.seen
    outputs, seen, made, _ = of.unfolded
    takes, each = 0.0, outputs
    if of.lines:  # in parts that stay in the L2 cache
        row = of.itemsize * used(seen, of.size, of.n_blocks)
        each = max(IN_CACHE // max(int(row * TILE), 1), 1) * TILE
    for rows, parts in ((each, outputs // each), (outputs % each, 1)):
        product = _product(of.product, of.size, dtype, rows, seen, made, of.n_blocks)
        if rows and parts:
            takes += parts * of_rungs(of.product, dtype, precision, product).get(by, inf)
    as_it_is = of.lines and not any(map(any, offsets)) and view.counts == view.sizes
    written = 0.0 if as_it_is else of.megabytes(outputs * used(seen, of.size, of.n_blocks))
    squares = of.batch * prod(view.out_sizes) * of.makes + outputs * made
    copied = of.megabytes(squares) if prod(view.residues) > 1 else 0.0
    return takes, not as_it_is, written, copied > 0, copied


def used(seen: int, size: int, n_blocks: int) -> float:
    """Of these features those that a block of w multiplies: the others are left out."""
    return seen * (1 - exp(-n_blocks * size / max(seen, 1)))


def _product(
    product: str, size: int, dtype: Any, outputs: int, seen: int, made: int, n_blocks: int
) -> times.Sizes:
    reads = used(seen, size, max(n_blocks, 1))
    return times.in_random(product, size, dtype, outputs, reads, made, max(n_blocks, 1))


def _tiles(of: Sizes, unfolds: bool) -> Counts:
    """Of rungs for older cards launches; products; terms; bytes of what all taps see, and of the
    result; terms of the busiest multiprocessor."""
    outputs, seen, features, n_blocks = of.unfolded
    size, residues = min(of.size, LARGEST), prod(of.whole.view.residues)
    blocks, products = of.values / size**2, outputs * of.values / 1e9
    square = of.makes * residues if residues > 1 else 0
    copies = unfolds and square > 0
    read = used(seen, of.size, n_blocks) if unfolds else seen
    written = features + square if copies else max(features, square)
    if of.lines:
        n_lines, tiles = max(features / size, 1), ceil(outputs / TILE) * ceil(features / TILE)
        longest = min(longest_line(blocks / n_lines, n_lines), max(seen / size, 1))
        terms, most = of.values / max(features, 1), ceil(tiles / PLACES) * longest * size
    else:
        parts = min(max(PLACES / max(blocks, 1), 1), max(outputs / LEAST, 1))
        terms, most = outputs, ceil(blocks * parts / PLACES) * outputs / parts
    megabytes = of.megabytes(outputs * read), of.megabytes(outputs * written + of.values)
    return 1 + copies / 2, products, terms / 1e3, *megabytes, most / 1e3


def _k4_lines(of: Sizes) -> Counts:
    """Of a multiprocessor's lines taps, boxes, rows and pixels of these; boxes at a stride."""
    k4, view = _rung("k4_wgmma").lines, of.seeing.view
    size, is_16_bit = min(of.size, max(k4.SHAPES[of.itemsize])), of.itemsize == 2
    residues, of_tap = prod(view.residues), of.seeing.residues
    lines, others = ceil(of.makes / size), of.reads / size
    shape = k4.shape_for(of.seeing, of.batch, of.itemsize, size, lines)
    how, chunks = k4.cut_for(of.seeing, of.batch, shape, size, of.itemsize, is_16_bit)
    places, items = shape.RESIDENT * PLACES, prod(how.tiles) * lines * residues
    taps = of.values / size**2 / (lines * residues)  # of a line
    shared = (Counter(of_tap[tap] for tap in chunk.taps) for chunk in chunks)
    boxes = others / residues * sum(of.met(n) for each in shared for n in each.values())
    most = others * max(Counter(of_tap).values(), default=1)  # of the residue with most taps
    longest = min(longest_line(most * of.density, lines), max(most, 1))
    each, rounds, high = max(items / places, 1.0), ceil(items / places), shape.ROWS / TILE
    chain = max(each * taps, longest) / 100
    loads = each * boxes / 100
    strided = loads if max(view.scale) > 1 else 0.0
    wide, stored = size / 32, of.megabytes(of.outputs * of.makes * residues)
    pixels, work = how.rows / TILE * wide, prod(how.tiles) * high * of.values / 1e6
    of_boxes = loads, loads * pixels, strided
    return chain, chain * high * wide**2, *of_boxes, rounds, rounds * high * wide, stored, work


def _k4_blocks(of: Sizes) -> Counts:
    """Of a multiprocessor's items tiles, and units of these; items; pieces that are added."""
    k4 = _rung("k4_wgmma").gradient
    size = k4.part_of(of.size, of.itemsize)
    shape, panels = k4.SHAPES[of.itemsize][size], TILE // size if of.itemsize == 2 else 1
    how, chunks = k4.cut_for(of.seeing, of.batch, shape, size, of.itemsize, True)
    pairs, items, units = of.reads * of.makes / size**2, 0.0, 0.0
    for chunk in chunks:
        kept = pairs * of.met(len(chunk.taps))
        taps = pairs * len(chunk.taps) * of.density / max(kept, 1e-9)
        own = max(taps / (1 + 0.7 * (panels - 1) * of.density), 1.0)
        items, units = items + kept * max(own / shape.MOST_UNITS, 1.0), units + kept * own
    items, tiles = max(items, 1.0), prod(how.tiles)
    pieces = k4.pieces_of(ceil(items), tiles, PLACES, of.values)
    rounds = ceil(ceil(items) * pieces / PLACES)
    chain, values = rounds * ceil(tiles / pieces) / 10, of.values / 1e6
    strided = chain if max(of.seeing.view.scale) > 1 else 0.0
    cut = float(pieces > 1)
    return chain, chain * units / items, strided, rounds, cut, cut * pieces * values, values


def _k6_lines(of: Sizes) -> Counts:
    """Of a multiprocessor's strips groups of features and blocks, and of a warp; sums that clusters
    add; what is stored and loaded."""
    k6, seen = _rung("k6_strips"), max(len(of.seeing.seen[0]), 1)
    columns = of.makes * prod(of.seeing.view.residues)
    tile, boxes = k6.tile_and_boxes(of.seeing, of.batch, of.size, columns, True)
    tiles, room, chunks = _tiles_of(of, tile), TILE, seen
    if boxes:
        room, chunks = _room(tile, boxes.box), len(boxes.chunks)
    sizes = tiles * k6.ROWS, max(chunks * of.reads * room // TILE, 1), columns
    model = k6.COSTS[of.size] if of.itemsize == 2 else None
    how = of.size, of.itemsize, of.n_blocks, PLACES, False, model
    warps, split, _ = k6.shared_out(sizes, *how)
    strips = ceil(columns / (warps * 32))
    rounds = ceil(strips * tiles * split / PLACES)
    wide = 64 if boxes and of.itemsize == 2 and of.reads % 64 == 0 else 32
    density = min(of.values / (of.reads * seen * columns), 1.0)
    group = warps * 32 * wide / of.size**2 * seen / chunks  # places for blocks that strips need
    groups = chunks * of.reads / 32 * (1 - (1 - density) ** max(group, 1))
    each, blocks, wider = rounds / split / 100, of.n_blocks / strips, warps / 8
    of_blocks = each * blocks, each * blocks / warps * 10, each * groups * wider
    stored = of.megabytes(of.outputs * columns)
    loaded = of.megabytes(tiles * groups * 32 * room * strips) / 10
    return each * groups * room / TILE, *of_blocks, (split > 1) * wider, stored, loaded, rounds


def _k6_blocks(of: Sizes) -> Counts:
    """What the plan of regions expects; slots of all and groups that they load; whether pieces are
    added."""
    k6, seen = _rung("k6_strips"), len(of.seeing.seen[0])
    plan, (tile, boxes) = k6.region_plan, k6.boxes_of_weight_grad(of)
    numbers = "float16" if of.itemsize == 2 else "float32"
    unfolded = of.outputs, of.reads * seen, of.makes, of.n_blocks
    product = times.in_random(of.product, of.size, numbers, *unfolded)
    rows, taps, ways = of.outputs, 1.0, ()
    if boxes:
        rows, taps = k6.STAGE_ROWS * _tiles_of(of, tile), seen / len(boxes.chunks)
        groups = ceil(of.reads / 64) * len(boxes.chunks), ceil(of.makes / 64)
        lines, a_slot = of.makes / of.size, 16 / of.size
        most = longest_line(64 / of.size * taps * of.density, lines * groups[0])
        slots = ceil(of.n_blocks / a_slot), ceil(most / a_slot)
        ways = k6.ways_in_boxes(of.size, _room(tile, boxes.box), boxes.shifts, groups, *slots)
    arithmetic = numbers if of.itemsize == 2 else "high"
    ways = ways or plan.ways_for(of.density, of.size, arithmetic, False, True)
    regions = cache(lambda region: times.regions_of(product, region, taps))
    how = of.size, rows, ways, PLACES
    takes, region, pieces = plan.soonest(lambda each: regions(each)[0], *how)
    (n, height, of_dy), filled = regions(region)
    each = rows / 1e3 / PLACES
    loads = each * (height * n + of_dy)
    return takes, each * filled, loads, float(pieces > 1), of.values / 1e6


def _tiles_of(of: Sizes, tile: Sequence[int]) -> int:
    """How many there are of all outputs."""
    counted = of.batch, *of.seeing.view.counts
    return prod(ceil(n / side) for n, side in zip(counted, tile, strict=True))


def _room(tile: Sequence[int], box: Sequence[int]) -> int:
    """Lines of a box that taps share."""
    return ceil(tile[0] * prod(box) / 8) * 8


OF_RUNG: dict[str, tuple[Callable[[Sizes], Counts], ...]] = {
    "k4_wgmma": (_k4_lines, _k4_blocks),
    "k6_strips": (_k6_lines, _k6_blocks),
}
"""What a rung does, for results of pixels and of blocks; others go by `_tiles`."""


def _rung(name: str) -> Any:
    return import_module(f"numbsparse.kernels.conv.{name}")


def unfolded_by(
    product: str, block_size: int, dtype: Any, precision: str, *sizes: Any
) -> list[str]:
    """The rungs of `matmul` that rung 2 may have multiply such `Sizes`, the fastest first."""
    of = sizes_of(product, block_size, dtype, *sizes)
    return multipliers(product, block_size, dtype, precision, *of.unfolded)


@lru_cache(1024)
def multipliers(
    product: str, block_size: int, dtype: Any, precision: str, outputs: int, *sizes: int
) -> list[str]:
    """The same of so many outputs, features that are seen and made, and blocks."""
    case = product, block_size, dtype, "cuda", outputs, precision  # on this card
    of = _product(product, block_size, dtype, max(outputs, 1), *sizes)
    takes = of_rungs(product, dtype, precision, of)
    names = [
        name
        for name in MULTIPLIERS
        if outputs <= MOST_OUTPUTS.get(name, outputs)
        and name in takes
        and matmul.rung(name).unsupported(*case) is None
    ]
    return sorted(names, key=takes.__getitem__)
