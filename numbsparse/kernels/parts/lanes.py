"""How the lanes of a warp fill a stage of its ring, with `cp.async`.

They copy tiles (`requests.copying`), or slabs: the features of a block as they follow each other in
memory. Where features are contiguous along a batch that is odd, they begin anywhere, and lanes copy
them word by word, or from 16 bytes on (`skewed`).
"""

from functools import cache
from math import prod
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.requests import Reach, copying, counting, picking, x_words
from numbsparse.kernels.parts.skewed import PIECES, places_of
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.ptx import cp_async_word, cp_async_zero_fill


@cache
def copying_slabs(form: Form, shape: tuple[int, int], depth: int, reach: Reach) -> Any:
    """The same of features that follow each other without gaps, up to (features, others).

    They stay as they are, `pitch` values apart.
    """
    RUN, ITEM, LINES, REQUESTS = form.run, 16 // form.run, shape[0] // depth, prod(shape) // 32
    place_of, line_of = picking(0, LINES), picking(1, LINES)
    WHOLE, number_type = reach.whole, int32 if reach.near else int64

    @cuda.jit(device=True)
    def copy(memory, record, features, pitch, shared, start):
        lane, pieces = uint32(cuda.threadIdx.x) % 32, uint32(depth // RUN * pitch)  # of a line
        for n in range(-(-REQUESTS // RUN)):
            number, k = uint32(lane + 32 * n), uint32(0)
            for j in range(1, LINES):
                k += uint32(number >= uint32(j * pieces))
            if number < uint32(LINES * pieces):
                line = number_type(line_of(record, k)) * number_type(depth * pitch)
                at = number_type(line + number_type(number - k * pieces) * RUN)
                left = number_type(number_type(features * pitch) - at)
                there = place_of(record, k) >= 0 and left > 0
                inside = RUN if WHOLE or left > RUN else left
                nbytes = int32(inside * ITEM) if there else int32(0)
                place = uint32(start + 4 * number)
                cp_async_zero_fill(shared, place, memory, int64(at if there else 0), nbytes)

    return copy


@cache
def copying_words(form: Form, features: int, depth: int, near: bool) -> Any:
    """As `copying` of 32 others, which are contiguous: word by word, as features begin at any."""
    RUN, ITEM, ROW = form.run // 4, 16 // form.run, form.row
    AT_ONCE, LINES, SHIFT = 32 // ROW, features // depth, uint32(ROW.bit_length() - 1)
    place_of, line_of = picking(0, LINES), picking(1, LINES)
    (number_type, plus, times), at_word = counting(near), word_of(form)

    @cuda.jit(device=True)
    def copy(memory, record, in_all, stride, first, many, shared, start):
        lane = uint32(cuda.threadIdx.x) % 32
        word, other = lane % uint32(ROW), lane >> SHIFT  # of the rows that are copied at once
        j = plus(first, word * uint32(RUN))
        left = plus(many, -j)
        inside = int32(min(left, number_type(RUN)) * ITEM) if left > 0 else int32(0)
        for k in range(LINES):
            line = plus(times(line_of(record, k), depth), other)
            left = plus(in_all, -line) if place_of(record, k) >= 0 else number_type(0)
            at = plus(times(line, stride), j)
            for n in range(depth // AT_ONCE):
                nbytes = inside if n * AT_ONCE < left else int32(0)
                to = uint32(start + at_word(k * depth + n * AT_ONCE + other, word))
                cp_async_word(shared, to, memory, int64(at), nbytes)
                at = plus(at, times(stride, AT_ONCE))

    return copy


@cache
def copying_skewed(form: Form, features: int, depth: int, near: bool) -> Any:
    """As `copying` of 32 others, which are contiguous: from 16 bytes on, as `skewed` says."""
    RUN, ITEM, LINES = form.run, 16 // form.run, features // depth
    MANY, FEATURE = WIDTH // RUN + 1, places_of(RUN, WIDTH, PIECES).box  # pieces and words of one
    FEATURES, EVEN = features, features * MANY % 32 == 0
    place_of, line_of = picking(0, LINES), picking(1, LINES)
    number_type, plus, times = counting(near)

    @cuda.jit(device=True)
    def copy(memory, record, in_all, stride, first, many, shared, start):
        lane = uint32(cuda.threadIdx.x) % 32
        for n in range(-(-features * MANY // 32)):
            number = uint32(lane + 32 * n)
            feature, piece = number // uint32(MANY), number % uint32(MANY)
            k = uint32(feature // depth)
            line = plus(times(line_of(record, k), depth), feature % depth)
            at = plus(times(line, stride), first)
            ahead = int32(piece * RUN) - int32(at % RUN)
            at, there = plus(at, ahead), place_of(record, k) >= 0 and first + ahead < many
            there = there and line < number_type(in_all)
            left = min(plus(memory.size, -at), number_type(RUN))
            to, nbytes = uint32(start + feature * FEATURE + 4 * piece), int32(left * ITEM)
            at, nbytes = int64(at if there else 0), nbytes if there else int32(0)
            if EVEN or feature < FEATURES:
                cp_async_zero_fill(shared, to, memory, at, nbytes)

    return copy


@cache
def word_of(form: Form) -> Any:
    """Where word `word` of row `row` of a swizzled tile is."""
    SHARE, IN_ROW = WIDTH // form.row, form.row // 4

    @cuda.jit(device=True)
    def place(row, word):
        piece = (row * IN_ROW + word // 4) ^ (row // SHARE % (8 // SHARE))
        return uint32(4 * piece + word % 4)

    return place


@cache
def copying_side(
    form: Form,
    features: int,
    others: int,
    depth: int,
    side: Operand,
    by_feature: bool,
    reach: Reach,
) -> Any:
    """An operand's part of a stage: a tile, or one for each 32 of the others, or a slab."""
    TILES = 1 if by_feature else max(others // WIDTH, 1)
    TILE, SLAB = WIDTH * form.row, side.slab > 0
    BY_WORDS = side.begins < BYTES
    copy_tile = copying(form, (features, others // TILES), depth, by_feature, reach)
    copy_slabs = copying_slabs(form, (features, 8 * side.slab), depth, reach)
    SKEWED, SKEWED_TILE = side.skewed != "", places_of(form.run, WIDTH, PIECES).words
    copy_skewed = copying_skewed(form, features, depth, reach.near)
    copy_words = copying_words(form, features, depth, reach.near)

    @cuda.jit(device=True)
    def copy(memory, record, view, first, shared, start):
        batch, features, of_batch, of_feature = view
        if SLAB:
            copy_slabs(memory, record, features, batch, shared, start)
        elif SKEWED:
            for u in range(TILES):
                here, place = first + u * WIDTH, uint32(start + u * SKEWED_TILE)
                copy_skewed(memory, record, features, of_feature, here, batch, shared, place)
        elif BY_WORDS:
            for u in range(TILES):
                here, place = first + u * WIDTH, uint32(start + u * TILE)
                copy_words(memory, record, features, of_feature, here, batch, shared, place)
        else:
            stride = of_batch if by_feature else of_feature
            for u in range(TILES):
                here, place = first + u * WIDTH, uint32(start + u * TILE)
                copy_tile(memory, record, features, stride, here, batch, shared, place)

    return copy


@cache
def lanes_ask(form: Form, x_side: Operand, transposed: bool, depth: int, reach: Reach) -> Any:
    """The same by the lanes, of as many blocks as make 32 terms; what is not there is 0."""
    X_WORDS, how = x_words(form, x_side), (x_side, not x_side.across, reach)
    copy_x = copying_side(form, WIDTH, 8 * x_side.groups, depth, *how)
    copy_w = copying(form, (WIDTH, depth), depth, transposed, reach, of_values=True)

    @cuda.jit(device=True)
    def request(record, operands, top, shared, start, bars, bar):
        x, x_view, values, w_view, _ = operands
        copy_x(x, record, x_view, top, shared, start)
        w_start = uint32(start + X_WORDS)
        copy_w(values, record, x_view[1], w_view[0], int64(0), depth, shared, w_start)

    return request
