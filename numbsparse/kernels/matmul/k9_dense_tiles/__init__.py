"""Rung 9: where many small blocks are kept, w is multiplied as if it were dense.

The rung before picks what each kept block needs, out of shared memory, block by block: so its time
grows with the blocks. From an eighth of those of 8 x 8 on, or a quarter to half of those of 16 x
16, it takes less time to pick nothing. Tiles of w are filled with the kept blocks of 64 or 128
features and as many columns of y, zeros between them, and `wgmma` multiplies them whole, straight
from shared memory.

- `plan` lists, once per layout, the tiles that keep any block, and what is where in each. It says
  from which part of the blocks on that is worth it, and how large the tiles of y are.
- `tiles` is the kernel. Some warps copy the kept blocks into a tile of w, each lane 16 bytes at a
  time, and the copy engine loads x; the other warps multiply. So w is read as it is stored, each
  block once for a tile of rows, and zeros cost no reads.

Where tiles of y are too few for the GPU, two or four blocks of threads of a cluster share a sum.

An infinity in x that meets a zero of no block makes NaN: such sums are computed again.

Of 16 bits, forward and input-gradient. The weight-gradient of so many blocks is k7's. With gates w
is multiplied by them before, and zeros are multiplied too: strips may skip them. Gates that lanes
read where they copy took 1.14 to 1.8 times as long as none, and other numbers than 0 and 1 up to
5.4 times (H200).

Reads per output, for a sum of K products at density d: from global memory K / (128 * d) of x and up
to K / 256 of w; from shared memory K / (128 * d) of x and K / (64 * d) of w, for any B.

What limits it is 1 / d: the tensor cores multiply all zeros of a tile. At half of the blocks of 8 x
8, 8192 x 8192 and 4,096 rows it takes 796 us, cuBLAS's dense product 715.
"""

from numbsparse.kernels.matmul.k9_dense_tiles.plan import kept_of_tiles, least_kept, suits
from numbsparse.kernels.matmul.k9_dense_tiles.tiles import in_dense_tiles
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16")
__all__ = ["forward", "input_grad", "kept_of_tiles", "least_kept", "suits", "unsupported"]


def _refused(product, block_size, dtype, batch, *call):
    return None if product != "weight_grad" else "computes only forward and input_grad"


unsupported = reach(
    *("k9_dense_tiles", "cuda", BLOCK_SIZES, DTYPES),
    capability=(9, 0),
    later=False,  # wgmma is Hopper's alone
    refused=_refused,
)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    in_dense_tiles(x, values, index, y, False)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    in_dense_tiles(dy, values, index, dx, True)
