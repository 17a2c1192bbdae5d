"""What a multiprocessor of the card has, and the instructions for each dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from numbsparse.device import SIMULATED, compute_capability
from numbsparse.device.runtime import current_device
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

_KILOBYTES = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


def shared_memory() -> int | None:
    """Bytes of shared memory that a block may have; None in the simulator."""
    return None if SIMULATED else 1024 * _KILOBYTES.get(compute_capability(), 99)


def copy_engine() -> bool:
    """Whether the card has one, and barriers that count its bytes."""
    return SIMULATED or compute_capability() >= (9, 0)


def multiprocessors() -> int:
    return 2 if SIMULATED else int(current_device().properties.multiprocessor_count)


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
