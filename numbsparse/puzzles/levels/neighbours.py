"""Puzzle 2: neighbours in memory.

Compute y = x @ w, with x (N, K), w (K, M) and y (N, M), a thread for each value of y. Blocks have
8 x 8 threads, 32 of which, a warp, read at the same time: those of four neighbouring threadIdx.y.
Memory arrives in sectors of 32 bytes, 8 values that are side by side. Which of its two indices
should run along the rows of y, so that the threads of a warp share the fewest sectors?
"""

from numba import cuda, float32


@cuda.jit
def kernel(x, w, y):
    # your code
    column, row = cuda.grid(2)
    total = float32(0)
    for k in range(x.shape[1]):
        total += x[row, k] * w[k, column]
    y[row, column] = total
    # end


# The checker's part.
from numbsparse.puzzles.checker import Case  # noqa: E402

HINTS = (
    "cuda.grid(2) gives two indices, the first of which belongs to threadIdx.x.",
    "Each thread runs along a row of x and down a column of w, and adds up K products.",
    "threadIdx.x changes fastest from thread to thread: as the column it reads w side by side.",
)


def cases(rng):
    for n, k, m in ((16, 16, 16), (8, 5, 16)):
        x, w = rng.standard_normal((n, k), "float32"), rng.standard_normal((k, m), "float32")
        warps = n * m // 32
        # In a step a warp reads 8 values of w, in one sector, or in two where rows are no multiple
        # of them, and one value in each of four rows of x.
        yield Case((m // 8, n // 8), (8, 8), (x, w), x @ w, sectors=warps * k * 5)
