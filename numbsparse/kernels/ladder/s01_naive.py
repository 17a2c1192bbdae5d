"""Step 1: a thread for each output.

Thread t computes one y[n, k] by itself: it walks down the kept blocks of its block column and adds
up. The 32 threads of a warp have neighbouring k. Their reads of w are adjacent, so that a warp's 32
loads are one request of 128 bytes (they are coalesced), and x[n, c] is the same for all of them.

What changed since the reference: there the CPU computes all outputs; here each has a thread.

Reads per output, for a sum of K = B * (blocks in the column) products: 2 K from global memory.

The limit: not these reads, most of which the L1 cache serves, but finding them. An index of a
strided array in 64 bits costs several instructions, and each product has five of them. The next
step writes the same reads in fewer instructions.
"""

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught

BM, BN = 8, 32  # rows and columns of y for a block of threads
THREADS = BM * BN

unsupported = taught("s01_naive", "float32", BM)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    batch, out_features = y.shape
    grid = batch // BM * (out_features // BN)
    launch(forward_kernel, grid, THREADS, x, values, *index.columns, y)


@cuda.jit
def forward_kernel(x, values, indptr, indices, blocks, y):
    t, tiles = cuda.threadIdx.x, y.shape[1] // BN
    top, left = cuda.blockIdx.x // tiles * BM, cuda.blockIdx.x % tiles * BN
    n, k = top + t // BN, left + t % BN
    B = values.shape[1]
    column, j = k // B, k % B
    acc = float32(0)
    for position in range(indptr[column], indptr[column + 1]):
        block, c = blocks[position], indices[position] * B
        for i in range(B):
            acc += x[n, c + i] * values[block, i, j]
    y[n, k] = acc
