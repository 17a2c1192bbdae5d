"""What the host does for a product, ours, torch's and JAX's; so small that no GPU is behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from numbsparse import ops
from numbsparse.bench.measure import Options
from numbsparse.bench.peers import torch_on_gpu
from numbsparse.bench.problem import matrices
from numbsparse.bench.timing import Graph, repeated, seconds_of
from numbsparse.device import SIMULATED

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


def calls(options: Options) -> dict[str, float]:
    """Median seconds of a call of ours and of torch's, and where a gradient is to be recorded."""
    features, batch, count = (64, 4, 2) if options.quick else (1024, 32, 200)
    problem = matrices(features, 32, 0.1, batch, "float32")
    x, w, y = problem.x.device, problem.w, problem.out("forward")
    found: dict[str, Callable[[], Any]] = {"ns.matmul": lambda: ops.matmul(x, w, out=y)}
    if (torch := torch_on_gpu()) is not None:
        nst = import_module("numbsparse.torch")
        tx, ty, tw = (torch.zeros(n, features, device="cuda") for n in (batch, batch, features))
        values = torch.as_tensor(w.values, device="cuda")
        grad_x, grad_tw, grad_values = (a.clone().requires_grad_() for a in (tx, tw, values))
        theirs, trained = (nst.BlockSparse(v, w.layout) for v in (values, grad_values))
        found["ns.matmul on torch tensors"] = lambda: ops.matmul(tx, w, out=ty)
        found["torch.mm"] = lambda: torch.mm(tx, tw, out=ty)
        found["ns.matmul on torch tensors without out"] = lambda: ops.matmul(tx, w)
        found["numbsparse.torch.matmul"] = lambda: nst.matmul(tx, theirs)
        found["torch.mm without out"] = lambda: torch.mm(tx, tw)
        found["numbsparse.torch.matmul with gradients"] = lambda: nst.matmul(grad_x, trained)
        found["torch.mm with gradients"] = lambda: torch.mm(grad_x, grad_tw)
    graphs = {name: Graph(repeated(call, count), count, call) for name, call in found.items()}
    for graph in graphs.values():
        graph.replay()  # compiles
    return seconds_of(graphs, 20 * options.seconds)


def chains(options: Options) -> dict[str, float]:
    """Median seconds of a product, sparse and dense, in JAX; nothing where JAX has no GPU."""
    if SIMULATED or options.quick or find_spec("jax") is None:
        return {}
    command = [sys.executable, "-c", CHAIN]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    return dict(zip(("numbsparse.jax", "jnp.matmul"), map(float, run.stdout.split()), strict=False))
