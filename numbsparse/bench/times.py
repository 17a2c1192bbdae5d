"""The times that `auto` goes by, measured on the grid that `ops.times` reads.

What the choice costs at other points is drawn and measured by `held_out`.
"""

import json
from itertools import islice
from itertools import product as every
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from numbsparse.bench import convolutions, held_out
from numbsparse.bench.contestants import named
from numbsparse.bench.measure import measure
from numbsparse.bench.problem import APART, BLOCK_SIZES, Problem, matrices
from numbsparse.bench.results import Row, write
from numbsparse.bench.timing import require_times
from numbsparse.kernels.conv import costs
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.machine import describe
from numbsparse.ops import choice, times

FEATURES = (1024, 2048, 4096, 8192)
DENSITIES = (0.02, 0.1, 0.3)
BATCHES = (1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192)
SLOW = ("k1_naive",)  # nowhere the fastest
PLAIN = "k3_registers"  # nowhere but with blocks of 8


def run(
    json_file: Path | None,
    points: int,
    only: str | None = None,
    minutes: float = inf,
    jobs: int = 1,
    seed: int = 0,
    conv: bool = False,
) -> None:
    """Measure the grid into a file, or say what the choice costs at so many random points.

    Of one rung alone, the file keeps the times of the others; without a file that rung is forced at
    the points, as on a card that has none above it. Of convolutions, the file has no times: the
    factors that fit some.
    """
    require_times()
    if json_file is not None:
        content = convolutions.fit(jobs) if conv else grid(FEATURES, DENSITIES, BATCHES, only)
        if only is not None:
            content["microseconds"] = _added(json_file, content["microseconds"], only)
        write(json_file, content, 2)
        for module in (times, costs):
            module.measured.cache_clear()
        choice.forget()
    if points:
        rng = np.random.default_rng(seed)
        forced = only if json_file is None else None
        all_drawn = convolutions.drawn(rng) if conv else held_out.drawn(rng, forced)
        drawn = islice(all_drawn, points * len(PRODUCTS))
        print(held_out.summary(list(held_out.found(drawn, minutes * 60, jobs))))


def _added(json_file: Path, found: dict[str, Any], only: str) -> dict[str, Any]:
    """The times in the file, with those of one rung as they are found now."""
    known = json.loads(json_file.read_text(encoding="utf-8"))["microseconds"]
    for case, of_rung in found.items():
        others = {name: times for name, times in known.get(case, {}).items() if name != only}
        known[case] = others | of_rung
    return known  # type: ignore[no-any-return]


def grid(
    features: tuple[int, ...],
    densities: tuple[float, ...],
    batches: tuple[int, ...],
    only: str | None = None,
) -> dict[str, Any]:
    """What `ops.times` reads: microseconds, None where a rung does not serve."""
    shape = len(features), len(densities), len(batches)
    found: dict[str, dict[str, np.ndarray]] = {}
    for (i, width), (j, density) in every(enumerate(features), enumerate(densities)):
        for size, numbers, (k, batch) in every(BLOCK_SIZES, APART, enumerate(batches)):
            problem = matrices(width, size, density, batch, *numbers)
            for product in PRODUCTS:
                of_rung = found.setdefault(times.case_of(product, size, *numbers), {})
                for name, seconds in timed(problem, product, only)["seconds"].items():
                    of_rung.setdefault(name, np.full(shape, np.nan))[i, j, k] = seconds
        print(f"{width} features, density {density}", flush=True)
    return {
        "machine": describe("cuda"),
        "command": "python -m numbsparse times --json numbsparse/ops/times.json --points 0",
        "features": features,
        "densities": densities,
        "batches": batches,
        "microseconds": {
            case: {  # three digits of each
                name: [None if s != s else float(f"{s * 1e6:.3g}") for s in array.ravel().tolist()]
                for name, array in of_rung.items()
            }
            for case, of_rung in found.items()
        },
    }


def timed(problem: Problem, product: str, only: str | None = None) -> Row:
    """Of each rung that may be the fastest; or of one, as it is."""
    left_out = SLOW if problem.block_size == 8 else (*SLOW, PLAIN)
    serving = [name for name in named(problem, product, "all") if name in RUNGS]
    names = [name for name in serving if name not in left_out and only in (None, name)]
    return measure(problem, product, ",".join(names), seconds=0.0)
