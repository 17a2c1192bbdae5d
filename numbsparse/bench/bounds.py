"""What bounds every product: the host's share of a call, and what the card can do at most.

The host's is measured of products so small that no GPU is behind, ours, torch's and JAX's.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.bench.contestants import torch_on_gpu
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import matrices
from numbsparse.bench.results import Row
from numbsparse.bench.timing import Graph, graph_of, record, repeated, seconds_of
from numbsparse.device import SIMULATED, compute_capability, empty
from numbsparse.device.runtime import current_device

MEMORY = 4e9  # bytes: many times an L2 cache
CHAIN = """
import os, time
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp, numbsparse as ns, numbsparse.jax as nsj
layout = ns.Layout(ns.patterns.random(32, 32, 0.1, seed=0))
w, x = nsj.BlockSparse(jnp.zeros((layout.n_blocks, 32, 32)), layout), jnp.zeros((32, 1024))
if jax.default_backend() == "gpu":
    for of in (w, w.to_dense()):
        chain = jax.jit(lambda x, of: [x := x @ of for _ in range(40)][-1])
        took = []
        for _ in range(60):
            began = time.perf_counter()
            chain(x, of).block_until_ready()
            took.append((time.perf_counter() - began) / 40)
        print(sorted(took)[30])
"""
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


def host(options: Options) -> Iterator[Row]:
    """The host: seconds a call, ours and torch's; seconds to a first result."""
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


def calls(options: Options) -> dict[str, float]:
    """Median seconds of a call, ours and torch's; and where a gradient is recorded, and made."""
    features, batch, count = (64, 4, 2) if options.quick else (1024, 32, 200)
    problem = matrices(features, 32, 0.1, batch, "float32")
    x, w, y = problem.x.device, problem.w, problem.out("forward")
    found: dict[str, Callable[[], Any]] = {"ns.matmul, out given": lambda: ops.matmul(x, w, out=y)}
    if (torch := torch_on_gpu()) is not None:
        tx, ty, tw = (torch.zeros(n, features, device="cuda") for n in (batch, batch, features))
        found["ns.matmul on torch tensors, out given"] = lambda: ops.matmul(tx, w, out=ty)
        found["torch.mm, out given"] = lambda: torch.mm(tx, tw, out=ty)
        found["ns.matmul on torch tensors"] = lambda: ops.matmul(tx, w)
        values = torch.as_tensor(w.values, device="cuda")
        found |= products_of_torch(torch, tx, tw, values, w.layout)
    graphs = {name: Graph(repeated(call, count), count, call) for name, call in found.items()}
    for graph in graphs.values():
        graph.replay()  # compiles
    return seconds_of(graphs, 20 * options.seconds)


def products_of_torch(torch: Any, x: Any, w: Any, values: Any, layout: Any) -> dict[str, Any]:
    """numbsparse.torch's product and torch's own; where a gradient is recorded, and made."""
    nst = import_module("numbsparse.torch")

    def back(product: Any, x: Any, w: Any, leaf: Any) -> Any:
        return torch.autograd.grad(product(x, w), (x, leaf), dy)

    found, dy = {}, torch.ones_like(x)
    for name, product, leaf, factor in (
        ("numbsparse.torch.matmul", nst.matmul, values, lambda v: nst.BlockSparse(v, layout)),
        ("torch.mm", torch.mm, w, lambda v: v),
    ):
        found[name] = partial(product, x, factor(leaf))
        trained = [a.clone().requires_grad_() for a in (x, leaf)]
        of = trained[0], factor(trained[1])
        found[f"{name}, gradients recorded"] = partial(product, *of)
        found[f"{name}, forward and backward"] = partial(back, product, *of, trained[1])
    return found


def chains(options: Options) -> dict[str, float]:
    """Median seconds of a product, sparse and dense, in JAX; nothing where JAX has no GPU."""
    if SIMULATED or options.quick or find_spec("jax") is None:
        return {}
    return dict(zip(("numbsparse.jax", "jnp.matmul"), printed(CHAIN, check=False), strict=False))


def printed(code: str, check: bool = True, **environment: str) -> list[float]:
    """The numbers that a program prints in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        check=check,
    )
    return [float(word) for word in run.stdout.split()]


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
