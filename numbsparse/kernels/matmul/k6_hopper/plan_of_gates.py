"""Records of forward and input_grad without blocks whose gate is zero, for a long batch.

There this launch before the product takes less time than what `gated` does in it, which leaves as
many steps as any block of theirs is left: on an H200, of 4,096 rows and blocks of 32 in float16,
0.74 of the time of all blocks where half of the gates are zero, against 0.89.

A block of threads reads the steps of a group; a thread looks at the gates of a step. The inputs
that are left of some steps are put into as few as they fit in, by one thread, and written by all.
So the copies, products and steps of what is zero are saved; what is not is another grouping of the
strips.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.gates import scale_blocks
from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, EDGE, LAST, MOST, SCALED, Plan, Tile
from numbsparse.kernels.ptx import let_next_kernel_start
from numbsparse.layout import Index

THREADS, RUN = (32, 8) if SIMULATED else (512, 16)  # steps at once; those that a thread packs


def steps_wanted(
    plan: Plan, tile: Tile, index: Index, values: DeviceArray, gates: DeviceArray
) -> tuple[Plan, list[DeviceArray]]:
    """(the plan with no more steps in any tile, [w, w times its gates]).

    Blocks whose gate is one are not written to the latter, and read from w. It is computed beside
    the plan.
    """
    scaled = empty(values.shape, values.dtype)
    records, tiles = empty(plan.records.shape, np.int32), empty(plan.tiles.shape, np.int32)
    args = plan.records.view(np.uint32), plan.tiles, gates, records.view(np.uint32), tiles
    launch(wanted_kernel(tile), len(plan.strips), THREADS, *args)
    scale_blocks(values, index.rows.blocks, gates, gates, True, scaled, True, True)
    return plan._replace(records=records, tiles=tiles), [values, scaled]


@cache
def wanted_kernel(tile: Tile) -> Any:
    """left : of each step INPUTS masks of the strips that its inputs meet, COLUMNS bits each

    begins : the entry, input e of step i as i * INPUTS + e, with which each new step begins; of
        each run of RUN steps on its own, and where the last of these ends
    """
    SHARES, SHARE, INPUTS, COLUMNS = tile.SHARES, tile.SHARE, tile.INPUTS, tile.COLUMNS
    FIRST_INPUT, FIRST_BLOCK, OF_BLOCK = SHARES + 1, SHARES + 1 + INPUTS, tile.PARTS * tile.ACROSS
    OWN, ALL, BLOCKS, RUNS = (1 << SHARE) - 1, (1 << COLUMNS) - 1, tile.BLOCKS, THREADS // RUN
    ENDS = RUNS * (RUN + 1)

    @cuda.jit(device=True)
    def gate_of(kept, gates):
        return gates[int32(kept & uint32(EDGE - 1)) // OF_BLOCK]

    @cuda.jit(device=True)
    def wanted_of(records, step, gates):
        wanted, left, met = uint32(0), uint32(0), uint32(0)
        for b in range(BLOCKS):  # zeros behind those of the step
            if gate_of(records[step, FIRST_BLOCK + b], gates) != 0:
                wanted = uint32(wanted | uint32(1 << b))
        for s in range(SHARES):
            mask = uint32(records[step, s])
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
    def write(records, chunk, left, begin, end, s, gates, record):
        """A share of a new step, of these entries; the first one also what all have in common."""
        own, before, place, taken = uint32(0), 0, 0, 0
        for entry in range(begin, end):
            i, e = entry // INPUTS, entry % INPUTS
            strips = uint32(left[i] >> uint32(e * COLUMNS) & uint32(ALL))
            if strips:
                if s == 0:
                    record[FIRST_INPUT + place] = records[chunk + i, FIRST_INPUT + e]
                mine = uint32(strips >> uint32(s * SHARE) & uint32(OWN))
                own = uint32(own | mine << uint32(place * SHARE))
                before += int32(cuda.popc(uint32(strips & uint32((1 << s * SHARE) - 1))))
                place, taken = place + 1, taken + int32(cuda.popc(strips))
        if s == 0:
            record[SHARES] = uint32(place + 256 * taken)
        record[s] = uint32(own | uint32(before << BEFORE))
        for entry in range(begin, end):
            i, e = entry // INPUTS, entry % INPUTS
            mask = uint32(records[chunk + i, s])
            for g in range(SHARE):
                if left[i] >> uint32(e * COLUMNS + s * SHARE + g) & uint32(1):
                    below = uint32(mask & uint32((1 << e * SHARE + g) - 1))
                    at = int32(mask >> uint32(BEFORE) & uint32(MOST)) + int32(cuda.popc(below))
                    kept = records[chunk + i, FIRST_BLOCK + at]
                    if gate_of(kept, gates) != 1:
                        kept = uint32(kept | uint32(SCALED))
                    record[FIRST_BLOCK + before] = kept
                    before += 1

    @cuda.jit
    def kernel(records, tiles, gates, wanted, ending):
        left, begins = cuda.shared.array(THREADS, uint32), cuda.shared.array(ENDS, int32)
        counts = cuda.shared.array(RUNS, int32)  # new steps of each run
        span = cuda.shared.array(2, int32)
        group, t = cuda.blockIdx.x, cuda.threadIdx.x
        let_next_kernel_start()
        for i in range(t, tiles.shape[0], THREADS):
            if tiles[i, 0] == group and tiles[i, 1] == 0:
                span[0], span[1] = tiles[i, 2], tiles[i, 3]
        cuda.syncthreads()
        first, end = span[0], span[1]
        done = first
        for chunk in range(first, end, THREADS):
            left[t] = wanted_of(records, chunk + t, gates) if chunk + t < end else uint32(0)
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
                    write(records, chunk, left, begins[at], begins[at + 1], s, gates, wanted[to])
            for run in range(RUNS):
                done += counts[run]
            cuda.syncthreads()
        if done == first and t <= SHARES:  # a step of nothing
            wanted[first, t] = uint32(0)
        done = max(done, first + 1)
        if t < SHARES:
            wanted[done - 1, t] |= uint32(LAST)
        for i in range(t, tiles.shape[0], THREADS):
            if tiles[i, 0] == group:
                ending[i, 0], ending[i, 1] = group, tiles[i, 1]
                ending[i, 2], ending[i, 3] = first, done

    return kernel
