"""Pieces of a sum that many blocks of threads have, added up in their order by a kernel behind.

An item is the sum of a few kept blocks. It is cut into pieces where items are too few for the GPU.
Each piece goes to memory of its own, float32, and none waits for another.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.fragments import PACK
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    load_4xf32,
    store_2xu32,
    store_4xf32,
    wait_for_earlier_kernels,
)

RUN = 4  # values that a thread takes at once
AHEAD, ADDERS = 8, 128  # loads in flight of a thread that adds pieces up, and such threads
# In tiles: until a block of threads multiplies; the kernel behind; a value that is saved and read.
BEGIN, BEHIND, SAVED = 1.0, 1.5, 1.3e-6


class Sums(NamedTuple):
    """Where pieces go; one argument of a kernel."""

    pieces: int  # of each item
    saved: DeviceArray  # float32: all values of the first pieces, of the second ones, and so on
    result: DeviceArray  # along one axis, where there is one piece


def sums_into(result: DeviceArray, pieces: int) -> Sums:
    saved = empty((pieces * result.size if pieces > 1 else 1,), np.float32)
    return Sums(pieces, saved, result.span)


@lru_cache(maxsize=1024)
def pieces_of(items: int, tiles: int, places: int, values: int) -> int:
    """Into how many pieces to cut each item of `tiles` tiles, so that all end soonest.

    Blocks of threads run side by side, one in each of the places. All items have so many values.
    """

    def time(pieces: int) -> float:
        rounds = -(-items * pieces // places)
        adding = BEHIND + SAVED * pieces * values if pieces > 1 else 0
        return rounds * (BEGIN - (-tiles // pieces)) + adding

    return min(range(1, max(1, min(tiles, places)) + 1), key=time)


@cache
def place_in_block(B: int) -> Any:
    """place(line, column) in a block of shared memory: lanes that write lines of a column, one or
    four of them on, use other banks."""
    ALONG = B // RUN

    @cuda.jit(device=True)
    def place(line, column):
        run = column // RUN ^ (line + line // 8) % ALONG
        return uint32((line * ALONG + run) * RUN + column % RUN)

    return place


@cache
def leave_piece(dtype: str, B: int, THREADS: int, PARTS: int = 1) -> Any:
    """leave(own, slices, blocks, first, count, piece, sums), for a result of this dtype.

    own : in shared memory, by `place_in_block`, `count` blocks; so often, to be added up
    blocks : from item `first` on, which of the blocks of the result they are, where those are of
        PARTS * B x PARTS * B values: (block * PARTS + row) * PARTS + column, negative where none
    """
    ALONG, write, in_block = B // RUN, _writer(dtype), place_in_block(B)
    RUNS, LINE = B * ALONG, PARTS * ALONG  # runs of a block, and of a line of the result

    @cuda.jit(device=True)
    def leave(own, slices, blocks, first, count, piece, sums):
        t = uint32(cuda.threadIdx.x)
        end = uint32(count * RUNS) if t < THREADS else uint32(0)
        before = int64(piece) * sums.result.size
        for run in range(t, end, THREADS):
            block, inside, place = blocks[first + run // RUNS], run % RUNS // ALONG, run % ALONG
            if block >= 0:
                line = block // PARTS * B + inside
                at = int64(line * LINE + block % PARTS * ALONG + place) * RUN
                start = uint32(run // RUNS * (B * B) + in_block(inside, place * RUN))
                a, b, c, d = load_4xf32(own, start)
                for s in range(1, slices):
                    e, f, g, h = load_4xf32(own, uint32(start + s * count * (B * B)))
                    a, b, c, d = a + e, b + f, c + g, d + h
                if sums.pieces == 1:
                    write(sums.result, at, a, b, c, d)
                else:
                    store_4xf32(sums.saved, before + at, a, b, c, d)

    return leave


def add_up(dtype: str, sums: Sums) -> None:
    """The result from its pieces, if there are several."""
    if sums.pieces > 1:
        blocks = -(-sums.result.size // (RUN * ADDERS))
        launch(adding_kernel(dtype), blocks, ADDERS, sums, overlap=True)


@cache
def adding_kernel(dtype: str) -> Any:
    write = _writer(dtype)

    @cuda.jit
    def kernel(sums):
        let_next_kernel_start()
        wait_for_earlier_kernels()
        at, size = int64(cuda.grid(1)) * RUN, sums.result.size
        if at >= size:
            return
        total, coming = cuda.local.array(RUN, float32), cuda.local.array((AHEAD, RUN), float32)
        for i in range(RUN):
            total[i] = 0
        for first in range(0, sums.pieces, AHEAD):
            for k in range(AHEAD):
                piece = min(first + k, sums.pieces - 1)  # the last one is read again
                own = coming[k]
                own[0], own[1], own[2], own[3] = load_4xf32(sums.saved, piece * size + at)
            for k in range(AHEAD):
                for i in range(RUN):
                    total[i] += coming[k, i] if first + k < sums.pieces else float32(0)
        write(sums.result, at, total[0], total[1], total[2], total[3])

    return kernel


def _writer(dtype: str) -> Any:
    """Four neighbours of the result, rounded to it."""
    if dtype == "float32":
        return store_4xf32
    pack = PACK[dtype]

    @cuda.jit(device=True)
    def write(result, at, a, b, c, d):
        store_2xu32(result, at, pack(a, b), pack(c, d))

    return write
