"""The records of forward and input_grad for a layout made on a GPU, written there.

They are those of `plan`, but neighbouring strips are a group, whatever they keep: which strips
meet the same inputs would take longer to find out than the product takes. A warp writes the steps
of a group; it goes through the words of bits of the group's lines, 32 inputs at a time. Where a
strip is a group of its own, each step is a part of a block, and a thread writes it.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import bits_below, entry_of
from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, EDGE, LAST, READ_AHEAD, Tile, steps_of
from numbsparse.kernels.parts.deal_on_gpu import LengthsOnGPU
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.walk_on_gpu import kept_by, next_kept
from numbsparse.layout import Index

LONE = 32 if SIMULATED else 128  # threads of a group that is one strip


@on_gpu_of(steps_of)
def steps_on_gpu(
    index: Index, transposed: bool, tile: Tile, ragged: bool
) -> tuple[DeviceArray, DeviceArray, LengthsOnGPU]:
    made, walk = index.made, index.rows if transposed else index.columns
    bits = made.rows if transposed else made.columns
    inputs = (index.columns if transposed else index.rows).indptr.size - 1
    groups = -(-(walk.indptr.size - 1) * tile.ACROSS // tile.COLUMNS)
    most = index.block_rows.size * tile.ACROSS * tile.PARTS + groups + READ_AHEAD
    records, lengths = empty((most, tile.RECORD), np.int32), LengthsOnGPU(groups)
    strips = empty((groups, tile.COLUMNS), np.int32)
    out = records.view(np.uint32), strips, lengths.starts, lengths.steps
    edge = inputs - 1 if ragged else -1
    if tile.COLUMNS == 1:
        launch(lone_steps_kernel(tile), groups, LONE, *walk, edge, *out)
        return records, strips, lengths
    launch(steps_kernel(tile), groups, 32, *bits, walk.indptr, walk.blocks, edge, *out)
    return records, strips, lengths


@cache
def lone_steps_kernel(tile: Tile) -> Any:
    PARTS, ACROSS = tile.PARTS, tile.ACROSS

    @cuda.jit
    def kernel(indptr, inputs, blocks, edge, records, strips, starts, steps):
        group, t = cuda.blockIdx.x, cuda.threadIdx.x
        line, across = group // ACROSS, group % ACROSS
        begin = indptr[line]
        parts = (indptr[line + 1] - begin) * PARTS
        first, many = begin * (ACROSS * PARTS) + group + parts * across, max(parts, 1)
        for i in range(t, many, cuda.blockDim.x):
            last = uint32(LAST if i == many - 1 else 0)
            records[first + i, 0], records[first + i, 1] = last, 0
            if parts > 0:
                x, part = inputs[begin + i // PARTS], i % PARTS
                block = uint32((blocks[begin + i // PARTS] * ACROSS + across) * PARTS + part)
                records[first + i, 0], records[first + i, 1] = uint32(last | uint32(1)), 1 + 256
                records[first + i, 2] = x * PARTS + part
                records[first + i, 3] = uint32(block | uint32(EDGE)) if x == edge else block
        if t == 0:
            strips[group, 0], starts[group], steps[group] = group, first, many

    return kernel


@cache
def steps_kernel(tile: Tile) -> Any:
    COLUMNS, INPUTS, BLOCKS, PARTS = tile.COLUMNS, tile.INPUTS, tile.BLOCKS, tile.PARTS
    ACROSS, finish = tile.ACROSS, finishing(tile)

    @cuda.jit
    def kernel(words, before, indptr, blocks, edge, records, strips, starts, steps):
        group, lane, lines = cuda.blockIdx.x, cuda.threadIdx.x, words.shape[0]
        line, across = group * COLUMNS // ACROSS, group * COLUMNS % ACROSS
        if lane < COLUMNS:
            strip = group * COLUMNS + lane
            strips[group, lane] = strip if strip < lines * ACROSS else -1
        own = line + lane % COLUMNS  # of this lane's blocks
        # As if each block had a step of its own, and each group one more.
        first = indptr[line] * (ACROSS * PARTS) + group
        first += (indptr[line + 1] - indptr[line]) * (across * PARTS)
        step, place, taken = first, 0, 0
        kept, x_tile, block = uint32(0), uint32(0), uint32(0)
        for at in range(words.shape[1]):
            masks, there = kept_by(words, line, COLUMNS, at)
            while there != 0:
                bit, columns, there = next_kept(there, masks)
                count, x = int32(cuda.popc(columns)), at * 32 + bit
                for part in range(PARTS):
                    if place == INPUTS or taken + count > BLOCKS:
                        finish(records, step, kept, place, taken, x_tile, block, uint32(0))
                        step, place, taken, kept = step + 1, 0, 0, uint32(0)
                    if lane // COLUMNS == place:
                        x_tile = uint32(x * PARTS + part)
                        if columns >> uint32(lane % COLUMNS) & uint32(1):
                            entry = blocks[entry_of(words, before, indptr, own, x)]
                            block = uint32((entry * ACROSS + across) * PARTS + part)
                            if x == edge:
                                block = uint32(block | uint32(EDGE))
                    kept = uint32(kept | uint32(columns << uint32(place * COLUMNS)))
                    place, taken = place + 1, taken + count
        finish(records, step, kept, place, taken, x_tile, block, uint32(LAST))
        if lane == 0:
            starts[group], steps[group] = first, step + 1 - first

    return kernel


@cache
def finishing(tile: Tile) -> Any:
    """finish(records, step, kept, place, taken, x_tile, block, last): the record of a step.

    kept : bit e * COLUMNS + c where column c has a block at the e-th of `place` inputs, and lane
        e * COLUMNS + c knows that input's tile of x, and the block
    """
    COLUMNS, INPUTS, SHARES, SHARE = tile.COLUMNS, tile.INPUTS, tile.SHARES, tile.SHARE
    BITS, FIRST_BLOCK = tile.INPUTS * tile.COLUMNS, tile.SHARES + 1 + tile.INPUTS
    EACH = sum(1 << e * COLUMNS for e in range(INPUTS))  # the first column at each input
    OWN = (1 << SHARE) - 1

    @cuda.jit(device=True)
    def blocks_before(kept, share):
        """Those of the shares before this one."""
        return int32(cuda.popc(uint32(kept & uint32(((1 << share * SHARE) - 1) * EACH))))

    @cuda.jit(device=True)
    def finish(records, step, kept, place, taken, x_tile, block, last):
        lane = int32(cuda.threadIdx.x)
        if lane < SHARES:
            mask = uint32(uint32(blocks_before(kept, lane) << BEFORE) | last)
            for e in range(INPUTS):
                own = uint32(kept >> uint32(e * COLUMNS + lane * SHARE)) & uint32(OWN)
                mask = uint32(mask | uint32(own << uint32(e * SHARE)))
            records[step, lane] = mask
        if lane == 0:
            records[step, SHARES] = uint32(place + 256 * taken)
        if lane % COLUMNS == 0 and lane // COLUMNS < place:
            records[step, SHARES + 1 + lane // COLUMNS] = x_tile
        if lane < BITS and kept >> uint32(lane) & uint32(1):
            share = lane % COLUMNS // SHARE
            own = uint32(kept & uint32((OWN << share * SHARE) * EACH))
            slot = blocks_before(kept, share) + bits_below(own, lane)
            records[step, FIRST_BLOCK + slot] = block

    return finish
