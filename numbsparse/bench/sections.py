"""What the benchmark measures, section by section.

A section of CASES is a function of the options that yields cases: each is a row. One of OTHERS
measures for itself, and yields rows. All shapes have B = 32 unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from numbsparse import patterns
from numbsparse.bench.contestants import FEATURE_MAJOR, MATMUL
from numbsparse.bench.lstm import lstm
from numbsparse.bench.machine import host, limits
from numbsparse.bench.measure import Options, measure
from numbsparse.bench.peers import CUBLAS, CUDNN, CUSPARSE, ON_CPU, TRITON
from numbsparse.bench.problem import Problem, random
from numbsparse.bench.results import Row
from numbsparse.kernels.ladder import NAMES, step
from numbsparse.kernels.matmul import OWN, PRODUCTS, add_rung
from numbsparse.layout import Layout

FIGURE = [("float32", "highest"), ("float16", "highest")]
DENSITIES = (1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005)
BLOCK_SIZES = (8, 16, 32, 64, 128)
# Of convolutions: taps along each axis, dtype and precision, and the block sizes.
KINDS = (
    (3, "float16", "highest", (16, 32, 64)),
    (1, "float16", "highest", (32,)),
    (3, "float32", "high", (32,)),
    (3, "float32", "highest", (32,)),
)
QUICK = ((3, "float16", "highest", (16,)), (1, "float16", "highest", (32,)))
# Of the CPU: features, batch, density, block size.
SHAPES = (
    (4096, 64, 0.5, 32),
    (4096, 64, 0.1, 32),
    (4096, 64, 0.02, 32),
    (4096, 512, 0.1, 32),
    (2048, 256, 0.1, 16),
    (4096, 64, 0.1, 8),
)
QUICK_SHAPES = ((256, 64, 0.1, 32), (256, 64, 0.1, 8))


class Case(NamedTuple):
    """A product of a problem, and who computes it: see `measure`."""

    problem: Problem
    product: str
    kernels: str
    others: tuple[str, ...]
    more: dict[str, Any]  # what its row says besides


def rows(name: str, options: Options) -> Iterator[Row]:
    """What a section measures, row by row."""
    if name in OTHERS:
        yield from OTHERS[name](options)
        return
    for case in CASES[name](options):
        yield measure(*case[:-1], options.seconds) | case.more


def headline(options: Options) -> Iterator[Case]:
    """The launch post's figure: 12288 x 12288, batch 32, against density."""
    features, batch = (128, 4) if options.quick else (12288, 32)
    for dtype, precision in FIGURE:
        for density in DENSITIES[:4] if options.quick else DENSITIES:
            problem = Problem(random(features, 32, density), 32, batch, dtype, precision)
            yield from _products(problem, options.kernels, CUBLAS, TRITON, CUSPARSE)


def float32(options: Options) -> Iterator[Case]:
    """The table at 8192 x 8192, batch 8192 in float32: at both precisions."""
    yield from _table(options, "float32", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "float32", "high", (0.1,))


def float16(options: Options) -> Iterator[Case]:
    """The same in float16, and in bfloat16."""
    yield from _table(options, "float16", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "bfloat16", "highest", (0.1,))


def _table(
    options: Options, dtype: str, precision: str, densities: tuple[float, ...]
) -> Iterator[Case]:
    """Every block size, beside the peers at the first density; cuBLAS where all is kept."""
    features, batch = (128, 16) if options.quick else (8192, 8192)
    dense = Problem(random(features, 32, 1), 32, batch, dtype, precision)
    yield from _products(dense, options.kernels, CUBLAS)
    for density in densities:
        for size in (8, 16) if options.quick else BLOCK_SIZES:
            layout = random(features, size, 0.5 if options.quick else density)
            others = [TRITON] if density == densities[0] else []
            problem = Problem(layout, size, batch, dtype, precision)
            yield from _products(problem, options.kernels, *others)


def ladder(options: Options) -> Iterator[Case]:
    """Every rung that serves, at density 0.1: many rows, then small blocks, then few rows.

    Or those that the options name.
    """
    kernels = "all" if options.kernels == "auto" else options.kernels
    homes = [(8192, 32, 8192), (8192, 8, 8192), (12288, 32, 32)]
    for features, size, batch in [(128, 32, 4)] if options.quick else homes:
        for dtype, precision in FIGURE:
            problem = Problem(random(features, size, 0.1), size, batch, dtype, precision)
            yield from _products(problem, kernels)


def steps(options: Options) -> Iterator[Case]:
    """The taught ladder, forward, beside the rungs whose techniques it teaches."""
    beside = {"float32": "k3_registers,k4_pipelined", "float16": "k5_tensor_core,k6_hopper"}
    features, batch = (128, 128) if options.quick else (8192, 8192)
    with _entered():
        for dtype, rungs in beside.items():
            kernels = ",".join((*NAMES, rungs)) if options.kernels == "auto" else options.kernels
            for size in (32,) if options.quick else (32, 64, 128):
                problem = Problem(random(features, size, 0.1), size, batch, dtype)
                yield Case(problem, "forward", kernels, (), {})


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


def layouts(options: Options) -> Iterator[Case]:
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
            as_many = patterns.random(n, n, float(pattern.mean()), seed=0)
            for kind, kept in ((f"random for {name}", as_many), (name, pattern)):
                problem = Problem(Layout(kept), 32, batch, dtype)
                yield from _products(problem, options.kernels, layout=kind)


def sweep(options: Options) -> Iterator[Case]:
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
            layout = random(32 * width, 32, blocks * more / width**2)
            problem = Problem(layout, 32, round(batch * longer), dtype)
            yield from _products(problem, options.kernels, changed=changed)


def feature_major(options: Options) -> Iterator[Case]:
    """Activations as `w @ x` has them, (features, batch) in memory, beside the same batch-major."""
    shapes = [(8192, 8192, size, 0.1) for size in BLOCK_SIZES]
    shapes += [(12288, 32, 32, 0.1), (12288, 32, 32, 0.01)]
    for dtype, precision in FIGURE:
        for features, batch, size, density in [(32, 8, 16, 0.5)] if options.quick else shapes:
            problem = Problem(random(features, size, density), size, batch, dtype, precision)
            yield from _products(problem, options.kernels, FEATURE_MAJOR)


def conv(options: Options) -> Iterator[Case]:
    """3 x 3 and 1 x 1 at 512 features, 32 x 32 images, batch 64, density 0.1.

    Beside cuDNN's dense ones, channels last, and one of a single tap beside the matmul.
    """
    batch, side, features = (1, 4, 32) if options.quick else (64, 32, 512)
    for taps_along, dtype, precision, sizes in QUICK if options.quick else KINDS:
        how = batch, dtype, precision, side, taps_along
        yield from _products(_images(features, 32, 1, *how), "", CUDNN)
        for size in sizes:
            problem = _images(features, size, 1 if options.quick else 0.1, *how)
            yield from _products(problem, "auto", *((MATMUL,) if taps_along == 1 else ()))


def _images(
    features: int,
    size: int,
    density: float,
    batch: int,
    dtype: str,
    precision: str,
    side: int,
    taps_along: int,
) -> Problem:
    n = features // size
    taps = patterns.taps(patterns.random(n, n, density, seed=0), (taps_along,) * 2)
    layout = Layout(taps)
    return Problem(layout, size, batch, dtype, precision, side=side, taps_along=taps_along)


def cpu(options: Options) -> Iterator[Case]:
    """On the CPU, in float32: k0_cpu and users' rungs, NumPy, SciPy, and torch if it is there."""
    for features, batch, density, size in QUICK_SHAPES if options.quick else SHAPES:
        problem = Problem(random(features, size, density), size, batch, "float32", place="cpu")
        yield from _products(problem, "all", *ON_CPU, density=density)


CASES: dict[str, Callable[[Options], Iterator[Case]]] = {
    "headline": headline,
    "float16": float16,
    "float32": float32,
    "ladder": ladder,
    "steps": steps,
    "layouts": layouts,
    "sweep": sweep,
    "feature_major": feature_major,
    "conv": conv,
    "cpu": cpu,
}
OTHERS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "limits": limits,
    "lstm": lstm,
    "host": host,
}
SECTIONS = (
    *("limits", "headline", "float16", "float32", "ladder", "steps", "layouts", "sweep"),
    *("feature_major", "lstm", "conv", "host"),
)
"""Those of the GPU, in the order in which they are run."""


def _products(problem: Problem, kernels: str, *others: str, **more: Any) -> Iterator[Case]:
    for product in PRODUCTS:
        yield Case(problem, product, kernels, others, more)
