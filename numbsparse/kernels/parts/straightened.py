"""Rows that begin anywhere, copied to rows that begin at multiples of 16 bytes.

A thread writes 16 bytes at once. It takes them from two neighbouring pieces of x, each from a
multiple of 16 bytes on, and leaves out what the row is skewed by. Where one of these is not inside
x, it copies value by value.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    load_4xu32,
    store_4xu32,
    wait_for_earlier_kernels,
)

BYTES, THREADS = 16, 32 if SIMULATED else 256  # of a piece; of a block


class Move(NamedTuple):
    """As one argument of a kernel: out[i * out_stride + j] = x[i * stride + j]."""

    total: int  # pieces of out
    pieces: int  # of a row
    width: int
    out: Any
    x: Any
    out_stride: int
    stride: int
    before: int  # values by which x begins behind a multiple of 16 bytes


def straighten(*copies: tuple[DeviceArray, DeviceArray]) -> None:
    """See `aligned.copy_matrices`; rows of x are gapless."""
    size, moves = copies[0][1].itemsize, []
    for out, x in copies:
        (rows, width), bits = x.shape, f"uint{8 * size}"
        pieces, items = -(-width * size // BYTES), rows * out.strides[0] // size
        whole = DeviceArray(out.address, (items,), bits, None, out.owner)
        strides = out.strides[0] // size, x.strides[0] // size
        before = x.address % BYTES // size
        moves.append(Move(rows * pieces, pieces, width, whole, x.span.view(bits), *strides, before))
    blocks = -(-max(move.total for move in moves) // THREADS)
    args, overlap = (moves[0], moves[-1]), copy_engine()
    launch(straightening(size, overlap), (blocks, 1, len(moves)), THREADS, *args, overlap=overlap)


@cache
def straightening(size: int, overlap: bool) -> Any:
    PER, WORD, ZERO = BYTES // size, 4 // size, uint16(0) if size == 2 else uint32(0)

    @cuda.jit
    def kernel(one, other):
        move = other if cuda.blockIdx.z else one
        p = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = p // uint32(move.pieces)
        j = int64(uint32(p - row * uint32(move.pieces))) * PER
        here, there, valid = row * move.stride + j, row * move.out_stride + j, move.width - j
        skew = uint32(uint32(here + move.before) % PER)
        first, more = here - skew, skew + min(valid, PER) > PER
        whole = first >= 0 and first + (2 * PER if more else PER) <= move.x.size
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        if p >= move.total:
            return
        if not whole:
            for k in range(PER):
                move.out[there + k] = move.x[here + k] if k < valid else ZERO
            return
        a0, a1, a2, a3 = load_4xu32(move.x, uint64(first))
        b0 = b1 = b2 = b3 = uint32(0)
        if more:
            b0, b1, b2, b3 = load_4xu32(move.x, uint64(first + PER))
        words = uint32(skew // WORD)
        if words & uint32(2):
            a0, a1, a2, a3, b0, b1 = a2, a3, b0, b1, b2, b3
        if words & uint32(1):
            a0, a1, a2, a3, b0 = a1, a2, a3, b0, b1
        if size == 2 and skew & uint32(1):
            a0, a1 = upper(a0, a1), upper(a1, a2)
            a2, a3 = upper(a2, a3), upper(a3, b0)
        a0, a1 = inside(a0, valid), inside(a1, valid - WORD)
        a2, a3 = inside(a2, valid - 2 * WORD), inside(a3, valid - 3 * WORD)
        store_4xu32(move.out, uint64(there), a0, a1, a2, a3)

    @cuda.jit(device=True)
    def inside(word, values):
        """A word of which so many values are in the row, the others 0."""
        half = uint32(word & uint32(0xFFFF)) if size == 2 and values == 1 else word
        return half if values > 0 else uint32(0)

    return kernel


@cuda.jit(device=True)
def upper(low, high):
    """The upper half of a word, and the lower one of the next."""
    return uint32(low >> uint32(16) | high << uint32(16))
