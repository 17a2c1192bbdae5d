"""Producer warps: kept weights and the rows that they meet, copied to shared memory step by step.

Of a block of threads one warp copies weights, one copies rows, and four warps multiply. A ring of
stages is between them: a stage is one read and its rows, and is full when it has both. The weights
of the next step are on their way before this step ends, so memory has no pause between steps. The
rows follow when all blocks of threads have written theirs of the tile: with those that were ready
early told apart, a training step took 3 % less at 18,432 units, and 2 % more at 2,048 and 4,096
(H200).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.lstm import WARPS, deal
from numbsparse.kernels.lstm.deal import BLOCKS, LINE, ROWS, SECTOR, B
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    elect,
    fence_proxy_async_global,
    fence_tensor_map,
    load_acquire,
    mbarrier_expect,
    mbarrier_wait,
    shfl_idx,
    sync_warp,
    tma_load_3d,
)

OF_WEIGHTS, OF_ROWS = WARPS, WARPS + 1  # the warps that copy
THREADS = 32 * (WARPS + 2)
SHARED, OF_EACH = 233_472, 3_072  # bytes of a multiprocessor; and that no stage of a block takes

# `engine` is (tensor maps, reads, the place's first and last of them, how many places each tile
# waits for, shared memory, its first item, barriers).


class Ring(NamedTuple):
    """Of a block of threads."""

    ITEM: int  # bytes
    transposed: bool  # when rows of the gates' gradient are copied, else rows of h
    tile: int  # rows of the batch
    tiled: bool  # whether it takes several tiles
    block: int  # units whose input gates are neighbours in memory
    exact: bool  # float32 weights in two parts, see `weights`
    alone: bool  # on its multiprocessor
    rest_first: bool  # whether a line is stored as a whole before others are told of it
    inputs: bool = False  # rows and weights of the inputs too, by maps 2 and 3

    @property
    def FEW(self) -> int:
        """Blocks of a read."""
        return deal.few_of(self.transposed, self.ITEM)

    @property
    def WEIGHTS(self) -> int:
        """Bytes of a stage's weights."""
        return (1 + self.exact) * self.FEW * B * B * self.ITEM

    @property
    def BLOCKS(self) -> int:
        """Of threads, on a multiprocessor."""
        return 1 if self.alone else BLOCKS

    @property
    def WORD(self) -> int:
        """Bytes of an item of shared memory."""
        return 4 if self.exact else 2

    @property
    def COPIES(self) -> int:
        """Of rows of a stage: see `deal.gathered`."""
        if self.block >= B:
            return 1
        return self.FEW * B * self.ITEM // LINE if self.transposed else B * self.ITEM // SECTOR

    @property
    def WIDTH(self) -> int:
        """Bytes of a line of the rows of the product."""
        return LINE if self.transposed else B * self.ITEM // self.COPIES

    @property
    def ROWS(self) -> int:
        return self.tile * (self.FEW if self.transposed else 1) * B * self.ITEM

    @property
    def GROUP(self) -> int:
        """Bytes from 8 rows of the product to the next 8: of half a tile every other 8 are none."""
        return self.WIDTH * self.tile // 8

    @property
    def AFTER(self) -> int:
        """Where the first rows of the product begin in a stage; those that are none, in weights."""
        return self.WEIGHTS - (self.GROUP if self.tile < ROWS else 0)

    @property
    def STAGE(self) -> int:
        return self.WEIGHTS + self.ROWS

    @property
    def STAGES(self) -> int:
        return 2 if SIMULATED else (SHARED // self.BLOCKS - OF_EACH) // self.STAGE


def ring_for(
    transposed: bool, itemsize: int, exact: bool, batch: int, units: int, block: int
) -> Ring:
    """For such a state; what is `exact` takes all registers."""
    tile = deal.rows_of_tile(batch, units, exact)
    alone = exact or deal.all_at_once(batch, units, tile)
    # Gates of tf32 are many bytes: if all places store them at once, the next step's rows wait.
    # 18,432 units took 0.93 of the time forward; 256 sequences of 2,048, a line each, 1.04 (H200).
    first = itemsize == 4 and not exact and not transposed
    first = first and deal.one_after_another(batch, units, tile)
    return Ring(itemsize, transposed, tile, batch > tile, block, exact, alone, first)


@cache
def copying(ring: Ring, rows: bool) -> Any:
    """copy(engine, of_steps, arrived): the weights of all reads, or the rows that they meet."""
    STAGES, STAGE = ring.STAGES, ring.STAGE // ring.WORD
    PANEL = LINE // ring.ITEM  # columns of the gates' gradient in a line
    COPIES, APART = ring.COPIES if rows else 1, ring.ROWS // ring.COPIES // ring.WORD
    SPAN = PANEL if ring.transposed and COPIES > 1 else B // COPIES  # of what a name counts
    AFTER, BYTES = (ring.WEIGHTS // ring.WORD, ring.ROWS) if rows else (0, ring.WEIGHTS)
    MAP, MAP_OF_INPUTS, NAME = (1, 3, 3) if rows else (0, 2, 0)
    INPUTS, TILED, TILE = ring.inputs, ring.tiled, ring.tile
    PANELS = rows and ring.transposed and COPIES == 1  # side by side in a box

    @cuda.jit(device=True)
    def copy(engine, of_steps, arrived):
        maps, reads, first, last, awaited, shared, base, bars = engine
        fence_tensor_map(maps[MAP])
        if INPUTS:
            fence_tensor_map(maps[MAP_OF_INPUTS])
        stage, parity, lane = uint32(0), uint32(1), cuda.threadIdx.x % 32
        waits, tops, tiles = int32(0), int32(0), awaited.size
        names, name = cuda.local.array(COPIES, int32), cuda.local.array(COPIES, int32)
        steps, row, down = of_steps
        for step in range(steps):
            first_row, tile, ready = int32(row), 0, -1  # the last tile whose rows are there
            for read in range(first, last):
                ahead = (read - first) % 32
                if ahead == 0:  # of 32 reads, one a lane
                    mine = min(read + lane, last - 1)
                    for k in range(COPIES):
                        names[k] = int32(reads[mine, NAME + k])
                    if rows:
                        waits = int32(reads[mine, 1])
                    if rows and TILED:
                        tops = int32(reads[mine, 2])
                for k in range(COPIES):
                    name[k] = shfl_idx(names[k], uint32(ahead))
                if rows:
                    wait = shfl_idx(waits, uint32(ahead)) != 0
                    if TILED:
                        top = shfl_idx(tops, uint32(ahead))
                        first_row, tile = int32(row + top), top // TILE
                    if wait and step > 0 and tile > ready:
                        wait_for_all(arrived, (step - 1) * tiles + tile, awaited[tile])
                        ready = tile
                mbarrier_wait(bars, STAGES + stage, parity)
                if elect() != 0:
                    at, of_inputs = uint32(base + stage * STAGE + AFTER), INPUTS and name[0] < 0
                    mbarrier_expect(bars, stage, uint32(BYTES))
                    for k in range(COPIES):
                        own = int32(~name[k]) if of_inputs else name[k]
                        x, y, z = int32(0), int32(0), own  # of weights
                        if rows:
                            x, y, z = int32(own * SPAN), first_row, int32(0)
                            if PANELS:
                                x, z = int32(0), int32(own * SPAN // PANEL)
                        if of_inputs:
                            tma_load_3d(shared, at, maps[MAP_OF_INPUTS], x, y, z, bars, stage)
                        else:
                            tma_load_3d(shared, at, maps[MAP], x, y, z, bars, stage)
                        at += uint32(APART)
                stage, parity = following(stage, parity, STAGES)
            row += down

    return copy


@cuda.jit(device=True)
def wait_for_all(arrived, i, places):
    """Until so many places have written what counter i counts."""
    if cuda.threadIdx.x % 32 == 0:
        while load_acquire(arrived, i) < places:
            pass
    sync_warp()
    fence_proxy_async_global()
