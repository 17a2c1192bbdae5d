"""Puzzle 3: a tile in shared memory, and its barrier.

Compute y[i] = x[i - 1] + x[i] + x[i + 1], where values beyond either end count as 0. Each value is
wanted by three threads, and global memory is far: a block of T threads fetches its own T values and
one more on either side, once, into the shared memory of the block, and adds from there. Threads run
in any order: what another thread fetches is there only after cuda.syncthreads().
"""

from numba import cuda, float32

T = 8  # threads in a block; the length of x is a multiple of it


@cuda.jit
def kernel(x, y):
    tile = cuda.shared.array(T + 2, float32)
    # your code
    i, t = cuda.grid(1), cuda.threadIdx.x
    tile[t + 1] = x[i]
    if t == 0:
        tile[0] = x[i - 1] if i > 0 else float32(0)
        tile[T + 1] = x[i + T] if i + T < x.size else float32(0)
    cuda.syncthreads()
    y[i] = tile[t] + tile[t + 1] + tile[t + 2]
    # end


# The checker's part.
import numpy as np  # noqa: E402

from numbsparse.puzzles.checker import Case  # noqa: E402

HINTS = (
    "Thread t keeps x[i] in tile[t + 1], so that tile[0] is the value before the block's first.",
    "One thread, say the first, also fetches the two at the ends, or puts zeros there.",
    "Between the last write to the tile and the first read of it all threads must synchronise.",
)


def cases(rng):
    for blocks in (3, 1):
        x = rng.standard_normal(blocks * 8, dtype="float32")
        ends = np.pad(x, 1)
        yield Case(blocks, 8, (x,), ends[:-2] + x + ends[2:], values=x.size + 2 * blocks)
