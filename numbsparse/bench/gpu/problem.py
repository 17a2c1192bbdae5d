"""A random product in GPU memory, and what parts of its result must be, in float64.

A product of this size would take the host a minute in float64. So parts are drawn: some block
columns of some rows of y, some block rows of dx, some blocks of dw. That every value was written is
seen by NaNs beforehand, on the GPU.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.device import DeviceArray, empty, to_device
from numbsparse.layout import Index, Layout

ROWS, LINES, BLOCKS = 32, 8, 24  # parts that are checked
PERIOD = 2**22 - 3  # of the random numbers, and no multiple of a row: no two rows are the same


class Problem:
    """Operands on the GPU, each with its values on the host: x, dy (batch, features), values."""

    def __init__(
        self, layout: Layout, block_size: int, batch: int, dtype: str, precision: str = "highest"
    ):
        self.layout, self.block_size, self.batch = layout, block_size, batch
        self.dtype, self.precision = dtype, precision
        self.in_features, self.out_features = (n * block_size for n in layout.shape)
        self._parts: dict[str, Parts] = {}

    @cached_property
    def x(self) -> Operand:
        return normal((self.batch, self.in_features), self.dtype, seed=1)

    @cached_property
    def dy(self) -> Operand:
        return normal((self.batch, self.out_features), self.dtype, seed=2)

    @cached_property
    def values(self) -> Operand:
        size = self.block_size
        return normal((self.layout.n_blocks, size, size), self.dtype, seed=3)

    @cached_property
    def index(self) -> Index:
        return ops.index_beside(self.layout, self.x.device)

    @property
    def flops(self) -> int:
        """A multiply and an add for each kept weight and row of the batch."""
        return 2 * self.batch * self.layout.n_blocks * self.block_size**2

    @property
    def nbytes(self) -> int:
        """What must cross the memory's bus at least: each operand once, each result once."""
        return sum(a.device.nbytes for a in (self.x, self.dy, self.values))

    def out(self, product: str) -> DeviceArray:
        """An array for the result: y, dx, or the blocks of dw."""
        like = {"forward": self.dy, "input_grad": self.x, "weight_grad": self.values}[product]
        return empty(like.device.shape, like.device.dtype)

    def parts(self, product: str) -> Parts:
        """What is checked of a product's result; drawn once."""
        if product not in self._parts:
            draw = _blocks_of if product == "weight_grad" else _lines_of
            self._parts[product] = draw(self, product)
        return self._parts[product]


class Operand:
    """The same values on the host and on the GPU."""

    def __init__(self, host: np.ndarray, device: DeviceArray):
        self.host, self.device = host, device

    @cached_property
    def feature_major(self) -> DeviceArray:
        """(batch, features) on the GPU again, a view of (features, batch)."""
        turned = empty(self.device.shape[::-1], self.device.dtype)
        ops.copy_into(turned, self.device.T)
        return turned.T


class Parts:
    """`picked` rows of y or dx, or blocks of dw; `take` cuts what is checked out of those."""

    def __init__(self, picked: np.ndarray, columns: Any, exact: np.ndarray, terms: int):
        self.picked, self.columns, self.exact, self.terms = picked, columns, exact, terms

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
    bound = _eps(dtype) * (abs(exact) + size) + 8 * _eps("float32") * np.sqrt(parts.terms) * size
    if dtype == "float32" and precision == "high":
        bound += 2.0**-7 * size  # factors of 10 bits
    wrong = int((~(difference <= bound)).sum())  # NaN is wrong
    if not wrong:
        return None
    return f"wrong: {wrong} of {exact.size} values, relative error {error_of(parts, picked):.1e}"


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a name; bfloat16 is brought by ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _lines_of(problem: Problem, product: str) -> Parts:
    """Some block columns of y (or of dx = dy @ w.T), for some rows of the batch."""
    forward, size, rng = product == "forward", problem.block_size, np.random.default_rng(0)
    lines = problem.layout.index.columns if forward else problem.layout.index.rows
    operand = (problem.x if forward else problem.dy).host
    lengths = np.diff(lines.indptr)
    ends = [0, len(lengths) - 1, int(lengths.argmin()), int(lengths.argmax())]
    chosen = np.unique(np.r_[ends, rng.integers(len(lengths), size=LINES)])
    rows = np.unique(np.r_[0, problem.batch - 1, rng.integers(problem.batch, size=ROWS)])
    x = operand[rows].reshape(rows.size, -1, size)
    exact = np.zeros((rows.size, chosen.size, size))
    for i, line in enumerate(chosen):
        span = slice(lines.indptr[line], lines.indptr[line + 1])
        w = problem.values.host[lines.blocks[span]].astype(np.float64)
        w = w if forward else w.transpose(0, 2, 1)
        x_parts = x[:, lines.indices[span]].astype(np.float64)
        exact[:, i] = np.einsum("nkc,kcj->nj", x_parts, w, optimize=True)
    columns = (chosen[:, None] * size + np.arange(size)).ravel()
    return Parts(rows, columns, exact.reshape(rows.size, -1), int(lengths.max()) * size)


def _blocks_of(problem: Problem, product: str) -> Parts:
    """Some blocks of dw."""
    index, size, rng = problem.layout.index, problem.block_size, np.random.default_rng(0)
    n_blocks = problem.layout.n_blocks
    ends = [0, n_blocks - 1] if n_blocks else []
    blocks = np.unique(np.r_[ends, rng.integers(max(n_blocks, 1), size=BLOCKS)]).astype(int)
    blocks = blocks[:n_blocks]
    exact = np.zeros((blocks.size, size, size))
    for i, b in enumerate(blocks):
        x = problem.x.host[:, index.block_rows[b] * size :][:, :size].astype(np.float64)
        dy = problem.dy.host[:, index.block_columns[b] * size :][:, :size].astype(np.float64)
        exact[i] = x.T @ dy
    return Parts(blocks, None, exact, problem.batch)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Operand:
    """Random numbers of a shape: the first ones of a pool that problems share."""
    size = int(np.prod(shape))
    host, device = _pool(1 << max(size - 1, 0).bit_length(), dtype, seed)
    return Operand(host[:size].reshape(shape), device[:size].reshape(shape))


def forget_numbers() -> None:
    """Let go of the random numbers that problems share."""
    _pool.cache_clear()


@lru_cache(maxsize=8)
def _pool(size: int, dtype: str, seed: int) -> tuple[np.ndarray, DeviceArray]:
    rng = np.random.default_rng(seed)
    few = rng.standard_normal(min(size, PERIOD), dtype=np.float32).astype(dtype_of(dtype))
    host = np.resize(few, size)
    return host, to_device(host)


def _eps(dtype: str) -> float:
    return 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
