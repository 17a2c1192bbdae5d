"""Rung 5: `ldmatrix` and `mma.sync`, the tensor cores.

One mma.sync multiplies 16 x 16 by 16 x 8 values of a whole warp, two 16-bit values in a register,
or 16 x 8 by 8 x 8 of float32 cut to tf32, and sums in float32. `cp.async` copies the tiles, 16
bytes at a time and through no registers, into a ring of stages: in each step those of the step
STAGES - 1 ahead are requested, while these are multiplied. They keep their type; the sum may run
along the lines of a tile or down its rows. So input_grad reads the same blocks as forward,
weight_grad x as it is, and feature-major activations are read and written as they are.

Reads per output, for a sum of K products: from global memory K / BM + K / BN, as in the rung
before; from shared memory K / WN + K / WM with the tile WM x WN of a warp, 32 x min(B, 64), and 16
rows in batches up to FEW, where a single thread had K / TM + K / TN.

    lines          forward and input_grad: a block of threads for a tile of y
    weight_grad    a block of threads for a block of w, or a part of one, or for a part of its sum

`parts.copies` loads the tiles, `parts.fragments` multiplies them, in 16 bits and in float32,
`parts.store_tile` stores sums, and `parts.repair` sums again what a split made NaN.

Where tiles of y are too few for the card k8_small_batch takes 0.73 to 1.03 times as long (H200).

cp.async reads pieces of 16 bytes that start at multiples of 16 bytes. An operand that has them in
neither direction (other strides, an odd address) is copied first. Every operand still passes
through the registers of each warp, and each warp issues its own loads: the next rung removes both.
"""

import numpy as np

from numbsparse.kernels.matmul.k5_tensor_core import weight_grad as of_blocks
from numbsparse.kernels.matmul.k5_tensor_core.lines import Tile, multiply_lines
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned_values
from numbsparse.kernels.parts.fragments import MMA, arithmetic_of

BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
TAKES_UNKNOWN_GATES = ("weight_grad",)
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
FEW = 64  # rows: batches up to here get smaller tiles

unsupported = reach(
    "k5_tensor_core",
    "cuda",
    BLOCK_SIZES,
    DTYPES,
    below="k7_small_blocks and k8_small_batch take smaller ones",
    capability=(8, 0),
)


def forward(x, values, index, y, precision="highest", tile=0):
    """y[:] = x @ w."""
    _along_lines("forward", x, values, index, y, precision, tile)


def input_grad(dy, values, index, dx, precision="highest", tile=0):
    """dx[:] = dy @ w.T."""
    _along_lines("input_grad", dy, values, index, dx, precision, tile)


def _along_lines(product, x, values, index, y, precision, number):
    size = values.shape[1]
    arithmetic = arithmetic_of(x, precision)
    if x.itemsize == 2:
        x, values, y = (a.view(np.uint16) for a in (x, values, y))
    values = aligned_values(values).reshape(-1, size)
    tile = line_tiles(size, x.shape[0], arithmetic)[number]
    multiply_lines(product, x, values, index, y, arithmetic, tile)


def weight_grad(x, dy, index, dvalues, precision="highest", tile=0, gates=None):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b], anything where gates[b] is 0."""
    of_blocks.multiply_blocks(x, dy, index, dvalues, arithmetic_of(x, precision), gates)


def tile_choices(product, block_size, dtype, batch, precision="highest"):
    if product == "weight_grad":
        return (None,)
    return line_tiles(block_size, batch, precision if dtype == "float32" else dtype.name)


def line_tiles(size: int, batch: int, arithmetic: str) -> list[Tile]:
    """Tiles of a (batch, features) output."""
    width = min(size, 64)
    if arithmetic in MMA:
        rows = [64] if batch <= FEW else [128, 64]
        return [Tile(BM, width, 32, 4) for BM in rows]
    return [Tile(128, width, 32, stages) for stages in ((2, 3) if size == 32 else (3, 2))]
