"""Pieces of a sum that many blocks of threads have: added in their order, in one place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.parts import fragments as halves
from numbsparse.kernels.ptx import (
    add_release,
    load_4xf32,
    load_acquire,
    store_2xu32,
    store_4xf32,
)

RUN = 4  # values that a thread takes at once
AHEAD = 6  # of those, loads under way


@cache
def add_in_turn(arithmetic: str, B: int, THREADS: int, PARTS: int = 1) -> Any:
    """add(sums, blocks, first, count, piece, pieces, totals, turns, number, dvalues).

    `sums`, in shared memory, has a piece of `count` blocks of B x B values; `blocks` names them,
    from item `first` on, as `walks.entries` counts parts of kept blocks, negative where there is
    none. `totals` takes the sum of the pieces so far, and `dvalues` the whole sum, rounded.
    turns[number] says whose turn it is: a piece waits for those of blocks of threads that began
    before its own, so none waits for ever.
    """
    ALONG, KEPT, write = B // RUN, AHEAD * RUN, writer(arithmetic)
    RUNS, LINE = B * ALONG, PARTS * ALONG  # runs of a block, and of a line of dvalues

    @cuda.jit(device=True)
    def add(sums, blocks, first, count, piece, pieces, totals, turns, number, dvalues):
        so_far = cuda.local.array(KEPT, float32)
        places = cuda.local.array(AHEAD, int32)
        t = uint32(cuda.threadIdx.x)
        if piece > 0:
            if t == 0:
                while load_acquire(turns, number) < piece:
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
                    four = load_4xf32(totals, int64(places[k]) * RUN)
                    for i in range(RUN):
                        so_far[k * RUN + i] = four[i]
            for k in range(AHEAD):
                if places[k] >= 0:
                    a, b, c, d = load_4xf32(sums, uint32(start + k * THREADS) * RUN)
                    a, b = a + so_far[k * RUN], b + so_far[k * RUN + 1]
                    c, d = c + so_far[k * RUN + 2], d + so_far[k * RUN + 3]
                    at = int64(places[k]) * RUN
                    if piece + 1 == pieces:
                        write(dvalues, at, a, b, c, d)
                    else:
                        store_4xf32(totals, at, a, b, c, d)
            start = uint32(start + AHEAD * THREADS)
        if piece + 1 < pieces:
            cuda.syncthreads()
            if t == 0:
                add_release(turns, number, 1)

    return add


def writer(arithmetic: str) -> Any:
    """Four neighbours of dvalues, rounded to it."""
    if arithmetic not in halves.MMA:
        return store_4xf32
    pack = halves.PACK[arithmetic]

    @cuda.jit(device=True)
    def write(dvalues, at, a, b, c, d):
        store_2xu32(dvalues, at, pack(a, b), pack(c, d))

    return write


def room_for_turns(pieces: int, items: int, size: int) -> tuple[DeviceArray, DeviceArray]:
    """(totals, turns) for dvalues of this size, of which each item is cut into pieces."""
    totals = empty((size if pieces > 1 else 1,), np.float32)
    turns = empty((items,), np.int32)
    if pieces > 1:
        fill(turns, 0)
    return totals, turns
