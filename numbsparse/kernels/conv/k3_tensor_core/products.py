"""What a warp adds up: rows of a box, shifted by a tap, times blocks of w or rows of dy.

Rows of a box are found one by one, because those of a tile are not at equal distances: `ldmatrix`
takes an address for each.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.kernels.parts import fragments
from numbsparse.kernels.parts.fragments import PIECE
from numbsparse.kernels.parts.one_by_one import one_by_one


class LineProduct(NamedTuple):
    """Of what a tap sees of a box, TA times 16 rows, and a block of w.

    places : where pieces are in a box, and in a block of w, see `banks`
    begin_w : where a lane reads in a block of w
    add : add(ring, x_start, w_at, base, shift, across, acc)
    """

    places: Any
    begin_w: Any
    add: Any


@cache
def line_product(dtype: str, B: int, TA: int, transposed: bool) -> LineProduct:
    of_w, places = fragments.Side(B // PIECE, transposed), fragments.places(B // PIECE)
    place_in, (_, load_x) = places[0], fragments.square(B // PIECE, True, True)

    @cuda.jit(device=True)
    def read_x(ring, at, i, m):
        return load_x(ring, at[m], 0, 2 * i)

    begin_w, add_products = fragments.adding_16(dtype, TA, B // 8, B, read_x, of_w)

    @cuda.jit(device=True)
    def add(ring, x_start, w_at, base, shift, across, acc):
        at = cuda.local.array(TA, uint32)
        for m in range(TA):
            at[m] = x_start + place_in(uint32(base[m] + shift), across)
        add_products(ring, at, w_at, acc)

    return LineProduct(places, begin_w, add)


class BoxProduct(NamedTuple):
    """Of what several taps see of 16 rows of a box, transposed, and the rows of dy behind them.

    add(mine, ring, x_start, dy_at, bases, i, shifts, half, acc) takes rows 16 i and on, and adds to
    acc[p] what tap p sees, of the first `mine` taps; `half` is which half of a block's features,
    where HEIGHT of them are fewer than B. The places are as in `LineProduct`.
    """

    place_in: Any
    begin_dy: Any
    add: Any


@cache
def box_product(dtype: str, B: int, PER: int) -> BoxProduct:
    """For warps that have PER taps."""
    HEIGHT, TB = min(B, 32), B // 8
    TA, B_REGISTERS, add_product = HEIGHT // 16, (TB // 2, 4), fragments.adding(dtype)
    begin_dy, load_dy = fragments.square(B // PIECE, False, True)
    place_in, _ = fragments.places(B // PIECE)
    _, load_x = fragments.square(B // PIECE, False, False)

    def of_tap(p):
        @cuda.jit(device=True)
        def add(mine, ring, x_start, base, shifts, piece, br, acc):
            if p < mine:
                at = x_start + place_in(uint32(base + shifts[p]), piece)
                for m in range(TA):
                    a = load_x(ring, at, 0, 2 * m)
                    for n in range(TB):
                        b = br[n // 2, n % 2 * 2 :]
                        add_product(a, b[0], b[1], acc[p, m, n])

        return add

    add_taps = one_by_one(of_tap, PER)  # so that the sums of a tap stay in registers

    @cuda.jit(device=True)
    def add(mine, ring, x_start, dy_at, bases, i, shifts, half, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        br = cuda.local.array(B_REGISTERS, uint32)
        for n in range(TB // 2):
            r = load_dy(ring, dy_at, 16 * i, 2 * n)
            br[n, 0], br[n, 1], br[n, 2], br[n, 3] = r
        row = bases[16 * i + 8 * (lane // 16) + lane % 8]
        piece = lane // 8 % 2 + half * (HEIGHT // PIECE)
        add_taps(mine, ring, x_start, row, shifts, piece, br, acc)

    return BoxProduct(place_in, begin_dy, add)
