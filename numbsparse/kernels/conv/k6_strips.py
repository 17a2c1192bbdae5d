"""Rung 6: the rows of rung 2, which are never made.

A block of 8 fills half of the 16 products that a tensor core sums, and merged with neighbours it is
mostly zeros. `matmul.k7_small_blocks` sums two blocks at once, wherever they are, and reads a
feature of 64 rows once for up to 512 columns of y. Its rows are those that rung 2 unfolds; here the
copy engine finds them in the images, tap by tap: see `parts.pixels`.

Reads per output: those of that rung; of x from the L2 cache, where all taps and strips meet.
"""

from functools import partial
from math import prod
from typing import Any

from numbsparse.device import DeviceArray
from numbsparse.kernels.conv.k2_unfolded import interleave, rows_of, taps_in_lines
from numbsparse.kernels.conv.window import Pass, Three
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.k7_small_blocks.regions import in_regions
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import WIDTH
from numbsparse.kernels.matmul.k7_small_blocks.strips import along_strips
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned, of_bits
from numbsparse.kernels.parts.pixels import Images, fits, tile_that_fits
from numbsparse.kernels.parts.plans import planned

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16")
FEATURES, DEPTH = 64, 32  # of a group of a region, and rows of a stage


def refused(product: str, size: int, _: str, batch: int, *call: Any) -> str | None:
    """What the copy engine does not serve."""
    if not call:
        return None
    window, in_features, out_features = call
    read = out_features if product == "input_grad" else in_features
    step, along = max(window.stride), zip(window.stride, window.small, strict=True)
    if step > 2 or (product != "input_grad" and any(s < step and n > 1 for s, n in along)):
        return f"takes a stride of 1 or 2, along all axes, got {window.stride}"
    if read % size:
        return f"takes multiples of {size} features in {product}, got {read}"
    if not fits(window.seeing(product).offsets, -(-max(in_features, out_features) // WIDTH)):
        return f"takes fewer features, and taps less far apart, got {window}"
    if product == "weight_grad" and batch:
        tile = tile_that_fits(batch, window.small, DEPTH)
        if 2 * prod(tile) < min(DEPTH, batch * prod(window.small)):
            return f"takes images made of boxes of {DEPTH} pixels, got {window.small}"
    return None


unsupported = reach("k6_strips", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), refused=refused)


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    of, B = window.seeing(product), values.shape[1]
    lines, *_ = planned(index, taps_in_lines, window.taps, product, of, WIDTH // B)
    if not x.size or not lines.block_rows.size:
        fill(y, 0.0)
        return
    rows, images = rows_of(y, of, B), images_of(x, of.view.sizes, of.view.counts, of, WIDTH)
    along_strips(images, values, lines, rows, product == "input_grad", precision)
    interleave(rows, index, of, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    of, B = window.whole("weight_grad"), dvalues.shape[1]
    how = taps_in_lines, window.taps, "weight_grad", of, FEATURES // B
    lines, *_ = planned(index, *how)
    x = images_of(x, window.big, window.small, of, FEATURES)
    dy = images_of(dy, window.small, window.small, None, 1)
    in_regions(x, dy, lines, dvalues, precision)


def images_of(x: DeviceArray, sizes: Three, outputs: Three, of: Pass | None, group: int) -> Images:
    """x (batch, pixels, features) as a pass sees it, or outputs do themselves; whole groups."""
    batch, _, features = x.shape
    pixels = aligned(of_bits(x).reshape(-1, features))
    taps = [(max(of.view.scale) - 1, *by) for by in of.seen[0]] if of else [(0, 0, 0, 0)]
    return Images(pixels, batch, sizes, outputs, tuple(taps), -(-features // group) * group)
