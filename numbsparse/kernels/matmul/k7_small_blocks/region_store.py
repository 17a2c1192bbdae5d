"""From the sums of a region's slots to dvalues, through shared memory, as whole blocks.

A slot is 16 x B values: a block of 16 x 16, or two of 8 x 8, one after the other. Lanes put their
sums in their places there, and read neighbours, 8 bytes to 32.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region_choice import Cuts
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import Sums
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.parts.pieces_of_blocks import Added, add_pieces
from numbsparse.kernels.parts.repair import repair_block
from numbsparse.kernels.parts.store import KINDS, PACK
from numbsparse.kernels.parts.swizzle import feature_of, feature_of_eight
from numbsparse.kernels.parts.words import words_of_lane
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_float32,
    as_uint32,
    cluster_sync,
    load_4xf32_at,
    shfl_idx,
    store_4xf32,
    sync_warp,
)


class Into(NamedTuple):
    """Where sums go, as one argument of a kernel."""

    partials: Any  # of regions that were cut, piece after piece
    blocks: Any  # of each slot, see `plan_regions`
    dvalues: Any  # along one axis


@cache
def place_of(sums: Sums) -> Any:
    """(row, column) of the i-th sum of a lane in the 16 x B values of a slot."""
    x_transposed, dy_transposed, B = sums.x_transposed, sums.dy_transposed, sums.B

    @cuda.jit(device=True)
    def place_16_bit(i):
        lane = uint32(cuda.threadIdx.x) % 32
        return lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2

    @cuda.jit(device=True)
    def place_tf32(i):
        lane = uint32(cuda.threadIdx.x) % 32
        g, half, line = lane // 4, i // 2 % 2, lane % 4 * 2 + i % 2
        row = feature_of(g, half) if x_transposed else 2 * g + half
        if B == 8:
            return row, feature_of_eight(line) if dy_transposed else line
        return row, feature_of(line, i // 4) if dy_transposed else 2 * line + i // 4

    return place_16_bit if sums.region.ITEM == 2 else place_tf32


@cache
def put_slot(sums: Sums, ITEM: int) -> Any:
    """The sums of a slot to shared memory, from a word on, in values of so many bytes."""
    COUNT, LINE, place = 4 * sums.TILES, sums.B * ITEM // 4, place_of(sums)
    pair = PACK["bf16" if sums.arithmetic == "bfloat16" else "f16"]

    @cuda.jit(device=True)
    def put_16_bit(acc, words, at):
        for i in range(0, COUNT, 2):
            row, column = place(i)
            c = acc[i // 4]
            words[at + row * LINE + column // 2] = pair(c[i % 4], c[i % 4 + 1])

    @cuda.jit(device=True)
    def put_float32(acc, words, at):
        for i in range(COUNT):
            row, column = place(i)
            words[at + row * LINE + column] = as_uint32(acc[i // 4, i % 4])

    return put_16_bit if ITEM == 2 else put_float32


@cuda.jit(device=True)
def stored_blocks(blocks, slot, a_slot):
    """Those of a slot, the same one twice where it has one: what a lane knows for its warp. So what
    each store would wait for is read at once."""
    return blocks[a_slot * slot], blocks[a_slot * slot + a_slot - 1]


@cuda.jit(device=True)
def block_of(stored, slot, half):
    """The block of half a slot, or -1, from the lane that knows."""
    first, second = shfl_idx(stored[0], uint32(slot)), shfl_idx(stored[1], uint32(slot))
    return int64(second if half else first)


@cache
def store_slot(sums: Sums, ITEM: int, exact: bool) -> Any:
    """A slot from shared memory to its blocks, a few neighbours of a row at a time. `stored` are
    those of its warp. What is beyond the edges was summed of zeros."""
    B = sums.B
    BLOCK, WORDS = B * B * ITEM // 4, 16 * B * ITEM // 128  # words of a block, and of a lane
    RUN = min(WORDS, 4)
    load, store_words = words_of_lane(WORDS)
    orders = False, sums.x_transposed, sums.dy_transposed

    @cuda.jit(device=True)
    def store(words, at, stored, slot, out, dense):
        lane = cuda.threadIdx.x % 32
        half = lane // 16 if B == 8 else 0
        block = block_of(stored, slot, half)
        if block >= 0:
            own, first = load(words, at), (block - half) * BLOCK
            store_words(out, first, own)
            if exact:
                bad = 0
                for w in range(WORDS):
                    bad = bad if as_float32(own[w]) == as_float32(own[w]) else WORDS
                for w in range(bad):
                    number = first + w // RUN * 128 + lane * RUN + w % RUN
                    repair_block(out, number, B, dense, orders)

    return store


@cache
def store_slots(sums: Sums, ITEM: int, exact: bool) -> Any:
    """The sums of a warp's slots, in its own part of the ring, as many at a time as it holds."""
    region = sums.region
    WARPS, SLOTS, SLOT = region.WARPS, region.SLOTS, 16 * sums.B * ITEM // 4
    AT_ONCE = min(SLOTS, region.STAGES * region.STAGE_BYTES // 4 // (WARPS * SLOT))
    put, store = put_slot(sums, ITEM), store_slot(sums, ITEM, exact)

    def some_slots(k: int) -> Any:
        first, last = k * AT_ONCE, min((k + 1) * AT_ONCE, SLOTS)

        @cuda.jit(device=True)
        def store_some(acc, warp, used, stored, words, start, out, dense):
            at = start + warp * (AT_ONCE * SLOT)
            if first > 0:
                sync_warp()
            for p in range(first, last):  # which are used is known too late for registers
                put(acc[p], words, at + (p - first) * SLOT)
            sync_warp()
            for p in range(first, min(used, last)):
                store(words, at + (p - first) * SLOT, stored, p, out, dense)

        return store_some

    return one_by_one(some_slots, -(-SLOTS // AT_ONCE))


@cache
def storer(sums: Sums) -> Any:
    """To the blocks; or in float32, one after another, where a region is one of several pieces."""
    region, A_SLOT = sums.region, sums.A_SLOT
    WARPS, SLOTS = region.WARPS, region.SLOTS
    store_blocks = store_slots(sums, region.ITEM, sums.exact)
    store_parts = store_slots(sums, 4, False)

    @cuda.jit(device=True)
    def store_region(acc, warp, slot, partial, used, words, start, into, dense):
        own = min(int32(cuda.threadIdx.x % 32), SLOTS - 1)
        if partial >= 0:
            own = ((partial * WARPS + warp) * SLOTS + own) * A_SLOT
            parts = int32(own), int32(own + A_SLOT - 1)
            store_parts(acc, warp, used, parts, words, start, into.partials, dense)
        else:
            stored = stored_blocks(into.blocks, slot + own, A_SLOT)
            store_blocks(acc, warp, used, stored, words, start, into.dvalues, dense)

    return store_region


@cache
def storer_of_cluster(sums: Sums) -> Any:
    """`storer` of a region whose blocks of threads have a part of all sums each, which they leave
    in their shared memory as their lanes hold them; each block adds up some of the slots. Left
    where they are added (`pieces.add_parts`), 0.97 to 1.06 of the time, 1.02 at the mean (H200)."""
    region, TILES = sums.region, sums.TILES
    WARPS, SLOTS, SPLIT, ALL = region.WARPS, region.SLOTS, region.SPLIT, region.WARPS * region.SLOTS
    EACH, LINE, SLOT = -(-ALL // (WARPS * SPLIT)), 32 * 4, 16 * sums.B * region.ITEM // 4
    put, A_SLOT = put_slot(sums, region.ITEM), sums.A_SLOT
    store = store_slot(sums, region.ITEM, sums.exact)

    @cuda.jit(device=True)
    def store_slice(acc, warp, slot, partial, used, words, start, into, dense):
        floats = cuda.shared.array(0, float32, ALIGNMENT)
        lane, total = uint32(cuda.threadIdx.x) % 32, cuda.local.array((TILES, 4), float32)
        own, first = int32(cuda.blockIdx.x) % SPLIT + SPLIT * warp, slot - warp * SLOTS
        known = first + min(int32(own + SPLIT * WARPS * lane), ALL - 1)
        stored = stored_blocks(into.blocks, known, A_SLOT)
        for p in range(SLOTS):
            for t in range(TILES):
                c = acc[p, t]
                at = uint32(start + ((warp * SLOTS + p) * TILES + t) * LINE + 4 * lane)
                store_4xf32(floats, at, c[0], c[1], c[2], c[3])
        cluster_sync()
        at = start + (ALL * TILES * LINE + warp * SLOT)
        for k in range(EACH):
            number = own + SPLIT * WARPS * k
            if number < ALL and block_of(stored, k, 0) >= 0:
                for t in range(TILES):
                    for i in range(4):
                        total[t, i] = 0
                for other in range(SPLIT):
                    for t in range(TILES):
                        where = uint32(start + (number * TILES + t) * LINE + 4 * lane)
                        four = load_4xf32_at(floats, where, uint32(other))
                        for i in range(4):
                            total[t, i] += four[i]
                put(total, words, at)
                sync_warp()
                store(words, at, stored, k, into.dvalues, dense)
                sync_warp()

    return store_slice


def add_up(sums: Sums, cuts: Cuts, into: Into, dense: Any, soon: bool) -> None:
    """The sums of the regions that were cut over the batch, the last ones."""
    own = into.blocks[cuts.whole * sums.region.CODES * sums.A_SLOT :]
    added = Added(sums.B, sums.B, KINDS.get(sums.arithmetic), sums.exact, made=sums.gated)
    orders, numbers = (0, int(sums.x_transposed), int(sums.dy_transposed)), (cuts.pieces, own.size)
    many, out = numbers[::-1], into.dvalues
    if sums.region.ITEM == 2:
        out = out.view("uint16")
    add_pieces(added, many, into.partials, own, numbers, out, soon, dense, orders)
