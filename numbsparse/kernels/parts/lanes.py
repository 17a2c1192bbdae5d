"""How the lanes of a warp fill a stage of its ring, with `cp.async`.

They copy tiles (`requests.copying`), or slabs: the features of a block as they follow each other in
memory. Where features are contiguous along a batch that is odd, they begin anywhere, and lanes copy
them word by word.
"""

from functools import cache
from math import prod
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.requests import Reach, copying, counting, picking, x_words
from numbsparse.kernels.parts.skewed import PIECES, places_of
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.ptx import cp_async_zero_fill


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
def copying_skewed(form: Form, features: int, depth: int, near: bool) -> Any:
    """As `copying` of 32 others, which are contiguous: from 16 bytes on, as `skewed` says."""
    RUN, ITEM, LINES = form.run, 16 // form.run, features // depth
    MANY = WIDTH // RUN + 1  # pieces of a feature
    FEATURE = places_of(RUN, WIDTH, PIECES).box
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
            skew = int32(at % RUN)
            at = plus(at, int32(piece * RUN) - skew)
            there = place_of(record, k) >= 0 and line < number_type(in_all)
            there = there and first + int32(piece * RUN) - skew < many
            left = min(plus(memory.size, -at), number_type(RUN))
            nbytes = int32(left * ITEM) if there else int32(0)
            if feature < features:
                to = uint32(start + feature * FEATURE + 4 * piece)
                cp_async_zero_fill(shared, to, memory, int64(at if there else 0), nbytes)

    return copy


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
    TILES, TILE, SLAB = 1 if by_feature else others // WIDTH, WIDTH * form.row, side.slab > 0
    copy_tile = copying(form, (features, others // TILES), depth, by_feature, reach)
    copy_slabs = copying_slabs(form, (features, 8 * side.slab), depth, reach)
    copy_skewed, SKEWED = copying_skewed(form, features, depth, reach.near), side.skewed != ""
    SKEWED_TILE = places_of(form.run, WIDTH, PIECES).words

    @cuda.jit(device=True)
    def copy(memory, record, view, first, shared, start):
        batch, features, of_batch, of_feature = view
        if SLAB:
            copy_slabs(memory, record, features, batch, shared, start)
        elif SKEWED:
            for u in range(TILES):
                here, place = first + u * WIDTH, uint32(start + u * SKEWED_TILE)
                copy_skewed(memory, record, features, of_feature, here, batch, shared, place)
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
