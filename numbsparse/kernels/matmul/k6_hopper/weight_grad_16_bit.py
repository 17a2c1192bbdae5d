"""The roles in a block of threads of a weight-gradient: supply, multiply, and store 16-bit values.

Panels go from the copy engine straight to wgmma, which takes them in either order. Those of float32
are in `weight_grad_float32`.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.matmul.k6_hopper.weight_grad_gated import keeping
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import MAPS, Tile
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.store import PACK, transposed
from numbsparse.kernels.ptx import (
    Operand,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    redux_or,
    store_4xu32,
    sync_warp,
    tma_load_3d,
    tma_load_3d_multicast,
    to_local,
    wgmma_pairs,
    wgmma_units,
    words,
    zeros,
)


@cache
def loader(tile: Tile, x_transposed: bool, dy_transposed: bool) -> Any:
    """Loads a run of panels, of DEPTH rows of the batch, to all blocks of threads in ranks."""
    SLOT, CLUSTER = tile.PANEL_BYTES, tile.CLUSTER

    @cuda.jit(device=True)
    def load(maps, layer, row, which, shared, start, bars, i):
        at = start + (which & uint32(0xFF)) * SLOT
        tensor_map, ranks = which >> uint32(8) & uint32(0xFF), which >> uint32(16)
        transposed = x_transposed if tensor_map < MAPS else dy_transposed
        column, line = (row, int32(0)) if transposed else (int32(0), row)
        if CLUSTER > 1 and ranks & (ranks - 1):
            tma_load_3d_multicast(shared, at, maps[tensor_map], column, line, layer, bars, i, ranks)
        else:
            tma_load_3d(shared, at, maps[tensor_map], column, line, layer, bars, i)

    return load


@cache
def supplier(tile: Tile, x_transposed: bool, dy_transposed: bool, gated: bool = False) -> Any:
    """supply(own, maps, tables, item, gates, shared, base, bars, ring_at): a warp requests copies.

    ring_at : (stage, phase), where the item before ended; returns where this one does
    """
    STAGES, EMPTY, LOADERS, PANEL_BYTES = tile.STAGES, tile.STAGES, tile.LOADERS, tile.PANEL_BYTES
    DEPTH, STAGE = tile.DEPTH, tile.SLOTS * tile.PANEL_BYTES
    load, keep = loader(tile, x_transposed, dy_transposed), keeping(tile)

    @cuda.jit(device=True)
    def supply(own, maps, tables, item, gates, shared, base, bars, ring_at):
        heads, loads, places, outs = tables
        lane = uint32(cuda.threadIdx.x) % 32
        first, steps = heads[item, 0], heads[item, 1]
        n_loads, arriving = heads[item, 2], heads[item, 3]
        panel, code = int32(0), uint32(0)
        mine = own + lane * LOADERS < n_loads
        if mine:
            panel = loads[item, own + lane * LOADERS, 0]
            code = uint32(loads[item, own + lane * LOADERS, 1])
        stage, phase = ring_at
        # A warp that is not waited for could fall two phases behind, and wait forever: those
        # without copies end at once, and lanes without any stay with the others.
        awaited = own == 0 or own < n_loads
        if gated:
            mine, arriving, some = keep(heads, loads, places, outs, item, gates, code, mine)
            awaited = some and (own == 0 or redux_or(uint32(1 if mine else 0)) != 0)
        for step in range(steps if awaited else 0):
            mbarrier_wait(bars, EMPTY + stage, phase ^ uint32(1))
            sync_warp()
            if lane == 0 and own == 0:
                mbarrier_expect(bars, stage, uint32(arriving * PANEL_BYTES))
            row = int32((first + step) * DEPTH)
            if mine:
                load(maps, panel, row, code, shared, base + stage * STAGE, bars, stage)
            stage, phase = following(stage, phase, STAGES)
        return stage, phase

    return supply


@cache
def multiplier(
    tile: Tile, kind: str, x_transposed: bool, dy_transposed: bool, gated: bool = False
) -> Any:
    """multiply(warp, heads, item, places, line, ..., ring_at, sums): sums = an item's products.

    line : of the item in `places`, and in the `outs` of `storer`
    left : if `gated`, 0 where no step is waited for
    """
    B, UNITS, DEPTH, STAGES, CLUSTER = tile.B, tile.UNITS, tile.DEPTH, tile.STAGES, tile.CLUSTER
    GROUPS, PANEL, SLOT, EMPTY = tile.GROUPS, tile.PANEL, tile.PANEL_BYTES, tile.STAGES
    STAGE, PLACES = tile.SLOTS * SLOT, 1 + 2 * UNITS
    x, dy = (
        Operand(2 * DEPTH if transposed else 2 * PANEL, SLOT, not transposed)
        for transposed in (x_transposed, dy_transposed)
    )
    operands = (dy, x) if B == 32 else (x, dy)
    add = wgmma_units(kind, UNITS, tile.SIZES, DEPTH // 16, *operands)
    if B == 32 and dy_transposed:
        add = wgmma_pairs(kind, UNITS, tile.N, DEPTH // 16, 2 * DEPTH, x)
    start_from, read_places = zeros(UNITS * tile.N // 2), words(2 * UNITS)

    @cuda.jit(device=True)
    def multiply(warp, heads, item, places, line, left, shared, base, bars, ring_at, sums):
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        number = uint32(places[line, group, 0])
        where = read_places(places, (line * GROUPS + group) * PLACES + 1)
        acc = start_from()
        stage, phase = ring_at
        for _ in range(heads[item, 1] if not gated or left != 0 else 0):
            mbarrier_wait(bars, stage, phase)
            acc = add(acc, shared, base + stage * STAGE, where, number)
            if lane < CLUSTER:
                mbarrier_arrive_at(bars, EMPTY + stage, lane)
            stage, phase = following(stage, phase, STAGES)
        to_local(acc, sums)
        return stage, phase

    return multiply


@cache
def storer(tile: Tile, kind: str | None) -> Any:
    """store(sums, warp, places, outs, item, out, dense): to kept blocks; rounded if of a kind.

    Two neighbours at once, except at B = 32, where products are transposed.
    """
    B, OUTS, PER_OUT = tile.B, tile.OUTS, tile.UNITS * tile.N // 2 // tile.OUTS
    rounded = PACK[kind or "f16"]

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        t = uint32(cuda.threadIdx.x)
        group, lane = warp // 4, t % 32
        m, n = 16 * (t // 32 % 4) + lane // 4, lane % 4 * 2
        for k in range(OUTS):
            block = outs[item, group, k]
            if B == 32:
                # Rows are columns of dy, of two blocks; columns are those of x.
                if block >= 0 and m // 32 == k % 2:
                    for i in range(16):
                        value = sums[k // 2 * 16 + i]
                        row, column = n + i // 4 * 8 + i % 2, m % 32 + i // 2 % 2 * 8
                        if kind is None:
                            out[block, row, column] = value
                        else:
                            out[block, row, column] = rounded(value, value) & 0xFFFF
            elif block >= 0:
                row = m + (64 * group if B == 128 else 0)
                for i in range(0, PER_OUT, 2):
                    low, high = sums[k * PER_OUT + i], sums[k * PER_OUT + i + 1]
                    line, column = row + i // 2 % 2 * 8, n + i // 4 * 8
                    if kind is None:
                        out[block, line, column] = low
                        out[block, line, column + 1] = high
                    else:
                        out[block, line, column // 2] = rounded(low, high)

    return store


@cache
def storer_of_lines(tile: Tile, kind: str) -> Any:
    """`storer` to blocks of 128, 16 bytes at once: four lanes exchange what they have.

    Lane q of the four has two columns of every eight, and gets all of every fourth eight. Stored
    two by two 512 rows took 1.37 times as long, 8,192 1.04 (H200).
    """
    B, OUTS, PER_OUT = tile.B, tile.OUTS, tile.UNITS * tile.N // 2 // tile.OUTS
    rounded = PACK[kind]

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        t = uint32(cuda.threadIdx.x)
        group, lane = warp // 4, t % 32
        row = 16 * (t // 32 % 4) + lane // 4 + 64 * group
        for k in range(OUTS):
            block = int64(outs[item, group, k])
            if block >= 0:
                for i in range(0, PER_OUT, 16):
                    for half in range(2):
                        at = k * PER_OUT + i + 2 * half
                        words = transposed(
                            rounded(sums[at], sums[at + 1]),
                            rounded(sums[at + 4], sums[at + 5]),
                            rounded(sums[at + 8], sums[at + 9]),
                            rounded(sums[at + 12], sums[at + 13]),
                        )
                        line, column = block * B + row + 8 * half, 2 * i + lane % 4 * 8
                        place = (line * B + column) // 2
                        store_4xu32(out, place, words[0], words[1], words[2], words[3])

    return store
