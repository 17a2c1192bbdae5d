"""How tiles are loaded into a stage of a warp's ring.

Where whole tiles can be copied, the copy engine does it, and the warp only requests it. Elsewhere,
for blocks under 32, features that end inside a tile and cards without a copy engine, its lanes copy
pieces of 16 bytes to the same places (`cp.async`); either way nothing passes through registers. A
tile is then gathered from the blocks and lines that a record names, in pairs of (place, line), with
0 elsewhere. A block begins at value 32 * place.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.skewed import BOXES, PIECES, loading, places_of
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.ptx import (
    bulk_load,
    cp_async_zero_fill,
    elect,
    fence_proxy_async,
    load_2xu32,
    mbarrier_expect,
    sync_warp,
    tma_load_2d,
    tma_load_3d,
)

ALIGNED = 1024  # bytes after which the pattern of swizzled tiles repeats


@cache
def reading(blocks: int, apart: int = 0) -> Any:
    """read(plan, unit): a unit's record, two numbers for each of its blocks and two more.

    apart : numbers of a unit, if they are more
    """
    WORDS = apart or 2 * blocks + 2

    @cuda.jit(device=True)
    def read_two(plan, at):
        v = load_2xu32(plan, at)
        return int32(v[0]), int32(v[1])

    def twos(many: int) -> Any:
        before, LAST = twos(many - 1) if many > 2 else read_two, 2 * many - 2

        @cuda.jit(device=True)
        def read(plan, at):
            return before(plan, at) + read_two(plan, at + LAST)

        return read

    read_twos = twos(blocks + 1)

    @cuda.jit(device=True)
    def read(plan, unit):
        return read_twos(plan, unit * WORDS)

    return read


@cache
def picking(first: int, many: int) -> Any:
    """pick(record, k): number first + 2 k of a record, k < many, all of which stay in registers."""
    SECOND, THIRD, FOURTH = first + 2, first + 4, first + 6

    @cuda.jit(device=True)
    def of_one(record, k):
        return record[first]

    @cuda.jit(device=True)
    def of_two(record, k):
        return record[first] if k == 0 else record[SECOND]

    @cuda.jit(device=True)
    def of_four(record, k):
        even, odd = (record[first], record[SECOND]) if k < 2 else (record[THIRD], record[FOURTH])
        return even if k % 2 == 0 else odd

    return {1: of_one, 2: of_two, 4: of_four}[many]


class Reach(NamedTuple):
    """What is known of all pieces that are copied: else 3 to 18 % more time (B = 8, 16; H200)."""

    near: bool  # their places are below 2^31: worked out in 32 bits
    whole: bool  # each is there or not, none in part


@cache
def counting(near: bool) -> Any:
    """(type, plus(a, b), times(a, b)) of places in memory, in 32 bits where all are `near`."""
    number_type = int32 if near else int64

    @cuda.jit(device=True)
    def plus(a, b):
        return number_type(number_type(a) + number_type(b))

    @cuda.jit(device=True)
    def times(a, b):
        return number_type(number_type(a) * number_type(b))

    return number_type, plus, times


@cache
def copying(
    form: Form,
    shape: tuple[int, int],
    depth: int,
    by_feature: bool,
    reach: Reach,
    of_values: bool = False,
) -> Any:
    """Copy to a tile: (features, others), every `depth` features from another place.

    Those are where a record says: its blocks, `of_values`, else its lines of x. Features are
    contiguous, `by_feature`, and make the rows of the tile, one for each of the others, `stride`
    apart; else the others are, and `stride` is that of features. The others are those from `first`
    on; `features` and `many` others are there in all.
    """
    (FEATURES, OTHERS), RUN, ITEM = shape, form.run, 16 // form.run
    ROWS, PIECES = (OTHERS, FEATURES // RUN) if by_feature else (FEATURES, OTHERS // RUN)
    SHIFT, LAST = uint32(PIECES.bit_length() - 1), uint32(PIECES - 1)
    SHARE, IN_ROW = WIDTH // form.row, form.row // 4  # rows of a line of 128 bytes; pieces of a row
    place_of, line_of = picking(0, FEATURES // depth), picking(1, FEATURES // depth)
    WHOLE, (number_type, plus, times) = reach.whole, counting(reach.near)

    @cuda.jit(device=True)
    def copy(memory, record, features, stride, first, many, shared, start):
        lane = uint32(cuda.threadIdx.x) % 32
        for n in range(ROWS * PIECES // 32):
            number = uint32(lane + 32 * n)
            # Not // and %: the compiler put these together again, to number + piece.
            row, piece = number >> SHIFT, number & LAST
            feature, other = (piece * RUN, row) if by_feature else (row, piece * RUN)
            block, line = place_of(record, feature // depth), line_of(record, feature // depth)
            i, j = feature % depth, plus(first, other)
            in_x = plus(times(line, depth), i)
            there = block >= 0 and in_x < number_type(features) and j < number_type(many)
            i = i if of_values else in_x
            at = int64(plus(i, times(j, stride)) if by_feature else plus(j, times(i, stride)))
            if of_values:
                at += int64(block) * WIDTH
            inside = number_type(RUN)
            if not WHOLE:
                left = plus(features, -in_x) if by_feature else plus(many, -j)
                inside = left if left < RUN else inside
                at = at if there else int64(0)
            swizzled = (row * IN_ROW + piece) ^ (row // SHARE % (8 // SHARE))
            nbytes = int32(inside * ITEM) if there else int32(0)
            cp_async_zero_fill(shared, uint32(start + 4 * swizzled), memory, at, nbytes)

    return copy


def squares_of(values: DeviceArray) -> tuple[Any, tuple[int, ...]]:
    """What `tensor_maps` takes of squares of 32: (row of a square, its place, column).

    Places are 32 values apart, and what begins at one reaches beyond the next: as a column and a
    row of w, worked out for each request, it took 1.02 to 1.04 times as long (12,288 features, 32
    rows, float16, half and more of the blocks). Two rows of a 16-bit block of 32 make one of 128
    bytes. The copy engine counts rows: with each its own, products of 12,288 features and 32 rows
    of which half of the blocks are kept took 1.04 to 1.05 times as long, and weight-gradients at a
    tenth 1.03 times (H200).
    """
    size, item = values.shape[-1], values.itemsize
    rows = 2 if size * item == 2 * WIDTH else 1  # that make one
    line, places = rows * WIDTH, values.size // WIDTH
    shape, strides = (WIDTH // rows, places, line), (rows * size * item, WIDTH * item, item)
    squares = DeviceArray(values.address, shape, values.dtype, strides, values.owner)
    return squares, (WIDTH // rows, 1, line)


@cache
def engine_asks(form: Form, x_side: Operand) -> Any:
    """request(record, operands, ...): fill a stage with a square of w, and tiles of x from row
    `top` on. Operands are (x, its view, w, its view, the maps of both).

    The view of w is (size of a block, a shift that is not read here, rows of x). A slab has all
    rows.
    """
    TILE, X_WORDS, SLAB = WIDTH * form.row, x_words(form, x_side), x_side.slab > 0
    x_across, X_TILES = x_side.across, x_side.groups // 4 if x_side.across else 1
    A_ROW = 4 * form.row  # bytes
    SKEWED, ROWS = x_side.skewed == BOXES, 8 * x_side.groups + form.run
    load = loading(form.run, 8 * x_side.groups)

    @cuda.jit(device=True)
    def request(record, operands, top, shared, start, bars, bar):
        x, x_view, _, w_view, maps = operands
        if elect() != 0:
            rows = x_view[0] if SLAB else ROWS if SKEWED else w_view[2]
            mbarrier_expect(bars, bar, uint32(A_ROW * (rows + WIDTH)))
            tma_load_3d(shared, start + X_WORDS, maps[1], 0, record[0], 0, bars, bar)
            if SLAB:
                at, nbytes = int64(record[1]) * (WIDTH * rows), uint32(A_ROW * rows)
                bulk_load(shared, start, x, at, nbytes, bars, bar)
            elif SKEWED:
                load(shared, start, maps[0], record[1], top, x_view[3], bars, bar)
            else:
                first = int32(record[1] * WIDTH)
                for u in range(X_TILES):
                    others = int32(top + u * WIDTH)
                    column, row = (others, first) if x_across else (first, others)
                    tma_load_2d(shared, start + u * TILE, maps[0], column, row, bars, bar)

    return request


@cache
def passing_over(request: Any, read: Any, engine: bool, stages: int) -> Any:
    """pass_over(record, units, unit, last, operands, top, ring): the request alone that follows a
    unit, of the one `stages` on, if any; where it has its own branch sums have one place."""

    @cuda.jit(device=True)
    def pass_over(record, units, unit, last, operands, top, ring):
        shared, start, bars, bar = ring
        if engine:
            fence_proxy_async()
        sync_warp()
        if stages > 0 and unit + stages < last:
            request(record, operands, top, shared, start, bars, bar)
            record = read(units, unit + stages + 1)
        return record

    return pass_over


@cache
def x_words(form: Form, x_side: Operand) -> int:
    """Words of a tile of x in a stage; that of w begins where the pattern of swizzles does."""
    words = 8 * (x_side.slab or x_side.groups) * form.row
    if x_side.skewed == BOXES:
        words = places_of(form.run, 8 * x_side.groups, BOXES).words
    elif x_side.skewed:
        words = x_side.groups // 4 * places_of(form.run, WIDTH, PIECES).words
    return -(-words // 256) * 256
