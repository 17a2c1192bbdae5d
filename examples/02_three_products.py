"""Lesson 2: the three products by hand, in NumPy.

You will learn what every kernel of this package computes: the product that a layer makes (forward),
and the two that its gradient needs. Each is a loop over kept blocks with a small dense product in
it, and each walks the blocks in its own way.

Look at the multiplications: only the kept ones are done.

Exercise: take w.T for w in `forward`, which then needs the other walk. Which of the three functions
did you write again?
"""

import numpy as np

import numbsparse as ns

B, BATCH = 8, 5
rng = np.random.default_rng(0)
layout = ns.Layout(ns.patterns.random(6, 4, density=0.4, seed=0))
index = layout.index
values = rng.standard_normal((layout.n_blocks, B, B))
x = rng.standard_normal((BATCH, 6 * B))
dy = rng.standard_normal((BATCH, 4 * B))


def part(matrix, block):
    """The columns of a block."""
    return matrix[:, block * B : (block + 1) * B]


def forward(x, values):
    """y = x @ w: down each block column."""
    y = np.zeros((len(x), 4 * B))
    indptr, indices, blocks = index.columns
    for column in range(4):
        for position in range(indptr[column], indptr[column + 1]):
            part(y, column)[:] += part(x, indices[position]) @ values[blocks[position]]
    return y


def input_grad(dy, values):
    """dx = dy @ w.T: along each block row; each block is transposed in place."""
    dx = np.zeros((len(dy), 6 * B))
    indptr, indices, blocks = index.rows
    for row in range(6):
        for position in range(indptr[row], indptr[row + 1]):
            part(dx, row)[:] += part(dy, indices[position]) @ values[blocks[position]].T
    return dx


def weight_grad(x, dy):
    """dw = x.T @ dy where w keeps blocks: block by block."""
    dw = np.zeros((layout.n_blocks, B, B))
    for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        dw[block] = part(x, row).T @ part(dy, column)
    return dw


# The same with dense matrices, and with the package.
w = ns.BlockSparse(values, layout)
dense = w.toarray()
kept = np.repeat(np.repeat(layout.pattern, B, axis=0), B, axis=1)
dw = ns.BlockSparse(weight_grad(x, dy), layout).toarray()
by_hand = {"forward": forward(x, values), "input_grad": input_grad(dy, values), "weight_grad": dw}
by_numpy = {"forward": x @ dense, "input_grad": dy @ dense.T, "weight_grad": (x.T @ dy) * kept}
by_package = {
    "forward": ns.matmul(x, w),
    "input_grad": ns.matmul(dy, w.T),
    "weight_grad": ns.sddmm(x.T, dy, w).toarray(),
}

print(f"{w}\n")
print("             largest difference from dense, from numbsparse")
for name, result in by_hand.items():
    errors = (abs(result - other[name]).max() for other in (by_numpy, by_package))
    print(f"{name:12} {next(errors):.1e}, {next(errors):.1e}")
print(
    f"\nmultiplications of each: {BATCH * w.nnz:,} of the {BATCH * dense.size:,} of a dense matrix"
)

assert all(np.allclose(by_hand[name], by_numpy[name]) for name in by_hand)
assert all(np.allclose(by_hand[name], by_package[name]) for name in by_hand)
