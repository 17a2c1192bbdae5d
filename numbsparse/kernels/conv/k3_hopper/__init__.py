"""Rung 3: Hopper's copy engine brings the boxes.

In the rung before, every thread works out where its pixels lie, and asks for 16 bytes at a time:
more instructions than the products take. Here one lane asks the copy engine for a whole box of
pixels, of five axes (image, depth, height, width, features), from wherever it begins: what lies
outside the image arrives as zeros. Barriers that count its bytes tell the warps that multiply, and
these tell it when a stage is free, so that no two warps wait for each other.

    copies        boxes of x and dy, blocks of w, and the barriers of a ring of stages
    lines         forward and input-gradient
    weight_grad   a pair of blocks of features, all taps of a chunk

Tiles, chunks and products are those of the rung before; and it computes what the copy engine does
not serve here: strides of the forward product and of the weight-gradient, and features that end
inside a block.
"""

from __future__ import annotations

from numbsparse.kernels.conv import k1_naive, k2_tensor_core
from numbsparse.kernels.conv.k3_hopper import weight_grad as gradient
from numbsparse.kernels.conv.k3_hopper.lines import multiply_lines
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (16, 32, 64)
DTYPES = ("float16", "bfloat16")


unsupported = reach("k3_hopper", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), later=False)


def forward(x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w)."""
    if x.shape[2] % values.shape[1] or max(window.stride) > 1 or not serves(x, values, y):
        k2_tensor_core.forward(x, values, index, window, y)
    else:
        multiply_lines("forward", x, values, index, window, y)


def input_grad(dy, values, index, window, dx, precision="highest"):
    """dx[:] = conv_transpose(dy, w)."""
    if dy.shape[2] % values.shape[1] or not serves(dy, values, dx):
        k2_tensor_core.input_grad(dy, values, index, window, dx)
    else:
        multiply_lines("input_grad", dy, values, index, window, dx)


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    if max(window.stride) > 1 or x.shape[2] % 8 or dy.shape[2] % 8 or not serves(x, dy, dvalues):
        k2_tensor_core.weight_grad(x, dy, index, window, dvalues)
    elif not gradient.weight_grad(x, dy, index, window, dvalues):
        k1_naive.repair_blocks(x, dy, index, window, dvalues)


def serves(*arrays):
    """Whether the copy engine can read them: they have values, from multiples of 16 bytes on."""
    return all(array.size and array.address % 16 == 0 for array in arrays)
