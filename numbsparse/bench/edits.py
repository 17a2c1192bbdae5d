"""What it costs to edit the layout of a layer in training, and what a pruned layer takes then."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np

from numbsparse import nn
from numbsparse.bench.host import printed
from numbsparse.bench.measure import Options
from numbsparse.bench.results import Row
from numbsparse.device import to_device
from numbsparse.layout import Layout
from numbsparse.nn import optim
from numbsparse.patterns import random
from numbsparse.tune import timed

EDITS, STEPS = 5, 30
WHAT = "a step", "an edit", "the step after it"
ON_TWO_CORES = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from numbsparse.bench import edits
from numbsparse.patterns import random
of = edits.Training("cpu", random({side}, {side}, {density}, seed=0), 8, 1)
print(*edits.edits_of(of).values())
"""


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
