"""Puzzle 4: a product of tiles.

Compute y = x @ w as in puzzle 2, but let a block of T x T threads, which owns T x T values of y, go
along K in steps of T: fetch a tile of x and a tile of w into shared memory, a value of each for
every thread, and add up T products from there. Each value is then read from global memory by one
thread of the block, not by T of them. Mind both barriers: tiles must be whole before they are read,
and read before the next ones take their place.
"""

from numba import cuda, float32

T = 4  # the sizes of x and w are multiples of it


@cuda.jit
def kernel(x, w, y):
    xs = cuda.shared.array((T, T), float32)
    ws = cuda.shared.array((T, T), float32)
    column, row = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    # your code
    for first in range(0, x.shape[1], T):
        xs[ty, tx] = x[row, first + tx]
        ws[ty, tx] = w[first + ty, column]
        cuda.syncthreads()
        for i in range(T):
            total += xs[ty, i] * ws[i, tx]
        cuda.syncthreads()
    # end
    y[row, column] = total


# The checker's part.
from numbsparse.puzzles.checker import Case  # noqa: E402

HINTS = (
    "for first in range(0, x.shape[1], T): the tiles of this step begin at x[.., first], w[first].",
    "Thread (tx, ty) fetches xs[ty, tx] and ws[ty, tx]; later it reads row ty and column tx.",
    "One barrier stands after the two fetches, the other after the loop of T products.",
)


def cases(rng):
    for n, k, m in ((8, 12, 8), (4, 4, 8)):
        x, w = rng.standard_normal((n, k), "float32"), rng.standard_normal((k, m), "float32")
        yield Case((m // 4, n // 4), (4, 4), (x, w), x @ w, values=2 * n * m * k // 4)
