"""Rung 6: Hopper's copy engine and `wgmma`, whose factors never pass through registers.

A warp or two do nothing but ask the copy engine for tiles: a box of x or a block of w is a single
instruction, lands in shared memory with its pieces already swapped, zero beyond the edges, and
tells a barrier how many bytes came. Warpgroups of four warps each wait at that barrier, multiply 64
rows by whole blocks with wgmma straight from shared memory, and give the stage back at another
barrier; nobody else waits. The blocks of threads stay for the whole launch, one on each
multiprocessor, and go from tile to tile while the copies for the next one already run, and those of
y still do. Which blocks come when is worked out once for every layout.

Reads per output, for a sum of K products: from global memory K / (B * U) of x, where a tile of x
serves U of the columns that a block of threads computes at once, and K / (ROWS * CLUSTER) of w,
which the blocks of threads of a cluster share; the rung before read K / min(B, 64) + K / BM.
Columns that keep the same inputs are computed together: of 8 columns of a random layout at density
0.1 a tile of x serves 1.7, where neighbours would share it among 1.4, and where columns are alike,
all 8. From shared memory it is K / B + K / 64, at the tensor cores' own pace.

weight_grad is the same machine with both factors turned, and float32 (`split`) the same products
of tf32; see their files.

What limits it at a small B is the L2 cache, which brings x to every multiprocessor: it serves so
many requests, of a line of a tile each, and its ways out carry so many bytes. Only sharing more of
x would help. With few blocks kept it is memory, which must give x and take y.
"""

from __future__ import annotations

from numbsparse.kernels.matmul.k6_hopper import weight_grad as both_factors
from numbsparse.kernels.matmul.k6_hopper.lines import along_lines
from numbsparse.kernels.matmul.k6_hopper.tile import line_tiles
from numbsparse.kernels.matmul.reach import reach

__all__ = [
    "BLOCK_SIZES",
    "DTYPES",
    "forward",
    "input_grad",
    "tile_choices",
    "unsupported",
    "weight_grad",
]

BLOCK_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each factor is off by 2^-22 of itself, and lo * lo is left out

unsupported = reach("k6_hopper", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), later=False)


def forward(x, values, index, y, precision="highest", tile=0):
    """y[:] = x @ w."""
    along_lines(x, values, index, y, False, precision, tile)


def input_grad(dy, values, index, dx, precision="highest", tile=0):
    """dx[:] = dy @ w.T."""
    along_lines(dy, values, index, dx, True, precision, tile)


def weight_grad(x, dy, index, dvalues, precision="highest", tile=0):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    both_factors.weight_grad(x, dy, index, dvalues, precision)


def tile_choices(product, block_size, dtype, batch, precision="highest"):
    several = product != "weight_grad" and dtype != "float32"
    return line_tiles(block_size, batch) if several else (None,)
