"""Sums that the blocks of a cluster have parts of: added in the order of the blocks.

Each leaves its part in its own shared memory, as its lanes hold it, their 16 bytes side by side.
The first blocks then take a slice each, and read it in the memory of all of them; so a sum
has the same bits in every run, and none of it goes through global memory.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.ptx import ALIGNMENT, cluster_sync, load_4xf32_at, store_4xf32


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


@cuda.jit(device=True)
def meet():
    """For a warp that has no part of the sums."""
    cluster_sync()
    cluster_sync()
