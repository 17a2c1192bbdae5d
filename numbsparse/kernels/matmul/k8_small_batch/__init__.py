"""Rung 8: small batches, where reading w is all the work.

With few rows of x each value of w is multiplied at most 64 times, so the warps of a block have
nothing to share. A layout is cut once into equal shares, one per multiprocessor, and each share
into equal runs, one per warp (`plan`), so that neither long lines nor few blocks leave a part of
the GPU idle. Each warp has a ring of its own for the tiles that it multiplies next (`requests`,
`lanes`, `tiles`). On a card with a copy engine and 225 KiB of shared memory the engine fills it;
elsewhere, for blocks under 32 and where features end inside a block, the lanes of the warp do; they
read x faster where it is feature-major, so where there is much of it in 16 bits it is transposed
first. Features of an odd batch begin anywhere, but those of a block, one after another, are a piece
of memory that begins at a multiple of 16 bytes, a slab. Where that pays (`slab_of`) it is loaded as
it is, and lanes read their values from there one by one; of short aligned features, as tiles. Of
more rows the engine loads features of large blocks from the multiple before on (`skewed`), as lanes
do of few small ones (`is_kept`), of which they else copy words; elsewhere, and in weight-gradients,
x is copied first. Batches beyond 64 rows are cut into tiles of as many, which share the
multiprocessors and read w once each; in `weight_grad` they are sums of more steps, which several
warps share where blocks are few.

A product is one launch: the last warp adds up the parts of a line that was cut, in their order
(`lines`; `blocks` for `weight_grad`). It starts while the kernel before it ends, and the host works
out a launch once (`launch`). Block sizes from 32 up share their kernels.

Reads per output of a sum of K terms: K / batch of w and K / min(B, 32) of x, from the L2 cache.
float32 is multiplied as hi + lo, two tf32 each, in three products. Those of 16 terms start from
zero, of 8 in `weight_grad`, whose sums are the shortest, and are added in float32, because tensor
cores cut off what they add.

What is left, in float32: the tensor cores, which need half the time that the kernel takes, and get
their operands two warps at a time. In 16-bit: the L2 cache, which serves as much of x as of w, and
at batches over 32 twice as much. At low densities: the time to start and to end; in float32, 12,288
features, batch 32 and density 0.01, of some 8,000 clocks of an H200 from one kernel to the next
about 2,000 until the first tiles are there, 2,500 for three units on each tensor core, 1,000 to
join and write lines, and 1,000 from the last block's end to the start of the next kernel. A
clustered layout takes as long as a random one: w is read once in any of them, and a product that
read nothing of x, all else the same, took 4 to 13 % less on an H200 (batch 32, densities of 0.02
and up).
"""

from numbsparse.kernels.matmul.k8_small_batch import plan_on_gpu  # noqa: F401
from numbsparse.kernels.matmul.k8_small_batch.blocks import multiply_blocks
from numbsparse.kernels.matmul.k8_small_batch.launch import along_lines, by_feature, in_reach
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned_values
from numbsparse.kernels.parts.plans import again
from numbsparse.kernels.parts.tiles import Form

BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("float32", "float16", "bfloat16")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
LARGEST_BATCH = 2**19  # a grid has up to 65,535 tiles of the batch, of 16 rows at least
TAKES_GATES = ("forward", "input_grad")
TAKES_UNKNOWN_GATES = TAKES_PLACES = (*TAKES_GATES, "weight_grad")
CLEARS_REST = True

unsupported = reach(
    "k8_small_batch", "cuda", BLOCK_SIZES, DTYPES, largest_batch=LARGEST_BATCH, capability=(8, 0)
)


def forward(x, values, index, y, precision="highest", gates=None):
    """y[:] = x @ w, or x @ (gates[b] * w[b] of each block)."""
    _product(index, x, aligned_values(values), y, False, precision, gates)


def input_grad(dy, values, index, dx, precision="highest", gates=None):
    """dx[:] = dy @ w.T, with gates as in forward."""
    _product(index, dy, aligned_values(values), dx, True, precision, gates)


def weight_grad(x, dy, index, dvalues, precision="highest", gates=None):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b], anything where gates[b] is 0."""
    multiply_blocks(x, dy, index, dvalues, (_form(dvalues, precision), gates))


def _product(index, x, values, y, transposed, precision, gates):
    if 0 not in y.shape:
        n_blocks, size, _ = values.shape
        form = _form(values, precision)
        x = by_feature(x, n_blocks, size)
        (x,) = in_reach(size, n_blocks, x, sparing=transposed and form.split)
        more = () if gates is None else (gates,)
        again(index, along_lines, (x, values, y), transposed, form, more=more)


def _form(values, precision):
    dtype = values.dtype.name
    return Form(dtype, dtype == "float32" and precision == "highest")
