"""What it costs that a layout changes: gates, layouts made on the GPU, plans of new ones, edits.

Edits are of the layout of a layer in training; and there is what a pruned layer takes then.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as every
from statistics import median
from typing import Any

import numpy as np

from numbsparse import nn, ops
from numbsparse.bench.bounds import printed
from numbsparse.bench.contestants import chosen
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import Problem, matrices
from numbsparse.bench.results import Row
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import to_device
from numbsparse.kernels.matmul import MADE_SIZES, PRODUCTS
from numbsparse.layout import Layout
from numbsparse.nn import optim
from numbsparse.patterns import random
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
EDITS, STEPS = 5, 30
WHAT = "a step", "an edit", "the step after it"

ON_TWO_CORES = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from numbsparse.bench.changing import Training, edits_of
from numbsparse.patterns import random
print(*edits_of(Training("cpu", random({side}, {side}, {density}, seed=0), 8, 1)).values())
"""


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


class Training:
    """A layer of such blocks and its optimizer, in float32."""

    def __init__(self, place: str, pattern: np.ndarray, size: int, batch: int):
        features = size * len(pattern)
        self.layer = nn.Linear(features, features, layout=pattern, block_size=size, seed=0)
        self.layer.to(place)
        rng = np.random.default_rng(0)
        self.optimizer = optim.Adam(self.layer.parameters())
        x = rng.standard_normal((batch, features), dtype=np.float32)
        self.x = to_device(x) if place == "cuda" else x

    def step(self) -> None:
        self.layer.zero_grad()
        nn.functional.sum(self.layer(self.x)).backward()
        self.optimizer.step()

    def others(self, seed: int) -> tuple[Layout, Layout]:
        """A tenth of the blocks, and as many that are not there."""
        there, rng = self.layer.weight.data.layout.pattern, np.random.default_rng(seed)
        found = []
        for of in (there, ~there):
            pattern = np.zeros_like(there)
            pattern.flat[rng.choice(np.flatnonzero(of), there.sum() // 10, replace=False)] = True
            found.append(Layout(pattern))
        return found[0], found[1]

    def edit(self, gone: Layout, new: Layout) -> None:
        """The weight and its moments; new blocks begin at zero."""
        weight = self.layer.weight
        weight.data = weight.data.remap(weight.data.layout - gone | new)
        self.optimizer.remap()


def edits(options: Options) -> Iterator[Row]:
    """Edits of a tenth of a layout, beside a step of training; a layer that was pruned."""
    side, size, density, batch = (8, 8, 0.5, 4) if options.quick else (384, 32, 0.05, 64)
    of = Training("cuda", random(side, side, density, seed=0), size, batch)
    blocks = f"{of.layer.weight.data.n_blocks:,} blocks"
    yield {"host": f"a tenth of {blocks} changed, batch {batch}", "seconds": edits_of(of)}
    side, density = (16, 0.5) if options.quick else (1000, 0.1)
    took = dict(zip(WHAT, printed(ON_TWO_CORES.format(side=side, density=density)), strict=True))
    blocks = f"{side * side * density:,.0f} blocks"
    yield {"host": f"a tenth of {blocks} changed, two CPU cores", "seconds": took}
    side, batch = (4, 4) if options.quick else (128, 4096)
    yield {"host": f"a step of {32 * side} features, a tenth kept", "seconds": pruned(side, batch)}


def edits_of(of: Training) -> dict[str, float]:
    """Median seconds of WHAT, each waited for."""
    took = []
    for k in range(1 + EDITS):  # the first compiles
        edit = partial(of.edit, *of.others(k))
        of.step()
        took.append([timed(call) for call in (of.step, edit, of.step)])
    return dict(zip(WHAT, map(median, zip(*took[1:], strict=True)), strict=True))


def pruned(side: int, batch: int) -> dict[str, float]:
    """Median seconds of a step of a layer that was made so, and of one that was pruned."""
    dense = Training("cuda", np.ones((side, side), bool), 32, batch)
    dense.step()
    nn.utils.prune(dense.layer, 0.1, remap=dense.optimizer)
    made = Training("cuda", dense.layer.weight.data.layout.pattern, 32, batch)
    took = [[timed(of.step) for of in (made, dense)] for _ in range(STEPS + 1)]
    return dict(zip(("made so", "pruned"), map(median, zip(*took[1:], strict=True)), strict=True))
