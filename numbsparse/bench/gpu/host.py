"""What the host's side costs: a call, and the first result after import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from numbsparse import ops, patterns
from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.peers import torch_on_gpu
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import empty, synchronize, to_device
from numbsparse.layout import Layout

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


def host(options: Options) -> Iterator[dict[str, Any]]:
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
    rng = np.random.default_rng(0)
    n = features // 32
    layout = Layout(patterns.random(n, n, 0.1, seed=0))
    values = rng.standard_normal((layout.n_blocks, 32, 32), dtype=np.float32)
    w = BlockSparse(values, layout).to("cuda")
    x = to_device(rng.standard_normal((batch, features), dtype=np.float32))
    y = empty((batch, features), np.float32)
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
