"""What the card can do at most."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numbsparse.bench.measure import Options
from numbsparse.bench.results import Row
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.device import SIMULATED, compute_capability, empty
from numbsparse.device.runtime import current_device

MEMORY = 4e9  # bytes: many times an L2 cache


def limits(options: Options) -> Iterator[Row]:
    """What the card can do at most: a row a limit, bytes or operations in a second."""
    from numbsparse.kernels import limits as kernels  # loads numba.cuda
    from numbsparse.kernels.elementwise import fill

    count = 1 if SIMULATED else current_device().properties.multiprocessor_count
    grid = (1 if options.quick else 8) * count  # all threads that the card keeps at once
    small = 16 * kernels.AT_ONCE * kernels.THREADS * grid  # bytes; fits in an L2 cache of 25 MB
    large = small * (1 if options.quick else round(MEMORY / small))
    rounds, passes = (2, 2) if options.quick else (4000, 100)
    x, out = (empty((n,), np.float32) for n in (large // 4, 8 * count * kernels.THREADS))
    fill(x, np.nan)

    def rate(limit: str, unit: str, work: Callable[..., Any], *how: Any) -> dict[str, Any]:
        done = work(*how, out)
        graph = graph_of(record, lambda: work(*how, out))
        seconds = seconds_of({limit: graph}, options.seconds)
        return {"limit": limit, "unit": unit, "rate": done / seconds[limit]}

    yield rate("device memory, read", "B/s", kernels.read, x, grid, 1)
    name = f"L2 cache, read ({small / 1e6:.0f} MB)"
    yield rate(name, "B/s", kernels.read, x[: small // 4], grid, passes)
    yield rate("float32 multiply-add", "FLOP/s", kernels.multiply_add, grid, rounds)
    if SIMULATED or compute_capability() >= (8, 0):
        for dtype in kernels.TENSOR_CORES:
            name = f"mma.sync {dtype}, operands in registers"
            yield rate(name, "FLOP/s", kernels.tensor_core, dtype, grid, rounds // 4 + 1)
    if SIMULATED or compute_capability() == (9, 0):
        for dtype in kernels.KINDS:  # a block a multiprocessor: more would not find registers
            name = f"wgmma {dtype}, operands in shared memory"
            yield rate(name, "FLOP/s", kernels.warpgroup, dtype, count, rounds // 4 + 1)
