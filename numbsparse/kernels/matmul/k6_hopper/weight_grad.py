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

A block of threads has roles: warps that supply panels, and warpgroups that multiply and store. Here
are those of 16 bits, whose panels go from the copy engine straight to wgmma, which takes them in
either order; those of float32 are in `weight_grad_float32`.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32 as of_float32
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.gated import Gates, asking, keeping, numbers_of, taking
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    OPERANDS,
    Tile,
)
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.aligned import aligned_either_way, of_any_rows, of_bits
from numbsparse.kernels.parts.pieces import Added, add_pieces
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.repair import factors_of
from numbsparse.kernels.parts.ring import begin_ring, following, show_own_barriers
from numbsparse.kernels.parts.store import FEATURES, KINDS, ROWS, Sums
from numbsparse.kernels.parts.store import storer as store_blocks
from numbsparse.kernels.parts.store_float32 import storer_of_pairs as store_pairs
from numbsparse.kernels.parts.swizzle import box_of, row_of_16
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    cluster_sync,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    let_next_kernel_start,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    more_registers,
    redux_or,
    shfl_idx,
    sync_warp,
    tma_load_2d,
    tma_load_2d_multicast,
    to_local,
    wait_for_earlier_kernels,
    wgmma_pairs,
    wgmma_units,
    words,
    zeros,
)
from numbsparse.layout import Index

SOME = 8  # pieces, where the GPU alone knows how many
# Rows from which on blocks are left out by gates. Of 64 to 256 rows looking at them took 1.2 to 1.4
# times as long with all gates one and 1.1 to 1.2 with half of them zero, of 512 and 1,024 rows 1.1
# to 1.3 and 0.89 to 0.99, as blocks of threads do not stay then; of blocks of 128 1.07 and 0.67, of
# float32 in blocks of 64 1.05 and 0.85, of 128 1.01 to 1.03 and 0.78 to 1.02. By
# bytes of a value and block size.
GATED_FROM = {2: {32: 2048, 64: 2048, 128: 1024}, 4: {32: 2048, 64: 512, 128: 512}}


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
        (tile,) = planned(index, of_float32.way_of, B)
        (tile,) = planned(index, of_float32.smaller, tile, -(-batch // tile.DEPTH), processors)
        tile = tile._replace(STAYS=not by_gates and batch < plans.LONG and index.made is None)
    else:
        tile = plans.tile_of(B, transposed, index, batch, by_gates)
    if tile.SWAPPED:
        (x, dy), transposed = (dy, x), transposed[::-1]
    steps, plan = -(-batch // tile.DEPTH), (of_float32 if is_float32 else plans).plan
    *tables, cut, numbers, n_sums = planned(index, plan, tile, steps, processors)
    boxes = (box_of(tile.DEPTH, tile.PANEL, across) for across in transposed)
    maps = tensor_maps(*zip((x, dy), boxes, strict=True))
    sums = empty((max(n_sums, 1) * tile.PART**2,), np.float32)
    blocks, places = tables[0].shape[0], processors // tile.CLUSTER * tile.CLUSTER * tile.RESIDENT
    # Launches of many blocks that overlap get blocks of threads apart: see LONG.
    alone = blocks <= places and (is_float32 or plans.is_deep(tile))
    stays = (tile.STAYS or (alone and index.made is None)) and not by_gates
    tile = tile._replace(STAYS=stays, AHEAD=stays and index.made is None)
    more = Gates(gates, cut) if by_gates else ()
    out: DeviceArray = of_bits(dvalues.span)
    dense = factors_of(x, dy, transposed, index) if is_float32 else ()
    short = is_float32 or tile.STAYS or batch < plans.LONG or alone
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
    of: Any = supplier, multiplier, storer
    if tile.ITEM == 4:
        of = of_float32.supplier, of_float32.multiplier, of_float32.storer
    supply = of[0](tile, kind, transposed, loader(tile, transposed), gated)
    multiply, SUMS = of[1](tile, kind, transposed, gated), tile.SUMS
    store, leave = of[2](tile, kind, transposed), of[2](tile, "", transposed)
    STAGES, CLUSTER, WARPS, LOADERS = tile.STAGES, tile.CLUSTER, 4 * tile.GROUPS, tile.LOADERS
    IMAGES = of_float32.BUFFERS if tile.ITEM == 4 else 0
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
def loader(tile: Tile, transposed: tuple[bool, bool]) -> Any:
    """Loads a panel, of DEPTH rows of the batch, to all blocks of threads in ranks."""
    PANEL, SLOT, CLUSTER = tile.PANEL, tile.PANEL_BYTES, tile.CLUSTER
    x_transposed, dy_transposed = transposed

    @cuda.jit(device=True)
    def load(maps, panel, row, which, shared, start, bars, i):
        at, feature = start + (which & uint32(0xFF)) * SLOT, int32(panel * PANEL)
        operand, ranks = which >> uint32(8) & uint32(0xFF), which >> uint32(16)
        across = dy_transposed if operand else x_transposed
        column, line = (row, feature) if across else (feature, row)
        if CLUSTER > 1 and ranks & (ranks - 1):
            tma_load_2d_multicast(shared, at, maps[operand], column, line, bars, i, ranks)
        else:
            tma_load_2d(shared, at, maps[operand], column, line, bars, i)

    return load


@cache
def supplier(tile: Tile, kind: str, transposed: tuple[bool, bool], load: Any, gated: bool) -> Any:
    """supply(own, maps, tables, item, gates, shared, base, bars): a warp requests copies.

    Where a tile stays, two warps at most do: each has copies of every item, of x or of dy.
    """
    STAGES, EMPTY, PANEL_BYTES, STAYS = tile.STAGES, tile.STAGES, tile.PANEL_BYTES, tile.STAYS
    DEPTH, STAGE = tile.DEPTH, tile.SLOTS * PANEL_BYTES
    LOADERS, AHEAD = min(tile.LOADERS, 2) if STAYS else tile.LOADERS, tile.AHEAD
    keep = keeping(tile)

    @cuda.jit(device=True)
    def supply(own, maps, tables, item, gates, shared, base, bars):
        heads, loads, places, outs = tables
        lane, items = uint32(cuda.threadIdx.x) % 32, heads.shape[0] if own < LOADERS else 0
        stage = phase = uint32(0)
        while item < items:
            first, steps = heads[item, 0], heads[item, 1]
            n_loads, arriving = heads[item, 2], heads[item, 3]
            panel, code = int32(0), uint32(0)
            mine = own + lane * LOADERS < n_loads
            if mine:
                panel = loads[item, own + lane * LOADERS, 0]
                code = uint32(loads[item, own + lane * LOADERS, 1])
            # A warp that is not waited for could fall two phases behind, and wait forever: those
            # without copies end at once, and lanes without any stay with the others.
            awaited = own == 0 or own < n_loads
            if gated:
                mine, arriving = keep(heads, loads, places, outs, item, gates, code, mine)
                awaited = own == 0 or redux_or(uint32(1 if mine else 0)) != 0
            if AHEAD:
                wait_for_earlier_kernels()
            for step in range(steps if awaited else 0):
                mbarrier_wait(bars, EMPTY + stage, phase ^ uint32(1))
                sync_warp()
                if lane == 0 and own == 0:
                    mbarrier_expect(bars, stage, uint32(arriving * PANEL_BYTES))
                row = int32((first + step) * DEPTH)
                if mine:
                    load(maps, panel, row, code, shared, base + stage * STAGE, bars, stage)
                stage, phase = following(stage, phase, STAGES)
            item += cuda.gridDim.x if STAYS else items

    return supply


@cache
def multiplier(tile: Tile, kind: str, transposed: tuple[bool, bool], gated: bool) -> Any:
    """multiply(warp, head, places, line, ..., ring_at, sums): sums = an item's products.

    head : as `numbers_of` takes it; line : of the warp in `places`, and `outs` of `storer`
    """
    B, UNITS, DEPTH, STAGES, CLUSTER = tile.B, tile.UNITS, tile.DEPTH, tile.STAGES, tile.CLUSTER
    GROUPS, PANEL, SLOT, EMPTY = tile.GROUPS, tile.PANEL, tile.PANEL_BYTES, tile.STAGES
    STAGE, PLACES = tile.SLOTS * SLOT, 1 + 2 * UNITS
    x, dy = (Operand(2 * DEPTH if across else 2 * PANEL, SLOT, not across) for across in transposed)
    operands, joined = (dy, x) if B == 32 else (x, dy), B == 128 or tile.JOINED
    add = wgmma_units(kind, UNITS, tile.N, DEPTH // 16, *operands, joined)
    if B == 32 and transposed[1] and not joined:
        add = wgmma_pairs(kind, UNITS, tile.N, DEPTH // 16, 2 * DEPTH, x)
    start_from, read_places = zeros(tile.SUMS), words(2 * UNITS)
    number_of = numbers_of(tile, gated)

    @cuda.jit(device=True)
    def multiply(warp, head, places, line, shared, base, bars, ring_at, sums):
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        number = uint32(places[line, group, 0])
        where = read_places(places, (line * GROUPS + group) * PLACES + 1)
        acc = start_from()
        stage, phase = ring_at
        for _ in range(number_of(head, 1)):
            mbarrier_wait(bars, stage, phase)
            acc = add(acc, shared, base + stage * STAGE, where, number)
            if lane < CLUSTER:
                mbarrier_arrive_at(bars, EMPTY + stage, lane)
            stage, phase = following(stage, phase, STAGES)
        to_local(acc, sums)
        return stage, phase

    return multiply


@cache
def storer(tile: Tile, kind: str, transposed: tuple[bool, bool]) -> Any:
    """store(sums, warp, places, outs, item, out, dense): to kept blocks, 16 bytes at once.

    By rows of a block, where four lanes exchange what they have, so that no sector of 32 bytes is
    written in parts. At B = 32 products are transposed, and rows are the features of `parts.store`.
    Of no kind are the float32 sums of what was cut.
    """
    B, PAIR, WHOLE = tile.B, tile.PAIR, (0,)
    PRODUCTS, PER_PRODUCT = tile.OUTS // PAIR, PAIR * tile.SUMS // tile.OUTS
    DOWN, ALONG = (1, B) if B == 32 else (B, 1)  # from a row to the next, and from a column
    of, order = Sums(kind, B, 1, 1, 64), FEATURES if B == 32 else ROWS
    store_rows = store_blocks(of, order) if kind else store_pairs(of, order, row_of_16, False)

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        group, part = warp // 4, uint32(cuda.threadIdx.x) // 32 % 4
        row = (16 * part + (64 * group if B == 128 else 0)) % B
        for k in range(PRODUCTS):
            block = int64(outs[item, group, PAIR * k + (part // 2 if PAIR == 2 else 0)])
            if block >= 0:
                y = out[block * (B * B) :], DOWN, ALONG, B, B
                store_rows(sums[k * PER_PRODUCT :], WHOLE, row, y)

    return store
