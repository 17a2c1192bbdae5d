"""The registers of a thread, and the instructions for each dtype and cluster."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from numbsparse.device import SIMULATED
from numbsparse.kernels.ptx import (
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    pack_bfloat2,
    pack_half2,
    tma_load_2d,
    tma_load_2d_multicast,
)

MMA = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16}
PAIR = {"float16": pack_half2, "bfloat16": pack_bfloat2}


def registers(warps: int) -> dict[str, int]:
    """Options of `cuda.jit`: the registers of a thread, handed out to four warps at once."""
    if SIMULATED:
        return {}
    return {"max_registers": min(255, 65536 // (128 * -(-warps // 4)) // 8 * 8)}


@cache
def load_for(cluster: int) -> Any:
    """tma_load_2d, to all blocks of a cluster."""
    if cluster == 1:
        return tma_load_2d
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, i, x_map, column, row, bars, stage):
        tma_load_2d_multicast(shared, i, x_map, column, row, bars, stage, RANKS)

    return load
