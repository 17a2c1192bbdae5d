"""Products of float32 on the tensor cores, which take tf32: float32 with 10 bits of mantissa.

"high" rounds each factor to tf32. "highest" splits it, x = hi + lo with hi the nearest tf32, and
adds lo * hi, hi * lo and hi * hi: what is left out is 2^-22 of a product. A tensor core cuts off
bits when it adds, always towards zero, and more of a large sum; so the products of every 16 terms
start from zero, the small ones first, and what they come to is added in float32. Values below
2^-113 lose bits of their lo, which is then too small for a float32; a hi that is not finite makes
NaN of the sum, and `repair` computes such outputs anew.

An mma takes 8 values of the sum, q and q + 4 of them in lane 4 g + q. Which ones these are is free
as long as both factors agree, and so are the rows and columns that a lane holds: here four
neighbours in memory, so that one load of 16 bytes feeds two or four mma.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.matmul.k5_tensor_core.swizzle import place, swap_for_lanes
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    cvt_rna_tf32,
    load_4xf32,
    mma_m16n8k8_tf32,
    shfl_xor,
    store_2xu32,
    store_4xf32,
)

PIECE = 4  # values in 16 bytes


def places(PIECES: int, along: bool, UNITS: int, DEPTH: int) -> Any:
    neighbours = UNITS % 4 == 0 if along else DEPTH >= 16
    return place(PIECES, PIECE, swap_for_lanes(PIECES, 4 if neighbours else 1))


@cache
def fragment(PIECES: int, along: bool, UNITS: int, DEPTH: int) -> tuple[Any, Any]:
    """(begin, load) for the values that a lane holds of 8 UNITS lines, CHUNK of the sum at a time.

    begin(line, piece) is where the lane reads; load(tile, at, k, values) fills values[j, u] with
    value j along the sum, from chunk k on, of the lane's line u. The sum runs along the lines of
    the tile, or down its rows.
    """
    CHUNK = min(DEPTH, 16)
    RUN, FOURS = CHUNK // 4, UNITS % 4 == 0
    place_in, move = places(PIECES, along, UNITS, DEPTH)

    @cuda.jit(device=True)
    def begin(line, piece):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        if along:
            line = line + (4 * g if FOURS else g)
            return place_in(line, piece + q) if RUN == 4 else place_in(line, piece) + q
        line = line + (4 * q if RUN == 4 else q)
        return place_in(line, piece + g) if FOURS else place_in(line, piece + g // 4) + g % 4

    @cuda.jit(device=True)
    def load_along(tile, at, k, values):
        for u in range(UNITS):
            line = u // 4 * 32 + u % 4 if FOURS else 8 * u
            if RUN == 4:
                run = load_4xf32(tile, move(at, line, 4 * k))
                for j in range(4):
                    values[j, u] = run[j]
            else:
                for j in range(2):
                    values[j, u] = tile[move(at, line, j)]

    @cuda.jit(device=True)
    def load_down(tile, at, k, values):
        for j in range(RUN):
            line = k * CHUNK + (j if RUN == 4 else 4 * j)
            if FOURS:
                for group in range(UNITS // 4):
                    run = load_4xf32(tile, move(at, line, 8 * group))
                    for e in range(4):
                        values[j, 4 * group + e] = run[e]
            else:
                for u in range(UNITS):
                    values[j, u] = tile[move(at, line, 2 * u)]

    return begin, load_along if along else load_down


@cache
def products(
    precision: str,
    TA: int,
    TB: int,
    DEPTH: int,
    A_PIECES: int,
    a_along: bool,
    B_PIECES: int,
    b_along: bool,
) -> Any:
    """(begin_a, begin_b, add_products), as in `halves.products`."""
    CHUNK = min(DEPTH, 16)  # of the sum, loaded at once
    RUN, A_UNITS = CHUNK // 4, 2 * TA
    A_VALUES, B_VALUES = (RUN, A_UNITS), (RUN, TB)
    begin_a, load_a = fragment(A_PIECES, a_along, A_UNITS, DEPTH)
    begin_b, load_b = fragment(B_PIECES, b_along, TB, DEPTH)
    multiply = chunk_products(precision, RUN, TA, TB)

    def chunks_from(k):
        """The products of each chunk from k on: loops unrolled, so that loads run ahead."""

        @cuda.jit(device=True)
        def none(ring, a_at, b_at, acc):
            pass

        if k == DEPTH // CHUNK:
            return none
        rest = chunks_from(k + 1)

        @cuda.jit(device=True)
        def add_chunk(ring, a_at, b_at, acc):
            a, b = cuda.local.array(A_VALUES, float32), cuda.local.array(B_VALUES, float32)
            load_a(ring, a_at, k, a)
            load_b(ring, b_at, k, b)
            multiply(a, b, acc)
            rest(ring, a_at, b_at, acc)

        return add_chunk

    return begin_a, begin_b, chunks_from(0)


@cache
def chunk_products(precision: str, RUN: int, TA: int, TB: int) -> Any:
    """acc += a (RUN, 2 TA) times b (RUN, TB), what a lane holds of 4 RUN terms."""
    exact = precision == "highest"
    split = split_exact if exact else round_to_tf32
    STEPS, SUMS = RUN // 2, (TA, TB, 4)
    A_HI, A_LO, B_HI, B_LO = (STEPS, 2, 2 * TA), (2, 2 * TA), (STEPS, 2, TB), (2, TB)

    @cuda.jit(device=True)
    def split_step(a, b, s, ah, al, bh, bl):
        for j in range(2):
            for u in range(2 * TA):
                ah[j, u], al[j, u] = split(a[2 * s + j, u])
            for u in range(TB):
                bh[j, u], bl[j, u] = split(b[2 * s + j, u])

    @cuda.jit(device=True)
    def multiply(a, b, acc):
        for m in range(TA):
            a0, a1, a2, a3 = a[0, 2 * m], a[0, 2 * m + 1], a[1, 2 * m], a[1, 2 * m + 1]
            for n in range(TB):
                c = acc[m, n]
                c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(
                    a0, a1, a2, a3, b[0, n], b[1, n], c[0], c[1], c[2], c[3]
                )

    @cuda.jit(device=True)
    def multiply_steps(a, b, acc):
        ah, al = cuda.local.array(A_HI, uint32), cuda.local.array(A_LO, uint32)
        bh, bl = cuda.local.array(B_HI, uint32), cuda.local.array(B_LO, uint32)
        for s in range(STEPS):
            split_step(a, b, s, ah[s], al, bh[s], bl)
            if exact:
                multiply(al, bh[s], acc)
                multiply(ah[s], bl, acc)
        for s in range(STEPS):
            multiply(ah[s], bh[s], acc)

    @cuda.jit(device=True)
    def add_from_zero(a, b, acc):
        chunk = cuda.local.array(SUMS, float32)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    chunk[m, n, i] = 0
        multiply_steps(a, b, chunk)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] += chunk[m, n, i]

    return add_from_zero if exact else multiply_steps


@cuda.jit(device=True)
def split_exact(x):
    """(hi, lo) of x = hi + lo, hi the nearest tf32; an mma ignores the last 13 bits of both.

    cvt.rna_tf32 takes three instructions more, for a NaN, which the addition may turn into 0: then
    it is lo that is NaN.
    """
    hi = uint32(as_uint32(x) + uint32(0x1000))
    return hi, as_uint32(x - as_float32(uint32(hi & uint32(0xFFFFE000))))


@cuda.jit(device=True)
def round_to_tf32(x):
    return cvt_rna_tf32(x), uint32(0)


@cache
def coordinates(UNITS: int) -> Any:
    """Where line g of unit u stands, of the 8 UNITS lines of a fragment."""

    @cuda.jit(device=True)
    def coordinate(u, g):
        if UNITS % 4 == 0:
            return u // 4 * 32 + 4 * g + u % 4
        return 8 * u + g

    return coordinate


@cache
def store(TA: int, TB: int, turned: bool, wide: bool, row_in: Any = None) -> Any:
    """y[top + ., left + .] = acc, where that lies before the edges; turned, y[left + ., top + .].

    y is of one axis. Four neighbours at once where `wide` and a lane holds four. Line g of unit u
    is row `row_in(u, g)`, if not that of `coordinates`.
    """
    row_in, column_in = row_in or coordinates(2 * TA), coordinates(TB)
    if wide and not turned and TB == 4:
        return store_sectors(TA, row_in)
    down = wide and turned and TA % 2 == 0
    across = wide and not turned and TB % 4 == 0

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    row = top + row_in(2 * m + i // 2, g)
                    column = left + column_in(n, 2 * q + i % 2)
                    at = column * rows + row if turned else row * columns + column
                    if row < rows and column < columns:
                        if across:
                            if n % 4 == 0:
                                a, b, c = acc[m, n + 1, i], acc[m, n + 2, i], acc[m, n + 3, i]
                                store_4xf32(y, at, acc[m, n, i], a, b, c)
                        elif down:
                            if m % 2 == 0 and i < 2:
                                a, b, c = acc[m, n, i + 2], acc[m + 1, n, i], acc[m + 1, n, i + 2]
                                store_4xf32(y, at, acc[m, n, i], a, b, c)
                        else:
                            y[at] = acc[m, n, i]

    return store_tile


@cache
def store_neighbours(TB: int, row_in: Any) -> Any:
    """`store` of 16 rows to a turned y, two at once: a lane has neighbours."""
    column_in = coordinates(TB)

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        row = top + row_in(0, g)
        for n in range(TB):
            for i in range(2):
                column = left + column_in(n, 2 * q + i)
                if row < rows and column < columns:
                    low, high = as_uint32(acc[0, n, i]), as_uint32(acc[0, n, i + 2])
                    store_2xu32(y, column * rows + row, low, high)

    return store_tile


def store_sectors(TA: int, row_in: Any) -> Any:
    """`store` of 32 columns: a lane holds eight neighbours of a row.

    Two lanes write four each, first of the one's and then of the other's: whole sectors of 32
    bytes. With more columns what is exchanged takes longer than what is won.
    """

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q, odd = lane // 4, lane % 4, lane % 2
        one, other = cuda.local.array(4, float32), cuda.local.array(4, float32)
        column = left + q // 2 * 16 + 4 * odd
        for m in range(TA):
            for half in range(2):
                row = top + row_in(2 * m + half, g)
                for e in range(4):
                    low, high = acc[m, e, 2 * half], acc[m, e, 2 * half + 1]
                    got = shfl_xor(low if odd else high, 1)
                    one[e], other[e] = got if odd else low, high if odd else got
                at = row * columns + column
                if row < rows and column < columns:
                    store_4xf32(y, at, one[0], one[1], one[2], one[3])
                if row < rows and column + 8 < columns:
                    store_4xf32(y, at + 8, other[0], other[1], other[2], other[3])

    return store_tile
