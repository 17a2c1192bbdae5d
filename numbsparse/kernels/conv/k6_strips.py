"""Rung 6: the rows of rung 2, which are never made.

A block of 8 fills half of the 16 products that a tensor core sums, and merged with neighbours it is
mostly zeros. `matmul.k7_small_blocks` sums two blocks at once, wherever they are, and reads a
feature of 64 rows once for up to 512 columns of y. Its rows are those that rung 2 unfolds; here the
copy engine finds them in the images, tap by tap: see `parts.pixels`.

Reads per output: those of that rung; of x from the L2 cache, where all taps and strips meet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numbsparse.kernels.conv.boxes import rows_of
from numbsparse.kernels.conv.k2_unfolded import taps_in_lines
from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import ROWS, WIDTH
from numbsparse.kernels.matmul.k7_small_blocks.strips import along_strips
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import of_bits
from numbsparse.kernels.parts.pixels import Images, fits, tile_in_a_row
from numbsparse.kernels.parts.plans import planned

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16")

of_card = reach("k6_strips", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0))


def unsupported(product, block_size, dtype, place, batch=1, precision="highest", *call):
    """None, or why in words: see `numbsparse.kernels.conv`."""
    if product == "weight_grad":
        return "k6_strips has no weight-gradient"
    reason = of_card(product, block_size, dtype, place, batch, precision)
    if reason is None and call:
        reason = refused(product, block_size, *call)
    return reason


def refused(
    product: str, size: int, window: Window, in_features: int, out_features: int
) -> str | None:
    """What the copy engine does not serve."""
    read = in_features if product == "forward" else out_features
    if max(window.stride) > 1:
        return f"k6_strips takes a stride of 1, got {window.stride}"
    if read % size:
        return f"k6_strips takes multiples of {size} features in {product}, got {read}"
    if not fits(window.passes(product)[0].offsets, -(-read // WIDTH)):
        return f"k6_strips takes fewer features, and taps less far apart, got {read} and {window}"
    return None


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    (of,), y, together = window.passes(product), y.reshape(-1, y.shape[2]), WIDTH // values.shape[1]
    if not (x.size and of.taps):
        fill(y, 0.0)
        return
    seen = window.view(product, of)
    x, width = of_bits(rows_of(x).values).reshape(x.shape), -(-x.shape[2] // WIDTH) * WIDTH
    tile = tile_in_a_row(x.shape[0], seen.out_sizes, ROWS)
    images: Any = Images(x, seen.sizes, seen.out_sizes, of.offsets, width, tile)
    (lines,) = planned(index, taps_in_lines, window.taps, product, of.taps, together)
    along_strips(images, values, lines, y, product == "input_grad", precision)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")
