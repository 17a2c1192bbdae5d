"""Launches: how the operands of a product are reached, and what its kernel is made for."""

from typing import Any

from numbsparse.device import SIMULATED, DeviceArray, multiprocessors
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import copy_engine, shared_memory
from numbsparse.kernels.matmul.k8_small_batch.lines import Lines, line_kernel
from numbsparse.kernels.matmul.k8_small_batch.plan import plan_lines
from numbsparse.kernels.parts.aligned import (
    BYTES,
    LINE,
    WORD,
    aligned_in_place,
    is_aligned,
    is_gapless,
    transposed_copy,
)
from numbsparse.kernels.parts.deal import even_rows
from numbsparse.kernels.parts.gates import listed_bytes, shift_of
from numbsparse.kernels.parts.plans import fresh_each_time, planned
from numbsparse.kernels.parts.repair import dense_of
from numbsparse.kernels.parts.requests import Reach, squares_of
from numbsparse.kernels.parts.ring import Source
from numbsparse.kernels.parts.shares import ends_sooner, longest_line
from numbsparse.kernels.parts.skewed import BOXES, PIECES, boxes_of
from numbsparse.kernels.parts.store import FEATURES
from numbsparse.kernels.parts.store_lines import SECOND_ROWS, Sums, order_of_sums, output_of
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.views import view_of
from numbsparse.layout import Index

SHARED_BYTES = 225 * 1024  # of a block, without the barriers'
BARRIERS = 2 * 1024  # bytes
WARPS = 2 if SIMULATED else 8
FEW = 8  # units of a warp: from so many on twice as many warps pay in a weight-gradient
BOXED = 6  # units of a warp up to which input-gradients of split float32 load boxes: see `skewed`
# Units of a warp: the first ones of all warps precede any other. Requested at once these took 1.05
# to 1.11 times as long (12,288 features, B = 32, batch 32, 1 and 2 % of the blocks, float32, H200).
SHORT = 3
MOST = 4  # stages that lanes fill: pieces of 16 bytes are longer on their way
MANY = 1 if SIMULATED else 6  # lines of all tiles of 32 rows, for each multiprocessor
MUCH = 9  # squares of w, times tiles of 32 rows, for each warp
MOST_BY_WORDS = {2: 16, 4: 8}  # blocks of w, times tiles, for a warp; by bytes of a value
# Units of a warp from which what gates leave is listed. Of 4 to 7 units all gates one took an H200
# 1.10 to 1.35 times as long as none so, 0.99 to 1.09 without a list, half of them zero 0.91 to 1.11
# and 0.94 to 1.08; of 11 or more 1.06 to 1.30 and 1.08 to 1.26, half 0.62 to 0.98 and 0.91 to 1.21.
LISTED_FROM = 8
MOST_LISTED = 48 * 1024  # bytes of a list: of more units none is made
NEAR = 2**31  # items whose places fit 32 bits
LONG_LINES = 8  # units of a line of y: else to store rows that are second takes what they gain
# Tiles of 32 rows, in float32 and blocks of 8, from which on pairs of them are one of 64 where
# rings are short, and lines long: 26 drawn products of 126 to 1,643 rows took 0.94 of the time of
# pairs from MANY on, and one row more than 128 to 384 up to 1.3 times as long, not 1.4 (H200).
LONG_BATCH = 32
ALONG = 3  # steps of all units, for each warp, up to which weight-gradients copy by pieces
SECTOR = 32  # bytes that memory is read by
READ = 800  # lines of 128 bytes that a multiprocessor reads while x is copied


def has_engine() -> bool:
    """Whether the card has a copy engine, and shared memory for a long ring for each warp."""
    return copy_engine() and (shared_memory() or SHARED_BYTES) >= SHARED_BYTES


def serves(x: DeviceArray, values: DeviceArray) -> bool:
    """Whether the copy engine can load whole tiles of w, and of x."""
    size = values.shape[1]
    whole = size >= WIDTH and x.shape[1] % size == 0 and values.size > 0
    return whole and begins_of(x, size) == BYTES and skewed(x, size) != PIECES and has_engine()


def in_reach(
    size: int, n_blocks: int, *operands: DeviceArray, sparing: bool = False
) -> list[DeviceArray]:
    """Each, or a copy unless it or its transpose is aligned, or a slab of all rows is read at once,
    or it is read from 16 bytes on or by words.

    Two are copied by one launch. If it is `sparing`, boxes are for few units of a warp.
    """
    n_blocks *= max(2 * (size // WIDTH) ** 2, 1)  # of 16
    kept = [is_kept(x, size, n_blocks, len(operands), sparing) for x in operands]
    others = [x for x, there in zip(operands, kept, strict=True) if not there]
    found = iter(aligned_in_place(*others))
    return [x if there else next(found) for x, there in zip(operands, kept, strict=True)]


def is_kept(x: DeviceArray, size: int, n_blocks: int, operands: int, sparing: bool) -> bool:
    """Whether a copy takes longer than to read x where it is.

    n_blocks : of 16. Of few of them words of float32 took 0.64 to 1.02 of the time, 0.89 at the
    median, and of 16 bits 0.74 to 0.98, 0.84 (17 to 129 rows, H200); weight-gradients of 16 bits or
    of many rows up to three times as long. `skewed` tells of the rest.
    """
    if slab_of(x, size):
        return True
    by, begins, tiles = skewed(x, size), begins_of(x, size), -(-x.shape[0] // WIDTH)
    if operands > 1 and pieces_of(x, size):
        return n_blocks * tiles * size <= ALONG * WIDTH * WARPS * n_shares()
    if by == BOXES:
        few = n_blocks // 2 * tiles <= BOXED * WARPS * n_shares()
        return operands == 1 and (few or not sparing)
    if (by == "" and begins == BYTES) or (x.itemsize == 2 and operands > 1):
        return False
    each = max(n_blocks * tiles / (WARPS * n_shares()), (operands - 1) * tiles)
    return each <= MOST_BY_WORDS[x.itemsize]


def begins_of(x: DeviceArray, size: int) -> int:
    """Bytes of which multiples the features of x begin at: 4, where lanes copy them by words; else
    16, as all other lines do.
    """
    if not is_apart(x, size) or x.address % WORD or x.strides[1] % WORD or skewed(x, size):
        return BYTES
    if size >= WIDTH and x.itemsize == 4 and has_engine():
        return BYTES
    return WORD


def is_apart(x: DeviceArray, size: int) -> bool:
    """Whether features of x are contiguous, but begin anywhere, and are no slab."""
    there = x.batch_is_contiguous and x.strides[1] > 0
    return there and not (is_aligned(x) or is_aligned(x.T) or slab_of(x, size))


def skewed(x: DeviceArray, size: int) -> str:
    """By what a product loads x whose features begin anywhere, see `parts.skewed`; "" elsewhere.

    By the copy engine it took 0.65 to 1.05 of the time that it takes with a copy (65 to 1,025 rows,
    H200), but 1.09 and 1.12 in input-gradients of float32 in two parts of 7 and 12 units of a warp,
    of 5 units 0.93. By lanes 0.62 to 0.80 in blocks of 8 and 16 where a warp has few, and up to 2.2
    times as long where it has many; 17 to 31 rows 0.73 to 1.13 of the time by words, which lanes
    straightened; of float32 1.08 times as long as by words. Of weight-gradients: `pieces_of`.
    """
    if not is_apart(x, size) or x.address % BYTES:
        return ""
    if size >= WIDTH and has_engine() and x.shape[1] % size == 0:
        return BOXES
    return PIECES if x.strides[1] % WORD else ""  # then words begin inside others


def pieces_of(x: DeviceArray, size: int) -> str:
    """PIECES where lanes copy x of a weight-gradient so, if it is kept; "" elsewhere.

    Of up to three steps of a warp it took 0.62 to 0.94 of the time with copies, of four 1.17, of 16
    twice as long (17 to 329 rows, H200); in blocks of 32 and more, which are copied, 0.76 to 1.26.
    """
    small = x.itemsize == 2 and size < WIDTH
    return PIECES if small and x.address % BYTES == 0 and is_apart(x, size) else ""


def slab_of(x: DeviceArray, size: int, along: bool = False) -> int:
    """Rows, in eights, that there is room for where the features of a block are read as one piece
    of memory, a slab; 0 where they are not.

    On an H200 5 and 9 rows took 0.3 to 1.04 of the time with slabs, and 31 to 63 rows by the copy
    engine 0.5 to 1.15, 0.8 at the median; by lanes up to twice as long. Short aligned features are
    slabs, too: boxes of lines that begin inside the sectors that memory is read by took longer than
    those of more rows, 1.0 to 2.1 times of 40 and 56 rows of 16 bits. Lanes take 0.66 to 0.93 of
    the time so, but for tiles of weight-gradients.

    along : whether rows are terms of a sum, as in weight-gradients
    """
    rows, whole = x.shape[0], size >= WIDTH and x.shape[1] % size == 0 and has_engine()
    nbytes, aligned = rows * x.itemsize, is_aligned(x.T)
    most = 2 * WIDTH if whole else 24 if aligned and x.itemsize == 2 else 16
    if rows == 1 or rows > most or not is_gapless(x):
        return 0
    short = nbytes <= SECTOR or (nbytes < LINE and nbytes % SECTOR > 0)
    if x.itemsize == 4 and not along:  # which has tiles of 16 rows
        short = nbytes <= 64
    if aligned and (not short or (along and not whole)):
        return 0
    return 2 if rows <= 16 else 4 if rows <= WIDTH else 8


def is_even(x: DeviceArray, slab: int) -> bool:
    """Whether it is a slab of aligned features, which lanes read as fast as a tile."""
    return slab > 0 and is_aligned(x.T)


def by_feature(x: DeviceArray, n_blocks: int, size: int, alone: bool = True) -> DeviceArray:
    """x, or an aligned feature-major copy, where lanes then read many fewer lines of 128 bytes.

    Of a small block 16 bytes are in a line of each row, but a whole line of each feature. Of 16
    features, or 8 of float32, it is 32 bytes, which memory is read by. When the copy pays was
    fitted to 60 products (H200): for more than 32 rows, or for one of two operands, later. Without
    it products of 32 to 64 rows in blocks of 8 took 1.3 to 3.0 times as long. Float32 has tiles of
    16 rows too, of which no copy is made, and none for one of two.
    """
    (rows, features), item = x.shape, x.itemsize
    if size * item > 32 or x.batch_is_contiguous or (item == 4 and (rows <= 16 or not alone)):
        return x
    pays = copy_pays(rows, features, n_blocks, size, item, alone)
    return transposed_copy(x) if pays else x


def copy_pays(
    rows: int, features: int, n_blocks: int, size: int, item: int, alone: bool = True
) -> bool:
    """Whether lanes then read so many fewer lines: see `by_feature`."""
    few = size * item == 16  # bytes of a small block
    lines = n_blocks * (rows - size * -(-item * rows // 128)) * (1 if few else 0.7)
    later = 4 if not alone else 1 if rows <= WIDTH else 1.5 if few else 2
    return lines > READ * n_shares() * later + 0.2 * rows * features


def along_lines(
    index: Index, x, values, y, transposed: bool, form: Form, gates: Any = (), *, first: bool
) -> None:
    """y = x @ w; tiles of the batch have shares of the multiprocessors in parallel.

    gates : a number for each block, (n,) float32
    first : as in `start`
    """
    source, gated = source_of(serves(x, values), values.shape[1], x), isinstance(gates, DeviceArray)
    made = index.made is not None  # then any line may be the longest
    longest = NEAR if made else planned(index, longest_line, transposed, values.shape[1], WIDTH)[0]
    lines = _lines(x, values, y, transposed, form, source, gated, longest)
    tiles, warps = -(-x.shape[0] // lines.rows), lines.warps
    shares = max(n_shares() // tiles, 1)
    slots = tiles * shares * (warps - 1) if lines.far else 0
    size, engine = values.shape[1], lines.source.engine
    of = shares, warps, lines.piece, slots, tiles, unit_of(form, size, lines.rows)
    work = planned(index, plan_lines, transposed, size, *of)
    more = listed_bytes(WIDTH // lines.depth, warps, work[1])
    lists = gated and work[1] >= LISTED_FROM and more <= MOST_LISTED
    listing = with_stages(lines._replace(source=source), lines.source.stages, more * lists)
    lists, lines = (lists, listing) if listing.warps == warps else (False, lines)
    units = values.size // (WIDTH**2 * shares * warps) if index.made is not None else work[1]
    patient = engine and lines.source.stages == 2 and units <= SHORT
    sums = lines.sums._replace(w=lines.sums.w._replace(listed=lists))
    lines = lines._replace(sums=sums, patient=patient)
    x_across = not is_aligned(x)
    rows = rows_of_a_tile(lines, x.shape[0], tiles)
    maps = work[0]
    if engine:
        x_box, w_tiles = (WIDTH if x_across else rows, WIDTH), squares_of(values)
        x_tiles = x.T if x_across else x, x_box
        if lines.sums.x.skewed:
            x_tiles = boxes_of(x, lines.rows)
        maps = tensor_maps(w_tiles if slab_of(x, size) else x_tiles, w_tiles)
    before = x.span, view_of(x), values.reshape(1, -1).span, (size, shift_of(size), rows)
    dense = dense_of(x, values, index, transposed, gates) if form.split else ()
    after = (gates, dense, *work, *output_of(y, lines.sums))
    start(line_kernel(lines), lines, (shares, tiles), before, maps, after, first, more * lists)


def start(
    kernel: Any, made: Any, grid: Any, before: Any, maps: DeviceArray, after: Any, first: bool,
    more: int = 0,
) -> None:  # fmt: skip
    """Launch a kernel that is `made` for something; the first time, after what was made for it.

    more : bytes of shared memory beyond what is `made`
    """
    fresh = fresh_each_time(maps) if made.source.engine else 0
    launch(
        *(kernel, grid, 32 * made.warps, *before, maps, int(first or fresh), *after),
        shared_bytes=made.shared_bytes + more,
        overlap=made.source.overlap and not first,
    )


def _lines(
    x, values, y, transposed, form: Form, source: Source, gated: bool, longest=NEAR
) -> Lines:
    """What its kernel is made for, where a line has up to `longest` units."""
    size, x_across = values.shape[1], not is_aligned(x)
    depth, batch = min(size, WIDTH), x.shape[0]
    n = -(-y.shape[1] // depth), values.size // WIDTH**2
    slab, skew = slab_of(x, size), skewed(x, size)
    even, few = is_even(x, slab), slab > 0 and batch <= 16
    by_value = 0 if even else slab
    groups = 2 if few else tile_rows(batch, *n, size, form, x_across, longest) // 8
    second = 8 * groups == SECOND_ROWS
    together = 4 if by_value or skew else 1 if second else together_of(form, x_across)
    together = min(together, groups)
    apart = slab, even, begins_of(x, size), skew
    x_side = Operand(x_across, groups, together, 0, *apart)
    together = together_of(form, not transposed, depth)
    w_side = Operand(not transposed, depth // 8, together, depth if gated else 0)
    order = order_of_sums(y, form, x_side, depth, source.engine)
    sums = Sums(form, x_side, w_side, order)
    tiles = -(-batch // (8 * groups))
    units = tiles * (values.size // (WIDTH * depth))
    many = not source.engine and has_many(units)
    warps, tiled = warps_of(form, many), tiles > 1
    lines = Lines(sums, depth, source, warps, far=groups == 8, tiled=tiled)
    return with_stages(lines, 2 if source.engine else MOST)


def rows_of_a_tile(lines: Lines, batch: int, tiles: int) -> int:
    """As many in each tile, but for float32 and feature-major x: see `even_rows`."""
    if lines.sums.x.across or not (lines.sums.form.is_16_bit and lines.source.engine):
        return lines.rows
    rows = even_rows(batch, tiles)
    return rows + rows % 2 if lines.sums.y == FEATURES else rows


def tile_rows(
    batch: int, lines: int, squares: int, size: int, form: Form, x_across: bool, longest: int = NEAR
) -> int:
    """Rows of a tile: 64 read w half as often as 32, but a warp has half as many units of w.

    So they are for much work: many lines of y, or squares of 32 x 32 of w. Fitted to what took less
    time at 36 layouts and 7 batches (H200); `size` 8 to an H100. But 65 to 96 rows are three of 32,
    which took 0.70 to 0.99 of the time of float32 at B = 8, 0.65 to 1.07 of 16 bits at larger ones.

    Float32 in two parts has tiles of SECOND_ROWS where no tile needs more: 33 to 48 and 65 to 72
    rows of 4,096 and 8,192 features, density 0.1 and 0.25, took an H200 0.79 to 0.98 of the time,
    at B = 16 0.81 to 0.84, 17 and 24 rows 0.87 to 0.99; not split up to 1.3 times as long, with 5
    blocks in a line up to 1.1; blocks of 8 0.73 to 0.85 with 65 and 72 rows, 1.04 to 1.10 with 36
    to 48. Tiles of 16, where no warp has two units then, took 0.72 to 0.82 of the time.
    """
    units = squares * (WIDTH // min(size, WIDTH))
    alone = form.split and -(-batch // 16) * units <= WARPS * n_shares()
    if not x_across and (batch <= 16 or alone):
        return 16
    tiles = -(-batch // WIDTH)
    few = form.split and not x_across and even_rows(batch, tiles) <= SECOND_ROWS
    if few and (units > LONG_LINES * lines if size > 8 else batch > 2 * WIDTH):
        return SECOND_ROWS
    three = tiles == 3 and not (form.is_16_bit and size == 8)
    if batch <= WIDTH or three or (not form.is_16_bit and size > 8):  # registers hold sums of 32
        return WIDTH
    short = not form.is_16_bit and (shared_memory() or SHARED_BYTES) < SHARED_BYTES  # rings
    if short and units >= lines and (tiles < LONG_BATCH or tiles % 2):
        return WIDTH
    most = MANY * (1 if size > 8 else 2 if form.is_16_bit else 1 / 2)
    many = lines * tiles > most * n_shares()
    much = size > 8 and squares * tiles**2 > (tiles + tiles % 2) * MUCH * WARPS * n_shares()
    if not (many or much):
        return WIDTH
    known = form.is_16_bit and size > 8 and longest < NEAR
    sooner = known and ends_sooner(batch, units, longest, n_shares(), WARPS)
    return WIDTH if sooner else 2 * WIDTH


def unit_of(form: Form, size: int, rows: int) -> float:
    """Microseconds that a warp takes for a unit where it has few, by which lines are cut (H200)."""
    if form.is_16_bit:
        return 0.3 if size >= WIDTH else 0.4 + 0.01 * rows
    return 0.25 + 0.02 * rows


def together_of(form: Form, across: bool, depth: int = WIDTH) -> int:
    """Neighbouring lines of a lane, as many as it loads at once or half of that."""
    return 1 if form.is_16_bit or depth < WIDTH else 4 if across else 2


def warps_of(form: Form, many: bool) -> int:
    """Of a block of threads: 16-bit sums leave registers for twice as many."""
    return 2 * WARPS if many and form.is_16_bit else WARPS


def has_many(units: int) -> bool:
    """Whether twice as many warps pay, of lanes that load so many units of all tiles: with half as
    many 170 drawn products of fewer took 0.93 of the time at the mean; 99 weight-gradients 0.84, as
    the next kernel finds room (16 bits, H200)."""
    return units >= FEW // 2 * WARPS * n_shares()


def source_of(engine: bool, size: int, *operands: DeviceArray) -> Source:
    """How they are loaded into a stage."""
    overlap = copy_engine()
    if engine:
        return Source(engine, 0, overlap)
    near = all(x.span.size < NEAR for x in operands)
    whole = all(_in_whole_pieces(x, size) for x in operands)
    return Source(engine, 0, overlap, Reach(near, whole))


def _in_whole_pieces(x: DeviceArray, size: int) -> bool:
    """Whether what lanes copy is there or not, none in part; of the batch, words see to that."""
    rows, features = (n * x.itemsize % BYTES == 0 for n in x.shape)
    by_words = begins_of(x, size) < BYTES or skewed(x, size) != ""
    return features and (rows or by_words or is_aligned(x) or slab_of(x, size) > 0)


def with_stages(kernel: Any, most: int, more: int = 0) -> Any:
    """As many stages as fit beside `more` bytes, of half as many warps where none does."""
    nbytes = min(SHARED_BYTES, (shared_memory() or SHARED_BYTES + BARRIERS) - BARRIERS)
    free = nbytes - kernel.shared_bytes - more
    stages = min(free // (4 * kernel.warps * kernel.stage_words), most)
    if stages < 1:
        return with_stages(kernel._replace(warps=kernel.warps // 2), most, more)
    return kernel._replace(source=kernel.source._replace(stages=stages))


def n_shares() -> int:
    """How many shares of equal size there are."""
    return 3 if SIMULATED else multiprocessors()
