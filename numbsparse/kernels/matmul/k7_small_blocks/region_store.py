"""The sums of a region to dvalues, after those of its pieces are added up where it was cut."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.strip_store import PAIR


@cache
def storer(B: int, name: str, region: Region) -> Any:
    """The sums of a warp to dvalues, or to the partial sums where its region is one of several
    pieces. Its own part of shared memory lies between: which slots are taken is known too late for
    registers."""
    SLOTS, SUMS, PAIRS = region.SLOTS, B // 2, B // 4
    WARPS, pair, store = region.WARPS, PAIR[name], store_pair(B)

    @cuda.jit(device=True)
    def store_region(acc, words, item, partial, useds, places, partials, dvalues):
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        if partial >= 0:
            for i in range(SLOTS * SUMS):
                at = int64(partial) * (WARPS * SLOTS * SUMS) + warp * (SLOTS * SUMS) + i
                partials[at * 32 + lane] = acc[i]
        else:
            first = warp * (SLOTS * PAIRS)
            for i in range(SLOTS * PAIRS):
                words[(first + i) * 32 + lane] = pair(acc[2 * i], acc[2 * i + 1])
            for p in range(useds[item * WARPS + warp]):
                for i in range(PAIRS):
                    both = words[(first + p * PAIRS + i) * 32 + lane]
                    store(both, i, (item * WARPS + warp) * SLOTS + p, lane, places, dvalues)

    return store_region


@cache
def total_kernel(B: int, name: str, region: Region) -> Any:
    """The sums of the regions that were cut over the batch; a warp per slot."""
    SLOTS, SUMS = region.WARPS * region.SLOTS, B // 2
    pair, store = PAIR[name], store_pair(B)

    @cuda.jit
    def kernel(partials, pieces, cut, blocks, block_rows, block_columns, sides, dvalues):
        places = blocks, block_rows, block_columns, sides
        which, slot = cuda.blockIdx.x // SLOTS, cuda.blockIdx.x % SLOTS
        lane = uint32(cuda.threadIdx.x)
        for i in range(SUMS // 2):
            lo = hi = float32(0)
            for piece in range(pieces):
                at = (((which * pieces + piece) * SLOTS + slot) * SUMS + 2 * i) * 32 + lane
                lo += partials[at]
                hi += partials[at + 32]
            store(pair(lo, hi), i, cut[which] * SLOTS + slot, lane, places, dvalues)

    return kernel


@cache
def store_pair(B: int) -> Any:
    """Pair i of a lane's sums of 16 x B to dvalues; 0 beyond the edges."""

    @cuda.jit(device=True)
    def store(both, i, slot, lane, places, dvalues):
        blocks, block_rows, block_columns, sides = places
        half, column = i % 2, i // 2 * 8 + lane % 4 * 2
        block = blocks[2 * slot + (half if B == 8 else 0)]
        if block >= 0:
            row = lane // 4 + (half * 8 if B == 16 else 0)
            inside = block_rows[block] * B + row < sides[0]
            right = sides[1] - int64(block_columns[block]) * B - column
            lo, hi = uint16(both & uint32(0xFFFF)), uint16(both >> uint32(16))
            dvalues[block, row, column] = lo if inside and right > 0 else uint16(0)
            dvalues[block, row, column + 1] = hi if inside and right > 1 else uint16(0)

    return store
