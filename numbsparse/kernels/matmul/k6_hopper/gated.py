"""Gates of blocks, as only the GPU knows them: in the kernels themselves, no launch before.

The lanes of a producer leave blocks whose gate is zero out of the records that they hold, 32 steps
at once; steps of nothing are passed over. So what is zero is neither copied nor multiplied, and
steps are as many as any block of theirs is left; of 16 bits, a long batch and few such blocks
`plan_on_gpu` is faster. A 16-bit block whose gate is not one is multiplied by it in its stage, by
the warps that read it there; float32's are as the images are made.

Of a weight-gradient each warp finds out what is left of its item: panels that no block needs are
not copied, products of no block are not computed, and nothing is written where the gate is zero. Of
half of the blocks, at 8,192 features, density 0.1 and 4,096 rows, an H200 took 0.86 of the time
with blocks of 32, 0.80 with 64, in float32 0.81. Items of blocks of 128 are few and become very
uneven: there blocks of threads do not stay, so that each item goes to those that are free first. Of
8,192 rows every other block took 0.64 of the time, drawn ones 0.79, all of them 1.01, and of 2,048
rows 0.76, 0.87, 1.06; where blocks of threads stayed half of the blocks took 0.95.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as gradient
from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, EDGE, LAST, TO_SCALE, Form, Tile
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    fence_proxy_async,
    load_4xu32,
    mbarrier_arrive,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    store_4xu32,
    sync_warp,
)


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
