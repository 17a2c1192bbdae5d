"""A random product to time, and the sizes that are worth timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numbsparse import patterns
from numbsparse.block_sparse import BlockSparse
from numbsparse.kernels.matmul import k0_reference
from numbsparse.layout import Layout

PRODUCTS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Shape:
    """features x features, random blocks."""

    features: int
    batch: int
    density: float
    block_size: int

    def __str__(self) -> str:
        return f"{self.features} x {self.features}, batch {self.batch}"


SHAPES = [
    Shape(4096, 64, 0.5, 32),
    Shape(4096, 64, 0.1, 32),
    Shape(4096, 64, 0.02, 32),
    Shape(4096, 512, 0.1, 32),
    Shape(2048, 256, 0.1, 16),
    Shape(4096, 64, 0.1, 8),
]
QUICK_SHAPES = [Shape(256, 64, 0.1, 32), Shape(256, 64, 0.1, 8)]


CHECKED_ROWS = 256


class Problem:
    """Operands on the CPU, and what each product must give, in float64."""

    def __init__(self, shape: Shape, dtype: str, seed: int = 0):
        rng = np.random.default_rng(seed)
        blocks = shape.features // shape.block_size
        self.shape, self.dtype = shape, dtype
        self.layout = Layout(patterns.random(blocks, blocks, shape.density, seed=rng))

        def normal(*sizes: int) -> np.ndarray:
            return rng.standard_normal(sizes, dtype=np.float32).astype(dtype)

        self.x = normal(shape.batch, shape.features)
        self.dy = normal(shape.batch, shape.features)
        size = shape.block_size
        # Each row of a batch is a sum of its own: of a large batch some are checked.
        self.rows = rng.permutation(shape.batch)[:CHECKED_ROWS]
        self.w = BlockSparse(normal(self.layout.n_blocks, size, size), self.layout)

    @property
    def flops(self) -> int:
        """A multiply and an add for each kept weight and row of the batch."""
        return 2 * self.shape.batch * self.w.nnz

    def exact(self, product: str) -> np.ndarray:
        """The right result: (n_blocks, B, B) for the weight-gradient, else CHECKED_ROWS rows."""
        values, index = self.w.values.astype(np.float64), self.layout.index
        if product == "weight_grad":
            out = np.full(values.shape, np.nan)
            k0_reference.weight_grad(self.x.astype(float), self.dy.astype(float), index, out)
            return out
        operand = (self.x if product == "forward" else self.dy)[self.rows].astype(np.float64)
        out = np.full(operand.shape, np.nan)
        getattr(k0_reference, product)(operand, values, index, out)
        return out

    def check(self, product: str, result: Any, exact: np.ndarray) -> str | None:
        """None where a result is right to the accuracy of its dtype; else what is wrong.

        `result` is whole: (n_blocks, B, B) or (batch, features).
        """
        if product != "weight_grad":
            if not np.isfinite(result).all():
                return "wrong: not finite"
            result = result[self.rows]
        terms = self.shape.batch if product == "weight_grad" else self.shape.features
        scale = np.linalg.norm(exact)
        error = np.linalg.norm(np.asarray(result, np.float64) - exact) / scale if scale else 0.0
        bound = np.finfo(self.dtype).eps + np.finfo(np.float32).eps * np.sqrt(terms)
        return None if error <= bound else f"wrong: relative error {error:.1e}"
