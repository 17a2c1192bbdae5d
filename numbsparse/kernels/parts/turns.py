"""Pieces of a sum that many blocks of threads have, added in their order, in one place.

An item is the sum of a few kept blocks. It is cut into pieces where items are too few for the GPU.
The pieces of an item add to the same float32 numbers, one after another and always in the same
order: each waits for its turn, not for long, because all end at the same time.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.parts.fragments import PACK
from numbsparse.kernels.ptx import add_release, load_4xf32, load_acquire, store_2xu32, store_4xf32

RUN = 4  # values that a thread takes at once
AHEAD = 6  # of those, loads in flight
LEAST_TILES = 4  # of a piece
TURN = 2.5  # what adding a piece takes, in tiles


class Sums(NamedTuple):
    """Where pieces are added; one argument of a kernel."""

    pieces: int  # of each item
    totals: DeviceArray  # float32, like `result`: the pieces so far
    turns: DeviceArray  # int32, of each item: whose turn it is
    result: DeviceArray  # along one axis


def sums_into(result: DeviceArray, items: int, pieces: int) -> Sums:
    totals = empty((result.size if pieces > 1 else 1,), np.float32)
    turns = empty((items,), np.int32)
    if pieces > 1:
        fill(turns, 0)
    return Sums(pieces, totals, turns, result.span)


@lru_cache(maxsize=1024)
def pieces_of(items: int, tiles: int, places: int) -> int:
    """Into how many pieces to cut each item of `tiles` tiles, so that all end soonest.

    Blocks of threads run side by side, one in each of the places.
    """

    def time(pieces: int) -> float:
        waves = -(-items * pieces // places)
        return waves * -(-tiles // pieces) + TURN * pieces

    return min(range(1, max(1, tiles // LEAST_TILES) + 1), key=time)


@cache
def add_in_turn(dtype: str, B: int, THREADS: int, PARTS: int = 1) -> Any:
    """add(own, blocks, first, count, piece, number, sums), for a result of this dtype.

    own : in shared memory, a piece of `count` blocks of B x B values
    blocks : from item `first` on, which of the blocks of the result they are, where those are of
        PARTS * B x PARTS * B values: (block * PARTS + row) * PARTS + column, negative where none
    piece, number : of the item's pieces, and of the items; a piece waits for those of blocks of
        threads that began before its own, so none waits forever
    """
    ALONG, KEPT, write = B // RUN, AHEAD * RUN, _writer(dtype)
    RUNS, LINE = B * ALONG, PARTS * ALONG  # runs of a block, and of a line of the result

    @cuda.jit(device=True)
    def add(own, blocks, first, count, piece, number, sums):
        so_far = cuda.local.array(KEPT, float32)
        places = cuda.local.array(AHEAD, int32)
        t = uint32(cuda.threadIdx.x)
        if piece > 0:
            if t == 0:
                while load_acquire(sums.turns, number) < piece:
                    pass
            cuda.syncthreads()
        end = uint32(count * RUNS) if t < THREADS else uint32(0)
        start = t
        while start < end:
            for k in range(AHEAD):
                run = uint32(start + k * THREADS)
                places[k] = -1
                if run < end:
                    block = blocks[first + run // RUNS]
                    if block >= 0:
                        line = block // PARTS * B + run % RUNS // ALONG
                        places[k] = int32(line * LINE + block % PARTS * ALONG + run % ALONG)
                for i in range(RUN):
                    so_far[k * RUN + i] = 0
                if piece > 0 and places[k] >= 0:
                    four = load_4xf32(sums.totals, int64(places[k]) * RUN)
                    for i in range(RUN):
                        so_far[k * RUN + i] = four[i]
            for k in range(AHEAD):
                if places[k] >= 0:
                    a, b, c, d = load_4xf32(own, uint32(start + k * THREADS) * RUN)
                    a, b = a + so_far[k * RUN], b + so_far[k * RUN + 1]
                    c, d = c + so_far[k * RUN + 2], d + so_far[k * RUN + 3]
                    at = int64(places[k]) * RUN
                    if piece + 1 == sums.pieces:
                        write(sums.result, at, a, b, c, d)
                    else:
                        store_4xf32(sums.totals, at, a, b, c, d)
            start = uint32(start + AHEAD * THREADS)
        if piece + 1 < sums.pieces:
            cuda.syncthreads()
            if t == 0:
                add_release(sums.turns, number, 1)

    return add


def _writer(dtype: str) -> Any:
    """Four neighbours of the result, rounded to it."""
    if dtype == "float32":
        return store_4xf32
    pack = PACK[dtype]

    @cuda.jit(device=True)
    def write(result, at, a, b, c, d):
        store_2xu32(result, at, pack(a, b), pack(c, d))

    return write
