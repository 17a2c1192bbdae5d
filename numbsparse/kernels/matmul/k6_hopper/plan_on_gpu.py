"""Records of forward and input_grad that only the GPU can write.

Those of a layout made on a GPU are those of `plan`, but neighbouring strips are a group, whatever
they keep: which strips meet the same inputs would take longer to find out than the product takes. A
warp writes the steps of a group; it goes through the words of bits of the group's lines, 32 inputs
at a time, whose blocks its lanes look up at once. Where a strip is a group of its own and a step
one block of it, a thread writes the step.

Of gates that only the GPU knows, records of 16 bits and a long batch leave out blocks whose gate is
zero. A block of threads reads the steps of a group; a thread looks at the gates of a step. The
inputs that are left of some steps are put into as few as they fit in, by one thread, and written by
all. So the copies, products and steps of what is zero are saved; what is not is another grouping of
the strips. This launch before the product takes less time there than what `gated` does in it, which
leaves as many steps as any block of theirs is left: of 4,096 rows and blocks of 32 in float16, half
of the gates zero, an H200 took 0.74 of the time of all blocks, against 0.89. Other blocks of
threads of it write blocks times their gates meanwhile. Another launch deals tiles anew where x is
small; the last block of threads to end could do so too, and took 3 to 8 us longer.

It is for products of more than FEW multiply-adds of all blocks, by their size. Gates all one, half
of them zero, and all other numbers, took with gates read in the kernel, and so, times as long as no
gates (H200, 8,192 features, density 0.1): with 512 rows and blocks of 32 1.08, 0.88 and 1.94, and
1.41, 1.16 and 1.51; 1,024 rows 1.11, 0.90 and 1.84, and 1.19, 0.92 and 1.20, in blocks of 128 1.02,
0.86 and 1.91, and 1.26, 0.99 and 1.45; 4,096 rows 0.99, 0.73 and 2.22, and 1.04, 0.80 and 1.11.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import bits_below, entry_of
from numbsparse.kernels.gates import DEEP, scaling_pieces
from numbsparse.kernels.matmul.k6_hopper.plan import (
    BEFORE,
    EDGE,
    LAST,
    MOST,
    READ_AHEAD,
    SCALED,
    Plan,
    Tile,
    steps_of,
)
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.plans_on_gpu import LengthsOnGPU, kept_by, next_kept, schedule_on_gpu
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    shfl_idx,
    sync_warp,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index

# Bytes of x up to which tiles are dealt anew of what gates leave. Of half of the blocks, 2,048 rows
# of 8,192 features, the longest place else has 1.1 to 1.3 times the mean; an H200 took 1.04 to 1.14
# times as long. Of more x a place out of turn does not find it in the L2 cache.
CACHED = 48 << 20
LONE = 32 if SIMULATED else 128  # threads of a group that is one strip
THREADS, RUN = (32, 8) if SIMULATED else (512, 16)  # steps at once; those that a thread packs


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
    if tile.BLOCKS == 1:
        launch(lone_steps_kernel(tile), groups, LONE, *walk, edge, *out)
        return records, strips, lengths
    launch(steps_kernel(tile), groups, 32, *bits, walk.indptr, walk.blocks, edge, *out)
    return records, strips, lengths


@cache
def lone_steps_kernel(tile: Tile) -> Any:
    """With a warp for a group the plan took 12 to 35 us, not 2 (8,192 features, B = 128, H200)."""
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
        named = cuda.local.array(COLUMNS, int32)  # the blocks at the input 32 at + lane
        # As if each block had a step of its own, and each group one more.
        first = indptr[line] * (ACROSS * PARTS) + group
        first += (indptr[line + 1] - indptr[line]) * (across * PARTS)
        step, place, taken = first, 0, 0
        kept, x_tile, block = uint32(0), uint32(0), uint32(0)
        for at in range(words.shape[1]):
            masks, there = kept_by(words, line, COLUMNS, at)
            for c in range(COLUMNS):
                named[c] = 0
                if masks >> uint32(c) & uint32(1):
                    named[c] = blocks[entry_of(words, before, indptr, line + c, at * 32 + lane)]
            sync_warp()  # else shuffles gave other blocks (H200)
            while there != 0:
                bit, columns, there = next_kept(there, masks)
                count, x, entry = int32(cuda.popc(columns)), at * 32 + bit, int32(0)
                for c in range(COLUMNS):
                    of_column = shfl_idx(named[c], uint32(bit))
                    entry = of_column if lane % COLUMNS == c else entry
                for part in range(PARTS):
                    if place == INPUTS or taken + count > BLOCKS:
                        finish(records, step, kept, place, taken, x_tile, block, uint32(0))
                        step, place, taken, kept = step + 1, 0, 0, uint32(0)
                    if lane // COLUMNS == place:
                        x_tile = uint32(x * PARTS + part)
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


def steps_wanted(
    plan: Plan,
    tile: Tile,
    index: Index,
    values: DeviceArray,
    gates: DeviceArray,
    x: DeviceArray,
    row_tiles: int,
    units: int,
) -> tuple[Plan, list[DeviceArray]]:
    """(the plan with no more steps in any tile, [w, w times its gates]).

    Blocks whose gate is one are not written to the latter, and read from w: one launch does both.
    row_tiles, units : tiles of rows, and to how many units all tiles are dealt
    """
    scaled, groups = empty(values.shape, values.dtype), len(plan.strips)
    piece, width = BYTES // values.itemsize, values.shape[1] * values.shape[2]
    grid = groups + -(-values.size // (piece * THREADS * DEEP))
    records, tiles = empty(plan.records.shape, np.int32), empty(plan.tiles.shape, np.int32)
    lengths, made = LengthsOnGPU(groups), index.made is not None
    before = plan.records.view(np.uint32), plan.tiles, gates, records.view(np.uint32), tiles
    after = values.span, index.rows.blocks, (width // piece).bit_length() - 1, scaled.span
    launch(
        *(wanted_kernel(tile, values.dtype.name), grid, THREADS, *before),
        *(lengths.starts, lengths.steps, *after),
        overlap=not made,  # whose plan a kernel may just have written
    )
    plan = plan._replace(records=records, tiles=tiles)
    if x.size * x.itemsize <= CACHED:
        tiles, starts = schedule_on_gpu(index, lengths, row_tiles, units)
        plan = plan._replace(tiles=tiles, tile_starts=starts)
    return plan, [values, scaled]


@cache
def wanted_kernel(tile: Tile, dtype: str) -> Any:
    """A block of threads for each group, and those after them scale blocks.

    steps : the records of THREADS steps; their blocks become SCALED where their gate is not one
    left : of each of these INPUTS masks of the strips that its inputs meet, COLUMNS bits each
    begins : the entry, input e of step i as i * INPUTS + e, with which each new step begins; of
        each run of RUN steps on its own, and where the last of these ends

    All that the plan says of the first steps is read while the kernel before may still run.
    """
    SHARES, SHARE, INPUTS, COLUMNS = tile.SHARES, tile.SHARE, tile.INPUTS, tile.COLUMNS
    FIRST_INPUT, FIRST_BLOCK, OF_BLOCK = SHARES + 1, SHARES + 1 + INPUTS, tile.PARTS * tile.ACROSS
    OWN, ALL, BLOCKS, RUNS = (1 << SHARE) - 1, (1 << COLUMNS) - 1, tile.BLOCKS, THREADS // RUN
    RECORD, STEPS, ENDS = tile.RECORD, (tile.RECORD, THREADS), RUNS * (RUN + 1)
    scale = scaling_pieces(dtype, sparing=True)

    @cuda.jit(device=True)
    def read(records, step, end, steps):
        t = cuda.threadIdx.x
        for e in range(RECORD):
            steps[e, t] = records[step, e] if step < end else uint32(0)

    @cuda.jit(device=True)
    def wanted_of(steps, gates):
        t, wanted, left, met = cuda.threadIdx.x, uint32(0), uint32(0), uint32(0)
        own, count = cuda.local.array(BLOCKS, float32), steps[SHARES, t] >> 8
        for b in range(BLOCKS):  # behind those of the step there may be anything
            kept = steps[FIRST_BLOCK + b, t] & uint32(EDGE - 1) if b < count else uint32(0)
            own[b] = gates[int32(kept) // OF_BLOCK]
        for b in range(BLOCKS):
            if own[b] != 0:
                wanted = uint32(wanted | uint32(1 << b))
            if own[b] != 1:
                steps[FIRST_BLOCK + b, t] |= uint32(SCALED)
        for s in range(SHARES):
            mask = uint32(steps[s, t])
            for bit in range(INPUTS * SHARE):
                if mask >> uint32(bit) & uint32(1):
                    there = uint32(wanted >> met & uint32(1))
                    strip = bit // SHARE * COLUMNS + s * SHARE + bit % SHARE
                    left = uint32(left | there << uint32(strip))
                    met = uint32(met + uint32(1))
        return left

    @cuda.jit(device=True)
    def pack(left, begin, end, begins):
        n, place, taken = 0, INPUTS, 0
        for i in range(begin, end):
            masks = uint32(left[i])
            for e in range(INPUTS):
                strips = uint32(masks >> uint32(e * COLUMNS) & uint32(ALL))
                many = int32(cuda.popc(strips))
                if many:
                    if place == INPUTS or taken + many > BLOCKS:
                        begins[n] = i * INPUTS + e
                        n, place, taken = n + 1, 0, 0
                    place, taken = place + 1, taken + many
        begins[n] = end * INPUTS
        return n

    @cuda.jit(device=True)
    def write(steps, left, begin, end, s, record):
        """A share of a new step, of these entries; the first one also what all have in common."""
        own, before, place, taken = uint32(0), 0, 0, 0
        for entry in range(begin, end):
            i, e = entry // INPUTS, entry % INPUTS
            strips = uint32(left[i] >> uint32(e * COLUMNS) & uint32(ALL))
            if strips:
                if s == 0:
                    record[FIRST_INPUT + place] = steps[FIRST_INPUT + e, i]
                mine = uint32(strips >> uint32(s * SHARE) & uint32(OWN))
                own = uint32(own | mine << uint32(place * SHARE))
                before += int32(cuda.popc(uint32(strips & uint32((1 << s * SHARE) - 1))))
                place, taken = place + 1, taken + int32(cuda.popc(strips))
        if s == 0:
            record[SHARES] = uint32(place + 256 * taken)
        record[s] = uint32(own | uint32(before << BEFORE))
        for entry in range(begin, end):
            i, e = entry // INPUTS, entry % INPUTS
            mask = uint32(steps[s, i])
            for g in range(SHARE):
                if left[i] >> uint32(e * COLUMNS + s * SHARE + g) & uint32(1):
                    below = uint32(mask & uint32((1 << e * SHARE + g) - 1))
                    at = int32(mask >> uint32(BEFORE) & uint32(MOST)) + int32(cuda.popc(below))
                    record[FIRST_BLOCK + before] = steps[FIRST_BLOCK + at, i]
                    before += 1

    @cuda.jit
    def kernel(
        records, tiles, gates, wanted, ending, starts, lengths, values, where, shift, scaled
    ):  # fmt: skip
        steps, left = cuda.shared.array(STEPS, uint32), cuda.shared.array(THREADS, uint32)
        begins, span = cuda.shared.array(ENDS, int32), cuda.shared.array(2, int32)
        counts = cuda.shared.array(RUNS, int32)  # new steps of each run
        group, t, groups = cuda.blockIdx.x, cuda.threadIdx.x, starts.size
        let_next_kernel_start()
        if group >= groups:
            wait_for_earlier_kernels()
            first = (group - groups) * (THREADS * DEEP) + t
            scale(values, where, gates, gates, 1, shift, scaled, first, THREADS)
            return
        for i in range(t, tiles.shape[0], THREADS):
            if tiles[i, 0] == group and tiles[i, 1] == 0:
                span[0], span[1] = tiles[i, 2], tiles[i, 3]
        cuda.syncthreads()
        first, end = span[0], span[1]
        done = first
        read(records, first + t, end, steps)
        wait_for_earlier_kernels()
        for chunk in range(first, end, THREADS):
            if chunk > first:
                read(records, chunk + t, end, steps)
            left[t] = wanted_of(steps, gates) if chunk + t < end else uint32(0)
            cuda.syncthreads()
            if t % RUN == 0:  # threads of several warps, which do not wait for each other
                run, last = t // RUN, min(t + RUN, end - chunk)
                counts[run] = pack(left, t, last, begins[run * (RUN + 1) :])
            cuda.syncthreads()
            for item in range(t, THREADS * SHARES, THREADS):
                run, k, s = item // (RUN * SHARES), item // SHARES % RUN, item % SHARES
                if k < counts[run]:
                    to, at = done + k, run * (RUN + 1) + k
                    for other in range(run):
                        to += counts[other]
                    write(steps, left, begins[at], begins[at + 1], s, wanted[to])
            for run in range(RUNS):
                done += counts[run]
            cuda.syncthreads()
        if done == first and t <= SHARES:  # a step of nothing
            wanted[first, t] = uint32(0)
        done = max(done, first + 1)
        if t < SHARES:
            wanted[done - 1, t] |= uint32(LAST)
        if t == 0:
            starts[group], lengths[group] = first, done - first
        for i in range(t, tiles.shape[0], THREADS):
            if tiles[i, 0] == group:
                ending[i, 0], ending[i, 1] = group, tiles[i, 1]
                ending[i, 2], ending[i, 3] = first, done

    return kernel
