"""Rung 4: `wgmma` multiplies pixels where the copy engine laid them.

In the rung before, every tap takes its pixels out of the box into registers, row by row: as many
instructions as products. `wgmma` reads both factors from shared memory by itself, in groups of 8
lines at equal distances. Eight neighbours of a line of the picture are such a group, and 8 lines of
it, a box apart, are the 64 rows of a product: a tap is one number, where in the box they begin.

    tiles         tiles of 8 x 8 pixels
    schedule      which block of threads computes which line of which tile
    rings         the boxes, and the blocks of w that come one after another for a box
    store         y on its way to memory
    lines         forward and input-gradient
    singles       float32, by products of tf32
    single_lines  forward and input-gradient of float32
    items         pairs of blocks of features, and the taps that a product takes together
    sums          where factors of several products lie, and where their sums go
    weight_grad   rows of a product are the features of several taps

Reads per output are those of the rung before. What limits it is shared memory, which gives 64 rows
of x and one block of w for each product of them.

float32 has its first factor in registers, and so tiles of any shape; its weight-gradient is that of
the rungs before. They also compute what the copy engine does not serve, and pictures that tiles of
8 x 8 would fill badly. Larger blocks are taken as several of 64, or of 32.
"""

from __future__ import annotations

from numbsparse.kernels.conv import k1_naive, k2_tensor_core, k3_hopper
from numbsparse.kernels.conv.k4_wgmma import lines, single_lines
from numbsparse.kernels.conv.k4_wgmma import weight_grad as gradient
from numbsparse.kernels.conv.repair import repair_lines
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each factor is off by 2^-22 of itself, and lo * lo is left out


unsupported = reach("k4_wgmma", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), later=False)


def forward(x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w)."""
    if max(window.stride) > 1:
        before(values).forward(x, values, index, window, y, precision)
    else:
        _lines("forward", x, values, index, window, y, precision)


def input_grad(dy, values, index, window, dx, precision="highest"):
    """dx[:] = conv_transpose(dy, w)."""
    _lines("input_grad", dy, values, index, window, dx, precision)


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    whole = max(window.stride) == 1 and x.shape[2] % 8 == dy.shape[2] % 8 == 0
    served = whole and x.itemsize == 2 and k3_hopper.serves(x, dy, dvalues)
    if not served or not gradient.fits(x, window, dvalues.shape[1]):
        before(dvalues).weight_grad(x, dy, index, window, dvalues, precision)
    elif not gradient.weight_grad(x, dy, index, window, dvalues):
        k1_naive.repair_blocks(x, dy, index, window, dvalues)


def before(values):
    """The rung before this one that takes blocks of this size."""
    if values.shape[1] not in k2_tensor_core.BLOCK_SIZES:
        return k1_naive
    return k3_hopper if values.itemsize == 2 else k2_tensor_core


def _lines(product, x, values, index, window, y, precision):
    """Where the copy engine can read x, and write y, and tiles are mostly filled."""
    size, features = values.shape[1], y.shape[2]
    served = x.shape[2] % size == 0 and k3_hopper.serves(x, values, y)
    if served and x.itemsize == 4 and features % size == 0:
        single_lines.multiply_lines(product, x, values, index, window, y, precision)
        if precision == "highest":
            repair_lines(product, x, values, index, window, y)
    elif served and x.itemsize == 2 and features % 8 == 0 and lines.fits(product, x, window, size):
        lines.multiply_lines(product, x, values, index, window, y)
    else:
        getattr(before(values), product)(x, values, index, window, y, precision)
