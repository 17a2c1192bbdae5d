"""Lesson 3: your first kernel.

You will learn what a kernel is: a function that many threads run at once, each of which finds out
from its number what to compute. Without a GPU, Numba's simulator runs the same code, slowly, as so
many threads of Python.

Look at which thread takes which value, and at the last block of threads: some of its threads have
nothing to do, and must say so.

Exercise: leave out `if i < x.size` and read what the simulator says (a GPU would write into memory
that is not yours). Then let a thread of `forward_kernel` start from acc = y[n, k]: why is y NaN?
"""

import gpu_or_simulator  # noqa: F401
import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch

THREADS = 4  # in a block; a GPU likes 128 and more


@cuda.jit
def who_kernel(x, y, who):
    """y = 2 x, and the block and the thread that computed each value."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x  # cuda.grid(1) is short for this
    if i < x.size:
        y[i] = 2 * x[i]
        who[i, 0], who[i, 1] = cuda.blockIdx.x, cuda.threadIdx.x


@cuda.jit
def forward_kernel(x, values, indptr, indices, blocks, y):
    """y = x @ w, a thread per output: thread (n, k) walks down the block column of k."""
    k, n = cuda.grid(2)
    if n >= y.shape[0] or k >= y.shape[1]:
        return
    size = values.shape[1]
    column, j = k // size, k % size
    acc = float32(0)
    for position in range(indptr[column], indptr[column + 1]):
        block, row = blocks[position], indices[position]
        for i in range(size):
            acc += x[n, row * size + i] * values[block, i, j]
    y[n, k] = acc


# Operands are sent to the GPU; results are NaN until somebody writes them.
x = ns.to_device(np.arange(10, dtype=np.float32))
y = ns.to_device(np.full(10, np.nan, np.float32))
who = ns.to_device(np.full((10, 2), -1, np.int32))
n_blocks = -(-x.size // THREADS)  # rounded up
launch(who_kernel, n_blocks, THREADS, x, y, who)
print(f"{n_blocks} blocks of {THREADS} threads for {x.size} values; {ns.device.describe()}")
for i, (block, thread) in enumerate(who.numpy()):
    print(f"  y[{i}] = {y.numpy()[i]:2.0f}  by thread {thread} of block {block}")

# The product of lesson 2. The index arrays go along, as the kernel's walk.
rng = np.random.default_rng(0)
layout = ns.Layout(ns.patterns.random(3, 4, density=0.5, seed=1))
w = ns.BlockSparse(rng.standard_normal((layout.n_blocks, 4, 4), dtype=np.float32), layout)
inputs = rng.standard_normal((5, 12), dtype=np.float32)
outputs = ns.to_device(np.full((5, 16), np.nan, np.float32))
walk = [ns.to_device(array) for array in layout.index.columns]
grid = (-(-16 // 8), -(-5 // 4))
launch(forward_kernel, grid, (8, 4), ns.to_device(inputs), ns.to_device(w.values), *walk, outputs)

error = abs(outputs.numpy() - inputs @ w.toarray()).max()
print(f"\ny = x @ w by {grid[0] * grid[1]} blocks of 8 x 4 threads: largest error {error:.1e}")
assert (y.numpy() == 2 * x.numpy()).all()
assert error < 1e-5, (  # NaN is not
    f"forward_kernel: y differs from x @ w by {error}. NaN stood in y before the launch: look for "
    "what reads y, and for values of it that nobody writes"
)
