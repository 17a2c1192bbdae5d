"""What each lane holds of the operands and sums of `mma.sync`, and products of tiles made of it.

`products` multiplies two tiles in shared memory, in any arithmetic: "float16", "bfloat16", or the
precision of float32 ("highest", "high"; see `fragments_tf32`). `ldmatrix` loads 16-bit values, four
matrices of 8 x 8 at once, and one mma takes 16 terms of the sum.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts import fragments_tf32
from numbsparse.kernels.parts.banks import place, swap_for_rows
from numbsparse.kernels.parts.words import PACK, UNPACK
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
)

PIECE = 8  # values in 16 bytes
MMA = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16}


@cache
def scaling(dtype: str, skips: bool = False, ragged: bool = False) -> Any:
    """scaled(word, factor): a float32, or two 16-bit values, times a float32, rounded.

    If it `skips`, 0 times infinity or NaN is 0. Where blocks are `ragged` zeros stay, whatever the
    factor: some stand for what is not there.
    """
    FLOAT32 = dtype == "float32"
    unpack, pack = UNPACK.get(dtype, UNPACK["f16"]), PACK.get(dtype, PACK["f16"])

    @cuda.jit(device=True)
    def times(value, factor):
        return value if ragged and value == 0 else value * factor

    @cuda.jit(device=True)
    def scaled(word, factor):
        if FLOAT32:
            product = as_uint32(times(as_float32(word), factor))
        else:
            low, high = unpack(word)
            product = pack(times(low, factor), times(high, factor))
        kept = uint32(0) if skips and factor == 0 else uint32(0xFFFFFFFF)  # no branch
        return uint32(product & kept)

    return scaled


class Side(NamedTuple):
    """The tile of an operand in shared memory."""

    PIECES: int  # of 16 bytes, in a line
    along: bool  # the sum runs along the lines, or else down them


class Products(NamedTuple):
    """acc[m, n] += a times b: the 16 TA x 8 TB sums of a warp.

    add(ring, a_at, b_at, acc) takes what begin_a(line, piece) and begin_b give, where a lane begins
    to read, plus where the tiles start.
    """

    TA: int
    TB: int
    a_places: Any  # see `banks`
    b_places: Any
    begin_a: Any
    begin_b: Any
    add: Any


def products(arithmetic: str, TA: int, TB: int, DEPTH: int, a: Side, b: Side) -> Products:
    """For DEPTH terms of the sum."""
    if arithmetic in MMA:
        parts = places(a.PIECES), places(b.PIECES), *products_16(arithmetic, TA, TB, DEPTH, a, b)
    else:
        of_a, of_b = fragments_tf32.places(*a, 2 * TA), fragments_tf32.places(*b, TB)
        parts = of_a, of_b, *fragments_tf32.products(arithmetic, TA, TB, DEPTH, a, b)
    return Products(TA, TB, *parts)


def arithmetic_of(x: DeviceArray, precision: str) -> str:
    """How x is multiplied: its dtype, or for float32 the precision."""
    return precision if x.itemsize == 4 else x.dtype.name


def piece_of(arithmetic: str) -> int:
    """Values in 16 bytes."""
    return PIECE if arithmetic in MMA else fragments_tf32.PIECE


def coordinates(arithmetic: str, UNITS: int) -> Any:
    """(u, g) -> where line g of unit u is, of the 8 UNITS rows or columns of a warp's sums.

    acc[m, n, i] of lane 4 g + q is line g of unit 2 m + i // 2 down, 2 q + i % 2 of unit n across.
    """
    return fragments_tf32.coordinates(1 if arithmetic in MMA else UNITS)


def places(PIECES: int) -> Any:
    return place(PIECES, PIECE, swap_for_rows(PIECES))


def products_16(dtype: str, TA: int, TB: int, DEPTH: int, a: Side, b: Side) -> tuple[Any, ...]:
    """(begin_a, begin_b, add) of `Products`, for 16-bit values."""
    begin_a, load_a = square(a.PIECES, a.along, a.along)
    along = a.along

    @cuda.jit(device=True)
    def read(ring, a_at, i, m):
        line, piece = (16 * m, 2 * i) if along else (16 * i, 2 * m)
        return load_a(ring, a_at, line, piece)

    return begin_a, *adding_16(dtype, TA, TB, DEPTH, read, b)


def adding_16(dtype: str, TA: int, TB: int, DEPTH: int, read_a: Any, b: Side) -> tuple[Any, Any]:
    """(begin_b, add); read_a(ring, a_at, i, m) gives the i-th 16 terms of a's m-th 16 lines."""
    A_REGISTERS, along = (TA, 4), b.along
    add_product, (begin_b, load_b) = adding(dtype), square(b.PIECES, along, not along)

    @cuda.jit(device=True)
    def add_products(ring, a_at, b_at, acc):
        ar = cuda.local.array(A_REGISTERS, uint32)
        for i in range(DEPTH // 16):
            for m in range(TA):
                ar[m, 0], ar[m, 1], ar[m, 2], ar[m, 3] = read_a(ring, a_at, i, m)
            for k in range(TB // 2):
                line, piece = (16 * k, 2 * i) if along else (16 * i, 2 * k)
                r = load_b(ring, b_at, line, piece)
                for m in range(TA):
                    for h in range(2):
                        add_product(ar[m], r[2 * h], r[2 * h + 1], acc[m, 2 * k + h])

    return begin_b, add_products


@cache
def adding(dtype: str) -> Any:
    """add(a, b0, b1, c): c (4,) += 16 x 16 values by 16 x 8, each lane's registers of an mma.

    For float32, as tf32, 16 x 8 by 8 x 8.
    """
    mma = MMA.get(dtype, mma_m16n8k8_tf32)

    @cuda.jit(device=True)
    def add_product(a, b0, b1, c):
        c[0], c[1], c[2], c[3] = mma(a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3])

    return add_product


@cache
def square(PIECES: int, along: bool, down_first: bool) -> tuple[Any, Any]:
    """(begin, load) for the registers of 16 x 16 values of a tile, as an mma takes them.

    begin(line, piece) is where the lane reads in the square there, load(tile, at, line, piece)
    reads that of the square further on. The quarters are loaded down or across first, each
    transposed where the sum runs down.
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
