"""Lesson 1: a layout and its picture.

You will learn what a block-sparse matrix keeps, and the index arrays that all kernels walk.

Look at how each block column lists the block rows that it meets, and where their values are stored:
the values are numbered row by row, so a walk down a column has to say which block comes next.

Exercise: empty a column (pattern[:, 2] = False). Which arrays get shorter, which do not, and how
does a walk say that it finds nothing?
"""

import numpy as np

import numbsparse as ns

pattern = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0]], bool)
layout = ns.Layout(pattern)
index = layout.index
print(ns.draw(layout))

# Where the values of each block are stored: values has the shape (n_blocks, B, B).
stored = np.full(layout.shape, "·", object)
for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
    stored[row, column] = str(block)
print("\nthe number of each block:")
for line in stored:
    print("  ", *line)

# Two walks over the same blocks. Line i has the positions indptr[i] to indptr[i + 1]; at each it
# meets a line of the other axis (indices), in a stored block (blocks).
for name, walk in (("column", index.columns), ("row", index.rows)):
    print(f"\nindptr of the block {name}s: {walk.indptr}")
    for line in range(len(walk.indptr) - 1):
        span = slice(walk.indptr[line], walk.indptr[line + 1])
        print(f"  block {name} {line} meets {walk.indices[span]} in blocks {walk.blocks[span]}")

# A larger one, as they are used: a ring of neighbours with a few far jumps.
small_world = ns.patterns.watts_strogatz(32, 2, 0.2, seed=0)
print(f"\n{ns.draw(small_world)}")

# Either walk holds the whole pattern.
walked = {name: np.zeros(layout.shape, bool) for name in ("rows", "columns")}
for line in range(4):
    rows, columns = index.rows, index.columns
    walked["rows"][line, rows.indices[rows.indptr[line] : rows.indptr[line + 1]]] = True
    walked["columns"][columns.indices[columns.indptr[line] : columns.indptr[line + 1]], line] = True
assert all((found == pattern).all() for found in walked.values())
