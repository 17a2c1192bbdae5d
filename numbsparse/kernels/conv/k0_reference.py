"""Rung 0: the definition. A product of matrices for every tap and block, in float64."""

import numpy as np

from numbsparse.kernels.matmul.reach import reach

unsupported = reach("k0_reference", "cpu")


def forward(x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w)."""
    x, values, total = x.astype(np.float64), values.astype(np.float64), np.zeros(y.shape)
    for block, inside, of_x, of_y in joined(index, values.shape[1], window, x, y):
        total[of_y] += x[of_x] @ values[block][inside]
    y[:] = total


def input_grad(dy, values, index, window, dx, precision="highest"):
    """dx[:] = conv_transpose(dy, w)."""
    dy, values, total = dy.astype(np.float64), values.astype(np.float64), np.zeros(dx.shape)
    for block, inside, of_x, of_y in joined(index, values.shape[1], window, dx, dy):
        total[of_x] += dy[of_y] @ values[block][inside].T
    dx[:] = total


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    x, dy, dvalues[:] = x.astype(np.float64), dy.astype(np.float64), 0
    for block, inside, of_x, of_y in joined(index, dvalues.shape[1], window, x, dy):
        total = np.einsum("npi,npj->ij", x[of_x], dy[of_y], optimize=True)
        dvalues[block][inside] = total


def joined(index, size, window, x, y):
    """Each block, what of it is inside the features, and what of x and y its tap joins by it."""
    in_blocks, sources = (index.rows.indptr.size - 1) // window.taps, window.sources("weight_grad")
    for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        tap, row = divmod(int(row), in_blocks)
        (outputs,) = np.nonzero(sources[tap] >= 0)
        first, last = np.multiply((row, column), size), (x.shape[2], y.shape[2])
        rows, columns = map(slice, first, np.minimum(first + size, last))
        inside = tuple(map(slice, np.subtract(last, first)))
        yield (
            block,
            inside,
            (slice(None), sources[tap, outputs], rows),
            (slice(None), outputs, columns),
        )
