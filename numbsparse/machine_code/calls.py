"""Calls whose kernels stand for all: each rung, product, dtype, block size and order somewhere.

A call is named by what a user would say of it, so that its name outlives any change of files.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as every

from numbsparse import patterns
from numbsparse.bench.contestants import by_ops, of_rung
from numbsparse.bench.lstm import Sequence
from numbsparse.bench.problem import matrices
from numbsparse.bench.timing import Call
from numbsparse.kernels import conv, ladder, matmul
from numbsparse.kernels.matmul import PRODUCTS

Make = Callable[[], Call]
"""Makes the operands, and gives the call; raises NotServed where its rung does not serve."""


class NotServed(ValueError):
    """A card's compute capability is not one that a rung takes."""


FEATURES, DENSITY = 4096, 0.1
BATCH, FEATURE = "batch-major", "feature-major"
BOTH = ("forward", "weight_grad")
SIMPLE = ("k1_naive", "k3_registers")
TENSOR_CORES = ("k5_tensor_core", "k6_hopper")
RUNGS = (  # each product by each rung in each case: numbers, block size, batch, order
    (SIMPLE, BOTH, [("float32", 32, 4096, BATCH)]),
    (TENSOR_CORES, PRODUCTS, [(dtype, 32, 4096, BATCH) for dtype in ("float16", "float32")]),
    (TENSOR_CORES, BOTH, [(of, 32, 4096, FEATURE) for of in ("bfloat16", "float32, high")]),
    (("k6_hopper",), BOTH, [("float16", size, 4096, BATCH) for size in (64, 128)]),
    (("k6_hopper",), PRODUCTS[:2], [("float16", 64, 96, BATCH)]),
    (
        ("k7_small_blocks",),
        BOTH,
        [
            ("float16", 8, 4096, BATCH),
            ("float16", 16, 4096, FEATURE),
            ("float32", 8, 4096, FEATURE),
            ("float32", 16, 4096, BATCH),
        ],
    ),
    (
        ("k8_small_batch",),
        BOTH,
        [
            ("float32", 32, 32, BATCH),
            ("float32, high", 64, 16, FEATURE),
            ("float16", 32, 32, FEATURE),
            ("bfloat16", 8, 16, BATCH),
        ],
    ),
    (
        ("k7_small_blocks",),
        ("forward",),
        [("float16", 8, 256, BATCH), ("float32", 16, 128, FEATURE), ("bfloat16", 16, 64, FEATURE)],
    ),
    (("k8_small_batch",), ("forward",), [("float16", 64, 64, BATCH), ("float16", 8, 128, BATCH)]),
    (("k8_small_batch",), ("input_grad",), [("float32", 32, 128, BATCH)]),
    (("k8_small_batch",), ("weight_grad",), [("float16", 8, 128, BATCH)]),
)
OF_MANY = (  # blocks: rung, product, numbers, block size, batch, order, and how many are kept
    ("k9_dense_tiles", "forward", "float16", 8, 512, BATCH, "half"),
    ("k9_dense_tiles", "input_grad", "bfloat16", 16, 256, FEATURE, "half"),
    ("k6_hopper", "weight_grad", "float16", 32, 4096, BATCH, "all"),
)
CONVOLUTIONS = (  # 3 x 3, of 32 x 32 images: rung, numbers, block size, products
    ("k3_tensor_core", "float16", 32, PRODUCTS[:2]),
    ("k2_unfolded", "float32", 32, PRODUCTS),
    ("k4_wgmma", "float16", 32, PRODUCTS),
    ("k4_wgmma", "float32", 64, PRODUCTS[:2]),
    ("k5_small_blocks", "float16", 8, PRODUCTS),
    ("k6_strips", "float16", 8, PRODUCTS),
)
RECURRENT = (  # an LSTM forward and backward: numbers, units, density, steps, norm
    ("float16", 2048, 0.1, 4, False),
    ("float32", 2048, 0.1, 4, False),
    ("float16", 18432, 0.03, 4, False),
    ("float32, high", 2048, 0.1, 4, True),
    ("float32, high", 2048, 0.1, 16, False),  # of more steps one kernel computes all
    ("float32", 2048, 0.1, 16, False),
)


def calls() -> dict[str, Make]:
    """By name. Steps are forward, those of wgmma with each block size."""
    return dict(_named())


def _named() -> Iterator[tuple[str, Make]]:
    for rungs, products, cases in RUNGS:
        for rung, product, (numbers, size, batch, order) in every(rungs, products, cases):
            name = f"matmul {rung} {product} {numbers}, B = {size}, batch {batch}, {order}"
            across = order == FEATURE
            yield name, partial(_product, rung, product, numbers, size, batch, across)
    for rung, product, numbers, size, batch, order, kept in OF_MANY:
        name = f"matmul {rung} {product} {numbers}, B = {size}, batch {batch}, {order}, {kept} kept"
        how = numbers, size, batch, order == FEATURE, {"half": 0.5, "all": 1.0}[kept]
        yield name, partial(_product, rung, product, *how)
    for name in ladder.NAMES:
        dtype = "float32" if name < "s08" else "float16"
        for size in (32, 64, 128) if name > "s10" else (32,):
            make = partial(_product, name, "forward", dtype, size, FEATURES)
            yield f"ladder {name}, B = {size}", make
    for rung, numbers, size, products in CONVOLUTIONS:
        for product in products:
            name = f"conv {rung} {product} {numbers}, B = {size}"
            yield name, partial(_convolution, rung, product, numbers, size)
    for case in RECURRENT:
        numbers, units, density, steps, norm = case
        many = f", {steps} steps" * (steps > 4)
        name = f"LSTM {numbers}, {units} units, density {density}{many}{', norm' * norm}"
        yield name, partial(_sequence, *case)


def _product(
    kernel: str,
    product: str,
    numbers: str,
    size: int,
    batch: int,
    feature_major: bool = False,
    density: float = DENSITY,
) -> Call:
    problem = matrices(FEATURES, size, density, batch, *_in_words(numbers))
    of = ladder.step(kernel) if kernel in ladder.NAMES else matmul.rung(kernel)
    how = product, size, problem.x.dtype, "cuda", batch, problem.precision
    _check(of.unsupported(*how))
    return of_rung(problem, product, kernel, feature_major).call


def _convolution(kernel: str, product: str, numbers: str, size: int) -> Call:
    problem = matrices(512, size, DENSITY, 8, *_in_words(numbers), side=32, taps=3)
    _check(conv.rung(kernel).unsupported(product, size, problem.x.dtype, "cuda", 8))
    return by_ops(problem, product, kernel).call


def _check(reason: str | None) -> None:
    if reason:
        raise NotServed(reason)


def _sequence(numbers: str, units: int, density: float, steps: int, norm: bool) -> Call:
    layout = patterns.random(units // 32, units // 32, density, seed=0)
    of = Sequence(units, *_in_words(numbers), steps, 64, layout, layer_norm=norm)
    return lambda: of.lstm(of.x)[0].backward(of.dy)


def _in_words(numbers: str) -> tuple[str, str]:
    """ "float32, high" as dtype and precision."""
    dtype, _, precision = numbers.partition(", ")
    return dtype, precision or "highest"
