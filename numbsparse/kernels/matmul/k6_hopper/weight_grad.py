"""The weight-gradient of rung 6: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

What limits it is reading both operands: a block of B x B sums takes 2 B values of each row of the
batch. So a block of threads, or a cluster of two, computes many kept blocks together that share
block rows and block columns, and the copy engine reads each of their panels from L2 once. Of few
rows it is writing: a block of threads waits while it stores.

Reads per output, for a sum of K products: K / B times the panels per kept block, 2 where nothing is
shared. On a random layout of density 0.1 these are 0.7 at B = 32 and 1.0 at B = 64 (`regions`),
and 1.3 at B = 128 (a block row for a cluster); of all blocks of 32 0.4 (`rectangles`). Of float32
they are K / N of x, where N is 32 or 64 columns, and K / 384 or K / 256 of dy, which six or four
products of 64 rows share. Columns that keep the same rows are taken by pairs, so that N is 64 at
B = 32 too. What limits float32 is shared memory, from which wgmma reads 64 bytes of an image each
cycle, besides what is copied in and what is split.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.matmul.k6_hopper import weight_grad_16_bit as of_16_bit
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32 as of_float32
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper import weight_grad_shares as shares
from numbsparse.kernels.matmul.k6_hopper.gated import Gates, numbers_of, taking
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    BUFFERS,
    OPERANDS,
    Tile,
)
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.aligned import aligned_either_way, of_any_rows, of_bits
from numbsparse.kernels.parts.calls import unannounced
from numbsparse.kernels.parts.pieces_of_blocks import Added, add_pieces
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.repair import factors_of
from numbsparse.kernels.parts.ring import begin_ring, show_own_barriers
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.parts.swizzle import box_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cluster_sync,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    let_next_kernel_start,
    more_registers,
    shfl_idx,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index

TILES = {
    32: Tile(32, 4, 4, 32, 32, 3, 37, 1, REGISTERS=(24, 112)),
    64: Tile(64, 2, 6, 64, 64, 3, 9, 1, REGISTERS=(40, 232)),
    128: Tile(128, 2, 2, 128, 64, 4, 6, 2, LOADERS=1),
}
OF_ROWS = Tile(64, 2, 4, 64, 64, 3, 9, 1, 2)
# Of a feature-major dy at B = 32. With a batch-major one, four stages would let some blocks of
# threads run ahead of others, which then find what they share no longer in the L2 cache.
OF_LINES = TILES[32]._replace(STAGES=4, SLOTS=27)
# Of rectangles of 256 x 128 features that keep nearly all blocks of 32: a warpgroup multiplies
# eight rows by two columns at once, which reads less of shared memory. JOINED_FROM rows and more of
# so many blocks took 0.71 to 0.91 of the time, feature-major ones 0.61 to 0.80; with three quarters
# of the blocks 0.92 and 0.80, with 0.7 0.98; 512 rows 0.99 to 1.12 (H200). In blocks of 64 full
# matrices took 0.91 to 0.97, and with a tenth of the blocks away 1.06.
RECTANGLES = Tile(32, 2, 8, 32, 64, 4, 12, 1, LOADERS=1, JOINED=True)
FILLED, JOINED_FROM, WORTH_JOINING = 0.75, 1024, 16_000_000  # rows; rows times blocks
# Smaller steps and items: 65 and 96 rows take 0.8 of the time, 128 and 192 1.03 and 0.98, 200 0.77
# and 0.92 (4,096 and 8,192 features; H200); 512 take 1.02.
SHORT, BRIEF = Tile(64, 2, 4, 64, 32, 6, 8, 1, REGISTERS=(40, 232)), 224
# Of batch-major operands, without a cluster: 8192 and 4096 features, density 0.25, 65 and 96 rows
# take 0.79 to 0.83 of the time, 128 to 256 0.89 to 0.92; density 0.1 0.88 to 1.04 (H200).
OF_FEW, FEW = Tile(128, 2, 2, 128, 32, 8, 6, 1, LOADERS=1), 256
# Of few blocks: more stages of smaller items, which hide how long a copy is on its way. 4,096 rows
# of 512 features take 5 to 8 us in place of 9 to 18, 512 rows 0.64 to 0.94 of the time, 1,024 rows
# of 4,096 features, three or six blocks for each multiprocessor, 0.8 to 0.9 (H200).
OF_FEW_BLOCKS = {
    32: Tile(32, 2, 2, 32, 64, 6, 8, 1, LOADERS=1),
    64: Tile(64, 2, 2, 64, 64, 6, 4, 1, LOADERS=1),
    128: Tile(128, 2, 1, 128, 64, 6, 4, 1, LOADERS=1),
}
# Blocks for each multiprocessor, at most; and where x and dy are larger than the L2 cache, from
# which blocks of threads that get apart read again: 8,192 rows and features, density 0.01 and 0.024
# in blocks of 32 and 64, took 1.32 and 1.19 times as long as few.
BLOCKS, LARGE_BLOCKS, LARGE = {32: 8, 64: 4, 128: 1}, {32: 1, 64: 2, 128: 1}, 50_000_000
SOME = 8  # pieces, where the GPU alone knows how many
# Rows of the batch from which on a launch waits for the one before, and announces its maps anew: at
# B = 32 it takes 311 us of an H200, one that overlaps 324. Blocks that stay lose nothing.
LONG = 2048
# Rows from which on blocks are left out by gates. Of 64 to 256 rows looking at them took 1.2 to 1.4
# times as long with all gates one and 1.1 to 1.2 with half of them zero, of 512 and 1,024 rows 1.1
# to 1.3 and 0.89 to 0.99, as blocks of threads do not stay then; of blocks of 128 1.07 and 0.67, of
# float32 in blocks of 64 1.05 and 0.85, of 128 1.01 to 1.03 and 0.78 to 1.02. By
# bytes of a value and block size.
GATED_FROM = {2: {32: LONG, 64: LONG, 128: 1024}, 4: {32: LONG, 64: 512, 128: 512}}


@of_any_rows
def weight_grad(
    x: DeviceArray,
    dy: DeviceArray,
    index: Index,
    dvalues: DeviceArray,
    precision: str,
    gates: DeviceArray | None = None,
) -> None:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b], anything where gates[b] is 0."""
    B, batch = dvalues.shape[1], x.shape[0]
    gates = gates if index.made is None and batch >= GATED_FROM[dvalues.itemsize][B] else None
    is_float32, by_gates = dvalues.itemsize == 4, gates is not None
    kind, processors = KINDS.get(str(dvalues.dtype), precision), multiprocessors()
    (x, dy), (x_transposed, dy_transposed) = aligned_either_way(x, dy)
    transposed = x_transposed, dy_transposed
    if is_float32:
        tile = plans.tile_for(index, B, batch, processors)
        tile = tile._replace(STAYS=not by_gates and batch < LONG and index.made is None)
    else:
        tile = tile_of(B, transposed, index, batch, by_gates)
    if tile.SWAPPED:
        (x, dy), transposed = (dy, x), transposed[::-1]
    steps, plan = -(-batch // tile.DEPTH), plans.plan if is_float32 else shares.plan
    *tables, cut, numbers, n_sums = planned(index, plan, tile, steps, processors)
    boxes = (box_of(tile.DEPTH, tile.PANEL, across) for across in transposed)
    maps = tensor_maps(*zip((x, dy), boxes, strict=True))
    sums = empty((max(n_sums, 1) * tile.PART**2,), np.float32)
    blocks, places = tables[0].shape[0], processors // tile.CLUSTER * tile.CLUSTER * tile.RESIDENT
    # Launches of many blocks that overlap get blocks of threads apart: see LONG.
    alone = blocks <= places and (is_float32 or shares.is_deep(tile))
    stays = (tile.STAYS or (alone and index.made is None)) and not by_gates
    tile = tile._replace(STAYS=stays, AHEAD=stays and index.made is None)
    more = Gates(gates, cut) if by_gates else ()
    out: DeviceArray = of_bits(dvalues.span)
    dense = factors_of(x, dy, transposed, index) if is_float32 else ()
    short = is_float32 or tile.STAYS or batch < LONG or alone
    launch(
        kernel_of(tile, kind, transposed, by_gates),
        min(blocks, places) if tile.STAYS else blocks,
        tile.THREADS,
        *(maps, unannounced(maps) if short else 1, *tables, out, sums, dense, more),
        shared_bytes=tile.SHARED_BYTES,
        cluster=(tile.CLUSTER,) if tile.CLUSTER > 1 else None,
        overlap=short,
    )
    if n_sums:
        made, soon = index.made is not None, x.nbytes + dy.nbytes < pieces.SOON
        exact, of = kind == "highest", None if is_float32 else kind
        added = Added(B, tile.PART, of, exact, by_gates, made)
        many = cut.size, SOME if made else n_sums // cut.size
        orders = tuple(map(int, (tile.SWAPPED, *transposed)))
        add_pieces(added, many, sums, cut, numbers, out, soon, dense, orders, more)


def tile_of(B: int, transposed: tuple[bool, bool], index: Index, batch: int, gated: bool) -> Tile:
    """Of 16-bit values, x and dy maybe transposed; OF_ROWS is for a layout made on a GPU."""
    made, few = index.made is not None, index.block_rows.size <= most_blocks(B, index, batch)
    tile = OF_LINES if B == 32 and transposed[1] else OF_ROWS if made and B == 64 else TILES[B]
    if B == 128 and batch <= FEW and not any(transposed) and not (made and few):
        tile = OF_FEW
    elif few:
        tile = OF_FEW_BLOCKS[B]
    elif B == 32 and not (made or gated) and are_filled(index, batch):
        tile = RECTANGLES
    if B == 64 and batch <= BRIEF:
        tile = SHORT
    if SIMULATED:
        tile = tile._replace(GROUPS=1 if B == 32 else 2, STAGES=2, LOADERS=1)
    dealt = made and (few or B == 32)  # whoever is free takes an item, as nobody knows how many
    stays = B == 128 or not (gated or batch >= LONG)
    return tile._replace(STAYS=stays and not dealt)


def are_filled(index: Index, batch: int) -> bool:
    worth = batch >= JOINED_FROM and batch * index.block_rows.size >= WORTH_JOINING
    return worth and planned(index, shares.filled, RECTANGLES)[0] >= FILLED


def most_blocks(B: int, index: Index, batch: int) -> int:
    """Blocks that are few."""
    features = B * (index.rows.indptr.size + index.columns.indptr.size - 2)
    large = 2 * batch * features > LARGE and index.made is None
    each = LARGE_BLOCKS if large else BLOCKS
    return each[B] * multiprocessors()


@cache
def kernel_of(tile: Tile, kind: str, transposed: tuple[bool, bool], gated: bool = False) -> Any:
    """A kernel of these roles, whose argument `dense` is `repair.Factors`, of float32; `gates` are
    `Gates`, if it is `gated`.

    kind : "f16", "bf16", or the precision of float32
    transposed : whether x and dy are feature-major

    GROUPS warpgroups multiply and LOADERS warps supply them. Every step loads DEPTH rows of the
    batch of all panels of the item to one of STAGES places in shared memory; panels that several
    blocks of a cluster need are requested by one of them and sent to all. So a place is free when
    the warps of the whole cluster have said so; of float32, also those that make images. Where a
    tile STAYS, blocks of threads go from item to item, and the copies for the next one run while
    sums are stored.
    """
    roles, SUMS = of_float32 if tile.ITEM == 4 else of_16_bit, tile.SUMS
    supply, multiply = (
        role(tile, kind, transposed, gated) for role in (roles.supplier, roles.multiplier)
    )
    store, leave = roles.storer(tile, kind, transposed), roles.leaver(tile)
    STAGES, CLUSTER, WARPS, LOADERS = tile.STAGES, tile.CLUSTER, 4 * tile.GROUPS, tile.LOADERS
    IMAGES = BUFFERS if tile.ITEM == 4 else 0
    BARRIERS, READERS = 2 * (STAGES + IMAGES), WARPS * CLUSTER + (LOADERS if IMAGES else 0)
    (GIVEN, TAKEN), STAYS, AHEAD = tile.REGISTERS, tile.STAYS, tile.AHEAD
    ALONE = tile.PART**2  # sums, where nothing is cut
    options = {} if SIMULATED else {"launch_bounds": (tile.THREADS, tile.RESIDENT)}
    START = (np.uint32(0),) * (4 if IMAGES else 2)
    take, ask, number_of = taking(tile, gated), asking(tile), numbers_of(tile, gated)
    OWN, OUTS = gated or AHEAD, (4, tile.GROUPS, tile.OUTS)
    PLACES = (*OUTS[:2], 1 + 2 * tile.UNITS)

    @cuda.jit(**options)
    def kernel(maps, fresh, heads, loads, places, outs, dvalues, sums, dense, gates):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        # Full and empty: stages, then buffers for images.
        bars = cuda.shared.array(BARRIERS, uint64)
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        item, ring_at = int64(cuda.blockIdx.x), START
        base = first_multiple(shared, uint32(1024))
        if t == 0:
            begin_ring(bars, 0, STAGES, 1, READERS)
            begin_ring(bars, 2 * STAGES, IMAGES, LOADERS, WARPS)
        if sums.size == ALONE:
            let_next_kernel_start()
        show_own_barriers(t, CLUSTER)
        if not AHEAD:
            wait_for_earlier_kernels()
        if warp >= WARPS:
            if GIVEN:
                fewer_registers(GIVEN)
            if fresh != 0:
                for m in range(OPERANDS):
                    fence_tensor_map(maps[m])
            fetcher, tables = uint32(warp - WARPS), (heads, loads, places, outs)
            supply(fetcher, maps, tables, item, gates, shared, base, bars)
        else:
            if TAKEN:
                more_registers(TAKEN)
            own = cuda.local.array(SUMS, float32)
            own_places = cuda.shared.array(PLACES, int32)  # a line for each warp of a group
            own_outs = cuda.shared.array(OUTS, int32)
            if OWN:
                words = ask(heads, places, outs, item, warp // 4)
            if AHEAD:
                wait_for_earlier_kernels()
            while True:
                if OWN:
                    head, where, into, line = words[0], own_places, own_outs, int64(warp % 4)
                    take(warp, words, gates, own_places, own_outs)
                else:
                    head, where, into, line = heads[item], places, outs, item
                item += cuda.gridDim.x
                if AHEAD and item < heads.shape[0]:
                    words = ask(heads, places, outs, item, warp // 4)
                ring_at = multiply(warp, head, where, line, shared, base, bars, ring_at, own)
                let_next_kernel_start()
                if number_of(head, 4) != 0:
                    leave(own, warp, where, into, line, sums, dense)
                else:
                    store(own, warp, where, into, line, dvalues, dense)
                if not STAYS or item >= heads.shape[0]:
                    break
        if CLUSTER > 1:
            cluster_sync()

    return kernel


@cache
def asking(tile: Tile) -> Any:
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
