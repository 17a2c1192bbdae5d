"""All CPU cores: a tile of outputs stays in vector registers until its whole sum is in it.

The three products are one loop around one step,

    tile[r, v] += a[r] * b[v]        R scalars times a row of C: R * C multiply-adds

    product       a                      b                           tile
    forward       a row of a block       x,  the batch along v       R out_features x C of the batch
    input_grad    a column of a block    dy, the batch along v       R in_features  x C of the batch
    weight_grad   a row of x             dy, features along v        R x C of one block's weights

The batch fills the vectors, not the block, so a small block runs as fast as a large one, and a
transposed block is the same block read with its strides swapped. `x` and `dy` are packed first, in
panels C wide, to make each row of `b` one run of memory; for a weight-gradient, whose rows are runs
anyway, only where that pays. An output is summed in one order whatever the batch and the number of
cores. CPUs multiply no 16-bit floats: such operands are copied as float32 first, and the result is
rounded.

    lines         forward and input_grad
    weight_grad   the weight-gradient
    few_rows      forward and input_grad where packing x costs more than it gains

Reads per output, from cache: (1/R + 1/C) * steps; steps is the batch for a weight, and else
B * (blocks in the line). With R = 8 and C = 32 they hide behind the arithmetic, and the limit is
how many multiply-adds the cores can do. A GPU does far more of those: the next rung runs there.
"""

import numpy as np

from numbsparse.kernels.matmul.k0_cpu.lines import product_of
from numbsparse.kernels.matmul.k0_cpu.weight_grad import sum_of
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")


unsupported = reach("k0_cpu", "cpu", BLOCK_SIZES, DTYPES)


def in_floats(compute, a, b, out, *how):
    """compute(a, b, out, *how), of 16-bit operands too."""
    a, b = (np.require(x, requirements="A") for x in (a, b))  # fields have strides of no whole item
    if out.itemsize > 2:
        compute(a, b, out, *how)
        return
    wide = np.empty_like(out, np.float32)
    compute(a.astype(np.float32), b.astype(np.float32), wide, *how)
    with np.errstate(over="ignore"):  # infinity, as on a GPU
        out[...] = wide


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    in_floats(_product, x, values, y, index, False)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    in_floats(_product, dy, values, dx, index, True)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    in_floats(lambda a, b, out: sum_of(len(a), out, index)(a, b, out), x, dy, dvalues)


def again(product, batch, values, index):
    """A product of so many rows as a function of its three arrays: see `few_product`.

    Of `values`, or of `dvalues`, its shape and dtype are asked for.
    """
    if values.itemsize == 2:
        compute = {"forward": forward, "input_grad": input_grad}.get(product, weight_grad)
        return lambda a, b, out: compute(a, b, index, out)
    if product == "weight_grad":
        return sum_of(batch, values, index)
    return product_of(batch, values, index, product == "input_grad")


def _product(x, values, y, index, transposed):
    """y[:, line] = sum over the line's blocks of x[:, other line] @ block, or its transpose."""
    product_of(len(x), values, index, transposed)(x, np.ascontiguousarray(values), y)
