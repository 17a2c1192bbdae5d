"""The warps that fill a strip's ring: what they know ahead, and what they request.

A load from global memory takes longer than the rest of a stage. So the lanes know the groups of
some stages, and the stored blocks of the next one, before these are requested; two arrays take
turns with the latter, since copying a register would mean waiting for it. Gates of blocks of 8 are
loaded after the stage before is requested, when it is known which they are: where a fetcher waited
for both, all gates one took 1.3 to 1.5 times as long as none, not 1.2 to 1.3; as stages of gates
that are 0 and 1 alone are copied as without, 1.08 to 1.12 (64 rows, H200). Those
of blocks of 16 are copied into the stage, and no fetcher waits for them: 1.07, not 1.21, and half
of them zero 1.04, not 1.19; in float32 0.88 of 128 rows, not 1.12.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.pixels import IMAGES, finding, loading
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.stored_blocks import Copying, copying
from numbsparse.kernels.parts.strip import Strip, registers_of
from numbsparse.kernels.ptx import (
    bulk_load,
    elect,
    fence_tensor_map,
    fewer_registers,
    mbarrier_expect,
    mbarrier_wait,
    shfl_idx,
    wait_for_earlier_kernels,
)


@cache
def producer(strip: Strip, x_order: str, transposed: bool) -> Any:
    """produce(fetcher, x_map, fresh, w, plan, first, last, ring): of tiles `first` to `last`."""
    GROUPS, CLUSTER = strip.GROUPS, strip.CLUSTER
    ROW_BYTES = strip.ITEM * strip.WIDTH
    PER = 32 // GROUPS  # stages of which the warp knows the groups, a lane each
    PACKED, scaled = strip.PACKED, "" if strip.GATES else strip.GATED
    how = strip.STEPS, strip.FETCHERS, transposed, scaled, strip.GATES
    blocks = copying(strip.B, strip.ITEM, *how)
    OF_GATES = PACKED and strip.GATED != ""  # the launch before wrote what the lanes know,
    EACH = 2 if OF_GATES else 1  # with where the steps of each stage end
    look_up, weigh, CODES = blocks.look_up, blocks.weigh, 1 if PACKED else blocks.codes
    turn, other_turn = (turning(strip, x_order, blocks) for _ in range(2))
    top = finding(x_order == IMAGES)
    FEWER, *_ = registers_of(strip)

    @cuda.jit(device=True)
    def looked_up(groups, begins, at):
        """Of the stages from `at` on: the groups, and where their steps begin and end."""
        lane, rank = uint32(cuda.threadIdx.x) % 32, uint32(cuda.blockIdx.x) % CLUSTER
        i = EACH * min((at + lane) * CLUSTER + rank, (begins.size - 2) // EACH)
        return groups[min(at * GROUPS + lane, groups.size - 1)], begins[i], begins[i + 1]

    @cuda.jit(device=True)
    def produce(fetcher, x_map, fresh, w, plan, first, last, ring):
        if FEWER:
            fewer_registers(FEWER)
        words, codes, begins, groups, _, tiles, _, rows, tops, gates, loaded, _ = plan
        sources = x_map, w, codes, words, uint32(loaded * ROW_BYTES), gates
        if OF_GATES:
            wait_for_earlier_kernels()
        if fresh != 0:
            fence_tensor_map(x_map)
        stage, phase = uint32(0), uint32(1)
        ahead = tiles[first, 2]  # the stage from which on the lanes know
        known = looked_up(groups, begins, ahead)
        own, others = cuda.local.array(CODES, int32), cuda.local.array(CODES, int32)
        if not PACKED:
            look_up(codes, known, 0, fetcher, own)
        then = tiles[min(first + 1, last - 1), 2]
        coming_from = ahead + PER if ahead + PER < tiles[first, 3] else then
        coming = looked_up(groups, begins, coming_from)
        if not OF_GATES and (fetcher == 0 or not PACKED):  # x was there before w was packed
            wait_for_earlier_kernels()
        if not PACKED:
            weigh(gates, own)
        for i in range(first, last):
            row, at, end = top(tops, rows, tiles[i, 1]), tiles[i, 2], tiles[i, 3]
            then = tiles[min(i + 1, last - 1), 2]
            if at < end and at != ahead:  # the strip before has no blocks
                known = looked_up(groups, begins, at)
                if not PACKED:
                    look_up(codes, known, 0, fetcher, own)
                    weigh(gates, own)
            while at < end:
                count = min(PER, end - at)
                # The next ones are under way while these are requested.
                ahead = at + PER if at + PER < end else then
                if ahead != coming_from:
                    coming, coming_from = looked_up(groups, begins, ahead), ahead
                for k in range(0, count, 2):
                    of = fetcher, known, coming, k, count, at, row
                    stage, phase = turn(of, sources, own, others, ring, stage, phase)
                    if k + 1 < count:
                        of = fetcher, known, coming, k + 1, count, at, row
                        stage, phase = other_turn(of, sources, others, own, ring, stage, phase)
                    else:
                        for c in range(CODES):
                            own[c] = others[c]
                at += PER
                known = coming

    return produce


def turning(strip: Strip, x_order: str, blocks: Copying) -> Any:
    """turn(of, sources, own, others, ring, stage, phase): fill an empty stage; gives the next one.

    of : (fetcher, what the lanes know, and of those to come, which of `count` stages that they know
        this is, the first of these, where its rows are, see `pixels.finding`)
    own : what a lane knows of the stage's blocks; others : of the next stage's, from here on
    """
    STAGES, STAGE_BYTES, W_START = strip.STAGES, strip.STAGE_BYTES, strip.W_START
    ask, PACKED = asking(strip, x_order), strip.PACKED
    look_up, weigh, copy = blocks.look_up, blocks.weigh, blocks.copy

    @cuda.jit(device=True)
    def turn(of, sources, own, others, ring, stage, phase):
        fetcher, known, coming, k, count, at, row = of
        shared, base, bars = ring
        if not PACKED:
            if k + 1 < count:
                look_up(sources[2], known, k + 1, fetcher, others)
            else:
                look_up(sources[2], coming, 0, fetcher, others)
        mbarrier_wait(bars, STAGES + stage, phase)
        ask(fetcher, sources, known, at + k, k, row, (shared, base, bars, stage))
        if not PACKED:
            many = shfl_idx(known[2], k) - shfl_idx(known[1], k)
            start = uint32(base + stage * STAGE_BYTES + W_START)
            copy(sources[1], sources[5], own, many, shared, start, bars, stage, fetcher)
            weigh(sources[5], others)
        return following(stage, phase, STAGES)

    return turn


def asking(strip: Strip, x_order: str) -> Any:
    """ask(fetcher, sources, known, number, k, row, ring): what the copy engine loads."""
    GROUPS, GROUP_BYTES, STAGE_BYTES = strip.GROUPS, strip.GROUP_BYTES, strip.STAGE_BYTES
    W_START, X_START, STEP_BYTES = strip.W_START, strip.X_START, strip.STEP_BYTES
    HEAD, CLUSTER, FETCHERS = strip.HEAD, strip.CLUSTER, strip.FETCHERS
    SHARES, PACKED = -(-GROUPS // (FETCHERS * CLUSTER)), strip.PACKED
    load = loading(strip, x_order)
    ASKED = 4 + (STEP_BYTES if PACKED else 0)  # bytes of a step

    @cuda.jit(device=True)
    def ask(fetcher, sources, known, number, k, row, ring):
        """The fetcher's copies for a stage, the k-th of those that the lanes know.

        The blocks of a cluster take turns with the groups; each one's copies are for all of them.
        """
        x_map, w, _, words_of, group_bytes, _ = sources
        shared, base, bars, stage = ring
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        first, end = shfl_idx(known[1], k), shfl_idx(known[2], k)
        own = cuda.local.array(SHARES, int32)
        many, nbytes = uint32(end - first), uint32(0)
        if fetcher == 0:
            nbytes = uint32(many * ASKED + HEAD * 4)
        for i in range(SHARES):
            for c in range(CLUSTER):
                g = (i * FETCHERS + fetcher) * CLUSTER + c
                group = shfl_idx(known[0], k * GROUPS + min(g, GROUPS - 1))
                if g >= GROUPS:
                    group = int32(-1)
                if group >= 0:
                    nbytes = uint32(nbytes + group_bytes)
                if c == rank:
                    own[i] = group
        if elect() != 0:
            start = uint32(base + stage * STAGE_BYTES)
            mbarrier_expect(bars, stage, nbytes)
            for i in range(SHARES):
                if own[i] >= 0:
                    g = (i * FETCHERS + fetcher) * CLUSTER + rank
                    to = start + X_START + g * GROUP_BYTES
                    load(shared, to, x_map, own[i], row, bars, stage)
            if fetcher == 0:
                at = int64(first) + (number * CLUSTER + rank) * HEAD
                nbytes = uint32((HEAD + many) * 4)
                bulk_load(shared, start, words_of, at, nbytes, bars, stage)
                if PACKED and many > 0:
                    at, nbytes = int64(first) * (STEP_BYTES // 4), uint32(many * STEP_BYTES)
                    bulk_load(shared, start + W_START, w, at, nbytes, bars, stage)

    return ask
