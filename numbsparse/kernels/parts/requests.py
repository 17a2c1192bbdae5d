"""How tiles are loaded into a stage of a warp's ring.

Where whole tiles can be copied, the copy engine does it, and the warp only requests it. Elsewhere,
for blocks under 32, features that end inside a tile and cards without a copy engine, its lanes copy
pieces of 16 bytes to the same places (`cp.async`); either way nothing passes through registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.gathers import Reach, copying
from numbsparse.kernels.parts.tiles import WIDTH, Form
from numbsparse.kernels.ptx import elect, mbarrier_expect, tma_load_2d

ALIGNED = 1024  # bytes after which the pattern of swizzled tiles repeats


@cuda.jit(device=True)
def square_of(place, shift):
    """(column, row) among values in lines of 32 << shift, of the one at 32 * place."""
    return int32((place & ((1 << shift) - 1)) * WIDTH), int32(place >> shift)


@cache
def engine_asks(form: Form, groups: int, x_across: bool) -> Any:
    """request(record, ...): fill a stage with a square of w, and tiles of x from row `top` on.

    `w_view` is (size of a block, shift as in `square_of`, `paired` as in `tiles`, a shift that is
    not read here, rows of x).
    """
    TILE, X_WORDS, X_TILES = WIDTH * form.row, x_words(form, groups), groups // 4 if x_across else 1
    A_ROW = 4 * form.row  # bytes

    @cuda.jit(device=True)
    def request(record, x, x_view, top, values, w_view, maps, shared, start, bars, bar):
        if elect() != 0:
            mbarrier_expect(bars, bar, uint32(A_ROW * (w_view[4] + WIDTH)))
            column, row = square_of(record[0], w_view[1])
            tma_load_2d(shared, start + X_WORDS, maps[1], column, row, bars, bar)
            first = int32(record[1] * WIDTH)
            for u in range(X_TILES):
                others = int32(top + u * WIDTH)
                column, row = (others, first) if x_across else (first, others)
                tma_load_2d(shared, start + u * TILE, maps[0], column, row, bars, bar)

    return request


@cache
def x_words(form: Form, groups: int) -> int:
    """Words of a tile of x in a stage; that of w begins where the pattern of swizzles does."""
    return -(-8 * groups * form.row // 256) * 256


@cache
def lanes_ask(
    form: Form, groups: int, x_across: bool, transposed: bool, depth: int, reach: Reach
) -> Any:
    """The same by the lanes, of as many blocks as make 32 terms; what is not there is 0."""
    X_WORDS, TILE = x_words(form, groups), WIDTH * form.row
    X_TILES = groups // 4 if x_across else 1
    copy_x = copying(form, (WIDTH, 8 * groups // X_TILES), depth, not x_across, reach)
    copy_w = copying(form, (WIDTH, depth), depth, transposed, reach, of_values=True)

    @cuda.jit(device=True)
    def request(record, x, x_view, top, values, w_view, maps, shared, start, bars, bar):
        batch, features, x_batch, x_feature = x_view
        x_stride, w_start = x_feature if x_across else x_batch, uint32(start + X_WORDS)
        for u in range(X_TILES):
            first, place = top + u * WIDTH, uint32(start + u * TILE)
            copy_x(x, record, features, x_stride, first, batch, shared, place)
        copy_w(values, record, features, w_view[0], int64(0), depth, shared, w_start)

    return request
