"""Without the blocks whose gate is zero, whether the host or only the GPU knows the gates.

Strips: blocks of w times their gates, packed (`parts.packed`).
Of few rows lanes multiply blocks of 8 as they copy them (`stored_blocks`): those of zero are not
read, but multiplied. Their gates are loaded after the stage before is requested, when it is known
which they are: where a fetcher waited for both, all gates one took 1.3 to 1.5 times as long as
none, not 1.2 to 1.3; as stages of gates that are 0 and 1 alone are copied as without, 1.08 to 1.12
(64 rows, H200). Of blocks of 16 who multiplies reads the gates (`parts.gates`): they are copied
into the stage, and no fetcher waits for them: 1.07, not 1.21, and half of them zero 1.04, not 1.19;
in float32 0.88 of 128 rows, not 1.12.
W is packed where it would be without gates (`is_packed`): where that began at 129 rows, 200 to 480
rows of 8,192 features at density 0.1, all gates one, took an H200 1.23 to 1.73 times as long as
none, half of them zero 0.88 to 1.26; read in the product they take 0.99 to 1.22 and 0.87 to 1.15.

A block of threads has a stage of the plan, and a thread a place for a block in it. The steps of
each column move together, and those that have two blocks are put together anew, so that a stage has
fewer; where it begins stays. All that the plan says is read while the kernel before may still run.

Regions: a lane has a slot of its warp. The blocks that are left go to the first slots of the warp,
and where a slot has two, those of each column are put together anew, while the first stages are on
their way. What is copied stays: it is what takes the time then.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.matmul.k7_small_blocks.region_slots import NEW_COLUMN, PLACE_BITS
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import MOST_STEPS
from numbsparse.kernels.parts.packed import COUNT_BITS, RUN, packing
from numbsparse.kernels.parts.plans_on_gpu import (
    begins_group,
    group_of,
    highest,
    lanes_where,
    mark,
    rank,
)
from numbsparse.kernels.parts.stored_blocks import INSIDE_BITS
from numbsparse.kernels.parts.strip import ALIGNED, Region, Strip
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    shfl_idx,
    sync_warp,
    wait_for_earlier_kernels,
)

NONE = 0xFFFFFFFF
# Threads: with 320 for many stages products of three layouts took 1.12 to 1.21 times as long as
# without gates, half of them zero 0.76 to 0.92, with 256 1.10 to 1.14 and 0.71 to 0.83 (H200).
MANY, FEW = (64, 128) if SIMULATED else (256, 640)
# FEW where stages are no more than multiprocessors: with 102 and 124 of them products took 0.95 and
# 0.86 of the time, half of the gates zero 0.99 and 0.87; with 146 to 213 as long, with 443 to 1,513
# up to 1.3 times as long, half of the gates zero 1.06 to 1.35 (H200).


def packed_by_gates(
    values: DeviceArray, plan: Any, strip: Strip, transposed: bool
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """(w, words, begins) of the steps of a `strips.Plan` that are left; of each stage `begins` has
    where they begin and end."""
    codes, words, begins = plan.codes, plan.words, plan.begins
    n_stages = begins.size - 1
    w = empty((codes.size // strip.BLOCKS_A_STEP * strip.STEP_BYTES // 4,), "uint32")
    left, ends = empty(words.shape, "uint32"), empty((2 * n_stages,), "int32")
    threads = FEW if n_stages <= multiprocessors() else MANY
    kernel = gate_kernel(strip, transposed, values.dtype.name, threads)
    args = values.view("uint32"), codes, words, begins, plan.gates, w, left, ends
    launch(kernel, n_stages, threads, *args, overlap=True)
    return w, left, ends


@cache
def gate_kernel(strip: Strip, transposed: bool, dtype: str, THREADS: int) -> Any:
    """An entry is a place for a block in a step, A_STEP to a step; of each its code, 0 if it is not
    left, and where its x is, before (`blocks[0]`, `places` of steps) and after (1, `moved`).

    ranks : how many entries are left before each; how many new steps begin before it
    firsts : the first step of the column that a step is of; starts : of each column of each warp
    """
    A_STEP, WARPS, COLUMNS, HEAD = strip.BLOCKS_A_STEP, strip.WARPS, strip.COLUMNS, strip.HEAD
    LINES, INSIDE, COUNT = WARPS * COLUMNS, (1 << INSIDE_BITS) - 1, (1 << COUNT_BITS) - 1
    NOWHERE, HALF, STEPS = strip.GROUPS * strip.GROUP_BYTES, 0xFFFF, A_STEP - 1
    MOST = MOST_STEPS * A_STEP
    BLOCKS, STARTS = (2, MOST), LINES + 1
    MASKS, RANKS = (A_STEP, MOST // 32 + 1), (A_STEP, MOST + 1)
    pack = packing(strip.B, strip.ITEM, transposed, dtype)

    @cuda.jit(device=True)
    def count_of(word, column):
        return int32(word >> uint32(COUNT_BITS * column) & uint32(COUNT))

    @cuda.jit(device=True)
    def start_of(word, column):
        first = int32(word >> uint32(4 * COUNT_BITS))
        for before in range(column):
            first += count_of(word, before)
        return first

    @cuda.jit(device=True)
    def place_of(places, entry):
        """One of the two that a step has, or all of it where a step is a block."""
        own = places[entry // A_STEP]
        return own if A_STEP == 1 else uint32(own >> uint32(16 * (entry % 2)) & uint32(HALF))

    @cuda.jit(**({} if THREADS == MANY else registers(THREADS)))
    def kernel(values, codes, words, begins, gates, w, left, ends):
        blocks, moved = cuda.shared.array(BLOCKS, int32), cuda.shared.array(MOST, uint32)
        places, firsts = cuda.shared.array(MOST_STEPS, uint32), cuda.shared.array(MOST_STEPS, int32)
        masks, ranks = cuda.shared.array(MASKS, uint32), cuda.shared.array(RANKS, int32)
        starts = cuda.shared.array(STARTS, int32)
        stage, t = int64(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        begin, end = begins[stage], begins[stage + 1]
        head, many = begin + stage * HEAD, end - begin
        entries = (many * A_STEP + 31) // 32 * 32
        for step in range(t, many, THREADS):
            places[step] = words[head + HEAD + step]
        for entry in range(t, entries, THREADS):
            there = entry < many * A_STEP
            blocks[0, entry] = codes[begin * A_STEP + entry] if there else int32(0)
            blocks[1, entry], moved[entry] = int32(0), uint32(NOWHERE)
        for line in range(t, LINES, THREADS):
            word, column = words[head + line // COLUMNS], line % COLUMNS
            starts[line] = start_of(word, column)
            for step in range(starts[line], starts[line] + count_of(word, column)):
                firsts[step] = starts[line]
        wait_for_earlier_kernels()
        let_next_kernel_start()
        for entry in range(t, entries, THREADS):
            code = blocks[0, entry]
            mark(masks[0], entry, code & INSIDE != 0 and gates[code >> INSIDE_BITS] != 0)
        cuda.syncthreads()
        rank(masks[0], ranks[0], entries)
        cuda.syncthreads()
        if STEPS:
            for entry in range(t, entries, THREADS):
                is_first = begins_group(ranks, firsts, entry // A_STEP, entry, A_STEP)
                mark(masks[STEPS], entry, is_first)
            cuda.syncthreads()
            rank(masks[STEPS], ranks[STEPS], entries)
            cuda.syncthreads()
        for entry in range(t, entries, THREADS):
            if ranks[0, entry + 1] > ranks[0, entry]:
                step, half = group_of(ranks, entry, A_STEP)
                to = step * A_STEP + half
                blocks[1, to], moved[to] = blocks[0, entry], place_of(places, entry)
        if t == 0:
            starts[LINES] = many
        cuda.syncthreads()
        for line in range(t, HEAD, THREADS):
            own = uint32(0)
            if line < WARPS:
                at = ranks[STEPS, starts[line * COLUMNS] * A_STEP]
                own = uint32(at << (4 * COUNT_BITS))
                for column in range(COLUMNS):
                    end_at = ranks[STEPS, starts[line * COLUMNS + column + 1] * A_STEP]
                    own = uint32(own | uint32((end_at - at) << (COUNT_BITS * column)))
                    at = end_at
            left[head + line] = own
        total = ranks[STEPS, many * A_STEP]
        last = (total + ALIGNED - 1) // ALIGNED * ALIGNED
        for step in range(t, last, THREADS):
            own = moved[step * A_STEP]
            if A_STEP == 2:
                own = uint32(own | moved[2 * step + 1] << uint32(16))
            left[head + HEAD + step] = own if step < total else uint32(0)
        if t == 0:
            ends[2 * stage], ends[2 * stage + 1] = begin, begin + last
        for step in range(t // 32 * RUN, total, THREADS // 32 * RUN):
            pack(values, blocks[1], total, step, gates, w, int64(begin))

    return kernel


@cache
def thinning(A_SLOT: int, region: Region) -> Any:
    """thin(plan, warp, own_warp, left): a lane's code of a slot, and how many are used.

    plan : `codes`, `used` and `blocks` as in `plan_regions`, and `gates`
    warp, own_warp : among those of the region, and of all regions
    left : as `blocks`, of what is left
    """
    SLOTS, PLACE, DY = region.SLOTS, (1 << PLACE_BITS) - 1, 2 * PLACE_BITS
    X = (1 << DY) - 1 if A_SLOT == 1 else PLACE  # of two pieces, or one
    MOVED = region.WARPS * SLOTS * A_SLOT

    @cuda.jit(device=True)
    def place_of(masks, lane, half):
        """How many places of all lanes are before one of a lane's."""
        before = int32(0)
        for h in range(A_SLOT):
            before += bits_below(masks[h], lane + (1 if h < half else 0))
        return before

    @cuda.jit(device=True)
    def thin(plan, warp, own_warp, left):
        # Of each place for a block: its code, without where the other one's x is, and the block.
        moved, kept = cuda.shared.array(MOVED, uint32), cuda.shared.array(MOVED, int32)
        lane, first = int32(cuda.threadIdx.x % 32), int64(own_warp) * SLOTS
        own, at = first + min(lane, SLOTS - 1), warp * (SLOTS * A_SLOT)
        there, code = lane < plan.used[own_warp], uint32(plan.codes[own])
        blocks, masks = cuda.local.array(A_SLOT, int32), cuda.local.array(A_SLOT, uint32)
        begins = cuda.local.array(A_SLOT, uint32)
        for h in range(A_SLOT):
            blocks[h] = plan.blocks[2 * own + h] if there else int32(-1)
            if blocks[h] >= 0 and plan.gates[blocks[h]] == 0:
                blocks[h] = int32(-1)
            masks[h] = lanes_where(blocks[h] >= 0)
            if lane < SLOTS:
                moved[at + lane * A_SLOT + h] = uint32(NONE)
                kept[at + lane * A_SLOT + h] = int32(-1)
        news = lanes_where(there and code & uint32(NEW_COLUMN) != 0)
        column = highest(uint32(news & uint32((int64(2) << lane) - 1)))
        of_column = place_of(masks, column, 0)
        for h in range(A_SLOT):
            nth = place_of(masks, lane, h) - of_column
            begins[h] = lanes_where(blocks[h] >= 0 and nth % A_SLOT == 0)
        sync_warp()
        for h in range(A_SLOT):
            if blocks[h] >= 0:
                half = (place_of(masks, lane, h) - of_column) % A_SLOT
                slot = place_of(begins, lane, h) - (1 if half else 0)
                x = uint32(code >> uint32(h * PLACE_BITS) & uint32(X))
                dy = uint32(code >> uint32(DY) & uint32(PLACE))
                moved[at + slot * A_SLOT + half] = uint32(x | dy << uint32(DY))
                kept[at + slot * A_SLOT + half] = blocks[h]
        sync_warp()
        used = place_of(begins, 32, 0)
        at += min(lane, SLOTS - 1) * A_SLOT
        code = moved[at]
        dy, second = uint32(code >> uint32(DY)), code
        left[2 * own] = kept[at]  # once: another block of the cluster may read it meanwhile
        left[2 * own + 1] = kept[at + 1] if A_SLOT == 2 else int32(-1)
        if A_SLOT == 2:
            second = moved[at + 1]
            second = code if second == uint32(NONE) else second
            code = uint32(code | (second & uint32(PLACE)) << uint32(PLACE_BITS))
        before = shfl_idx(dy, uint32(max(lane - 1, 0)))
        if lane == 0 or before != dy:
            code = uint32(code | uint32(NEW_COLUMN))
        return code if lane < used else uint32(0), used

    return thin
