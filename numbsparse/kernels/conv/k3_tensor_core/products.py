"""What a block of threads adds up, in 16 bits and in float32.

Operands are rows of a box, shifted by a tap, and blocks of w or rows of dy. Rows of a box are found
one by one, because those of a tile are not at equal distances. float32 is split into tf32 as
`parts.split` says: what a lane reads is four neighbours in memory, which are four terms of a sum,
or four features.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, uint16, uint32

from numbsparse.kernels.parts import fragments, fragments_tf32
from numbsparse.kernels.parts.banks import place, swap_for_lanes
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.ptx import load_4xf32

RUN = 4  # terms of a sum that a lane holds of 16 of float32


def is_16_bit(arithmetic: str) -> bool:
    """The arithmetic is a dtype of 16 bits, or a precision of float32."""
    return arithmetic in fragments.MMA


class LineProduct(NamedTuple):
    """Of what a tap sees of a box, TA times 16 rows, and a block of w.

    item, PIECE : what shared memory holds, and how many of them are in 16 bytes
    UNITS : lines of the tile that a lane reads: unit u is line read_by(u, lane), from the piece
        first_piece(lane) on
    x_place, w_places : where pieces are in a box, and in a block of w, see `banks`
    begin_w : where a lane reads in a block of w
    add : add(ring, x_start, w_at, base, shift, across, acc)
    """

    item: Any
    PIECE: int
    UNITS: int
    read_by: Any
    first_piece: Any
    x_place: Any
    w_places: Any
    begin_w: Any
    add: Any


@cache
def line_product(arithmetic: str, B: int, TA: int, transposed: bool) -> LineProduct:
    make = _lines_16_bit if is_16_bit(arithmetic) else _lines_float32
    return make(arithmetic, B, TA, transposed)


def _lines_16_bit(dtype: str, B: int, TA: int, transposed: bool) -> LineProduct:
    PIECE, of_w = fragments.PIECE, fragments.Side(B // fragments.PIECE, transposed)
    places = place_in, _ = fragments.places(B // PIECE)
    _, load_x = fragments.square(B // PIECE, True, True)

    @cuda.jit(device=True)
    def read_by(u, lane):
        return 16 * u + 8 * (lane // 8 % 2) + lane % 8

    @cuda.jit(device=True)
    def first_piece(lane):
        return lane // 16

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

    return LineProduct(uint16, PIECE, TA, read_by, first_piece, place_in, places, begin_w, add)


def _lines_float32(precision: str, B: int, TA: int, transposed: bool) -> LineProduct:
    PIECE, TB, UNITS = fragments_tf32.PIECE, B // 8, 2 * TA
    PIECES, A_VALUES, B_VALUES = B // PIECE, (RUN, UNITS), (RUN, TB)
    multiply = fragments_tf32.chunk_products(precision, TA, TB)
    begin_w, load_w = fragments_tf32.fragment(PIECES, transposed, TB)

    @cuda.jit(device=True)
    def swap(line):
        """Of two rows at a time four pieces each are read."""
        return line % 2 * 4 if PIECES >= 8 else 0

    place_in = place(PIECES, PIECE, swap)[0]

    @cuda.jit(device=True)
    def read_by(u, lane):
        return 8 * u + lane // 4

    @cuda.jit(device=True)
    def first_piece(lane):
        return lane % 4

    @cuda.jit(device=True)
    def add(ring, x_start, w_at, base, shift, across, acc):
        ar, br = cuda.local.array(A_VALUES, float32), cuda.local.array(B_VALUES, float32)
        for k in range(B // 16):
            for u in range(UNITS):
                at = x_start + place_in(uint32(base[u] + shift), uint32(4 * k + across))
                run = load_4xf32(ring, at)
                for j in range(RUN):
                    ar[j, u] = run[j]
            load_w(ring, w_at, k, br)
            multiply(ar, br, acc)

    places = fragments_tf32.places(PIECES, transposed, TB)
    return LineProduct(float32, PIECE, UNITS, read_by, first_piece, place_in, places, begin_w, add)


class BoxProduct(NamedTuple):
    """Of what several taps see of 16 rows of a box, transposed, and the rows of dy behind them.

    add(mine, ring, x_start, dy_at, bases, i, shifts, half, acc) takes rows 16 i and on, and adds to
    acc[p] what tap p sees, of the first `mine` taps; `half` is which half of a block's features,
    where HEIGHT of them are fewer than B. `item`, PIECE and the places are as in `LineProduct`.
    """

    item: Any
    PIECE: int
    x_place: Any
    dy_place: Any
    begin_dy: Any
    add: Any


@cache
def box_product(arithmetic: str, B: int, PER: int) -> BoxProduct:
    """For warps that have PER taps."""
    make = _boxes_16_bit if is_16_bit(arithmetic) else _boxes_float32
    return make(arithmetic, B, PER)


def _boxes_16_bit(dtype: str, B: int, PER: int) -> BoxProduct:
    PIECE, HEIGHT, TB = fragments.PIECE, min(B, 32), B // 8
    TA, B_REGISTERS, add_product = HEIGHT // 16, (TB // 2, 4), fragments.adding(dtype)
    begin_dy, load_dy = fragments.square(B // PIECE, False, True)
    place_in, _ = fragments.places(B // PIECE)
    _, load_x = fragments.square(B // PIECE, False, False)

    @cuda.jit(device=True)
    def add_tap(ring, x_start, base, shift, piece, br, acc):
        at = x_start + place_in(uint32(base + shift), piece)
        for m in range(TA):
            a = load_x(ring, at, 0, 2 * m)
            for n in range(TB):
                b = br[n // 2, n % 2 * 2 :]
                add_product(a, b[0], b[1], acc[m, n])

    add_taps = _of_taps(add_tap, PER)

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

    return BoxProduct(uint16, PIECE, place_in, place_in, begin_dy, add)


def _boxes_float32(precision: str, B: int, PER: int) -> BoxProduct:
    PIECE, HEIGHT, TB = fragments_tf32.PIECE, min(B, 32), B // 8
    TA, PIECES = HEIGHT // 16, B // PIECE
    UNITS, A_VALUES, B_VALUES, ROWS = 2 * TA, (RUN, 2 * TA), (RUN, TB), RUN
    # Of four rows that are four apart two pieces each are read.
    place_in = place(PIECES, PIECE, swap_for_lanes(PIECES, 4))[0]
    multiply = fragments_tf32.chunk_products(precision, TA, TB)
    begin_dy, load_dy = fragments_tf32.fragment(PIECES, False, TB)

    @cuda.jit(device=True)
    def add_tap(ring, x_start, rows, shift, piece, br, acc):
        g = uint32(cuda.threadIdx.x) % 32 // 4
        ar = cuda.local.array(A_VALUES, float32)
        for j in range(RUN):
            row = uint32(rows[j] + shift)
            if UNITS == 4:
                run = load_4xf32(ring, x_start + place_in(row, uint32(piece + g)))
                for u in range(4):
                    ar[j, u] = run[u]
            else:
                for u in range(UNITS):
                    at = place_in(row, uint32(piece + 2 * u + g // 4))
                    ar[j, u] = ring[x_start + at + g % 4]
        multiply(ar, br, acc)

    add_taps = _of_taps(add_tap, PER)

    @cuda.jit(device=True)
    def add(mine, ring, x_start, dy_at, bases, i, shifts, half, acc):
        q = uint32(cuda.threadIdx.x) % 4
        br = cuda.local.array(B_VALUES, float32)
        rows = cuda.local.array(ROWS, uint32)
        load_dy(ring, dy_at, i, br)
        for j in range(RUN):
            rows[j] = uint32(bases[16 * i + 4 * q + j])
        piece = uint32(half * (HEIGHT // PIECE))
        add_taps(mine, ring, x_start, rows, shifts, piece, br, acc)

    dy_place = fragments_tf32.places(PIECES, False, TB)[0]
    return BoxProduct(float32, PIECE, place_in, dy_place, begin_dy, add)


def _of_taps(add_tap: Any, PER: int) -> Any:
    """add(mine, ring, x_start, rows, shifts, piece, br, acc): the first `mine` of PER taps.

    One by one, so that acc[p], to which add_tap(ring, x_start, rows, shifts[p], piece, br, acc[p])
    adds, stays in registers.
    """

    def of_tap(p):
        @cuda.jit(device=True)
        def add(mine, ring, x_start, rows, shifts, piece, br, acc):
            if p < mine:
                add_tap(ring, x_start, rows, shifts[p], piece, br, acc[p])

        return add

    return one_by_one(of_tap, PER)
