"""Sums that the blocks of a cluster have parts of: added in the order of the blocks.

Each leaves its part in its own shared memory, as its lanes hold it, their 16 bytes side by side.
The first blocks then take a slice each, and read it in the memory of all of them; so a sum
has the same bits in every run, and none of it goes through global memory.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.parts.store import Sums
from numbsparse.kernels.ptx import ALIGNMENT, cluster_sync, load_4xf32_at, shfl_idx, store_4xf32


def part_bytes(warps: int, count: int) -> int:
    """Shared memory for `count` float32 of each lane."""
    return warps * 32 * 4 * count


@cache
def add_parts(BLOCKS: int, SLICES: int, LINES: int, TILES: int, FOURS: int) -> Any:
    """add(acc, own, warp, base): own = a slice of the sums of all blocks, where there is one.

    All threads of the cluster come here or call `meet`, after the last use of what shared memory
    holds from byte `base` on; acc (LINES, TILES, FOURS, 4) and own, with TILES / SLICES tiles or
    one more, are flat arrays of a lane. Block k of the first SLICES has the k-th of them.
    """
    OWN, COUNT = -(-TILES // SLICES), LINES * TILES * FOURS

    @cuda.jit(device=True)
    def add(acc, own, warp, base):
        floats = cuda.shared.array(0, float32, ALIGNMENT)
        lane, block = uint32(cuda.threadIdx.x) % 32, uint32(cuda.blockIdx.x) % BLOCKS
        start = uint32(base // 4 + (warp * (32 * COUNT) + lane) * 4)
        cluster_sync()  # all have read what was there
        for i in range(COUNT):
            c = acc[4 * i : 4 * i + 4]
            store_4xf32(floats, start + 128 * i, c[0], c[1], c[2], c[3])
        cluster_sync()
        if block < SLICES:
            for j in range(LINES):
                for i in range(OWN * FOURS):
                    tile = min(block * OWN + i // FOURS, TILES - 1)  # beyond it, of no meaning
                    at = uint32(start + 128 * ((j * TILES + tile) * FOURS + i % FOURS))
                    for k in range(4):
                        own[(j * OWN * FOURS + i) * 4 + k] = 0
                    for other in range(BLOCKS):
                        four = load_4xf32_at(floats, at, uint32(other))
                        for k in range(4):
                            own[(j * OWN * FOURS + i) * 4 + k] += four[k]

    return add


@cache
def joining(SPLIT: int, all_sums: Sums, own_sums: Sums) -> Any:
    """join(sums, columns, base): the slice that this block of a cluster stores, of all its blocks.

    The slice takes the first place among the sums, and its strips that of the columns, counted in
    what `own_sums` have for a block. Gives the first row of it.
    """
    TILES, STRIPS, B = all_sums.TILES, all_sums.B // 8, own_sums.B
    COLUMNS, WIDTH, ACROSS, APART = own_sums.COLUMNS, B // 8, all_sums.B // B, all_sums.APART
    OWN = all_sums.COLUMNS * TILES * STRIPS // SPLIT
    SUMS, add = 4 * OWN, add_parts(SPLIT, SPLIT, 1, SPLIT, OWN)

    @cuda.jit(device=True)
    def join(sums, columns, base):
        own, t = cuda.local.array(SUMS, float32), uint32(cuda.threadIdx.x)
        add(sums, own, shfl_idx(uint32(t // 32), 0), base)
        for k in range(SUMS):
            sums[k] = own[k]
        first = int32(cuda.blockIdx.x % SPLIT * OWN)
        for c in range(COLUMNS):
            column = columns[first // (TILES * STRIPS) + c]
            strip = first % STRIPS // WIDTH
            columns[c] = column * ACROSS + strip if column >= 0 else -1
        return first // STRIPS % TILES * APART

    return join


@cuda.jit(device=True)
def meet():
    """For a warp that has no part of the sums."""
    cluster_sync()
    cluster_sync()
