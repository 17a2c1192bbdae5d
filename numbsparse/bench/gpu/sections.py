"""What the benchmark of the GPU measures, section by section, a row at a time.

A section is a function of the options that yields rows. All shapes have B = 32 unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from numbsparse import patterns
from numbsparse.bench.gpu.contestants import FEATURE_MAJOR
from numbsparse.bench.gpu.conv import conv
from numbsparse.bench.gpu.host import host
from numbsparse.bench.gpu.limits import limits
from numbsparse.bench.gpu.lstm import lstm
from numbsparse.bench.gpu.measure import Row
from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.peers import CUBLAS, CUSPARSE, TRITON
from numbsparse.bench.gpu.problem import Problem
from numbsparse.kernels.ladder import NAMES, step
from numbsparse.kernels.matmul import OWN, PRODUCTS, add_rung
from numbsparse.layout import Layout

FIGURE = [("float32", "highest"), ("float16", "highest")]
DENSITIES = (1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005)
BLOCK_SIZES = (8, 16, 32, 64, 128)


def headline(options: Options) -> Iterator[Row]:
    """The launch post's figure: 12288 x 12288, batch 32, against density."""
    features, batch = (128, 4) if options.quick else (12288, 32)
    for dtype, precision in FIGURE:
        for density in DENSITIES[:4] if options.quick else DENSITIES:
            problem = Problem(_random(features, 32, density), 32, batch, dtype, precision)
            yield from _products(problem, options, CUBLAS, TRITON, CUSPARSE)


def float32(options: Options) -> Iterator[Row]:
    """The table at 8192 x 8192, batch 8192 in float32: at both precisions."""
    yield from _table(options, "float32", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "float32", "high", (0.1,))


def float16(options: Options) -> Iterator[Row]:
    """The same in float16, and in bfloat16."""
    yield from _table(options, "float16", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "bfloat16", "highest", (0.1,))


def _table(
    options: Options, dtype: str, precision: str, densities: tuple[float, ...]
) -> Iterator[Row]:
    """Every block size, beside the peers at the first density; cuBLAS where all is kept."""
    features, batch = (128, 16) if options.quick else (8192, 8192)
    dense = Problem(_random(features, 32, 1), 32, batch, dtype, precision)
    yield from _products(dense, options, CUBLAS)
    for density in densities:
        for size in (8, 16) if options.quick else BLOCK_SIZES:
            layout = _random(features, size, 0.5 if options.quick else density)
            others = [TRITON] if density == densities[0] else []
            yield from _products(Problem(layout, size, batch, dtype, precision), options, *others)


def ladder(options: Options) -> Iterator[Row]:
    """Every rung that serves, at density 0.1: many rows, then small blocks, then few rows.

    Or those that the options name.
    """
    options = replace(options, kernels="all") if options.kernels == "auto" else options
    homes = [(8192, 32, 8192), (8192, 8, 8192), (12288, 32, 32)]
    for features, size, batch in [(128, 32, 4)] if options.quick else homes:
        for dtype, precision in FIGURE:
            problem = Problem(_random(features, size, 0.1), size, batch, dtype, precision)
            yield from _products(problem, options)


def steps(options: Options) -> Iterator[Row]:
    """The taught ladder, forward, beside the rungs whose techniques it teaches."""
    beside = {"float32": "k3_registers,k4_pipelined", "float16": "k5_tensor_core,k6_hopper"}
    features, batch = (128, 128) if options.quick else (8192, 8192)
    with _entered():
        for dtype, rungs in beside.items():
            for size in (32,) if options.quick else (32, 64, 128):
                problem = Problem(_random(features, size, 0.1), size, batch, dtype)
                kernels = ",".join((*NAMES, rungs))
                kernels = kernels if options.kernels == "auto" else options.kernels
                yield options.measure(problem, "forward", kernels, (), options.seconds)


@contextmanager
def _entered() -> Iterator[None]:
    """The taught steps among the rungs, and afterwards no more."""
    for name in NAMES:
        add_rung(name, step(name))
    try:
        yield
    finally:
        for name in NAMES:
            del OWN[name]


def layouts(options: Options) -> Iterator[Row]:
    """Uneven and clustered layouts, each beside a random one of as many blocks."""
    shapes = [(8192, 8192, "float16"), (8192, 8192, "float32"), (12288, 32, "float32")]
    for features, batch, dtype in [(512, 4, "float32")] if options.quick else shapes:
        n = features // 32
        few, band = max(2, n // 50), max(1, n // 20)
        named = {
            "Barabasi-Albert": patterns.barabasi_albert(n, few, seed=0),
            "banded": patterns.banded(n, n, band),
            "Watts-Strogatz": patterns.watts_strogatz(n, band, 0.1, seed=0),
            "block-diagonal": patterns.block_diagonal(n, n, 10),
        }
        for name, pattern in named.items():
            random = patterns.random(n, n, float(pattern.mean()), seed=0)
            for kind, kept in ((f"random for {name}", random), (name, pattern)):
                for row in _products(Problem(Layout(kept), 32, batch, dtype), options):
                    yield row | {"layout": kind}


def sweep(options: Options) -> Iterator[Row]:
    """From 8192 x 8192, batch 4096, density 0.1: one thing doubled or halved at a time."""
    features, batch = (128, 4) if options.quick else (8192, 4096)
    n = features // 32
    blocks = round(0.1 * n * n)
    cases = {
        "": (1, 1, 1),
        "features / 2": (0.5, 1, 1),
        "features x 2": (2, 1, 1),
        "blocks / 2": (1, 0.5, 1),
        "blocks x 2": (1, 2, 1),
        "batch / 2": (1, 1, 0.5),
        "batch x 2": (1, 1, 2),
    }
    for dtype, _ in FIGURE[-1:] if options.quick else FIGURE:
        for changed, (wider, more, longer) in cases.items():
            width = round(n * wider)
            layout = Layout(patterns.random(width, width, blocks * more / width**2, seed=0))
            problem = Problem(layout, 32, round(batch * longer), dtype)
            for row in _products(problem, options):
                yield row | {"changed": changed}


def feature_major(options: Options) -> Iterator[Row]:
    """Activations as `w @ x` has them, (features, batch) in memory, beside the same batch-major."""
    shapes = [(8192, 8192, size, 0.1) for size in BLOCK_SIZES]
    shapes += [(12288, 32, 32, 0.1), (12288, 32, 32, 0.01)]
    for dtype, precision in FIGURE:
        for features, batch, size, density in [(32, 8, 16, 0.5)] if options.quick else shapes:
            problem = Problem(_random(features, size, density), size, batch, dtype, precision)
            yield from _products(problem, options, FEATURE_MAJOR)


SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "limits": limits,
    "headline": headline,
    "float16": float16,
    "float32": float32,
    "ladder": ladder,
    "steps": steps,
    "layouts": layouts,
    "sweep": sweep,
    "feature_major": feature_major,
    "lstm": lstm,
    "conv": conv,
    "host": host,
}


def _products(problem: Problem, options: Options, *others: str) -> Iterator[Row]:
    for product in PRODUCTS:
        yield options.measure(problem, product, options.kernels, others, options.seconds)


def _random(features: int, block_size: int, density: float) -> Layout:
    blocks = features // block_size
    return Layout(patterns.random(blocks, blocks, density, seed=0))
