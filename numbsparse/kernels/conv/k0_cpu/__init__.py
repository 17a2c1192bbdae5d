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

import numpy as np

from numbsparse.kernels.conv.k0_cpu.lines import lines_of
from numbsparse.kernels.conv.k0_cpu.unfolded import pays, sum_unfolded_of, unfolded_of
from numbsparse.kernels.conv.k0_cpu.weight_grad import pixels_of
from numbsparse.kernels.matmul.k0_cpu import in_floats
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")

unsupported = reach("k0_cpu", "cpu", BLOCK_SIZES, DTYPES)


def forward(x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w)."""
    _call("forward", x, values, y, values, index, window)


def input_grad(dy, values, index, window, dx, precision="highest"):
    """dx[:] = conv_transpose(dy, w)."""
    _call("input_grad", dy, values, dx, values, index, window)


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    _call("weight_grad", x, dy, dvalues, dvalues, index, window)


def _call(product, a, b, out, *of):
    # Fields have strides of no whole item.
    a, b = (np.require(x, requirements=("C", "A")) for x in (a, b))
    again(product, a.shape, *of)(a, b, out)


def again(product, shape, values, index, window):
    """A product of images of a shape as a function of its three arrays, for calls that come again.

    They are C-contiguous and aligned. Of `values`, or `dvalues`, shape and dtype are asked for.
    """
    if values.itemsize == 2:
        wide = np.broadcast_to(np.float32(0), values.shape)
        return partial(in_floats, again(product, shape, wide, index, window))
    batch, _, features = shape
    of = values, index, window
    if product == "weight_grad":
        return (sum_unfolded_of if window.taps == 1 else pixels_of)(batch, *of)
    if pays(product, batch, features, window, values.shape[1]):
        return unfolded_of(batch, *of, product)
    return lines_of(batch, features, *of, product)
