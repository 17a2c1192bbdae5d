"""What the card can do at most, and what the host's side of a call costs."""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numbsparse.bench.host_calls import calls, chains, printed
from numbsparse.bench.measure import Options
from numbsparse.bench.results import Row
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.device import SIMULATED, compute_capability, empty
from numbsparse.device.runtime import current_device

MEMORY = 4e9  # bytes: many times an L2 cache
FIRST = """
import time
began = time.perf_counter()
import numpy as np, numbsparse as ns
imported = time.perf_counter()
n = {features} // 32
layout = ns.Layout(ns.patterns.random(n, n, 0.1, seed=0))
values = np.ones((layout.n_blocks, 32, 32), np.{dtype})
w = ns.BlockSparse(values, layout).to("cuda")
x = ns.to_device(np.ones(({batch}, {features}), np.{dtype}))
ns.matmul(x, w).numpy()
print(imported - began, time.perf_counter() - imported)
"""


def limits(options: Options) -> Iterator[Row]:
    """A row a limit: bytes or operations in a second."""
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


def host(options: Options) -> Iterator[Row]:
    """Seconds of the host a call, ours and torch's; seconds to a first result."""
    yield {"host": "a call, nothing waited for", "seconds": calls(options)}
    if chain := chains(options):
        yield {"host": "a product in a jitted chain of JAX", "seconds": chain}
    shapes = (
        [(64, 4, "float32")] if options.quick else [(12288, 32, "float32"), (8192, 8192, "float16")]
    )
    for features, batch, dtype in shapes:
        with tempfile.TemporaryDirectory() as folder:
            code = FIRST.format(features=features, batch=batch, dtype=dtype)
            for cache in ("empty", "warm"):
                imported, first = printed(code, NUMBSPARSE_CACHE_DIR=folder)
                yield {
                    "host": f"first result, {features} features, batch {batch}, {dtype}",
                    "cache": cache,
                    "seconds": {"import": imported, "import to result": first},
                }
