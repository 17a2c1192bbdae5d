"""Products of float16 and bfloat16: `ldmatrix` reads them, one mma takes 16 along the sum."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint16, uint32

from numbsparse.kernels.matmul.k5_tensor_core.swizzle import place, swap_for_rows
from numbsparse.kernels.ptx import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    pack_bfloat2,
    pack_half2,
)

PIECE = 8  # values in 16 bytes
MMA = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16}
PACK = {"float16": pack_half2, "bfloat16": pack_bfloat2}


def places(PIECES: int) -> Any:
    return place(PIECES, PIECE, swap_for_rows(PIECES))


@cache
def products(
    dtype: str,
    TA: int,
    TB: int,
    DEPTH: int,
    A_PIECES: int,
    a_along: bool,
    B_PIECES: int,
    b_along: bool,
) -> Any:
    """(begin_a, begin_b, add_products): acc[m, n] += 16 x DEPTH of a times DEPTH x 8 of b.

    The sum runs along the lines of a tile, or down its rows. add_products(ring, a_at, b_at, acc)
    takes what begin_a(line, piece) and begin_b give, plus where their tiles start.
    """
    A_REGISTERS = (TA, 4)
    mma = MMA[dtype]
    begin_a, load_a = square(A_PIECES, a_along, a_along)
    begin_b, load_b = square(B_PIECES, b_along, not b_along)

    @cuda.jit(device=True)
    def add_products(ring, a_at, b_at, acc):
        ar = cuda.local.array(A_REGISTERS, uint32)
        for i in range(DEPTH // 16):
            for m in range(TA):
                r = (
                    load_a(ring, a_at, 16 * m, 2 * i)
                    if a_along
                    else load_a(ring, a_at, 16 * i, 2 * m)
                )
                ar[m, 0], ar[m, 1], ar[m, 2], ar[m, 3] = r
            for k in range(TB // 2):
                r = (
                    load_b(ring, b_at, 16 * k, 2 * i)
                    if b_along
                    else load_b(ring, b_at, 16 * i, 2 * k)
                )
                for m in range(TA):
                    for h in range(2):
                        c = acc[m, 2 * k + h]
                        c[0], c[1], c[2], c[3] = mma(
                            ar[m, 0],
                            ar[m, 1],
                            ar[m, 2],
                            ar[m, 3],
                            r[2 * h],
                            r[2 * h + 1],
                            c[0],
                            c[1],
                            c[2],
                            c[3],
                        )

    return begin_a, begin_b, add_products


@cache
def square(PIECES: int, along: bool, down_first: bool) -> tuple[Any, Any]:
    """(begin, load) for the registers of 16 x 16 values of a tile, as an mma takes them.

    begin(line, piece) is where the lane reads in the square there, load(tile, at, line, piece)
    reads that of the square further on. The quarters come down first or across first, each turned
    over where the sum runs down.
    """
    load_matrices = ldmatrix_x4 if along else ldmatrix_x4_trans
    place_in, move = places(PIECES)

    @cuda.jit(device=True)
    def begin(line, piece):
        lane = uint32(cuda.threadIdx.x) % 32
        quarter = lane // 8
        down = quarter % 2 if down_first else quarter // 2
        across = quarter // 2 if down_first else quarter % 2
        return place_in(line + lane % 8 + 8 * down, piece + across)

    @cuda.jit(device=True)
    def load(tile, at, line, piece):
        return load_matrices(tile, move(at, line, piece))

    return begin, load


@cache
def store(dtype: str, TA: int, TB: int, wide: bool) -> Any:
    """y[top + ., left + .] = acc, where that lies before the edges; y is of one axis.

    Two neighbours at once where `wide`: then y is of uint32, a pair each.
    """
    pack = PACK[dtype]

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(TA):
            for n in range(TB):
                for h in range(2):
                    row = top + 16 * m + row_of(lane, 2 * h)
                    column = left + 8 * n + column_of(lane, 0)
                    pair = pack(acc[m, n, 2 * h], acc[m, n, 2 * h + 1])
                    at = row * columns + column
                    if row < rows and column < columns:
                        if wide:
                            y[at // 2] = pair
                        else:
                            y[at] = uint16(pair & uint32(0xFFFF))
                            if column + 1 < columns:
                                y[at + 1] = uint16(pair >> uint32(16))

    return store_tile


# PTX ISA, "Matrix Fragments for mma.m16n8k16": where value i of a 16 x 8 result stands.


@cuda.jit(device=True)
def row_of(lane, i):
    return lane // 4 + i // 2 * 8


@cuda.jit(device=True)
def column_of(lane, i):
    return lane % 4 * 2 + i % 2
