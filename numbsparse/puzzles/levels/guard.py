"""Puzzle 1: a thread for each value.

Compute y[i] = 2 * x[i]. A grid of threads runs this function, all at once, each with an index of
its own. Threads come in whole blocks, so there are more of them than values: those left over have
nothing to do, and must not touch the memory behind the arrays.
"""

from numba import cuda


@cuda.jit
def kernel(x, y):
    # your code
    i = cuda.grid(1)
    if i < x.size:
        y[i] = 2 * x[i]
    # end


# The checker's part.
from numbsparse.puzzles.checker import Case  # noqa: E402

HINTS = (
    "cuda.grid(1) is the index of this thread among all threads of all blocks.",
    "The last block has threads beyond the end: compare the index with x.size.",
)


def cases(rng):
    for n in (20, 24):
        x = rng.standard_normal(n, dtype="float32")
        yield Case(3, 8, (x,), 2 * x, values=n)
