"""Gates of blocks, as only the GPU knows them.

**In the kernels themselves**, no launch before. The lanes of a producer leave blocks whose gate is
zero out of the records that they hold, 32 steps at once; steps of nothing are passed over. So what
is zero is neither copied nor multiplied, and steps are as many as any block of theirs is left. A
16-bit block whose gate is not one is multiplied by it in its stage, by the warps that read it
there; float32's are as the images are made.

**Before the kernel**, of 16 bits and a long batch: `steps_wanted`. Records leave out blocks whose
gate is zero. A block of threads reads the steps of a group; a thread looks at the gates of a step.
The inputs that are left of some steps are put into as few as they fit in, by one thread, and
written by all. So the copies, products and steps of what is zero are saved; what is not is another
grouping of the strips. This launch before the product takes less time there than what is done in
it, which leaves as many steps as any block of theirs is left: of 4,096 rows and blocks of 32 in
float16, half of the gates zero, an H200 took 0.74 of the time of all blocks, against 0.89. Other
blocks of threads of it write blocks times their gates meanwhile. Another launch deals tiles anew
where x is small; the last block of threads to end could do so too, and took 3 to 8 us longer.

It is for products of more than FEW multiply-adds of all blocks, by their size. Gates all one, half
of them zero, and all other numbers, took with gates read in the kernel, and so, times as long as no
gates (H200, 8,192 features, density 0.1): with 512 rows and blocks of 32 1.08, 0.88 and 1.94, and
1.41, 1.16 and 1.51; 1,024 rows 1.11, 0.90 and 1.84, and 1.19, 0.92 and 1.20, in blocks of 128 1.02,
0.86 and 1.91, and 1.26, 0.99 and 1.45; 4,096 rows 0.99, 0.73 and 2.22, and 1.04, 0.80 and 1.11.

**Of a weight-gradient** each warp finds out what is left of its item: panels that no block needs
are not copied, products of no block are not computed, and nothing is written where the gate is
zero. Of half of the blocks, at 8,192 features, density 0.1 and 4,096 rows, an H200 took 0.86 of the
time with blocks of 32, 0.80 with 64, in float32 0.81. Items of blocks of 128 are few and become
very uneven: there blocks of threads do not stay, so that each item goes to those that are free
first. Of 8,192 rows every other block took 0.64 of the time, drawn ones 0.79, all of them 1.01, and
of 2,048 rows 0.76, 0.87, 1.06; where blocks of threads stayed half of the blocks took 0.95.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.gates import DEEP, scaling_pieces
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as gradient
from numbsparse.kernels.matmul.k6_hopper.plan import (
    BEFORE,
    EDGE,
    LAST,
    MOST,
    SCALED,
    TO_SCALE,
    Form,
    Plan,
    Tile,
)
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.plans_on_gpu import LengthsOnGPU, schedule_on_gpu
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    fence_proxy_async,
    let_next_kernel_start,
    load_4xu32,
    mbarrier_arrive,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    store_4xu32,
    sync_warp,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index

# Bytes of x up to which tiles are dealt anew of what gates leave. Of half of the blocks, 2,048 rows
# of 8,192 features, the longest place else has 1.1 to 1.3 times the mean; an H200 took 1.04 to 1.14
# times as long. Of more x a place out of turn does not find it in the L2 cache.
CACHED = 48 << 20
THREADS, RUN = (32, 8) if SIMULATED else (512, 16)  # steps at once; those that a thread packs


@cache
def thinning(tile: Tile) -> Any:
    """thin(record, is_last, gates): whether a step has anything to do; its record is changed.

    Masks are of blocks that are left, and LAST of the last one. For the counts there are bits of
    the inputs that these meet, and from the 8th on of the blocks. Of 16 bits the gates of all
    blocks follow.
    """
    SHARES, SHARE, INPUTS, BLOCKS = tile.SHARES, tile.SHARE, tile.INPUTS, tile.BLOCKS
    FIRST_BLOCK, OF_BLOCK = tile.SHARES + 1 + tile.INPUTS, tile.PARTS * tile.ACROSS
    FIRST_GATE, IS_16_BIT, GATES = tile.RECORD, tile.ITEM == 2, gates_in(tile)
    ALL = uint32((1 << 32) - 1)

    @cuda.jit(device=True)
    def thin(record, is_last, gates):
        own, count = cuda.local.array(BLOCKS, float32), record[SHARES] >> 8
        for b in range(BLOCKS):  # behind those of the step there may be anything
            kept = record[FIRST_BLOCK + b] & uint32(EDGE - 1) if b < count else uint32(0)
            own[b] = gates[uint32(kept) // uint32(OF_BLOCK)]
        left, scaled, met, inputs = uint32(0), uint32(0), uint32(0), uint32(0)
        end = uint32(LAST if is_last else 0)
        for b in range(BLOCKS):
            if b < count:
                if own[b] != 0:
                    left = uint32(left | uint32(1 << b))
                if IS_16_BIT and own[b] != 1:
                    scaled = uint32(scaled | uint32(1 << b))
        for s in range(SHARES):
            mask, flag = record[s], uint32(0)
            before = uint32(cuda.popc(uint32(left & ~uint32(ALL << met))))
            kept = end
            for bit in range(INPUTS * SHARE):
                here = uint32(mask >> uint32(bit) & uint32(1))
                stays = uint32(here & uint32(left >> met))
                kept = uint32(kept | uint32(stays << uint32(bit)))
                inputs = uint32(inputs | uint32(stays << uint32(bit // SHARE)))
                flag = uint32(flag | stays & uint32(scaled >> met))
                met = uint32(met + here)
            record[s] = uint32(kept | uint32(before << uint32(BEFORE)) | uint32(flag * TO_SCALE))
        for b in range(GATES):
            record[FIRST_GATE + b] = as_uint32(own[b])
        record[SHARES] = uint32(inputs | uint32(left << uint32(8)))
        # One number: of `left != 0 or is_last` ptxas 13.0 makes another condition at two blocks.
        return uint32(left | end) != 0

    return thin


def gates_in(tile: Tile) -> int:
    """How many gates follow a record."""
    return tile.BLOCKS if tile.ITEM == 2 else 0


@cache
def showing(tile: Tile) -> Any:
    """show(record, stage, source, shared, base, info): the gates of a stage's blocks, if they are
    to be scaled, by the lane that has the record."""
    SHARES, BLOCKS, FIRST_GATE, FACTORS = tile.SHARES, tile.BLOCKS, tile.RECORD, tile.MASKS

    @cuda.jit(device=True)
    def show(record, stage, source, shared, base, info):
        scaled = uint32(0)
        for s in range(SHARES):
            scaled = uint32(scaled | record[s] & uint32(TO_SCALE))
        if scaled != 0:
            n = uint32(FACTORS + stage * BLOCKS)
            for b in range(BLOCKS):
                if record[SHARES] >> uint32(8 + b) & uint32(1):
                    info[n] = record[FIRST_GATE + b]
                    n = uint32(n + 1)

    return show


@cache
def scaler(form: Form, BARRIER: int) -> Any:
    """scale(shared, start, info, at, count, share, warpgroup, bars, turn): blocks in a stage.

    `count` blocks from byte `start` on are multiplied by the numbers in `info` from `at` on, by all
    threads of the share; its barrier says when all have done so.
    """
    tile, PIECES = form.tile, form.tile.W_BYTES // 16
    THREADS, SHARES = 128 * (tile.WARPGROUPS // tile.SHARES), tile.SHARES
    times = scaling("bfloat16" if form.kind == "bf16" else "float16", ragged=True)

    @cuda.jit(device=True)
    def scale(shared, start, info, at, count, share, warpgroup, bars, turn):
        thread = uint32(warpgroup // SHARES * 128 + cuda.threadIdx.x % 128)
        for piece in range(thread, count * PIECES, THREADS):
            gate = as_float32(info[at + piece // PIECES])
            if gate != 1:
                place = start + piece * 16
                w0, w1, w2, w3 = load_4xu32(shared, place)
                w0, w1, w2, w3 = times(w0, gate), times(w1, gate), times(w2, gate), times(w3, gate)
                store_4xu32(shared, place, w0, w1, w2, w3)
        fence_proxy_async()
        sync_warp()
        if thread % 32 == 0:
            mbarrier_arrive(bars, BARRIER + share)
        mbarrier_wait(bars, BARRIER + share, turn)

    return scale


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


class Gates(NamedTuple):
    """Of a weight-gradient, one argument; `cut` is what items that leave sums name by numbers."""

    of_blocks: Any
    cut: Any  # blocks, of float32 parts of these


@cuda.jit(device=True)
def left_of(out, is_cut, gates, parts):
    """A number of `outs`, or -1 where its gate is 0; a block has so many parts."""
    if out >= 0:
        part = gates.cut[out % gates.cut.size] if is_cut else out
        if gates.of_blocks[part // parts] == 0:
            out = int32(-1)
    return out


@cuda.jit(device=True)
def of_lane(head, k):
    return shfl_idx(head, uint32(k))


@cuda.jit(device=True)
def of_row(head, k):
    return head[k]


def numbers_of(tile: gradient.Tile, gated: bool) -> Any:
    """(head, k) -> number k of the head of an item, which is a word of each lane, or in memory."""
    return of_lane if gated or tile.AHEAD else of_row


@cache
def asking(tile: gradient.Tile) -> Any:
    """ask(heads, places, outs, item, group): a lane's words of an item, of a warpgroup.

    They are there when its turn comes: asked for while the item before is multiplied, or, for the
    first one, earlier kernels end, which write no plans of the host. Of 64 to 512 rows, 4,096 and
    8,192 features, density 0.1, an H200 took 0.78 to 0.96 of the time in 16 bits, of float32 0.86
    to 0.98. Where blocks of threads do not stay it gains nothing, and of a layout made on a GPU
    float32 took 1.15 times.
    """
    UNITS, LAST = tile.UNITS, tile.OUTS - 1

    @cuda.jit(device=True)
    def ask(heads, places, outs, item, group):
        lane = int32(cuda.threadIdx.x % 32)
        head, out = heads[item, min(lane, heads.shape[1] - 1)], outs[item, group, min(lane, LAST)]
        return head, places[item, group, min(lane, 2 * UNITS)], out

    return ask


@cache
def taking(tile: gradient.Tile, gated: bool) -> Any:
    """take(warp, words, gates, own_places, own_outs): what a warp's group does of an item.

    It comes into line `warp % 4` of the warp's own tables, from `words`, one a lane. If `gated`,
    units that are left come first; the others have places too.
    """
    UNITS, OUTS, PER, PARTS = tile.UNITS, tile.OUTS, tile.OUTS // tile.UNITS, tile.PARTS

    @cuda.jit(device=True)
    def take(warp, words, gates, own_places, own_outs):
        (head, place, out), lane = words, int32(cuda.threadIdx.x % 32)
        places, outs = own_places[warp % 4, warp // 4], own_outs[warp % 4, warp // 4]
        sync_warp()
        if lane <= 2 * UNITS:
            places[lane] = place
        if lane < OUTS:
            outs[lane] = int32(-1) if gated else out
        if gated:
            is_cut = shfl_idx(head, uint32(4)) != 0
            out = left_of(out, is_cut, gates, PARTS) if lane < OUTS else int32(-1)
            first, unit = lane - lane % PER, min(lane // PER, UNITS - 1)
            one, other = (
                shfl_idx(place, uint32(1 + 2 * unit)),
                shfl_idx(place, uint32(2 + 2 * unit)),
            )
            units = redux_or(uint32(uint32(1 if out >= 0 else 0) << uint32(first)))
            at = bits_below(units, first)
            sync_warp()
            if lane == 0:
                places[0] = int32(cuda.popc(units))
            if units >> uint32(lane) & uint32(1):
                places[1 + 2 * at], places[2 + 2 * at] = one, other
            if lane < OUTS and units >> uint32(first) & uint32(1):
                outs[at * PER + lane - first] = out
        sync_warp()

    return take


@cache
def needing(tile: gradient.Tile) -> Any:
    """slots_of(places, item, group, k): bits of the slots whose panels a number of `outs` needs."""
    PER, ACROSS = tile.OUTS // tile.UNITS, tile.N // tile.PANEL
    HALF, STEP = max(PER // 2, 1), tile.STEP

    @cuda.jit(device=True)
    def slots_of(places, item, group, k):
        at = 1 + 2 * (k // PER)
        one, other = places[item, group, at], places[item, group, at + 1] & 0xFFFF
        first = (one & 0xFFFF) + (one >> 16) * (k // HALF % 2)  # of two panels, or the only one
        return int64(1) << first // STEP | int64((1 << ACROSS) - 1) << other // STEP

    return slots_of


@cache
def keeping(tile: gradient.Tile) -> Any:
    """keep(heads, loads, places, outs, item, gates, code, mine): (whether a lane's copy, if it has
    one, is needed, how many panels of the item arrive).

    Panels of x that any block of threads of a cluster needs are for all of it.
    """
    GROUPS, OUTS, slots_of = tile.GROUPS, tile.OUTS, needing(tile)
    ALL, CLUSTER, PARTS = GROUPS * OUTS, tile.CLUSTER, tile.PARTS
    SHARED = (1 << tile.B // tile.PANEL) - 1 if CLUSTER > 1 else 0  # slots of x

    @cuda.jit(device=True)
    def of_all(own):
        """The bits of all lanes."""
        low, high = redux_or(uint32(own & 0xFFFFFFFF)), redux_or(uint32(own >> 32))
        return int64(low) | int64(high) << 32

    @cuda.jit(device=True)
    def of_copy(code):
        """The slot that it fills."""
        return int64(1) << int64(code & uint32(0xFF))

    @cuda.jit(device=True)
    def keep(heads, loads, places, outs, item, gates, code, mine):
        lane, own = int32(cuda.threadIdx.x % 32), int64(0)
        group, k, is_cut = lane % ALL // OUTS, lane % OUTS, heads[item, 4] != 0
        share = item - item % CLUSTER + lane // ALL
        there = lane < CLUSTER * ALL
        if there and left_of(outs[share, group, k], is_cut, gates, PARTS) >= 0:
            own = slots_of(places, item, group, k) if share == item else int64(SHARED)
        needed = of_all(own)
        own = needed & SHARED if heads[item, 3] else int64(0)
        for i in range(lane, heads[item, 2], 32):
            slots = of_copy(uint32(loads[item, i, 1]))
            own |= slots if slots & needed else 0
        arriving = int32(cuda.popc(of_all(own)))
        return mine and of_copy(code) & needed != 0, arriving

    return keep
