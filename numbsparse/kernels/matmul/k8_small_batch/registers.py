"""As many warps on a multiprocessor as a kernel counts on."""

from __future__ import annotations

from typing import Any

from numba import cuda

from numbsparse.device import SIMULATED

OF_A_MULTIPROCESSOR = 65536


def jit_for(warps: int) -> Any:
    """cuda.jit with as many registers a thread as `warps` warps leave each; eight at a time."""
    registers = min(OF_A_MULTIPROCESSOR // (32 * warps) // 8 * 8, 255)
    return cuda.jit if SIMULATED else cuda.jit(max_registers=registers)
