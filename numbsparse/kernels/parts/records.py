"""Producer warps, which walk the records of a plan and request the copies that each names.

A lane holds the record of one of 32 steps while those of the next 32 are under way, across tiles
too, so no step waits for its record; each is broadcast to the whole warp. Lanes may change what
they hold by what only the GPU knows, and leave steps out.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.parts.plans_on_gpu import lowest
from numbsparse.kernels.ptx import (
    elect,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    sync_warp,
    wait_for_earlier_kernels,
)


@cache
def walking(
    RECORD: int,
    STAGES: int,
    request: Any,
    FETCHERS: int = 1,
    CLUSTER: int = 1,
    AHEAD: bool = False,
    thin: Any = None,
    show: Any = None,
    MORE: int = 0,
) -> Any:
    """walk(fetcher, records, tiles, rows, first, last, bars, more, *args), `rows` those of a tile.

    Of each step request(step, row, stage, bars, *args); with `thin`, of those of which
    thin(record, is_last, more) says so, once it has changed their record and MORE numbers behind it
    (`is_last` of a tile's part): then its lane comes first with show(record, stage, *args), if any.
    Where AHEAD is, the first records are read before earlier kernels end.
    """

    THINS, ALL = thin is not None, RECORD + MORE

    @cuda.jit(device=True)
    def tile_at(tiles, rows, i):
        """First row, first step and end of a tile."""
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        return int32((tiles[i, 1] * CLUSTER + rank) * rows), tiles[i, 2], tiles[i, 3]

    @cuda.jit(device=True)
    def pass_on(held, k, step, turn, row, bars, *args):
        for e in range(RECORD):
            step[e] = shfl_idx(held[e], k)
        stage, phase = uint32(turn % STAGES), uint32(turn // STAGES % 2)
        mbarrier_wait(bars, STAGES + stage, phase ^ 1)
        if MORE:
            if uint32(cuda.threadIdx.x) % 32 == k:
                show(held, stage, *args)
            sync_warp()
        if elect() != 0:
            request(step, row, stage, bars, *args)

    @cuda.jit(device=True)
    def pass_wanted(fetcher, held, n, is_end, more, step, done, row, bars, *args):
        """The steps before the n-th that are wanted; how many they are."""
        lane, count, some = uint32(cuda.threadIdx.x) % 32, uint32(0), uint32(0)
        if lane < n:
            some = uint32(1 if thin(held, is_end and lane == n - 1, more) else 0)
        left = redux_or(uint32(some << lane))
        while left != 0:
            k = uint32(lowest(left))
            left = uint32(left & uint32(left - uint32(1)))
            turn = uint32(done + count)
            if turn % FETCHERS == fetcher:
                pass_on(held, k, step, turn, row, bars, *args)
            count = uint32(count + 1)
        return count

    @cuda.jit(device=True)
    def walk(fetcher, records, tiles, rows, first, last, bars, more, *args):
        lane = uint32(cuda.threadIdx.x) % 32
        held = cuda.local.array(ALL, uint32)
        coming = cuda.local.array(RECORD, uint32)
        step = cuda.local.array(RECORD, uint32)
        row, at, end = tile_at(tiles, rows, first)
        next_row, next_at, next_end = tile_at(tiles, rows, min(first + 1, last - 1))
        for e in range(RECORD):
            held[e] = uint32(records[at + lane, e])
        if AHEAD:
            wait_for_earlier_kernels()
        done = uint32(0)  # steps, by whichever fetcher
        for i in range(first, last):
            then_row, then_at, then_end = tile_at(tiles, rows, min(i + 2, last - 1))
            while at < end:
                n = uint32(min(32, end - at))
                at += 32
                for e in range(RECORD):
                    coming[e] = uint32(records[(at if at < end else next_at) + lane, e])
                if THINS:
                    n = pass_wanted(fetcher, held, n, at >= end, more, step, done, row, bars, *args)
                else:
                    k = uint32((fetcher + FETCHERS - done % FETCHERS) % FETCHERS)
                    while k < n:
                        pass_on(held, k, step, uint32(done + k), row, bars, *args)
                        k = uint32(k + FETCHERS)
                for e in range(RECORD):
                    held[e] = coming[e]
                done = uint32(done + n)
            row, at, end = next_row, next_at, next_end
            next_row, next_at, next_end = then_row, then_at, then_end

    return walk


def counting(thinned: bool) -> tuple[Any, Any, Any]:
    """many(word), before(word, i) and has(word, i): how many inputs or blocks a step has, how many
    of them before the i-th, and whether that. A word is their number, of what is thinned bits."""

    @cuda.jit(device=True)
    def many(word):
        return uint32(cuda.popc(word)) if thinned else word

    @cuda.jit(device=True)
    def before(word, i):
        return uint32(cuda.popc(uint32(word & uint32((1 << i) - 1)))) if thinned else i

    @cuda.jit(device=True)
    def has(word, i):
        return word >> uint32(i) & 1 != 0 if thinned else i < word

    return many, before, has
