"""What it costs that a layout changes: gates, layouts made on the GPU, and plans of new ones."""

from collections.abc import Callable, Iterator
from itertools import product as every
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.bench.contestants import chosen
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import Problem, matrices
from numbsparse.bench.results import Row
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import to_device
from numbsparse.kernels.matmul import MADE_SIZES, PRODUCTS
from numbsparse.layout import Layout
from numbsparse.tune import timed

SHAPES = (  # features, block size, batch, dtype; at density 0.1
    (8192, 32, 64, "float16"),
    (8192, 32, 64, "float32"),
    (8192, 8, 64, "float16"),
    (8192, 32, 512, "float16"),
    (8192, 16, 512, "float16"),
    (8192, 8, 512, "float16"),
    (8192, 32, 8192, "float16"),
    (8192, 64, 8192, "float16"),
    (8192, 128, 8192, "float16"),
    (8192, 8, 8192, "float16"),
    (32768, 32, 4096, "float16"),
)
NEW = 3  # layouts that are planned
PLANNED = (  # alike, with a density: 6,560, 105,000 and a million blocks, for all rungs
    *every((8192,), (32, 8), (1, 16, 64, 256, 1024, 8192), ("float16", "float32"), (0.1,)),
    (32768, 8, 64, "float16", 0.06),
)


def changing(options: Options) -> Iterator[Row]:
    """Layouts that change: a row a product, and what of it changes."""
    shapes = [(64, 32, 2, "float16")] if options.quick else SHAPES
    for features, size, batch, dtype in shapes:
        problem = matrices(features, size, 0.5 if options.quick else 0.1, batch, dtype)
        for product in PRODUCTS[::2] if options.quick else PRODUCTS:
            said = {"product": product, **problem.named()}
            for layout, calls in (
                ("gates:", with_gates(problem, product)),
                ("made on the GPU:", made_there(problem, product)),
            ):
                if calls:
                    for call in calls.values():
                        call()
                    graphs = {name: graph_of(record, call) for name, call in calls.items()}
                    yield {**said, "layout": layout, "seconds": seconds_of(graphs, options.seconds)}
    planned = [(64, 8, 2, "float16", 0.5)] if options.quick else PLANNED
    for features, size, batch, dtype, density in planned:
        problem = matrices(features, size, density, batch, dtype)
        for product in PRODUCTS:
            said = {"product": product, **problem.named(), "auto": chosen(problem, product)}
            yield {**said, "layout": "a new layout:", "seconds": first_product(problem, product)}


def call_of(problem: Problem, product: str, w: BlockSparse, gate: Any = None) -> Callable[[], Any]:
    """A product as users call it."""
    x, dy = problem.x.device, problem.dy.device
    if product == "weight_grad":
        return lambda: ops.sddmm(x.T, dy, w if gate is None else gate)
    return lambda: ops.matmul(*((x, w) if product == "forward" else (dy, w.T)), gate=gate)


def with_gates(problem: Problem, product: str) -> dict[str, Callable[[], Any]]:
    """Gates that the host knows, and others: in a graph it knows none of itself."""
    w, n = problem.w, problem.layout.n_blocks
    ones, half = np.ones(n, np.float32), np.arange(n, dtype=np.float32) % 2
    gates = {
        "none": None,
        "all one": ops.all_blocks(w, to_device(ones)),
        "half zero": ops.all_blocks(w, to_device(half)),
        "half zero, known": ops.select_gated(w, to_device(half)),
    }
    return {name: call_of(problem, product, w, gate) for name, gate in gates.items()}


def made_there(problem: Problem, product: str) -> dict[str, Callable[[], Any]]:
    """The same blocks in a layout that the host plans, and in one that it does not know."""
    if problem.block_size not in MADE_SIZES:
        return {}
    index = problem.layout.index
    rows, columns = (to_device(a.copy()) for a in (index.block_rows, index.block_columns))
    made = Layout.on_device(rows, columns, problem.layout.shape)
    layouts = {
        "planned by the host": problem.w,
        "by the GPU": BlockSparse(problem.w.values, made),
    }
    return {name: call_of(problem, product, w) for name, w in layouts.items()}


def first_product(problem: Problem, product: str) -> dict[str, float]:
    """The shortest of some calls on a layout that was used before, and on layouts that were not."""
    took, known = {"used before": np.inf, "not used before": np.inf}, problem.layout
    for k in range(NEW):
        # Equal layouts share their plans.
        layout = known.select(np.arange(known.n_blocks) != k % known.n_blocks)
        call = call_of(problem, product, BlockSparse(problem.w.values[:-1], layout))
        for name in reversed(took):
            took[name] = min(took[name], timed(call))
    return took
