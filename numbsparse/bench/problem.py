"""A random product, its operands where it is computed, and what parts of its result must be.

A product of matrices is a convolution of images of one pixel: one tap sees the pixel itself. A
product of a GPU's size would take the host a minute in float64. So parts are drawn: some block
columns of some rows of y, some block rows of dx, some blocks of dw. That every value was written is
seen by NaNs beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from numbsparse import ops, patterns
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, empty, to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.conv.walks import Entries, entries
from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.matmul import PRECISIONS
from numbsparse.layout import Index, Layout

ON_GPU = 64, 8, 24  # rows, lines, blocks that are checked
ON_CPU = 256, 2**20, 2**20  # the same of a smaller product: all but the rows of a large batch
BLOCK_SIZES = (8, 16, 32, 64, 128)  # of GPUs
NUMBERS = (  # a dtype and a precision
    *(("float16", "highest"), ("bfloat16", "highest")),
    *(("float32", precision) for precision in PRECISIONS),
)
APART = tuple(numbers for numbers in NUMBERS if numbers[0] != "bfloat16")  # in their times
PRODUCT_ERROR = 6  # of one float32 product, in units of 2^-23: what the rungs of tensor cores state
Counts = tuple[int, int, int]
PERIOD = 2**22 - 3  # of the random numbers, and no multiple of a row: no two rows are the same


@dataclass(eq=False)
class Problem:
    """Operands x, dy (batch, features), or (batch, side, side, features) of images, and values.

    `given` is the layout, or what makes it: a block row for each tap and block of features before.
    `side` is that of images before; 0, there are none. After, it is divided by the stride. Nothing
    is made before it is asked for: until then a problem may be sent to another process.
    """

    given: Layout | Callable[[], Layout]
    block_size: int
    batch: int
    dtype: str
    precision: str = "highest"
    place: str = "cuda"
    side: int = 0
    taps_along: int = 1
    stride: int = 1

    def __str__(self) -> str:
        images = ""
        if self.side:
            taps, by = f"{self.taps_along} x {self.taps_along}", f"stride {self.stride}"
            images = f", {taps}, {by}, images of {self.side} x {self.side}"
        return (
            f"{self.dtype} {self.precision} B={self.block_size} {self.in_features} x "
            f"{self.out_features} batch {self.batch} density {self.layout.density:.3f}{images}"
        )

    @cached_property
    def layout(self) -> Layout:
        return self.given if isinstance(self.given, Layout) else self.given()

    @property
    def in_features(self) -> int:
        return self.layout.shape[0] // self.taps_along**2 * self.block_size

    @property
    def out_features(self) -> int:
        return self.layout.shape[1] * self.block_size

    @property
    def window(self) -> Window:
        side, k = (self.side or 1,) * 2, self.taps_along
        return ops.conv_window(side, k, self.stride, k // 2, 1)

    @cached_property
    def x(self) -> Operand:
        image = self.window.big[1:] if self.side else ()
        return Operand((self.batch, *image, self.in_features), self.dtype, seed=1)

    @cached_property
    def dy(self) -> Operand:
        image = self.window.small[1:] if self.side else ()
        return Operand((self.batch, *image, self.out_features), self.dtype, seed=2)

    @cached_property
    def values(self) -> Operand:
        size = self.block_size
        return Operand((self.layout.n_blocks, size, size), self.dtype, seed=3)

    def here(self, operand: Operand) -> Any:
        """The array of it that is computed with."""
        return operand.host if self.place == "cpu" else operand.device

    @cached_property
    def w(self) -> BlockSparse:
        return BlockSparse(self.here(self.values), self.layout)

    @cached_property
    def index(self) -> Index:
        return ops.index_beside(self.layout, self.here(self.x))

    @property
    def flops(self) -> int:
        """A multiply and an add for each kept weight and row or pixel, those beyond edges too."""
        return 2 * self.batch * self.dy.pixels * self.layout.n_blocks * self.block_size**2

    @property
    def nbytes(self) -> int:
        """What must cross the memory's bus at least: each operand once, each result once."""
        return sum(a.nbytes for a in (self.x, self.dy, self.values))

    def named(self) -> dict[str, Any]:
        """What a row of results says of it."""
        said = {
            "dtype": self.dtype,
            "precision": self.precision,
            "features": self.in_features,
            "batch": self.batch,
            "block_size": self.block_size,
            "n_blocks": self.layout.n_blocks,
            "density": self.layout.density,
            "flops": self.flops,
            "bytes": self.nbytes,
        }
        if self.side:
            images = {"side": self.side, "taps_along": self.taps_along}
            said |= images | {"input_bytes": self.x.nbytes}
        return said

    def out(self, product: str) -> DeviceArray:
        """An array on the GPU for the result: y, dx, or the blocks of dw."""
        like = {"forward": self.dy, "input_grad": self.x, "weight_grad": self.values}[product]
        return empty(like.shape, like.dtype)

    def parts(self, product: str) -> Parts:
        """What is checked of a product's result."""
        counts = ON_CPU if self.place == "cpu" else ON_GPU
        draw = _blocks_of if product == "weight_grad" else _lines_of
        return draw(self, product, entries(self.layout.index, self.window.taps, product), counts)

    def sources(self, product: str) -> np.ndarray:
        """(taps, pixels of the result, or dy): the pixel that each one sees, or -1: none."""
        return self.window.sources(product)


Features = int | tuple[int, int]
"""In and out; a number is both."""


@lru_cache(maxsize=4)
def random(features: Features, block_size: int, density: float, taps: int = 1) -> Layout:
    """The layout of most problems; of convolutions, with as many taps along each axis."""
    rows, columns = (features, features) if isinstance(features, int) else features
    pattern = patterns.random(rows // block_size, columns // block_size, density, seed=0)
    return Layout(pattern if taps == 1 else patterns.taps(pattern, (taps, taps)))


def matrices(
    features: Features,
    block_size: int,
    density: float,
    batch: int,
    dtype: str,
    precision: str = "highest",
    *,
    place: str = "cuda",
    side: int = 0,
    taps: int = 1,
    stride: int = 1,
) -> Problem:
    """Of a random layout; of images of side x side pixels, with `taps` along each axis."""
    layout = partial(random, features, block_size, density, taps)
    return Problem(layout, block_size, batch, dtype, precision, place, side, taps, stride)


class Operand:
    """The same random numbers on the host and on the GPU, each once it is asked for.

    They are the first ones of a pool that problems share.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, seed: int):
        self.shape, self.dtype, self._seed = shape, as_dtype(dtype), seed
        self.size, self.pixels = prod(shape), prod(shape[1:-1])
        self.nbytes = self.size * self.dtype.itemsize

    @cached_property
    def host(self) -> np.ndarray:
        return _numbers(*self._pool)[: self.size].reshape(self.shape)

    @cached_property
    def device(self) -> DeviceArray:
        return _on_the_gpu(*self._pool)[: self.size].reshape(self.shape)

    @cached_property
    def feature_major(self) -> DeviceArray:
        """(batch, features) on the GPU again, a view of (features, batch)."""
        transposed = empty(self.shape[::-1], self.dtype)
        ops.copy_into(transposed, self.device.T)
        return transposed.T

    def in_blocks(self, size: int) -> np.ndarray:
        """(batch, pixels, blocks of features, size) on the host."""
        return self.host.reshape(self.shape[0], self.pixels, -1, size)

    @property
    def _pool(self) -> tuple[int, np.dtype, int]:
        return 1 << max(self.size - 1, 0).bit_length(), self.dtype, self._seed


class Parts(NamedTuple):
    """`picked` rows of y or dx, or blocks of dw; `take` cuts what is checked out of those."""

    picked: np.ndarray
    columns: Any  # of the rows; None: all
    exact: np.ndarray
    terms: int  # in the longest sum

    def take(self, picked: np.ndarray) -> np.ndarray:
        values = picked.astype(np.float64)
        return values if self.columns is None else values[:, self.columns]


def error_of(parts: Parts, picked: np.ndarray) -> float:
    """|result - exact| / |exact|, the root of the mean square over the parts."""
    scale = float(np.linalg.norm(parts.exact))
    return float(np.linalg.norm(parts.take(picked) - parts.exact)) / (scale or 1.0)


def fault_in(parts: Parts, picked: np.ndarray, dtype: str, precision: str) -> str | None:
    """None where each value is right to the accuracy of its dtype; else what is wrong."""
    exact, difference = parts.exact, abs(parts.take(picked) - parts.exact)
    size = float(np.sqrt(np.mean(exact**2))) if exact.size else 0.0
    products = PRODUCT_ERROR * _eps("float32") if dtype == "float32" else 0.0
    bound = (_eps(dtype) + products) * (abs(exact) + size)
    bound += 8 * _eps("float32") * np.sqrt(parts.terms) * size
    if dtype == "float32" and precision == "high":
        bound += 2.0**-7 * size  # factors of 10 bits
    wrong = int((~(difference <= bound)).sum())  # NaN is wrong
    if not wrong:
        return None
    return f"{wrong} of {exact.size} values, relative error {error_of(parts, picked):.1e}"


def _lines_of(problem: Problem, product: str, walks: Entries, counts: Counts) -> Parts:
    """Some block columns of y (or of dx = dy @ w.T), at some rows of the batch or some pixels."""
    forward, size, rng = product == "forward", problem.block_size, np.random.default_rng(0)
    lengths = np.bincount(walks.line, minlength=walks.lines)
    lines = _some(rng, walks.lines, counts[1], int(lengths.argmin()), int(lengths.argmax()))
    operand, made = (problem.x, problem.dy) if forward else (problem.dy, problem.x)
    rows = _some(rng, problem.batch * made.pixels, counts[0])
    image, pixel = np.divmod(rows[:, None], made.pixels)
    x, sources = operand.in_blocks(size), problem.sources(product)
    exact = np.zeros((rows.size, lines.size, size))
    for i, line in enumerate(lines):
        own = slice(*np.searchsorted(walks.line, [line, line + 1]))
        source = sources[walks.tap[own], pixel]  # (rows, entries)
        seen = x[image, source, walks.other[own]].astype(np.float64)
        seen[source < 0] = 0
        w = problem.values.host[walks.block[own]].astype(np.float64)
        w = w if forward else w.transpose(0, 2, 1)
        exact[:, i] = np.einsum("nkc,kcj->nj", seen, w, optimize=True)
    columns = (lines[:, None] * size + np.arange(size)).ravel()
    return Parts(rows, columns, exact.reshape(rows.size, -1), int(lengths.max()) * size)


def _blocks_of(problem: Problem, product: str, walks: Entries, counts: Counts) -> Parts:
    """Some blocks of dw."""
    size, rng = problem.block_size, np.random.default_rng(0)
    blocks = _some(rng, problem.layout.n_blocks, counts[-1])
    x, dy = (operand.in_blocks(size) for operand in (problem.x, problem.dy))
    sources, place = problem.sources(product), np.argsort(walks.block)
    exact = np.zeros((blocks.size, size, size))
    for i, at in enumerate(place[blocks]):
        source = sources[walks.tap[at]]
        inside = np.flatnonzero(source >= 0)
        seen = x[:, source[inside], walks.other[at]].reshape(-1, size)
        behind = dy[:, inside, walks.line[at]].reshape(-1, size)
        exact[i] = seen.T.astype(np.float64) @ behind.astype(np.float64)
    return Parts(blocks, None, exact, problem.batch * problem.dy.pixels)


def _some(rng: np.random.Generator, n: int, count: int, *more: int) -> np.ndarray:
    """Numbers below n: all, where there are no more than `count`; else the ends, `more`, others."""
    if n <= count:
        return np.arange(n)
    return np.unique([0, n - 1, *more, *rng.integers(n, size=count)])


def forget_numbers() -> None:
    """Let go of the random numbers that problems share."""
    _numbers.cache_clear()
    _on_the_gpu.cache_clear()


@lru_cache(maxsize=8)
def _numbers(size: int, dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    few = rng.standard_normal(min(size, PERIOD), dtype=np.float32).astype(dtype)
    return np.resize(few, size)


@lru_cache(maxsize=8)
def _on_the_gpu(size: int, dtype: np.dtype, seed: int) -> DeviceArray:
    return to_device(_numbers(size, dtype, seed))


def _eps(dtype: str) -> float:
    return 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
