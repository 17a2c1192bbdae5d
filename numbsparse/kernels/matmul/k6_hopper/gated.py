"""Gates of blocks, as only the GPU knows them: in the kernel itself, no launch before.

The lanes of a producer leave blocks whose gate is zero out of the records that they hold, 32 steps
at once; steps of nothing are passed over. So what is zero is neither copied nor multiplied, and
steps are as many as any block of theirs is left; of 16 bits, a long batch and few such blocks
`plan_on_gpu` is faster. A 16-bit block whose gate is not one is multiplied by it in its stage, by
the warps that read it there; float32's are as the images are made.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, EDGE, LAST, TO_SCALE, Form, Tile
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    fence_proxy_async,
    load_4xu32,
    mbarrier_arrive,
    mbarrier_wait,
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
