"""Rows that begin anywhere, copied to rows that begin at multiples of 16 bytes.

A thread writes 16 bytes at once, which it takes from two neighbouring pieces of x, each from a
multiple of 16 bytes on. Of the two it leaves out what the row is skewed by. What of x is in no
whole piece inside it is read value by value.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int64, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine, multiprocessors
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    load_4xu32,
    store_4xu32,
    wait_for_earlier_kernels,
)

BYTES = 16  # of a piece
THREADS, EACH, BLOCKS = 256, 4, 4  # of a block; pieces; of a multiprocessor before EACH is more


class Move(NamedTuple):
    """As one argument of a kernel: out[i * out_stride + j] = x[i * stride + j]."""

    count: int  # pieces of out
    pieces: int  # of a row
    width: int
    out: Any
    x: Any
    out_stride: int
    stride: int
    before: int  # items by which x begins after a multiple of 16 bytes


def straighten(*copies: tuple[DeviceArray, DeviceArray]) -> None:
    """out[:] = x of one or two (out, x) of a dtype, with gapless rows; those of out are aligned,
    and what follows in their last 16 bytes may be anything."""
    if not copies:
        return
    size, moves = copies[0][1].itemsize, []
    for out, x in copies:
        (rows, width), (stride, _) = x.shape, x.strides
        pieces, items = -(-width * size // BYTES), out.strides[0] // size * rows
        whole = DeviceArray(out.address, (items,), f"uint{8 * size}", None, out.owner)
        before = x.address % BYTES // size
        strides = out.strides[0] // size, stride // size
        given = x.span.view(f"uint{8 * size}")
        moves.append(Move(rows * pieces, pieces, width, whole, given, *strides, before))
    most = max(move.count for move in moves)
    blocks = max(
        -(-most // (EACH * THREADS)), min(-(-most // THREADS), BLOCKS * multiprocessors())
    )
    kernel = straightening(size, copy_engine(), EACH, THREADS)
    launch(kernel, (blocks, 1, len(moves)), THREADS, moves[0], moves[-1], overlap=copy_engine())


@cache
def straightening(size: int, overlap: bool, EACH: int, THREADS: int) -> Any:
    PER = BYTES // size

    @cuda.jit(device=True)
    def place(p, move):
        """Row and column of the first value of a piece of out."""
        row = p // uint32(move.pieces)
        return row, int64(uint32(p - row * uint32(move.pieces))) * PER

    @cuda.jit(device=True)
    def take(p, move):
        """Two pieces of x, how many values are left out, and whether one is not inside x."""
        zero = skew = uint32(0)
        a, b, edge = (zero, zero, zero, zero), (zero, zero, zero, zero), False
        if p < move.count:
            row, j = place(p, move)
            at = row * move.stride + j
            skew = uint32(uint32(at + move.before) % PER)
            first, more = at - skew, skew + min(move.width - j, PER) > PER
            edge = first < 0 or first + (2 * PER if more else PER) > move.x.size
            if not edge:
                a = load_4xu32(move.x, uint64(first))
                if more:
                    b = load_4xu32(move.x, uint64(first + PER))
        return a, b, skew, edge

    @cuda.jit(device=True)
    def put(p, move, taken):
        (a0, a1, a2, a3), (b0, b1, b2, b3), skew, edge = taken
        words = uint32(skew * size // 4)
        if words & uint32(2):
            a0, a1, a2, a3, b0, b1 = a2, a3, b0, b1, b2, b3
        if words & uint32(1):
            a0, a1, a2, a3, b0 = a1, a2, a3, b0, b1
        if size == 2 and skew & uint32(1):
            a0, a1 = upper(a0, a1), upper(a1, a2)
            a2, a3 = upper(a2, a3), upper(a3, b0)
        if p < move.count and not edge:
            row, j = place(p, move)
            store_4xu32(move.out, uint64(row * move.out_stride + j), a0, a1, a2, a3)

    @cuda.jit
    def kernel(one, other):
        move = one
        if cuda.blockIdx.z:
            move = other
        step = uint32(cuda.gridDim.x) * uint32(THREADS)
        p = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        if EACH == 1:
            first = take(p, move)
            put(p, move, first)
            edges = 1 if first[3] else 0
        else:
            q, r, s = uint32(p + step), uint32(p + 2 * step), uint32(p + 3 * step)
            first, second, third, last = take(p, move), take(q, move), take(r, move), take(s, move)
            put(p, move, first)
            put(q, move, second)
            put(r, move, third)
            put(s, move, last)
            edges = 1 if first[3] else 0
            edges |= (2 if second[3] else 0) | (4 if third[3] else 0) | (8 if last[3] else 0)
        for k in range(EACH):
            if edges >> k & 1:
                row, j = place(uint32(p + k * step), move)
                for i in range(min(move.width - j, PER)):
                    move.out[row * move.out_stride + j + i] = move.x[row * move.stride + j + i]

    return kernel


@cuda.jit(device=True)
def upper(low, high):
    """The upper half of a word, and the lower one of the next."""
    return uint32(low >> uint32(16) | high << uint32(16))
