"""Producer warps, which walk the records of a plan and request the copies that each names.

A lane holds the record of one of 32 steps while those of the next 32 are under way, across tiles
too, so no step waits for its record; each is broadcast to the whole warp.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.ptx import elect, mbarrier_wait, shfl_idx


@cache
def walking(RECORD: int, STAGES: int, request: Any, FETCHERS: int = 1, CLUSTER: int = 1) -> Any:
    """walk(fetcher, records, tiles, rows, first, last, bars, *args), `rows` those of a tile: it
    does request(step, row, stage, bars, *args) for each step."""

    @cuda.jit(device=True)
    def tile_at(tiles, rows, i):
        """First row, first step and end of a tile."""
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        return int32((tiles[i, 1] * CLUSTER + rank) * rows), tiles[i, 2], tiles[i, 3]

    @cuda.jit(device=True)
    def walk(fetcher, records, tiles, rows, first, last, bars, *args):
        lane = uint32(cuda.threadIdx.x) % 32
        held = cuda.local.array(RECORD, uint32)
        coming = cuda.local.array(RECORD, uint32)
        step = cuda.local.array(RECORD, uint32)
        row, at, end = tile_at(tiles, rows, first)
        next_row, next_at, next_end = tile_at(tiles, rows, min(first + 1, last - 1))
        for e in range(RECORD):
            held[e] = uint32(records[at + lane, e])
        done = uint32(0)  # steps, by whichever fetcher
        for i in range(first, last):
            then_row, then_at, then_end = tile_at(tiles, rows, min(i + 2, last - 1))
            while at < end:
                n = uint32(min(32, end - at))
                at += 32
                for e in range(RECORD):
                    coming[e] = uint32(records[(at if at < end else next_at) + lane, e])
                k = uint32((fetcher + FETCHERS - done % FETCHERS) % FETCHERS)
                while k < n:
                    for e in range(RECORD):
                        step[e] = shfl_idx(held[e], k)
                    turn = uint32(done + k)
                    stage, phase = uint32(turn % STAGES), uint32(turn // STAGES % 2)
                    mbarrier_wait(bars, STAGES + stage, phase ^ 1)
                    if elect() != 0:
                        request(step, row, stage, bars, *args)
                    k = uint32(k + FETCHERS)
                for e in range(RECORD):
                    held[e] = coming[e]
                done = uint32(done + n)
            row, at, end = next_row, next_at, next_end
            next_row, next_at, next_end = then_row, then_at, then_end

    return walk
