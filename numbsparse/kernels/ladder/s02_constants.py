"""Step 2: addresses of 32 bits, and constants.

The same reads and the same sums. But the kernel is made by a function, for one block size: B is a
constant in it, so that a division by B is a shift, and the loop over a block is unrolled: addresses
of neighbouring loads differ by constants in the instructions.

What changed since the step before: arrays are passed with one axis, and the beginning of a row is
computed once, in unsigned 32-bit numbers. NumPy's rule that -1 is the last item costs a test for
each signed index; an unsigned one has none. `uint32(...)` stands around sums and products because
Numba makes 64 bits of two numbers of 32.

Reads per output, for a sum of K products: 2 K from global memory, as before.

The limit: still integers, for `i` has 64 bits and so has what is added to it; and two loads for
each multiply-add. The next step reads each value once for many threads.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught

BM, BN = 8, 32  # rows and columns of y for a block of threads
THREADS = BM * BN

unsupported = taught("s02_constants", "float32", BM)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    (batch, out_features), in_features = y.shape, x.shape[1]
    grid = batch // BM * (out_features // BN)
    kernel = line_kernel(values.shape[1])
    args = x.span, values.span, *index.columns, y.span, in_features, out_features
    launch(kernel, grid, THREADS, *args)


@cache
def line_kernel(B: int) -> Any:
    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y, in_features, out_features):
        t, tiles = uint32(cuda.threadIdx.x), uint32(out_features // BN)
        top = uint32(cuda.blockIdx.x // tiles * BM)
        left = uint32(cuda.blockIdx.x % tiles * BN)
        n, k = uint32(top + t // BN), uint32(left + t % BN)
        column, j = k // B, k % B
        acc = float32(0)
        for position in range(indptr[column], indptr[column + 1]):
            x_at = uint32(n * in_features + indices[position] * B)
            w_at = uint32(blocks[position] * B * B + j)
            for i in range(B):
                acc += x[x_at + i] * values[w_at + i * B]
        y[uint32(n * out_features + k)] = acc

    return kernel
