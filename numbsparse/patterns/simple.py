"""Patterns that need no graph: dense, random, block-diagonal, banded."""

import numpy as np

from numbsparse.patterns.checks import Pattern, Seed, generator, integer, number


def dense(in_blocks: int, out_blocks: int) -> Pattern:
    """Every block is kept.

    >>> import numbsparse as ns
    >>> ns.patterns.dense(2, 3)
    array([[ True,  True,  True],
           [ True,  True,  True]])
    """
    return np.ones(_sides(in_blocks, out_blocks), dtype=bool)


def random(in_blocks: int, out_blocks: int, density: float, *, seed: Seed) -> Pattern:
    """Exactly round(density * in_blocks * out_blocks) blocks, every choice of them equally likely.

    Blocks are drawn without replacement. `density` is a number from 0 to 1. A row or a column may
    be left without any block; `balanced_random` gives each its share.

    >>> import numbsparse as ns
    >>> pattern = ns.patterns.random(20, 30, 0.1, seed=0)
    >>> pattern.shape, int(pattern.sum())
    ((20, 30), 60)
    """
    in_blocks, out_blocks = _sides(in_blocks, out_blocks)
    density = number("density", density, most=1)
    rng = generator(seed)
    blocks = in_blocks * out_blocks
    pattern = np.zeros((in_blocks, out_blocks), dtype=bool)
    pattern.flat[rng.choice(blocks, size=round(density * blocks), replace=False)] = True
    return pattern


def block_diagonal(in_blocks: int, out_blocks: int, groups: int) -> Pattern:
    """`groups` dense rectangles down the diagonal, each joining its inputs to its outputs only.

    Block row i belongs to group floor(i * groups / in_blocks), block column j to group
    floor(j * groups / out_blocks), so that the sides of two groups differ by one block at most.
    `groups` is at most the shorter side.

    >>> import numbsparse as ns
    >>> ns.patterns.block_diagonal(3, 5, groups=2).astype(int)
    array([[1, 1, 1, 0, 0],
           [1, 1, 1, 0, 0],
           [0, 0, 0, 1, 1]])
    """
    in_blocks, out_blocks = _sides(in_blocks, out_blocks)
    groups = integer("groups", groups, most=min(in_blocks, out_blocks))
    group_of_row = np.arange(in_blocks) * groups // in_blocks
    group_of_column = np.arange(out_blocks) * groups // out_blocks
    return group_of_row[:, None] == group_of_column


def banded(in_blocks: int, out_blocks: int, width: int) -> Pattern:
    """The diagonal and `width` blocks to each side of it: `|i - j| <= width` if square.

    If rectangular, the longer side is first scaled to the shorter, i * out_blocks // in_blocks for
    i or j * in_blocks // out_blocks for j, so that the band runs from corner to corner, `width`
    counts blocks of the shorter side, and no row or column is empty. `width` is at least 0.

    >>> import numbsparse as ns
    >>> ns.patterns.banded(3, 6, width=0).astype(int)
    array([[1, 1, 0, 0, 0, 0],
           [0, 0, 1, 1, 0, 0],
           [0, 0, 0, 0, 1, 1]])
    """
    in_blocks, out_blocks = _sides(in_blocks, out_blocks)
    width = integer("width", width, least=0)
    shorter = min(in_blocks, out_blocks)
    row = np.arange(in_blocks) * shorter // in_blocks
    column = np.arange(out_blocks) * shorter // out_blocks
    return np.abs(row[:, None] - column) <= width


def _sides(in_blocks: int, out_blocks: int) -> tuple[int, int]:
    return integer("in_blocks", in_blocks), integer("out_blocks", out_blocks)
