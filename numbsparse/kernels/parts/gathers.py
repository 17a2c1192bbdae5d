"""Tiles that the lanes of a warp copy to shared memory, 16 bytes at a time, with `cp.async`.

For tiles that the copy engine cannot load whole: a tile is gathered from the blocks and lines that
a record names, in pairs of (place, line), with 0 elsewhere. A block begins at value 32 * place.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.tiles import WIDTH, Form
from numbsparse.kernels.ptx import cp_async_zero_fill, load_2xu32, load_4xu32


@cache
def reading(blocks: int) -> Any:
    """read(plan, unit): a unit's record, two numbers for each of its blocks and two more."""
    WORDS = 2 * blocks + 2

    @cuda.jit(device=True)
    def read_four(plan, unit):
        v = load_4xu32(plan, unit * WORDS)
        return int32(v[0]), int32(v[1]), int32(v[2]), int32(v[3])

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

    return read_four if blocks == 1 else read


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
    """What is known of all pieces that are copied."""

    near: bool  # their places are below 2^31: worked out in 32 bits
    whole: bool  # each is there or not, none in part


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
    WHOLE, number_type = reach.whole, int32 if reach.near else int64

    @cuda.jit(device=True)
    def plus(a, b):
        return number_type(number_type(a) + number_type(b))

    @cuda.jit(device=True)
    def times(a, b):
        return number_type(number_type(a) * number_type(b))

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
