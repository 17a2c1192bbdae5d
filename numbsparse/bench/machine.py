"""What was measured on: its name, the card's limits, and what the host's side of a call costs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np

from numbsparse import device, ops
from numbsparse.bench.measure import Options
from numbsparse.bench.peers import torch_on_gpu
from numbsparse.bench.problem import Problem, random
from numbsparse.bench.results import Row
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.device import SIMULATED, DeviceArray, compute_capability, empty, synchronize
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


def describe(place: str) -> str:
    """Processor or GPU, cores, and the versions that matter."""
    if place == "cuda":
        what = device.describe()
    else:
        what = f"{processor()}, {device.CPU_THREADS} of {os.cpu_count()} cores"
    packages = ("numba", "numba-cuda", "numpy", "scipy", "torch")
    versions = [f"{name} {number}" for name in packages if (number := version_of(name))]
    return f"{what}; Python {sys.version.split()[0]}, {', '.join(versions)}"


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def limits(options: Options) -> Iterator[Row]:
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


def host(options: Options) -> Iterator[Row]:
    """Seconds of the host a call, ours and torch's; seconds to a first result."""
    yield {"host": "a call, nothing waited for", "seconds": _calls(options)}
    shapes = (
        [(64, 4, "float32")] if options.quick else [(12288, 32, "float32"), (8192, 8192, "float16")]
    )
    for features, batch, dtype in shapes:
        with tempfile.TemporaryDirectory() as folder:
            code = FIRST.format(features=features, batch=batch, dtype=dtype)
            for cache in ("empty", "warm"):
                imported, first = _in_a_new_process(code, folder)
                yield {
                    "host": f"first result, {features} features, batch {batch}, {dtype}",
                    "cache": cache,
                    "seconds": {"import": imported, "import to result": first},
                }


def _calls(options: Options) -> dict[str, float]:
    """Median seconds of host time; products so small that the GPU is never behind."""
    features, batch, count = (64, 4, 2) if options.quick else (1024, 32, 200)
    problem = Problem(random(features, 32, 0.1), 32, batch, "float32")
    x, w, y = problem.x.device, problem.w, problem.out("forward")
    calls: dict[str, Callable[[], Any]] = {"ns.matmul": lambda: ops.matmul(x, w, out=y)}
    if (torch := torch_on_gpu()) is not None:
        tx, ty, tw = (torch.zeros(n, features, device="cuda") for n in (batch, batch, features))
        calls["ns.matmul on torch tensors"] = lambda: ops.matmul(tx, w, out=ty)
        calls["torch.mm"] = lambda: torch.mm(tx, tw, out=ty)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + (2 if options.quick else 20)):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - began) / count)
            synchronize()
    return {name: median(taken[1:]) for name, taken in samples.items()}  # the first compiles


def _in_a_new_process(code: str, cache: str) -> tuple[float, float]:
    """Seconds of the import, and from there to the first result."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBSPARSE_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    imported, first = run.stdout.split()
    return float(imported), float(first)
