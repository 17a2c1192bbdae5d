"""Lesson 4: a tile in shared memory.

You will learn the first technique of every fast kernel. Global memory is far away, and in a matrix
product the threads of a block want the same values of it: let them fetch a tile of each operand
together, a value each, into the block's own shared memory, and multiply from there.

Look at the reads of global memory: each value is fetched once by a block, and not once by each of
the T threads that need it. A sector is what is really moved: 32 bytes.

Exercise: keep the tile of w transposed (ws[tx, ty] = ..., and read ws[tx, i]) and look at the
excess of the shared reads and writes: threads that meet in one of the 32 memory banks wait for each
other. Then give the tile four columns more, (T, T + 4), and see it vanish.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch

T = 8  # a block of T x T threads owns T x T outputs


@cuda.jit
def plain_kernel(x, w, y):
    k, n = cuda.grid(2)
    acc = float32(0)
    for c in range(x.shape[1]):
        acc += x[n, c] * w[c, k]
    y[n, k] = acc


@cuda.jit
def tiled_kernel(x, w, y):
    xs = cuda.shared.array((T, T), float32)
    ws = cuda.shared.array((T, T), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    k, n = cuda.grid(2)
    acc = float32(0)
    for first in range(0, x.shape[1], T):
        xs[ty, tx] = x[n, first + tx]
        ws[ty, tx] = w[first + ty, k]
        cuda.syncthreads()  # the tiles are whole
        for i in range(T):
            acc += xs[ty, i] * ws[i, tx]
        cuda.syncthreads()  # all have read them
    y[n, k] = acc


rng = np.random.default_rng(0)
x, w = (rng.standard_normal(shape, np.float32) for shape in ((16, 32), (32, 16)))


def counted(kernel):
    """What the kernel asks of the memory, checked to compute x @ w."""
    y = ns.to_device(np.full((16, 16), np.nan, np.float32))
    operands = ns.to_device(x), ns.to_device(w), y
    (count,) = ns.testing.count(lambda: launch(kernel, (2, 2), (T, T), *operands))
    np.testing.assert_allclose(y.numpy(), x @ w, rtol=1e-4, atol=1e-5)
    print(count, end="\n\n")
    return count


plain, tiled = counted(plain_kernel).global_reads, counted(tiled_kernel).global_reads
print(f"reads of global memory per output: {plain.accesses / 256:g} and {tiled.accesses / 256:g},")
print(f"which is 2 K and 2 K / T with K = {len(w)} and T = {T}")
assert plain.accesses == T * tiled.accesses
