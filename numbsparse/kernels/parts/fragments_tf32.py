"""Products of float32 on the tensor cores, split into tf32 as `split` says, 16 terms at a time.

An mma takes 8 values of the sum, q and q + 4 of them in lane 4 g + q. Which ones these are is free
as long as both operands agree, and so are the rows and columns that a lane holds: here four
neighbours in memory, so that one load of 16 bytes feeds two or four mma.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.banks import place, swap_for_lanes
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.parts.split import add_product, splitting
from numbsparse.kernels.ptx import as_float32, load_2xu32, load_4xf32

PIECE = 4  # values in 16 bytes
CHUNK = 16  # terms of the sum, loaded at once
RUN = CHUNK // 4  # that a lane holds
LINE = 128  # bytes of a line of swizzled memory


def places(PIECES: int, along: bool, UNITS: int) -> Any:
    neighbours = not along or UNITS % 4 == 0
    return place(PIECES, PIECE, swap_for_lanes(PIECES, 4 if neighbours else 1))


@cache
def fragment(PIECES: int, along: bool, UNITS: int) -> tuple[Any, Any]:
    """(begin, load) for the values that a lane holds of 8 UNITS lines, CHUNK of the sum at a time.

    begin(line, piece) is where the lane reads; load(tile, at, k, values) fills values[j, u] with
    value j along the sum, from chunk k on, of the lane's line u. The sum runs along the lines of
    the tile, or down its rows.
    """
    FOURS = UNITS % 4 == 0
    place_in, move = places(PIECES, along, UNITS)

    @cuda.jit(device=True)
    def begin(line, piece):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        if along:
            return place_in(line + (4 * g if FOURS else g), piece + q)
        line = line + RUN * q
        return place_in(line, piece + g) if FOURS else place_in(line, piece + g // 4) + g % 4

    @cuda.jit(device=True)
    def load_along(tile, at, k, values):
        for u in range(UNITS):
            line = u // 4 * 32 + u % 4 if FOURS else 8 * u
            run = load_4xf32(tile, move(at, line, 4 * k))
            for j in range(RUN):
                values[j, u] = run[j]

    @cuda.jit(device=True)
    def load_down(tile, at, k, values):
        for j in range(RUN):
            line = k * CHUNK + j
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
def products(precision: str, TA: int, TB: int, DEPTH: int, a: Any, b: Any) -> tuple[Any, Any, Any]:
    """(begin_a, begin_b, add) of `fragments.Products`, for sides a and b."""
    A_VALUES, B_VALUES = (RUN, 2 * TA), (RUN, TB)
    begin_a, load_a = fragment(*a, 2 * TA)
    begin_b, load_b = fragment(*b, TB)
    multiply = chunk_products(precision, TA, TB)

    def chunk(k):
        @cuda.jit(device=True)
        def add_chunk(ring, a_at, b_at, acc):
            ar, br = cuda.local.array(A_VALUES, float32), cuda.local.array(B_VALUES, float32)
            load_a(ring, a_at, k, ar)
            load_b(ring, b_at, k, br)
            multiply(ar, br, acc)

        return add_chunk

    return begin_a, begin_b, one_by_one(chunk, DEPTH // CHUNK)  # so that loads run ahead


@cache
def chunk_products(precision: str, TA: int, TB: int) -> Any:
    """acc += a (RUN, 2 TA) times b (RUN, TB), what a lane holds of a chunk of the sum."""
    exact = precision == "highest"
    split = splitting(exact)
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
                add_product(a0, a1, a2, a3, b[0, n], b[1, n], acc[m, n])

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
        pieces.clear(chunk)
        multiply_steps(a, b, chunk)
        pieces.add(acc, chunk)

    return add_from_zero if exact else multiply_steps


@cache
def number_of(together: int) -> Any:
    """The line that is number i of group j, of 8, where a lane has `together` neighbours."""
    EIGHTS = 8 * together

    @cuda.jit(device=True)
    def number(j, i):
        return j // together * EIGHTS + together * i + j % together

    return number


def coordinates(UNITS: int) -> Any:
    """Where line g of unit u is, of the 8 UNITS lines of a fragment."""
    return number_of(4 if UNITS % 4 == 0 else 1)


@cache
def rows_of_warpgroup(DEPTH: int, x_transposed: bool, exact: bool) -> tuple[Any, Any]:
    """(read, row_of): what a lane has of a warpgroup's 64 rows of x, split.

    Which terms of the sum it has is free as long as the images of w have the same order. Of a warp
    its row of a half is `row_of(0, half)`: such that no two lanes share a bank.
    """
    BOX, split = LINE // 4, splitting(exact)  # values of a line of a box of a transposed x

    @cuda.jit(device=True)
    def read_rows(ring, start, hi, lo):
        t = uint32(cuda.threadIdx.x)
        row, q = row_of_rows(0, 0), t % 4
        line = uint32(start + (16 * (t // 32 % 4) + row) * DEPTH)
        for c in range(2):
            piece = int64(line + ((4 * c + q) ^ row) * 4)  # and 8 rows below
            for u in range(2):
                run = load_4xf32(ring, piece + u * (8 * DEPTH))
                for j in range(4):
                    k = (2 * c + j // 2) * 4 + j % 2 * 2 + u
                    hi[k], lo[k] = split(run[j])

    @cuda.jit(device=True)
    def read_columns(ring, start, hi, lo):
        t = uint32(cuda.threadIdx.x)
        g, q, warp = t % 32 // 4, t % 4, t // 32 % 4
        box = uint32(start + uint32(warp // 2 * (BOX * DEPTH) + g % 2 * 2))
        for j in range(2):
            line = 2 * q + j
            piece = int64(uint32(box + uint32(line * BOX + (warp % 2 * 4 + g // 2 ^ line) * 4)))
            for c in range(4):  # and 8, 16 and 24 lines below
                a, b = load_2xu32(ring, piece + c * (8 * BOX))
                k = 4 * c + 2 * j
                hi[k], lo[k] = split(as_float32(a))
                hi[k + 1], lo[k + 1] = split(as_float32(b))

    @cuda.jit(device=True)
    def row_of_rows(tile, half):
        g = uint32(cuda.threadIdx.x) % 32 // 4
        return 8 * half + g // 2 + g % 2 * 4

    @cuda.jit(device=True)
    def row_of_columns(tile, half):
        return 2 * (uint32(cuda.threadIdx.x) % 32 // 4) + half

    return (read_columns, row_of_columns) if x_transposed else (read_rows, row_of_rows)
