"""The roles in a block of threads of a weight-gradient: supply, multiply, and store 16-bit values.

Panels go from the copy engine straight to wgmma, which takes them in either order. Those of float32
are in `weight_grad_float32`.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32, uint64

from numbsparse.kernels.matmul.k6_hopper.gated import keeping, numbers_of
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import Tile
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.store import FEATURES, ROWS, Sums
from numbsparse.kernels.parts.store import storer as store_blocks
from numbsparse.kernels.ptx import (
    Operand,
    as_uint32,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    redux_or,
    store_2xu32,
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
def supplier(tile: Tile, kind: str, transposed: tuple[bool, bool], gated: bool) -> Any:
    """supply(own, maps, tables, item, gates, shared, base, bars): a warp requests copies.

    Where a tile stays, two warps at most do: each has copies of every item, of x or of dy.
    """
    STAGES, EMPTY, PANEL_BYTES, STAYS = tile.STAGES, tile.STAGES, tile.PANEL_BYTES, tile.STAYS
    DEPTH, STAGE = tile.DEPTH, tile.SLOTS * PANEL_BYTES
    LOADERS, AHEAD = min(tile.LOADERS, 2) if STAYS else tile.LOADERS, tile.AHEAD
    load, keep = loader(tile, transposed), keeping(tile)

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
def leaver(tile: Tile) -> Any:
    """leave(sums, warp, places, outs, item, out, dense): float32 sums of what was cut.

    At B = 32 rows of a product are columns of dy, of two blocks; its columns are those of x.
    """
    B, PAIR, PRODUCTS = tile.B, tile.PAIR, tile.OUTS // tile.PAIR
    PER_PRODUCT = tile.SUMS // PRODUCTS
    DOWN, ALONG = (1, B) if B == 32 else (B, 1)  # from a product's row to the next, and column

    @cuda.jit(device=True)
    def leave(sums, warp, places, outs, item, out, dense):
        t = uint32(cuda.threadIdx.x)
        group, lane = warp // 4, t % 32
        m, n = 16 * (t // 32 % 4) + lane // 4 + (64 * group if B == 128 else 0), lane % 4 * 2
        for k in range(PRODUCTS):
            block = int64(outs[item, group, PAIR * k + (m // 32 if PAIR == 2 else 0)])
            if block >= 0:
                first = block * (B * B) + m % B * DOWN + n * ALONG
                for i in range(0, PER_PRODUCT, 2):
                    at = uint64(first + i // 2 % 2 * 8 * DOWN + i // 4 * 8 * ALONG)
                    a, b = sums[k * PER_PRODUCT + i], sums[k * PER_PRODUCT + i + 1]
                    if ALONG == 1:
                        store_2xu32(out, at, as_uint32(a), as_uint32(b))
                    else:
                        out[at], out[at + uint64(ALONG)] = a, b

    return leave


@cache
def storer(tile: Tile, kind: str, transposed: tuple[bool, bool]) -> Any:
    """store(sums, warp, places, outs, item, out, dense): to kept blocks, 16 bytes at once.

    By rows of a block, where four lanes exchange what they have, so that no sector of 32 bytes is
    written in parts. At B = 32 products are transposed, and rows are the features of `parts.store`.
    """
    B, PAIR, WHOLE = tile.B, tile.PAIR, (0,)
    PRODUCTS, PER_PRODUCT = tile.OUTS // PAIR, PAIR * tile.SUMS // tile.OUTS
    store_rows = store_blocks(Sums(kind, B, 1, 1, 64), FEATURES if B == 32 else ROWS)

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        group, part = warp // 4, uint32(cuda.threadIdx.x) // 32 % 4
        row = (16 * part + (64 * group if B == 128 else 0)) % B
        for k in range(PRODUCTS):
            block = int64(outs[item, group, PAIR * k + (part // 2 if PAIR == 2 else 0)])
            if block >= 0:
                y = out[block * (B * B) :], B, B, B, B
                store_rows(sums[k * PER_PRODUCT :], WHOLE, row, y)

    return store
