"""Rung 7: many small blocks share what one block of threads has read.

A tile of x that is read for one block of 8 x 8 is used for 8 columns of y. So here a block of
threads takes as much of the output as its registers hold, reads every feature that this needs once
into shared memory, and lets the kept blocks pick theirs there. What may be picked differs from
warp to warp and is known only at run time; the registers that sums stand in must be known when the
kernel is compiled. `strip_plan` and `region_plan` settle once per layout who picks what.

- `strips`: a strip of 512 columns of y by 64 rows. Each warp has 32 columns, and walks the blocks
  of each, stage by stage. An mma sums 16 products: one block of 16 x 16, or two of 8 x 8 of one
  column, wherever they stand. `pack` puts w in that order, in the registers of an mma.
- `regions`: some 150 blocks of w of 16 x 16, or 600 of 8 x 8, near each other. Each warp has slots
  for their sums; neighbouring slots are in one column and read its dy once.

Reads per output from global memory, for a sum of K products over the features of x: K / 512 + K d
/ 64 at density d, for any B; the rungs before had K d / B of x alone. From shared memory K d / B +
K d / 64 of w, as those before. Of weight_grad, for a sum of K: 2 K / (s d B) per value of a block
with regions of s blocks a side, about 40 at density 0.1 and B = 16, where k5_tensor_core had 2 K /
B. Features that no block of a strip or region keeps are not read, so clustered layouts read less.

All warps fetch, and then wait for each other after every stage. Without the products four fifths
of the time remain on an H200: cp.async brings some 5 TB/s from L2, where the copy engine of the
rung before brings 8 to 9.
"""

from __future__ import annotations

from numbsparse.kernels.matmul.k7_small_blocks.regions import in_regions
from numbsparse.kernels.matmul.k7_small_blocks.strips import along_strips
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16")


unsupported = reach("k7_small_blocks", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    along_strips(x, values, index, y, turned=False)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    along_strips(dy, values, index, dx, turned=True)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    in_regions(x, dy, index, dvalues)
