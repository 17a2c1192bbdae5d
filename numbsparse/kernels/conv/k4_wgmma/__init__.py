"""Rung 4: `wgmma` multiplies pixels where the copy engine put them.

In the rung before, every thread works out where its pixels are and copies 16 bytes at a time, and
every tap loads its pixels from the box into registers, row by row: together as many instructions as
products. Here one lane requests a whole box from the copy engine, of five axes (image, depth,
height, width, features), from wherever it begins: what is outside the image arrives as zeros.
Barriers that count its bytes signal the consumer warps, which signal back when a stage is free.

`wgmma` reads both operands directly from shared memory, in groups of 8 lines at equal distances.
Eight neighbours of a line of the image are such a group, and 8 lines of it, a box apart, are the 64
rows of a product: a tap is one number, where in the box they begin.

    lines         forward and input-gradient: rings of boxes and of blocks of w
    products      what is multiplied and stored there, of 16 bits and of float32
    weight_grad   rows of a product are the features of several taps; its `_sums` are cut in pieces

Reads per output are those of the rung before. What limits it is shared memory, from which 64 rows
of x and one block of w are read for each product.

float32 has its first operand in registers, and so tiles of any shape; its weight-gradient is by
`mma`, of pixels that threads read from the box, because `wgmma` transposes none.
What the copy engine does not serve, and images that tiles of 8 x 8 would fill badly, are refused.
Larger blocks are taken as several of 64, or of 32.
"""

from functools import partial
from typing import Any

from numbsparse.kernels.conv.k1_naive import repair_blocks, repair_lines
from numbsparse.kernels.conv.k4_wgmma import lines
from numbsparse.kernels.conv.k4_wgmma import weight_grad as gradient
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned_values

BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
FARTHEST = 4  # stride: of a line of 64 pixels the copy engine takes no more


def refused(product: str, size: int, dtype: str, batch: int, *call: Any) -> str | None:
    """What the copy engine does not serve, and what would be wasteful."""
    if not call:
        return None
    window, *features = call
    whole = [size, size if dtype == "float32" else 8]
    if product == "weight_grad":
        whole = [8, 8]
    if product == "input_grad":
        whole.reverse()
    elif max(window.stride) > FARTHEST:
        return f"takes a stride of up to {FARTHEST} in {product}, got {window.stride}"
    if any(n % by for n, by in zip(features, whole, strict=True)):
        return f"takes multiples of {whole} features in {product}, got {features}"
    if not batch or (dtype == "float32" and product != "weight_grad"):
        return None
    itemsize = 4 if dtype == "float32" else 2
    if product == "weight_grad":
        part, of = gradient.part_of(size, itemsize), window.whole(product)
        shape: Any = gradient.SHAPES[itemsize][part]
    else:
        part, of = min(size, max(lines.SHAPES[2])), window.seeing(product)
        shape = lines.shape_for(of, batch, 2, part, -(-features[product == "forward"] // part))
    how, _ = lines.cut_for(of, batch, shape, part, itemsize, True)
    if not how.is_filled(of, batch, shape.ROWS):
        return f"takes images that mostly fill tiles of 8 x 8 pixels, got {window.big}"
    return None


unsupported = reach(
    "k4_wgmma", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), later=False, refused=refused
)


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    if not x.size or not values.size:
        fill(y, 0.0)
        return
    x, values = map(aligned_values, (x, values))
    lines.multiply_lines(product, x, values, index, window, y, precision)
    if x.itemsize == 4 and precision == "highest":
        repair_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    if not x.size or not dvalues.size:
        fill(dvalues, 0.0)
        return
    x, dy = map(aligned_values, (x, dy))
    even = gradient.weight_grad(x, dy, index, window, dvalues, precision)
    if not even or (x.itemsize == 4 and precision == "highest"):
        repair_blocks(x, dy, index, window, dvalues)
