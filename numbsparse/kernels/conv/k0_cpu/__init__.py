"""All CPU cores: a tile of outputs stays in vector registers until its whole sum is in it.

The loops are those of the matmul's `k0_cpu`. There the batch fills the vectors; here pixels of a
row of the image do, of several images where rows are short. Each row of input is packed once,
features down and pixels across, with the zeros of its padding: a tap sees the same memory a few
items further on, so nothing is copied for it. A tap that is above or below the image is left out.

    rows          how rows of pixels are packed, and where each tap finds them
    lines         forward and input-gradient
    weight_grad   the weight-gradient, over runs of pixels that a tap joins
    unfolded      all three of one tap, and forward of few outputs: products of matrices

Reads per output, from cache: (1/R + 1/C) * B * (entries of the line), with tiles of R features and
C pixels.
"""

from functools import partial

from numbsparse.kernels.conv.k0_cpu.lines import multiply_lines
from numbsparse.kernels.conv.k0_cpu.unfolded import multiply_unfolded, pays, sum_unfolded
from numbsparse.kernels.conv.k0_cpu.weight_grad import sum_pixels
from numbsparse.kernels.matmul.k0_cpu import in_floats
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")

unsupported = reach("k0_cpu", "cpu", BLOCK_SIZES, DTYPES)


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    unfolds = pays(product, x, window, values.shape[1])
    compute = multiply_unfolded if unfolds else multiply_lines
    in_floats(compute, x, values, y, index, window, product)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    compute = sum_unfolded if window.taps == 1 else sum_pixels
    in_floats(compute, x, dy, dvalues, index, window)
