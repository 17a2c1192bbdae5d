"""The kernels of the weight-gradient.

A block of threads has GROUPS warpgroups that multiply and LOADERS warps that ask for copies. Every
step brings DEPTH rows of the batch of all tiles of the item to one of STAGES places in shared
memory; tiles that several blocks of a cluster need are asked for by one of them and sent to all.
So a place is free when the warps of the whole cluster have said so.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.types import uint16

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import MAPS, OPERANDS, Tile
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    Operand,
    cluster_sync,
    fence_mbarrier_init,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    more_registers,
    pack_bfloat2,
    pack_half2,
    shfl_idx,
    sync_warp,
    tma_load_3d,
    tma_load_3d_multicast,
    to_local,
    wgmma_pairs,
    wgmma_units,
    words,
    zeros,
)


def threads(tile: Tile) -> int:
    return 128 * tile.GROUPS + 32 * tile.LOADERS


def shared_bytes(tile: Tile) -> int:
    return 1024 + tile.STAGES * tile.SLOTS * tile.PANEL_BYTES


@cache
def weight_grad_kernel(tile: Tile, kind: str, x_turned: bool, dy_turned: bool) -> Any:
    B, GROUPS, UNITS, SIZES, DEPTH, STAGES, SLOTS, CLUSTER, LOADERS, RESIDENT = tile[:10]
    GIVEN, TAKEN = tile.REGISTERS
    PANEL, SLOT = tile.PANEL, tile.PANEL_BYTES // 2
    STAGE = SLOTS * SLOT
    WARPS, N = 4 * GROUPS, max(SIZES)
    BARS, EMPTY = 2 * STAGES, STAGES
    COUNT = UNITS * N // 2
    PLACES, ALL_MAPS = 1 + 2 * UNITS, MAPS * OPERANDS
    x_operand = Operand(2 * PANEL if x_turned else 2 * DEPTH, SLOT * 2, x_turned)
    dy_operand = Operand(2 * PANEL if dy_turned else 2 * DEPTH, SLOT * 2, dy_turned)
    factors = (dy_operand, x_operand) if B == 32 else (x_operand, dy_operand)
    multiply = wgmma_units(kind, UNITS, SIZES, DEPTH // 16, *factors)
    if B == 32 and not dy_turned:
        multiply = wgmma_pairs(kind, UNITS, N, DEPTH // 16, 2 * DEPTH, x_operand)
    start_from, read_places = zeros(COUNT), words(2 * UNITS)
    load = loader(tile, x_turned, dy_turned)
    store, store_sums = stores(tile, kind), stores(tile, None)
    options = {} if SIMULATED else {"launch_bounds": (threads(tile), RESIDENT)}

    @cuda.jit(**options)
    def kernel(maps, heads, loads, places, outs, dvalues, sums):
        shared = cuda.shared.array(0, uint16)
        bars = cuda.shared.array(BARS, uint64)
        t = uint32(cuda.threadIdx.x)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32
        item = cuda.blockIdx.x
        base = first_multiple(shared, uint32(1024))
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(bars, s, 1)
                mbarrier_init(bars, EMPTY + s, WARPS * CLUSTER)
            fence_mbarrier_init()
        cuda.syncthreads()
        if CLUSTER > 1:
            cluster_sync()
        first, steps = heads[item, 0], heads[item, 1]
        stage, parity = uint32(0), uint32(0)
        if warp >= WARPS:
            if GIVEN:
                fewer_registers(GIVEN)
            for m in range(ALL_MAPS):
                fence_tensor_map(maps[m])
            own = warp - WARPS
            n_loads, arriving = heads[item, 2], heads[item, 3]
            panel, code = int32(0), uint32(0)
            mine = own + lane * LOADERS < n_loads
            if mine:
                panel = loads[item, own + lane * LOADERS, 0]
                code = uint32(loads[item, own + lane * LOADERS, 1])
            # Who is not waited for could fall two phases behind, and wait for ever: warps without
            # copies end at once, and lanes without any stay beside the others.
            awaited = own == 0 or own < n_loads
            for step in range(steps if awaited else 0):
                mbarrier_wait(bars, EMPTY + stage, parity ^ uint32(1))
                sync_warp()
                if lane == 0 and own == 0:
                    mbarrier_expect(bars, stage, uint32(arriving * SLOT * 2))
                row = int32((first + step) * DEPTH)
                if mine:
                    load(maps, panel, row, code, shared, base + stage * STAGE, bars, stage)
                stage, parity = following(stage, parity, STAGES)
        else:
            if TAKEN:
                more_registers(TAKEN)
            group = warp // 4
            number = uint32(places[item, group, 0])
            where = read_places(places, (item * GROUPS + group) * PLACES + 1)
            acc = start_from()
            for _ in range(steps):
                mbarrier_wait(bars, stage, parity)
                acc = multiply(acc, shared, base + stage * STAGE, where, number)
                if lane < CLUSTER:
                    mbarrier_arrive_at(bars, EMPTY + stage, lane)
                stage, parity = following(stage, parity, STAGES)
            results = cuda.local.array(COUNT, float32)
            to_local(acc, results)
            if heads[item, 4] != 0:
                store_sums(results, group, outs, item, sums)
            else:
                store(results, group, outs, item, dvalues)
        if CLUSTER > 1:
            cluster_sync()

    return kernel


@cache
def loader(tile: Tile, x_turned: bool, dy_turned: bool) -> Any:
    """Brings a run of panels, of DEPTH rows of the batch, to all blocks of threads in ranks."""
    SLOT, CLUSTER = tile.PANEL_BYTES // 2, tile.CLUSTER

    @cuda.jit(device=True)
    def load(maps, layer, row, which, shared, start, bars, i):
        at = start + (which & uint32(0xFF)) * SLOT
        tensor_map, ranks = which >> uint32(8) & uint32(0xFF), which >> uint32(16)
        turned = x_turned if tensor_map < MAPS else dy_turned
        column, line = (int32(0), row) if turned else (row, int32(0))
        if CLUSTER > 1 and ranks & (ranks - 1):
            tma_load_3d_multicast(shared, at, maps[tensor_map], column, line, layer, bars, i, ranks)
        else:
            tma_load_3d(shared, at, maps[tensor_map], column, line, layer, bars, i)

    return load


@cache
def stores(tile: Tile, kind: str | None) -> Any:
    """The accumulators of a warpgroup to its kept blocks, rounded; of no kind, as they are."""
    B, OUTS = tile.B, tile.OUTS
    PER_OUT = tile.UNITS * max(tile.SIZES) // 2 // tile.OUTS
    rounded = pack_bfloat2 if kind == "bf16" else pack_half2

    @cuda.jit(device=True)
    def store(results, group, outs, item, out):
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32 % 4, t % 32
        m, n = 16 * warp + lane // 4, lane % 4 * 2
        for k in range(OUTS):
            block = outs[item, group, k]
            if B == 32:
                # Rows are columns of dy, of two blocks; columns are those of x.
                if block >= 0 and m // 32 == k % 2:
                    for i in range(16):
                        value = results[k // 2 * 16 + i]
                        row, column = n + i // 4 * 8 + i % 2, m % 32 + i // 2 % 2 * 8
                        if kind is None:
                            out[block, row, column] = value
                        else:
                            out[block, row, column] = rounded(value, value) & 0xFFFF
            elif block >= 0:
                row = m + (64 * group if B == 128 else 0)
                for i in range(0, PER_OUT, 2):
                    low, high = results[k * PER_OUT + i], results[k * PER_OUT + i + 1]
                    line, column = row + i // 2 % 2 * 8, n + i // 4 * 8
                    if kind is None:
                        out[block, line, column] = low
                        out[block, line, column + 1] = high
                    else:
                        out[block, line, column // 2] = rounded(low, high)

    return store


@cache
def add_kernel(kind: str, B: int) -> Any:
    rounded = pack_bfloat2 if kind == "bf16" else pack_half2

    @cuda.jit
    def kernel(sums, blocks, pieces, dvalues):
        """dvalues[blocks[k]] = the sum of the pieces of block k, in the order of the batch."""
        k = int64(cuda.blockIdx.x)
        block = blocks[k]
        i = uint32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        row, column = i // B, i % B
        total = float32(0)
        for piece in range(pieces):
            total += sums[piece * blocks.size + k, row, column]
        dvalues[block, row, column] = rounded(total, total) & 0xFFFF

    return kernel
