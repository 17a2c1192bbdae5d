"""A random convolution in GPU memory, and what parts of its results must be, in float64."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from numbsparse import patterns
from numbsparse.bench.gpu.problem import Operand, Parts, normal
from numbsparse.block_sparse import BlockSparse
from numbsparse.kernels.conv.walks import entries
from numbsparse.layout import Layout
from numbsparse.ops import conv_window

PIXELS, LINES, BLOCKS = 64, 4, 8  # parts that are checked


class ConvProblem:
    """Images of side x side pixels and their gradients as large, on the GPU and on the host."""

    def __init__(self, case: Any, dtype: str, precision: str, density: float):
        self.case, self.dtype, self.precision = case, dtype, precision
        self.batch, self.side, self.features, self.taps_along, self.block_size = case
        n = self.features // self.block_size
        of_features = patterns.random(n, n, density, seed=0)
        self.layout = Layout(patterns.taps(of_features, (self.taps_along,) * 2))
        space = (self.side, self.side)
        self.window = conv_window(space, self.taps_along, 1, "same", 1)
        self.shape = (self.batch, *space, self.features)
        self._parts: dict[str, Parts] = {}

    @cached_property
    def x(self) -> Operand:
        return normal(self.shape, self.dtype, seed=1)

    @cached_property
    def dy(self) -> Operand:
        return normal(self.shape, self.dtype, seed=2)

    @cached_property
    def values(self) -> Operand:
        size = self.block_size
        return normal((self.layout.n_blocks, size, size), self.dtype, seed=3)

    @cached_property
    def w(self) -> BlockSparse:
        return BlockSparse(self.values.device, self.layout)

    @property
    def flops(self) -> int:
        """A multiply and an add for each kept weight and pixel, those beyond the edge too."""
        return 2 * self.batch * self.side**2 * self.layout.n_blocks * self.block_size**2

    def parts(self, product: str) -> Parts:
        """What is checked of a product's result; drawn once."""
        if product not in self._parts:
            draw = _blocks_of if product == "weight_grad" else _lines_of
            self._parts[product] = draw(self, product)
        return self._parts[product]


def _lines_of(problem: ConvProblem, product: str) -> Parts:
    """Some block columns of y, or block rows of dx, at some pixels."""
    size, rng = problem.block_size, np.random.default_rng(0)
    operand = (problem.x if product == "forward" else problem.dy).host
    operand = operand.reshape(problem.batch, -1, problem.features)
    pixels = problem.side**2
    (of,) = problem.window.passes(product)
    found = entries(problem.layout.index, problem.window.taps, product)
    lines = np.unique(np.r_[0, found.lines - 1, rng.integers(found.lines, size=LINES)])
    at = np.unique(np.r_[0, pixels - 1, rng.integers(pixels, size=PIXELS)])
    image = rng.integers(problem.batch, size=at.size)
    seen = {
        tap: of.sources(k, (1, problem.side, problem.side))[at] for k, tap in enumerate(of.taps)
    }
    exact, longest = np.zeros((at.size, lines.size, size)), 1
    for i, line in enumerate(lines):
        own = np.flatnonzero(found.line == line)
        longest = max(longest, own.size * size)
        for e in own:
            source = seen[found.tap[e]]
            x = operand[image, source, found.other[e] * size :][:, :size].astype(np.float64)
            w = problem.values.host[found.block[e]].astype(np.float64)
            w = w if product == "forward" else w.T
            exact[:, i] += np.where(source[:, None] >= 0, x, 0) @ w
    columns = (lines[:, None] * size + np.arange(size)).ravel()
    return Parts(image * pixels + at, columns, exact.reshape(at.size, -1), longest)


def _blocks_of(problem: ConvProblem, product: str) -> Parts:
    """Some kept blocks of dw."""
    size, rng = problem.block_size, np.random.default_rng(0)
    index, n = problem.layout.index, problem.features // problem.block_size
    blocks = np.unique(np.r_[0, rng.integers(problem.layout.n_blocks, size=BLOCKS)])
    x, dy = (a.host.reshape(problem.batch, -1, problem.features) for a in (problem.x, problem.dy))
    (of,) = problem.window.passes(product)
    exact = np.zeros((blocks.size, size, size))
    for i, b in enumerate(blocks):
        tap, row = divmod(int(index.block_rows[b]), n)
        source = of.sources(tap, (1, problem.side, problem.side))
        inside = np.flatnonzero(source >= 0)
        seen = x[:, source[inside], row * size : (row + 1) * size].reshape(-1, size)
        column = index.block_columns[b] * size
        behind = dy[:, inside, column : column + size].reshape(-1, size)
        exact[i] = seen.T.astype(np.float64) @ behind.astype(np.float64)
    return Parts(blocks, None, exact, problem.batch * problem.side**2)
