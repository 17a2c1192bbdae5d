"""The card's own limits, measured: what no kernel can pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.replay import graph_of, record, seconds_of
from numbsparse.device import SIMULATED, DeviceArray, compute_capability, empty
from numbsparse.device.runtime import current_device

MEMORY = 4e9  # bytes: many times an L2 cache


def limits(options: Options) -> Iterator[dict[str, Any]]:
    """A row a limit: bytes or operations in a second."""
    from numbsparse.kernels import limits as kernels  # loads numba.cuda

    grid = 8 * _multiprocessors()  # all threads that the card keeps at once
    small = 16 * kernels.AT_ONCE * kernels.THREADS * grid  # bytes; fits in an L2 cache of 25 MB
    large = small * (1 if options.quick else round(MEMORY / small))
    rounds = 2 if options.quick else 4000
    out = empty((grid * kernels.THREADS,), np.float32)

    def rate(limit: str, unit: str, work: Any) -> dict[str, Any]:
        counts = [work()]
        graph = graph_of(record, lambda: counts.append(work()))
        seconds = seconds_of({limit: graph}, options.seconds)
        return {"limit": limit, "unit": unit, "rate": counts[0] / seconds[limit]}

    x = _zeros(large)
    yield rate("device memory, read", "B/s", lambda: kernels.read(x, grid, 1, out))
    part, passes = x[: small // 4], 2 if options.quick else 100
    name = f"L2 cache, read ({small / 1e6:.0f} MB)"
    yield rate(name, "B/s", lambda: kernels.read(part, grid, passes, out))
    yield rate("float32 multiply-add", "FLOP/s", lambda: kernels.multiply_add(grid, rounds, out))
    if SIMULATED or compute_capability() >= (8, 0):
        for dtype in kernels.TENSOR_CORES:
            name = f"mma.sync {dtype}, operands in registers"
            yield rate(
                name, "FLOP/s", lambda d=dtype: kernels.tensor_core(d, grid, rounds // 4 + 1, out)
            )

    if SIMULATED or compute_capability() == (9, 0):
        grid = _multiprocessors()  # more would not find registers
        for dtype in kernels.KINDS:
            name = f"wgmma {dtype}, operands in shared memory"
            yield rate(
                name, "FLOP/s", lambda d=dtype: kernels.warpgroup(d, grid, rounds // 4 + 1, out)
            )


def _multiprocessors() -> int:
    return 1 if SIMULATED else current_device().properties.multiprocessor_count


def _zeros(nbytes: int) -> DeviceArray:
    from numbsparse.kernels.poison import fill_with_nan

    array = empty((nbytes // 4,), np.float32)
    fill_with_nan(array)
    return array
