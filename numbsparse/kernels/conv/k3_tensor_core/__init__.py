"""Rung 3: tensor cores, and each pixel loaded once for many taps.

Neighbouring outputs see nearly the same pixels through neighbouring taps. A block of threads takes
a tile of outputs and loads, for a block of features, the box of pixels that a chunk of up to nine
taps sees from there. In shared memory a tap is a shift of rows: `ldmatrix` takes an address for
each row, so the shifted tile feeds `mma.sync` without being copied. Pixels outside the image are
zeros that `cp.async` fills in.

Reads per output of a 3 x 3 convolution with all taps kept, from global memory: a row of x is read
(8 + 2) * (32 + 2) / (8 * 32) = 1.3 times for 9 taps, with tiles of 8 x 32 pixels, where the rung
before read it 9 times; w is read once a tile.

    products      the products of shifted rows
    lines         forward and input-gradient, and where sums go
    weight_grad   a pair of blocks of features, all taps of a chunk

A stride of the forward product makes a box of every s-th pixel; that of the input-gradient makes
passes, one for the outputs of each residue, which few taps reach. What is NaN in a weight-gradient
because an infinity met zeros that fill a tile is summed again, as k1 does. For 16 bits alone:
float32, which `mma.sync` takes as tf32 in three products, is unfolded.
"""

from __future__ import annotations

from functools import partial

from numbsparse.kernels.conv.k1_naive import repair_blocks
from numbsparse.kernels.conv.k3_tensor_core import weight_grad as gradient
from numbsparse.kernels.conv.k3_tensor_core.lines import multiply_lines
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (16, 32, 64)
DTYPES = ("float16", "bfloat16")

unsupported = reach("k3_tensor_core", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    multiply_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    if not gradient.weight_grad(x, dy, index, window, dvalues):
        repair_blocks(x, dy, index, window, dvalues)
