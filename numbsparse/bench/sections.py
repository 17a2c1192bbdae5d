"""What the benchmark measures, section by section, and how it runs, prints and keeps them.

A section of CASES is a function of the options that yields cases: each is a row. One of OTHERS
measures for itself, and yields rows. All shapes have B = 32 unless said.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product as every
from pathlib import Path
from typing import Any

from numbsparse import patterns
from numbsparse.bench.bounds import host, limits
from numbsparse.bench.changing import changing, edits
from numbsparse.bench.contestants import CUBLAS, CUDNN, CUSPARSE, FEATURE_MAJOR, ON_CPU, TRITON
from numbsparse.bench.lstm import lstm
from numbsparse.bench.measure import Case, Options, compile_ahead, processes_here
from numbsparse.bench.problem import BLOCK_SIZES, Problem, matrices
from numbsparse.bench.results import CELLS, Results, Row, line, load, save
from numbsparse.bench.timing import require_times
from numbsparse.kernels.ladder import NAMES
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.layout import Layout
from numbsparse.machine import describe

DEFAULT = Options()
PATIENCE = 60.0  # seconds; what is not compiled by then is compiled where it is timed
DTYPES = ("float32", "float16")  # of the headline's figure
DENSITIES = (1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005)
# Of convolutions: taps along each axis, dtype and precision, and the block sizes.
KINDS = (
    (3, "float16", "highest", (8, 16, 32, 64)),
    (1, "float16", "highest", (32,)),
    (3, "float32", "high", (32,)),
    (3, "float32", "highest", (32,)),
)
QUICK = ((3, "float16", "highest", (16,)), (1, "float16", "highest", (16,)))
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


def rows(name: str, options: Options) -> Iterator[Row]:
    """What a section measures, row by row."""
    if name in OTHERS:
        yield from OTHERS[name](options)
        return
    for case in CASES[name](options):
        yield case.measured(options.seconds)


def headline(options: Options) -> Iterator[Case]:
    """The launch post's figure: 12288 x 12288, batch 32, against density."""
    features, batch = (128, 4) if options.quick else (12288, 32)
    for dtype, density in every(DTYPES, DENSITIES[:4] if options.quick else DENSITIES):
        problem = matrices(features, 32, density, batch, dtype)
        yield from _products(problem, options.kernels, CUBLAS, TRITON, CUSPARSE)


def float32(options: Options) -> Iterator[Case]:
    """The table at 8192 x 8192, batch 8192 in float32: at both precisions."""
    yield from _table(options, "float32", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "float32", "high", (0.1,))


def float16(options: Options) -> Iterator[Case]:
    """The table at 8192 x 8192, batch 8192 in float16, and in bfloat16."""
    yield from _table(options, "float16", "highest", (0.1, 0.02, 0.5))
    yield from _table(options, "bfloat16", "highest", (0.1,))


def _table(
    options: Options, dtype: str, precision: str, densities: tuple[float, ...]
) -> Iterator[Case]:
    """Every block size, beside the peers at the first density; cuBLAS where all is kept."""
    how = 16 if options.quick else 8192, dtype, precision
    features, sizes = (128, (8, 16)) if options.quick else (8192, BLOCK_SIZES)
    yield from _products(matrices(features, 32, 1, *how), options.kernels, CUBLAS)
    for density, size in every(densities, sizes):
        problem = matrices(features, size, 0.5 if options.quick else density, *how)
        others = [TRITON] if density == densities[0] else []
        yield from _products(problem, options.kernels, *others)


def ladder(options: Options) -> Iterator[Case]:
    """Every rung that serves: many rows, then small blocks, then few rows, at density 0.1.

    Or those that the options name. The last one, for many small blocks, is timed at 0.5 alone.
    """
    kernels = "all" if options.kernels == "auto" else options.kernels
    homes = [(8192, 32, 0.1, 8192), (8192, 8, 0.1, 8192), (12288, 32, 0.1, 32)]
    homes += [(8192, 8, 0.5, 4096)]
    before_last = ",".join([*RUNGS][:-1])
    for shape, dtype in every([(64, 16, 0.5, 4)] if options.quick else homes, DTYPES):
        at_0_1 = kernels == "all" and shape in homes[:-1]
        yield from _products(matrices(*shape, dtype), before_last if at_0_1 else kernels)


def steps(options: Options) -> Iterator[Case]:
    """The taught ladder, forward, beside the rungs whose techniques it teaches."""
    beside = {"float32": "k3_registers", "float16": "k5_tensor_core,k6_hopper"}
    features, sizes = (128, (32,)) if options.quick else (8192, (32, 64, 128))
    for (dtype, rungs), size in every(beside.items(), sizes):
        kernels = ",".join((*NAMES, rungs)) if options.kernels == "auto" else options.kernels
        problem = matrices(features, size, 0.1, features, dtype)
        yield Case(problem, "forward", kernels)


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
                problem = Problem(partial(Layout, kept), 32, batch, dtype)
                yield from _products(problem, options.kernels, layout=kind)


def feature_major(options: Options) -> Iterator[Case]:
    """Activations as `w @ x` has them, (features, batch) in memory, beside the same batch-major."""
    shapes = [(8192, size, 0.1, 8192) for size in BLOCK_SIZES]
    shapes += [(12288, 32, 0.1, 32), (12288, 32, 0.01, 32)]
    for dtype, shape in every(DTYPES, [(16, 8, 0.5, 4)] if options.quick else shapes):
        yield from _products(matrices(*shape, dtype), options.kernels, FEATURE_MAJOR)


def conv(options: Options) -> Iterator[Case]:
    """Convolutions of 3 x 3 and 1 x 1 at 512 features, 32 x 32 images, batch 64, density 0.1.

    Beside cuDNN's dense ones, channels last.
    """
    batch, side, features = (1, 2, 16) if options.quick else (64, 32, 512)
    for taps, dtype, precision, sizes in QUICK if options.quick else KINDS:
        how = batch, dtype, precision
        yield from _products(
            matrices(features, min(features, 32), 1, *how, side=side, taps=taps), "", CUDNN
        )
        for size in sizes:
            density = 1 if options.quick else 0.1
            problem = matrices(features, size, density, *how, side=side, taps=taps)
            yield from _products(problem, "auto")


def cpu(options: Options) -> Iterator[Case]:
    """On the CPU, in float32: k0_cpu and users' rungs, NumPy, SciPy, and torch if it is there."""
    for features, batch, density, size in QUICK_SHAPES if options.quick else SHAPES:
        problem = matrices(features, size, density, batch, "float32", place="cpu")
        yield from _products(problem, "all", *ON_CPU, density=density)


def _products(problem: Problem, kernels: str, *others: str, **more: Any) -> Iterator[Case]:
    for product in PRODUCTS:
        yield Case(problem, product, kernels, others, more)


CASES: dict[str, Callable[[Options], Iterator[Case]]] = {
    section.__name__: section
    for section in (
        *(headline, float16, float32, ladder, steps),
        *(layouts, feature_major, conv, cpu),
    )
}
OTHERS: dict[str, Callable[[Options], Iterator[Row]]] = {
    section.__name__: section for section in (limits, changing, edits, lstm, host)
}
SECTIONS = (
    "limits",
    *(name for name in CASES if name != "cpu"),
    "changing",
    "edits",
    "lstm",
    "host",
)
"""Those of the GPU, in the order in which they are run."""


def heading(name: str) -> str:
    """What a section says of itself."""
    return ((CASES | OTHERS)[name].__doc__ or "").partition("\n")[0]


def run(
    only: Iterable[str] = (),
    options: Options = DEFAULT,
    *,
    json_file: Path | None = None,
    place: str = "cuda",
) -> Results:
    """Print a place's sections, all or those in `only`, a line a row, and give them back.

    With `json_file` each row is put there when it is measured, so that a run that is broken off
    leaves what it has; sections of earlier runs stay, and are given back, too.

    Raises RuntimeError where there is no GPU, ValueError where `json_file` holds something else.
    """
    if place == "cuda":
        require_times()
    results = {} if json_file is None else load(json_file)
    machine, names = describe(place), list(only or (SECTIONS if place == "cuda" else ("cpu",)))
    print(f"{machine}\nMedians; on a GPU of graph replays. Random data. {CELLS}.", flush=True)
    jobs, began = processes_here(), time.perf_counter()
    if jobs > 1 and place == "cuda":
        ahead = (case for name in names if name in CASES for case in CASES[name](options))
        compile_ahead(ahead, jobs, PATIENCE)
        print(f"\nkernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for name in names:
        command = f"python -m numbsparse bench --place {place}"
        command += f" --only {name}" if place == "cuda" else ""
        if options.kernels != DEFAULT.kernels:
            command += f" --kernels {options.kernels}"
        print(f"\n{name}: {heading(name)}", flush=True)
        section: dict[str, Any] = {"machine": machine, "command": command, "took": 0.0, "rows": []}
        began = time.perf_counter()
        for row in rows(name, options):
            section["rows"].append(row)
            section["took"] = time.perf_counter() - began
            print(line(row, section["rows"]), flush=True)
            if json_file is not None:
                save(json_file, {name: section})
        print(f"{name} took {section['took']:.0f} s", flush=True)
        results[name] = section
    return results
