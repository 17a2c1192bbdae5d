"""Where the factors of several products lie, and where their sums go."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.conv.k4_wgmma.tiles import PIXELS
from numbsparse.kernels.ptx import to_local


def places_from(u: int, units: int) -> Any:
    """The places of both factors of the units from u on, as a tuple of two words for each."""

    @cuda.jit(device=True)
    def last(words, x_at, dy_at):
        return uint32(words[u] + x_at), dy_at

    if u + 1 == units:
        return last
    rest = places_from(u + 1, units)

    @cuda.jit(device=True)
    def placed(words, x_at, dy_at):
        return uint32(words[u] + x_at), dy_at, *rest(words, x_at, dy_at)

    return placed


@cache
def gather_units(B: int, UNITS: int) -> Any:
    """The sums of all warpgroups to shared memory; of those that share a unit, in order."""
    COUNT = UNITS * B // 2

    @cuda.jit(device=True)
    def gather(acc, sums, slices, group, part, mine):
        results = cuda.local.array(COUNT, float32)
        to_local(acc, results)
        t = uint32(cuda.threadIdx.x)
        # In the accumulators, strips of 8 columns, lane 4 r + q of warp w holds columns 2 q and
        # 2 q + 1 of rows 16 w + r and r + 8.
        row, column = t // 32 % 4 * 16 + t % 32 // 4, t % 4 * 2
        for s in range(slices):
            cuda.syncthreads()
            if s == part:
                for u in range(UNITS):
                    if u < mine:
                        for i in range(B // 2):
                            line = row + i // 2 % 2 * 8
                            at = (group * UNITS + u) * (PIXELS * B) + line * B
                            at += column + i // 4 * 8 + i % 2
                            if s == 0:
                                sums[at] = results[u * (B // 2) + i]
                            else:
                                sums[at] += results[u * (B // 2) + i]
        cuda.syncthreads()

    return gather
