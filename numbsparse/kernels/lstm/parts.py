"""Sums of a line that several blocks share: the one that comes last adds them, in their order."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64

from numbsparse.kernels.lstm.cell import WARPS
from numbsparse.kernels.ptx import add_acq_rel, load_4xf32, shfl_idx, store_4xf32, sync_warp


@cache
def joining(SUMS: int) -> Any:
    @cuda.jit(device=True)
    def join(sums, partials, tickets, part, first_part, many):
        """Whether this warp came last; `sums` are the line's then. Tickets are zero again."""
        warp, lane = int64(cuda.threadIdx.x // 32), int64(cuda.threadIdx.x % 32)
        at = (part * WARPS + warp) * (32 * SUMS) + 4 * lane
        for i in range(0, SUMS, 4):
            store_4xf32(partials, at + 32 * i, sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
        sync_warp()
        ticket, counter = int32(0), first_part * WARPS + warp
        if lane == 0:
            ticket = add_acq_rel(tickets, counter, int32(1))
        if shfl_idx(ticket, 0) < many - 1:
            return False
        sync_warp()
        for i in range(SUMS):
            sums[i] = float32(0)
        for k in range(first_part, first_part + many):
            at = (k * WARPS + warp) * (32 * SUMS) + 4 * lane
            for i in range(0, SUMS, 4):
                v = load_4xf32(partials, at + 32 * i)
                sums[i] += v[0]
                sums[i + 1] += v[1]
                sums[i + 2] += v[2]
                sums[i + 3] += v[3]
        tickets[counter] = 0
        return True

    return join
