"""Which sums a thread has, as `wgmma` leaves them: twos of neighbouring columns.

The sums of a warp are 16 rows of the batch by the four gates of 32 units. A thread has two rows, 8
apart, and of thread q of four are the units 8 i + 2 q and the next, i from 0 to 3: all four gates
of them, which are all that a unit takes. Twos of float32 make whole sectors of memory, 32 bytes by
four threads; of 16-bit floats two threads swap a two each, and then have fours, which do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64, uint64

from numbsparse.kernels.lstm.cell import GATES
from numbsparse.kernels.lstm.deal import B
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    load_2xu32,
    pack_bfloat2,
    pack_half2,
    shfl_xor,
    store_2xu32,
    unpack_bfloat2,
    unpack_half2,
)

COLUMNS = GATES * B  # of a line
DOWN, TWOS = 2, 4  # rows of a thread, and twos of each row and gate
PER_GATE = DOWN * TWOS * 2
SUMS = GATES * PER_GATE  # of a thread


def place_of_sum(two: int, down: int) -> int:
    """Of the first value of a two, among those of a gate."""
    return 4 * two + 2 * down


@cuda.jit(device=True)
def row_of(down):
    thread = cuda.threadIdx.x
    return int64(thread // 32 * 16 + thread % 32 // 4 + 8 * down)


@cuda.jit(device=True)
def unit_of(two):
    """The first of a two, among 32."""
    return int64(8 * two + cuda.threadIdx.x % 4 * 2)


@cuda.jit(device=True)
def unit_of_four(two):
    """The first of the four that two threads have of the twos `two` and `two + 1` after a swap."""
    q = cuda.threadIdx.x % 4
    return int64(8 * (two + q % 2) + q // 2 * 4)


@cuda.jit(device=True)
def swapped(a, b):
    """Words of the twos `two` and `two + 1`: those of a four of one of them."""
    odd = cuda.threadIdx.x % 2 != 0
    got = shfl_xor(a if odd else b, 1)
    return (got if odd else a), (b if odd else got)


@cache
def loading_two(kind: str) -> Any:
    """(array, at) -> two float32; of 16-bit floats, the array is of words."""
    unpack = unpack_bfloat2 if kind == "bf16" else unpack_half2

    @cuda.jit(device=True)
    def halves(array, at):
        return unpack(array[uint64(at >> 1)])

    @cuda.jit(device=True)
    def floats(array, at):
        a, b = load_2xu32(array, at)
        return as_float32(a), as_float32(b)

    return floats if kind == "tf32" else halves


@cache
def storing_twos(kind: str, two: int) -> Any:
    """(array, at, left, a, b, c, d): (a, b) and (c, d) are the twos `two` and `two + 1` of a row.

    They belong at item `at` + their units, those under `left`, a multiple of 8. All threads of a
    warp come.
    """
    pack = pack_bfloat2 if kind == "bf16" else pack_half2

    @cuda.jit(device=True)
    def halves(array, at, left, a, b, c, d):
        low, high = swapped(pack(a, b), pack(c, d))
        unit = unit_of_four(two)
        if unit < left:
            store_2xu32(array, (at + unit) >> 1, low, high)

    @cuda.jit(device=True)
    def floats(array, at, left, a, b, c, d):
        unit, following = unit_of(two), unit_of(two + 1)
        if unit < left:
            store_2xu32(array, at + unit, as_uint32(a), as_uint32(b))
        if following < left:
            store_2xu32(array, at + following, as_uint32(c), as_uint32(d))

    return floats if kind == "tf32" else halves
