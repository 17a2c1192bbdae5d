"""Puzzle 5: the block-sparse product.

Compute y = x @ w as in puzzle 4, where w keeps only some of its B x B blocks, column by column of
blocks: those of column c have the numbers p from indptr[c] up to indptr[c + 1]; block p stands in
the row indices[p] of blocks, and its values are values[blocks[p]], a B x B array. cuda.blockIdx.x
is the column of blocks, cuda.blockIdx.y the piece of B rows of x and y. What is not kept is not
read, and takes no time: that is the whole point. `numbsparse/kernels/ladder/s03_shared.py` does so.
"""

from numba import cuda, float32

B = 4  # the side of a block, and of a block of threads


@cuda.jit
def kernel(x, values, indptr, indices, blocks, y):
    xs = cuda.shared.array((B, B), float32)
    ws = cuda.shared.array((B, B), float32)
    column, row = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    # your code
    for p in range(indptr[cuda.blockIdx.x], indptr[cuda.blockIdx.x + 1]):
        xs[ty, tx] = x[row, indices[p] * B + tx]
        ws[ty, tx] = values[blocks[p], ty, tx]
        cuda.syncthreads()
        for i in range(B):
            total += xs[ty, i] * ws[i, tx]
        cuda.syncthreads()
    # end
    y[row, column] = total


# The checker's part.
import numpy as np  # noqa: E402

from numbsparse.puzzles.checker import Case  # noqa: E402

HINTS = (
    "The loop of puzzle 4 goes over the kept blocks of a column now, not over all of K.",
    "Block p wants the values of x from indices[p] * B on, and is values[blocks[p]].",
    "A column of blocks may keep none: its part of y is 0, which total already is.",
)


def cases(rng):
    for n, pattern in ((8, [[1, 0, 1], [1, 0, 0], [0, 0, 1]]), (4, [[0, 1], [1, 1]])):
        kept = np.array(pattern, bool)
        rows, columns = np.nonzero(kept)
        values = rng.standard_normal((len(rows), 4, 4), "float32")
        x = rng.standard_normal((n, 4 * kept.shape[0]), "float32")
        w = np.zeros((4 * kept.shape[0], 4 * kept.shape[1]), "float32")
        for block, i, j in zip(values, rows, columns, strict=True):
            w[4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = block
        order = np.argsort(columns, kind="stable")
        indptr = np.searchsorted(columns[order], np.arange(kept.shape[1] + 1))
        index = indptr, rows[order], order
        threads = n * kept.shape[1] * 4
        # For each kept block a thread reads a value of x, one of w, and two numbers; the first and
        # the last number of its column besides.
        reads = 2 * threads + 4 * (n // 4) * len(rows) * 16
        grid = kept.shape[1], n // 4
        yield Case(grid, (4, 4), (x, values, *index), x @ w, values=reads)
