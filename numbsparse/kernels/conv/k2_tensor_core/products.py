"""Products of shifted rows of a box, and where their sums go: shared with the next rung."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int64, uint16, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts import fragments as halves
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.views import span

PIECE = halves.PIECE


def stored_as(y: DeviceArray, out_features: int, size: int) -> tuple[DeviceArray, str]:
    """y as one axis, and how: two values at once where they may be, and without any edge."""
    if y.itemsize == 4:
        whole = out_features % size == 0 and y.address % 16 == 0
        return span(y), "whole" if whole else "singles"
    if out_features % 2 or y.address % 4:
        return span(y), "singles"
    y = span(y)
    pairs = DeviceArray(y.address, (y.size // 2,), np.uint32, None, y.owner)
    return pairs, "pairs" if out_features % size else "whole"


@cache
def add_tap(dtype: str, B: int, TA: int, turned: bool) -> Any:
    """(add_products, begin_w): acc += what a tap sees of a box times a block of w."""
    TB, A_REGISTERS, PIECES = B // 8, (TA, 4), B // PIECE
    mma, (place_in, _) = halves.MMA[dtype], halves.places(PIECES)
    _, load_x = halves.square(PIECES, True, True)
    begin_w, load_w = halves.square(PIECES, turned, not turned)

    @cuda.jit(device=True)
    def add_products(ring, x_start, w_at, base, shift, across, acc):
        ar = cuda.local.array(A_REGISTERS, uint32)
        at = cuda.local.array(TA, uint32)
        for m in range(TA):
            at[m] = x_start + place_in(uint32(base[m] + shift), across)
        for i in range(B // 16):
            for m in range(TA):
                r = load_x(ring, at[m], 0, 2 * i)
                ar[m, 0], ar[m, 1], ar[m, 2], ar[m, 3] = r
            for k in range(TB // 2):
                r = (
                    load_w(ring, w_at, 16 * k, 2 * i)
                    if turned
                    else load_w(ring, w_at, 16 * i, 2 * k)
                )
                for m in range(TA):
                    for h in range(2):
                        c = acc[m, 2 * k + h]
                        c[0], c[1], c[2], c[3] = mma(
                            ar[m, 0], ar[m, 1], ar[m, 2], ar[m, 3], r[2 * h], r[2 * h + 1],
                            c[0], c[1], c[2], c[3],
                        )  # fmt: skip

    return add_products, begin_w


@cache
def store_tile(dtype: str, TA: int, TB: int, stored: str) -> Any:
    """The sums of a warp to the rows of y named in `out_rows`."""
    WHOLE, PAIRS, pack = stored == "whole", stored != "singles", halves.PACK[dtype]

    @cuda.jit(device=True)
    def store(acc, y, out_rows, own, left, out_features):
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(TA):
            for h in range(2):
                row = out_rows[own + 16 * m + halves.row_of(lane, 2 * h)]
                if row >= 0:
                    column = int64(left) + int64(halves.column_of(lane, 0))
                    at = int64(row) * out_features + column
                    at = at // 2 if PAIRS else at
                    for n in range(TB):
                        pair = pack(acc[m, n, 2 * h], acc[m, n, 2 * h + 1])
                        inside = out_features - column - 8 * n
                        if WHOLE or (PAIRS and inside > 0):
                            y[at + 4 * n] = pair
                        elif inside > 0:
                            y[at + 8 * n] = uint16(pair & uint32(0xFFFF))
                            if inside > 1:
                                y[at + 8 * n + 1] = uint16(pair >> uint32(16))

    return store


@cache
def add_shifted(dtype: str, B: int, PER: int) -> Any:
    """(add_rows, begin_dy): acc[p] += what taps see of 16 rows of a box, turned, times dy.

    add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc) takes rows 16 i and on, of the
    first `mine` taps; `half` of a block's features, where HEIGHT are less than B.
    """
    PIECES, HEIGHT = B // PIECE, min(B, 32)
    TA, TB, mma = HEIGHT // 16, B // 8, halves.MMA[dtype]
    B_REGISTERS = (TB // 2, 4)
    begin_dy, load_dy = halves.square(PIECES, False, True)
    place_in, _ = halves.places(PIECES)
    _, load_x = halves.square(PIECES, False, False)

    @cuda.jit(device=True)
    def add_tap(ring, x_start, base, shift, piece, br, acc):
        at = x_start + place_in(uint32(base + shift), piece)
        for m in range(TA):
            a = load_x(ring, at, 0, 2 * m)
            for n in range(TB):
                c = acc[m, n]
                c[0], c[1], c[2], c[3] = mma(
                    a[0], a[1], a[2], a[3], br[n // 2, n % 2 * 2], br[n // 2, n % 2 * 2 + 1],
                    c[0], c[1], c[2], c[3],
                )  # fmt: skip

    add_taps = unrolled(add_tap, PER)

    @cuda.jit(device=True)
    def add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        br = cuda.local.array(B_REGISTERS, uint32)
        for n in range(TB // 2):
            r = load_dy(ring, dy_at, 16 * i, 2 * n)
            br[n, 0], br[n, 1], br[n, 2], br[n, 3] = r
        row = bases[16 * i + 8 * (lane // 16) + lane % 8]
        piece = lane // 8 % 2 + half * (HEIGHT // PIECE)
        add_taps(mine, ring, x_start, row, shifts, piece, br, acc)

    return add_rows, begin_dy


def unrolled(add_tap: Any, PER: int, p: int = 0) -> Any:
    """add(mine, ring, x_start, rows, shifts, piece, br, acc): the first `mine` of PER taps.

    Unrolled, so that acc[p], to which add_tap(ring, x_start, rows, shifts[p], piece, br, acc[p])
    adds, stays in registers.
    """

    @cuda.jit(device=True)
    def none(mine, ring, x_start, rows, shifts, piece, br, acc):
        pass

    if p == PER:
        return none
    rest = unrolled(add_tap, PER, p + 1)

    @cuda.jit(device=True)
    def add(mine, ring, x_start, rows, shifts, piece, br, acc):
        if p < mine:
            add_tap(ring, x_start, rows, shifts[p], piece, br, acc[p])
            rest(mine, ring, x_start, rows, shifts, piece, br, acc)

    return add


@cache
def gather_sums(arithmetic: str, B: int, PER: int) -> Any:
    """The sums of all warps, one kept block after another; of those that share one, in order."""
    HEIGHT = min(B, 32)
    TA, TB = HEIGHT // 16, B // 8
    row_in, column_in = coordinates(arithmetic, 2 * TA), coordinates(arithmetic, TB)

    @cuda.jit(device=True)
    def gather(acc, sums, own_slices, slices, part, group, mine):
        t = uint32(cuda.threadIdx.x)
        g, q = t % 32 // 4, t % 4
        for s in range(slices):
            cuda.syncthreads()
            if s == part and s < own_slices:
                for p in range(PER):
                    if p < mine:
                        for m in range(TA):
                            for n in range(TB):
                                for i in range(4):
                                    row = row_in(2 * m + i // 2, g)
                                    column = column_in(n, 2 * q + i % 2)
                                    at = ((group * PER + p) * HEIGHT + row) * B + column
                                    if s == 0:
                                        sums[at] = acc[p, m, n, i]
                                    else:
                                        sums[at] += acc[p, m, n, i]
        cuda.syncthreads()

    return gather


def coordinates(arithmetic: str, UNITS: int) -> Any:
    """Where line g of unit u stands, of the 8 UNITS lines of a result."""
    return singles.coordinates(UNITS if arithmetic not in halves.MMA else 1)
