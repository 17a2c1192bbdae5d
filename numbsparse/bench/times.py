"""The times that `auto` goes by, measured; and what its choice costs where nobody measured.

`grid` makes what `ops.times` reads. `regrets` draws products of any size at random, times every
rung that serves them, and says how much longer than the fastest the chosen one takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import product as every
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numbsparse import files, patterns
from numbsparse.bench.machine import describe
from numbsparse.bench.problem import random
from numbsparse.bench.timing import graph_of, record, shortest
from numbsparse.device import SIMULATED, DeviceArray, empty, require, to_device
from numbsparse.kernels.matmul import PRECISIONS, PRODUCTS, function_of
from numbsparse.layout import Layout
from numbsparse.ops import choice, index_beside, times
from numbsparse.tune import agree, sample

FEATURES = (1024, 4096, 8192)
DENSITIES = (0.02, 0.1, 0.3)
BATCHES = (1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192)
SIZES = (8, 16, 32, 64, 128)
NUMBERS = (("float16", "highest"), *(("float32", precision) for precision in PRECISIONS))
FEW = 64  # rows: beyond, the rungs without tensor cores are nowhere the fastest
SLOW = ("k1_naive", "k2_shared")  # nowhere at all
PLAIN = ("k3_registers", "k4_pipelined")
POOL = 2**27  # random numbers, of which operands are parts


def run(json_file: Path | None, points: int, only: str | None = None) -> None:
    """Measure the grid into a file, or say what the choice costs at so many random points.

    Of one rung alone, the file keeps the times of the others.
    """
    if SIMULATED:
        raise RuntimeError("the simulator's times mean nothing: unset NUMBA_ENABLE_CUDASIM")
    require()
    if json_file is not None:
        content = grid(FEATURES, DENSITIES, BATCHES, only)
        if only is not None:
            content["microseconds"] = _added(json_file, content["microseconds"], only)
        files.write_bytes(json_file, json.dumps(content).encode())
        times.measured.cache_clear()
        choice.forget()
    if points:
        print(summary(list(regrets(points))))


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
        for size in SIZES:
            layout = random(width, size, density)
            for numbers, (k, batch), product in every(NUMBERS, enumerate(batches), PRODUCTS):
                of_rung = found.setdefault(times.case_of(product, size, *numbers), {})
                here = timed(product, layout, size, batch, *numbers, only=only)
                for name, seconds in here.items():
                    of_rung.setdefault(name, np.full(shape, np.nan))[i, j, k] = seconds
        print(f"{width} features, density {density}", flush=True)
    return {
        "machine": describe("cuda"),
        "command": "python -m numbsparse times --json numbsparse/ops/times.json --points 0",
        "features": features,
        "densities": densities,
        "batches": batches,
        "microseconds": {
            case: {name: _in_microseconds(array) for name, array in of_rung.items()}
            for case, of_rung in found.items()
        },
    }


def _in_microseconds(array: np.ndarray) -> list[float | None]:
    """In one list, three digits of each."""
    return [None if s != s else float(f"{s * 1e6:.3g}") for s in array.ravel().tolist()]


def timed(
    product: str,
    layout: Layout,
    size: int,
    batch: int,
    dtype: str,
    precision: str,
    only: str | None = None,
) -> dict[str, float]:
    """Seconds of each rung that may be the fastest and that agrees with the first of them."""
    rungs = choice.serving(product, size, dtype, "cuda", batch, precision)[::-1]
    if only is not None:
        rungs = [name for name in rungs if name == only]  # as it is, beside none
    x, dy = (numbers_of(dtype, (batch, n * size)) for n in layout.shape)
    values = numbers_of(dtype, (layout.n_blocks, size, size))
    operands, like = {
        "forward": ((x, values), dy),
        "input_grad": ((dy, values), x),
        "weight_grad": ((x, dy), values),
    }[product]
    out, right, graphs = empty(like.shape, like.dtype), None, {}
    given = *operands, index_beside(layout, x), out, precision
    for name in rungs:
        if name in SLOW or (name in PLAIN and batch > FEW and size > 8):
            continue
        call = partial(function_of(name, product), *given)
        with suppress(RuntimeError, ValueError):  # one that fails is not chosen
            call()
            got = sample(out)
            right = got if right is None else right
            if agree(got, right, x.dtype, precision):
                graphs[name] = graph_of(record, call)
    return {name: shortest(graph) for name, graph in graphs.items()}


def numbers_of(dtype: str, shape: tuple[int, ...]) -> DeviceArray:
    return _pool(dtype)[: prod(shape)].reshape(shape)


@cache
def _pool(dtype: str) -> DeviceArray:
    return to_device(np.random.default_rng(0).standard_normal(POOL, np.float32).astype(dtype))


class Regret(NamedTuple):
    """At a random point: seconds of each rung, the chosen one, its time over the fastest's."""

    point: str
    seconds: dict[str, float]
    chosen: str
    ratio: float


def regrets(points: int, seed: int = 0) -> Iterator[Regret]:
    """At products drawn at random: any features in and out, batch, density, block size, dtype."""
    rng = np.random.default_rng(seed)
    while points:
        size = int(rng.choice(SIZES))
        rows, columns = (max(int(2 ** rng.uniform(9.5, 13.7)) // size, 2) for _ in range(2))
        batch, density = int(2 ** rng.uniform(0, 13)), 2 ** rng.uniform(-6, -1)
        dtype, precision = NUMBERS[rng.integers(len(NUMBERS))]
        layout = Layout(patterns.random(rows, columns, density, seed=int(rng.integers(1000))))
        if max(max(rows, columns) * batch, layout.n_blocks * size) * size > POOL:
            continue
        points -= 1
        for product in PRODUCTS:
            seconds = timed(product, layout, size, batch, dtype, precision)
            like = numbers_of(dtype, (1,))
            name = choice.choose(product, "auto", size, like, batch, precision, layout)
            if name in seconds:
                where = f"{product} {dtype} {precision} B={size} {rows * size} x {columns * size}"
                where += f" batch {batch} density {density:.3f}"
                yield Regret(where, seconds, name, seconds[name] / min(seconds.values()))


def summary(found: list[Regret]) -> str:
    """How the ratios are spread, and the points where they are largest."""
    ratios = np.array([each.ratio for each in found])
    lines = [
        f"auto takes {ratios.mean():.3f} times as long as the fastest rung over {len(found)} "
        f"random products; more than 1.05 times at {np.mean(ratios > 1.05):.1%} of them, at most "
        f"{ratios.max():.2f}"
    ]
    for each in sorted(found, key=lambda each: -each.ratio)[:12]:
        seconds = ", ".join(f"{name} {s * 1e6:.1f}" for name, s in each.seconds.items())
        lines.append(f"  {each.ratio:.2f}  {each.point}: {each.chosen} of {seconds} us")
    return "\n".join(lines)
