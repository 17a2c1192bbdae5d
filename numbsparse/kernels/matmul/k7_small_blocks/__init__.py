"""Rung 7: many small blocks share what one block of threads has read.

A tile of x that is read for one block of 8 x 8 is used for 8 columns of y. So here a block of
threads takes as much of the output as its registers hold, reads every feature that this needs once
into shared memory, and lets the kept blocks pick theirs there. What is picked differs from warp to
warp and is known only at run time; the registers of sums must be known when the kernel is compiled.
`strip_plan` and `region_plan` work out once per layout what each warp picks.

- `strips`: a strip of up to 512 columns of y by 64 rows, or fewer where tiles of the batch have no
  more. Each warp has 32 columns, and walks the blocks of each, stage by stage. An mma sums 16
  products: one block of 16 x 16, or two of 8 x 8 of one column, wherever they are.
  `parts.stored_blocks` copies them as they are stored; for a long batch, in float32 of more than
  128 rows, `packed` puts w in that order first, as the registers of an mma. Where strips are too
  few for the GPU they are narrower, and blocks of threads share the sum of a strip.
- `regions`: 130 or more blocks of w of 16 x 16, or 430 of 8 x 8, near each other. Each warp has
  slots for their sums; neighbouring slots are in one column and read its dy once. Where regions are
  too few for the GPU they are smaller, or a cluster has one and its blocks parts of the batch; some
  that the last round would have alone are cut over the batch.

Some warps only have the copy engine fill a ring in shared memory, and the others need not wait
for each other: how many blocks a warp finds in a stage is chance, and the ring evens it out.

Tensor cores take float32 as tf32, by three products where they are to be exact (`parts.split`). It
takes twice the registers: a strip has 384 columns of y, a region 128 or 144 blocks of 16 x 16.

x and dy are read in either order. Of feature-major ones a line of shared memory is a feature, with
16 to 64 rows of the batch: then `ldmatrix` transposes the tiles it otherwise would not, and the
others not; in float32 a lane reads neighbours of the batch (`parts.swizzle`).

Reads per output, for a sum of K products at density d, so over K / d features of x: from global
memory K / (512 * d) of x, or K / (1024 * d) where two strips share it in a cluster, and K / 64 of
w, for any B; the rungs before had K / B of x only. From shared memory K / B of x and K / 64 of w,
as those before. weight_grad reads 2 * K / (s * d * B) per value, for a batch of K rows and regions
of s blocks a side, about 36 at density 0.1 and B = 16, where k5_tensor_core had 2 * K / B. Features
that no block of a strip or region keeps are not read, so clustered layouts read less.

What limits it at B = 8 is shared memory, which is read for every kept block; where few blocks are
kept, what a multiprocessor takes in, 30 to 42 bytes a clock: every strip must still read nearly all
of x, and has less to multiply. Two strips of a cluster read half as much of x from the L2 cache: of
blocks of 16 that takes 3 to 12 % less, of blocks of 8 it took 5 to 9 % more; four took twice as
long, and so did two blocks of threads on a multiprocessor.

A weight-gradient of many regions takes as long when nothing is copied, no less when a cluster reads
x once for two of them, and no less when a warp loads a slot while it multiplies the one before: it
waits for shared memory, read 512 bytes or more for 16 rows of a slot. Of few regions, up to 1,024
features, the launch, and 1 to 3 us in which a cluster adds up its parts, are most of the time.
"""

from numbsparse.kernels.matmul.k7_small_blocks.regions import in_regions
from numbsparse.kernels.matmul.k7_small_blocks.strips import along_strips
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
TAKES_GATES = ("forward", "input_grad")
TAKES_UNKNOWN_GATES = TAKES_PLACES = (*TAKES_GATES, "weight_grad")


unsupported = reach("k7_small_blocks", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0))


def forward(x, values, index, y, precision="highest", gates=None):
    """y[:] = x @ w, or x @ (gates[b] * w[b] of each block)."""
    along_strips(x, values, index, y, False, precision, gates)


def input_grad(dy, values, index, dx, precision="highest", gates=None):
    """dx[:] = dy @ w.T, with gates as in forward."""
    along_strips(dy, values, index, dx, True, precision, gates)


def weight_grad(x, dy, index, dvalues, precision="highest", gates=None):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b], anything where gates[b] is 0."""
    in_regions(x, dy, index, dvalues, precision, gates)
