"""Rung 1: a GPU thread per output.

Thread (n, k) sums y[n, k] by itself, block by block down its block column. Neighbouring threads
take neighbouring k, so a warp reads 32 adjacent weights, and one x that all lanes share. Numbers of
16 bits are `widened` to float32 where they are read, and the sum is `rounded` where it is stored.

What changed since k0_cpu: there a core kept many outputs in vector registers and computed them one
after another; here each output has a thread, and thousands of them run at a time.

Reads per output, for a sum of K = B * (blocks in the column) products: 2 * K, from global memory.
Every x is read again by each of the B threads that need it and every weight by each row of the
batch: the next rung removes that.
"""

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
THREADS = (32, 4)  # along the contiguous axis, along the other


unsupported = reach("k1_naive", "cuda", BLOCK_SIZES, DTYPES)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    batch, out_features = y.shape
    launch(forward_kernel, grid_of(out_features, batch), THREADS, x, values, *index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    batch, in_features = dx.shape
    launch(input_grad_kernel, grid_of(in_features, batch), THREADS, dy, values, *index.rows, dx)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    grid = grid_of(size, n_blocks * size)
    launch(weight_grad_kernel, grid, THREADS, x, dy, index.block_rows, index.block_columns, dvalues)


def grid_of(width, height):
    """Blocks of threads that cover a width x height output, along x only: y ends at 65535."""
    return -(-height // THREADS[1]) * -(-width // THREADS[0])


@cuda.jit(device=True)
def line_and_column(height):
    """The output of this thread: blocks of threads go down the lines first."""
    blocks = -(-height // cuda.blockDim.y)
    line = cuda.blockIdx.x % blocks * cuda.blockDim.y + cuda.threadIdx.y
    return line, cuda.blockIdx.x // blocks * cuda.blockDim.x + cuda.threadIdx.x


def line_kernel(transposed):
    """y = x @ w down the block columns of w; transposed, x @ w.T along its block rows."""

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y):
        batch, out_features = y.shape
        n, k = line_and_column(batch)
        if n >= batch or k >= out_features:
            return
        size = values.shape[1]
        line, j = k // size, k % size
        acc = float32(0)
        for position in range(indptr[line], indptr[line + 1]):
            block, first = blocks[position], indices[position] * size
            for i in range(min(size, x.shape[1] - first)):
                w = values[block, j, i] if transposed else values[block, i, j]
                acc += widened(x[n, first + i]) * widened(w)
        y[n, k] = rounded(acc, y)

    return kernel


forward_kernel, input_grad_kernel = line_kernel(False), line_kernel(True)


@cuda.jit
def weight_grad_kernel(x, dy, block_rows, block_columns, dvalues):
    # The blocks are stacked: line = block * B + i.
    n_blocks, size = dvalues.shape[0], dvalues.shape[1]
    line, j = line_and_column(n_blocks * size)
    if line >= n_blocks * size or j >= size:
        return
    block, i = line // size, line % size
    c, k = block_rows[block] * size + i, block_columns[block] * size + j
    acc = float32(0)
    if c < x.shape[1] and k < dy.shape[1]:
        for n in range(x.shape[0]):
            acc += widened(x[n, c]) * widened(dy[n, k])
    dvalues[block, i, j] = rounded(acc, dvalues)
