"""Pieces of the sums of a weight-gradient: how many, and what a block of threads leaves of one.

An item is the sum of a few kept blocks. It is cut into pieces where items are too few for the GPU.
Each piece goes to memory of its own, float32, and none waits for another.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.parts.pieces import writing
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.ptx import load_4xf32, store_4xf32

RUN = 4  # values that a thread takes at once
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
    ALONG, write, in_block = B // RUN, writing(KINDS.get(dtype)), place_in_block(B)
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
