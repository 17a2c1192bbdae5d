"""A loop unrolled in Python: a function for each number, run one after another."""

from typing import Any

from numba import cuda


def one_by_one(make: Any, count: int, k: int = 0) -> Any:
    """make(0), make(1), ... after one another: no loop is left, and registers have no index."""
    one = make(k)
    if k + 1 == count:
        return one
    rest = one_by_one(make, count, k + 1)

    @cuda.jit(device=True)
    def run(*args):
        one(*args)
        rest(*args)

    return run
