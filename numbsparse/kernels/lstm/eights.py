"""Which sums a thread has: wgmma leaves them in twos, memory is read and written in eights.

The sums of a warp are 16 rows of the batch by a block of columns, and a thread has two rows of
them. wgmma gives each of four threads two of every eight columns; they exchange them, and then each
has eight neighbours of a block's 32 columns: 16 bytes of 16-bit floats, 32 of float32. In memory
and until they are needed these are words, which no thread has to wait for to widen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64

from numbsparse.kernels.lstm.twos import row_of
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    load_4xu32,
    pack_bfloat2,
    pack_half2,
    shfl_xor,
    store_4xu32,
    unpack_bfloat2,
    unpack_half2,
)


@cache
def exchanging() -> Any:
    """Sums (TWOS, DOWN, 2) of a block of columns: what their places mean changes.

    Before, two number i of thread q of four are columns 8 i + 2 q and the next; after, 8 q + 2 i.
    """
    swap_near, swap_far = swapping(1), swapping(2)

    @cuda.jit(device=True)
    def exchange(sums):
        for k in range(4):
            swap_near(sums, k, k + 4)
            swap_near(sums, k + 8, k + 12)
            swap_far(sums, k, k + 8)
            swap_far(sums, k + 4, k + 12)

    return exchange


@cache
def swapping(MASK: int) -> Any:
    @cuda.jit(device=True)
    def swap(sums, i, j):
        """The j of one thread for the i of the other."""
        upper = cuda.threadIdx.x & MASK != 0
        a, b = sums[i], sums[j]
        got = shfl_xor(a if upper else b, MASK)
        sums[i] = got if upper else a
        sums[j] = b if upper else got

    return swap


@cache
def place_of(down: int) -> Any:
    """Row of the batch, and first of the eight units among 32, of a thread."""

    @cuda.jit(device=True)
    def place():
        return row_of(down), int64(cuda.threadIdx.x % 4 * 8)

    return place


def words_of(kind: str) -> int:
    """How many hold eight values, of "f16", "bf16" or "tf32", which is float32 in memory."""
    return 8 if kind == "tf32" else 4


@cache
def loading_eight(kind: str) -> Any:
    WORDS = words_of(kind)

    @cuda.jit(device=True)
    def load_eight(array, at, words, k):
        """words[k], ... = the eight values from item `at` on."""
        for i in range(0, WORDS, 4):
            a, b, c, d = load_4xu32(array, at + i)
            words[k + i], words[k + i + 1], words[k + i + 2], words[k + i + 3] = a, b, c, d

    return load_eight


@cache
def storing_eight(kind: str) -> Any:
    WORDS = words_of(kind)

    @cuda.jit(device=True)
    def store_eight(array, at, words, k):
        for i in range(0, WORDS, 4):
            k += i
            store_4xu32(array, at + i, words[k], words[k + 1], words[k + 2], words[k + 3])

    return store_eight


@cache
def taking(kind: str) -> Any:
    """Two number i of eight values in words[k], ..., as float32."""
    unpack = unpack_bfloat2 if kind == "bf16" else unpack_half2

    @cuda.jit(device=True)
    def halves(words, k, i):
        return unpack(words[k + i])

    @cuda.jit(device=True)
    def floats(words, k, i):
        return as_float32(words[k + 2 * i]), as_float32(words[k + 2 * i + 1])

    return floats if kind == "tf32" else halves


@cache
def putting(kind: str) -> Any:
    """And back."""
    pack = pack_bfloat2 if kind == "bf16" else pack_half2

    @cuda.jit(device=True)
    def halves(words, k, i, a, b):
        words[k + i] = pack(a, b)

    @cuda.jit(device=True)
    def floats(words, k, i, a, b):
        words[k + 2 * i], words[k + 2 * i + 1] = as_uint32(a), as_uint32(b)

    return floats if kind == "tf32" else halves
