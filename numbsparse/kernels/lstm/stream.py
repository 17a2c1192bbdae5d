"""Kept weights streamed past a recurrent state, step after step, in one kernel.

A ring in shared memory holds the weights of several reads and the rows that they meet. Four warps
multiply what the copy engine brings, and the first of them asks for the next read whenever one was
taken. The weights of the next step are on their way before this step ends, so memory has no pause
between steps; the rows follow when all blocks of the grid have written theirs.

In the simulator blocks run one after another, so there a launch takes a single step.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.lstm.cell import GATES, WARPS
from numbsparse.kernels.lstm.deal import ROWS, B
from numbsparse.kernels.ptx import (
    elect,
    fence_mbarrier_init,
    fence_proxy_async_global,
    fence_tensor_map,
    load_acquire,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl_idx,
    sync_warp,
    tma_load_3d,
)

COLUMNS = GATES * B
THREADS = 32 * WARPS
LINE = 128  # bytes of a line of the gates' gradient in shared memory

# The kernels' `engine` is (tensor maps, reads, shared memory, its first item, barriers); what the
# asking warp knows: how many reads it asked for, of all steps; how many belong to steps whose rows
# are there; stage and parity of the next; where it stands, its blocks and its rows.
ASKED, READY, NEXT, PARITY, AT, BLOCK, OTHER = range(7)
KNOWN = 7


class Ring(NamedTuple):
    """Of a block: `turned` when rows of the gates' gradient are read, else rows of h."""

    turned: bool
    ITEM: int  # bytes
    FEW: int  # blocks of a read
    BLOCKS: int  # of threads, on a multiprocessor
    STAGES: int

    @property
    def WEIGHTS(self) -> int:
        """Of a stage, in units of 2 bytes, as STAGE."""
        return self.FEW * B * B * self.ITEM // 2

    @property
    def STAGE(self) -> int:
        return self.WEIGHTS + ROWS * (self.FEW if self.turned else 1) * B * self.ITEM // 2

    @property
    def PANEL(self) -> int:
        """Columns of the gates' gradient in a line."""
        return LINE // self.ITEM

    @property
    def BARS(self) -> int:
        """Those of full stages, then those of free ones."""
        return 2 * self.STAGES

    @property
    def shared_bytes(self) -> int:
        return 1024 + 2 * self.STAGE * self.STAGES

    @property
    def options(self) -> dict[str, Any]:
        return {} if SIMULATED else {"launch_bounds": (THREADS, self.BLOCKS)}


@cache
def beginning(ring: Ring) -> Any:
    STAGES, refill = ring.STAGES, refilling(ring)

    @cuda.jit(device=True)
    def begin(known, engine, own, row, steps):
        """Barriers, and the first reads but one: the last stage is asked for when one was taken."""
        maps, reads, _, _, bars = engine
        first, last = own
        if cuda.threadIdx.x == 0:
            for s in range(STAGES):
                mbarrier_init(bars, s, 1)
                mbarrier_init(bars, STAGES + s, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        known[ASKED], known[READY], known[NEXT], known[PARITY] = 0, last - first, 0, 1
        known[AT], known[BLOCK], known[OTHER] = first, reads[first, 0], reads[first, 1]
        if cuda.threadIdx.x < 32:
            fence_tensor_map(maps[0])
            fence_tensor_map(maps[1])
            for _ in range(STAGES - 1):
                refill(known, engine, own, row, steps)

    return begin


@cache
def refilling(ring: Ring) -> Any:
    STAGES, STAGE, BYTES, load_rows = ring.STAGES, ring.STAGE, 2 * ring.STAGE, rows_loading(ring)

    @cuda.jit(device=True)
    def refill(known, engine, own, row, steps):
        """Ask for one more read, if there is one; for its rows, too, if it is of a ready step."""
        maps, reads, shared, base, bars = engine
        first, last = own
        if known[ASKED] < (last - first) * steps:
            stage = uint32(known[NEXT])
            mbarrier_wait(bars, STAGES + stage, uint32(known[PARITY]))
            if elect() != 0:
                at, none = uint32(base + stage * STAGE), int32(0)
                mbarrier_expect(bars, stage, uint32(BYTES))
                tma_load_3d(shared, at, maps[0], none, none, known[BLOCK], bars, stage)
            if known[ASKED] < known[READY]:
                load_rows(known[OTHER], row, engine, stage)
            known[ASKED] += 1
            known[NEXT] += 1
            if known[NEXT] == STAGES:
                known[NEXT], known[PARITY] = 0, known[PARITY] ^ 1
            known[AT] += 1
            if known[AT] == last:
                known[AT] = first
            known[BLOCK], known[OTHER] = reads[known[AT], 0], reads[known[AT], 1]

    return refill


@cache
def rows_loading(ring: Ring) -> Any:
    STAGE, WEIGHTS, TURNED, PANEL = ring.STAGE, ring.WEIGHTS, ring.turned, ring.PANEL

    @cuda.jit(device=True)
    def load_rows(line, row, engine, stage):
        maps, _, shared, base, bars = engine
        if elect() != 0:
            at, row = uint32(base + stage * STAGE + WEIGHTS), int32(row)
            if TURNED:
                layer = int32(line * B // PANEL)
                tma_load_3d(shared, at, maps[1], int32(0), row, layer, bars, stage)
            else:
                tma_load_3d(shared, at, maps[1], int32(line * B), row, int32(0), bars, stage)

    return load_rows


@cache
def taking_reads(ring: Ring, multiply: Any) -> Any:
    STAGE, STAGES, WEIGHTS, refill = ring.STAGE, ring.STAGES, ring.WEIGHTS, refilling(ring)

    @cuda.jit(device=True)
    def take(acc, count, turn, known, engine, own, row, steps):
        """acc + the products of the next `count` reads; `turn` is the stage and its parity."""
        _, _, shared, base, bars = engine
        stage, parity = turn[0], turn[1]
        for _ in range(count):
            mbarrier_wait(bars, stage, parity)
            at = uint32(base + stage * STAGE)
            acc = multiply(acc, shared, at + WEIGHTS, shared, at)
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage = uint32(stage + 1)
            if stage == STAGES:
                stage, parity = uint32(0), parity ^ uint32(1)
            if cuda.threadIdx.x < 32:
                refill(known, engine, own, row, steps)
        turn[0], turn[1] = stage, parity
        return acc

    return take


@cache
def meeting(ring: Ring) -> Any:
    STAGES, load_rows = ring.STAGES, rows_loading(ring)

    @cuda.jit(device=True)
    def meet(step, known, engine, own, row, arrived):
        """Wait for all blocks of the grid to have written what this step gives to the next.

        Then the rows of the next step, from `row` on, follow the weights that are on their way.
        """
        (first, last), lane = own, cuda.threadIdx.x % 32
        cuda.syncthreads()
        if cuda.threadIdx.x >= 32:
            return  # to wait for the next rows
        other = engine[1][min(first + lane, max(last - 1, first)), 1]
        if lane == 0:
            fence_proxy_async_global()
            cuda.threadfence()
            cuda.atomic.add(arrived, step, 1)
            while load_acquire(arrived, step) < cuda.gridDim.x:
                pass
        sync_warp()
        fence_proxy_async_global()
        stage = uint32(known[READY] % STAGES)
        for k in range(min(known[ASKED] - known[READY], last - first)):
            load_rows(shfl_idx(other, uint32(k)), row, engine, stage)
            stage = uint32(stage + 1)
            if stage == STAGES:
                stage = uint32(0)
        known[READY] += last - first

    return meet
