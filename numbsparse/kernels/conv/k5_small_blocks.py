"""Rung 5: blocks too small for tensor cores, merged into blocks of 16.

A block of 16 is kept where any of the blocks in it is; what is not kept in it is zero, multiplied
like the rest, and left out of a weight-gradient. On a random layout of density 0.1 a third of all
blocks of 16 hold a kept block of 8. Earlier rungs multiply; where an infinity met such a zero,
the output is summed again. Blocks of 8 are merged on cards before Hopper: 32 images of 28 x 28
pixels, 256 features, float16, by what these have, took an H200 0.65 to 0.91 of the time of
`k2_unfolded`, float32 1.4 to 1.5 times as long.
"""

from functools import partial
from typing import Any

import numpy as np
from numba import cuda, int32, int64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.conv import chosen
from numbsparse.kernels.conv.k1_naive import repair_lines
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.plans import Sent, planned
from numbsparse.layout import Index, layout_of

BLOCK_SIZES = (4, 8)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
MERGED = 16
OTHERS = ("k2_unfolded", "k3_tensor_core", "k4_wgmma", "k6_strips")

unsupported = reach("k5_small_blocks", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    small, big = (y, x) if product == "forward" else (x, y)
    merged, cells = planned(index, merge, window.taps, values.shape[1])
    whole = empty((cells.shape[0], MERGED, MERGED), values.dtype)
    move(values, cells, whole, 1)
    of = rung_for(merged, product, x, precision, window, big.shape[2], small.shape[2])
    getattr(of, product)(x, whole, merged, window, y, precision)
    repair_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    merged, cells = planned(index, merge, window.taps, dvalues.shape[1])
    whole = empty((cells.shape[0], MERGED, MERGED), dvalues.dtype)
    of = rung_for(merged, "weight_grad", x, precision, window, x.shape[2], dy.shape[2])
    of.weight_grad(x, dy, merged, window, whole, precision)
    move(dvalues, cells, whole, 0)


def rung_for(merged: Index, product: str, x: DeviceArray, precision: str, *call: Any) -> Any:
    """The best of the other rungs that serves this call with blocks of 16."""
    case = product, MERGED, x.dtype, "cuda", x.shape[0], precision
    return chosen(OTHERS, merged.block_rows.size, *case, *call)


def merge(index: Index, n_taps: int, B: int) -> tuple[Any, ...]:
    """(merged index on the GPU, cells (merged blocks, along * along)).

    A merged block holds along * along blocks: `cells` says which, -1 for none.
    """
    along = MERGED // B
    rows, columns = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    tap, row = np.divmod(index.block_rows, rows // n_taps)
    in_blocks, out_blocks = -(-(rows // n_taps) // along), -(-columns // along)
    down, across = tap * in_blocks + row // along, index.block_columns // along
    places, number = np.unique(down * out_blocks + across, return_inverse=True)
    merged = layout_of((n_taps * in_blocks, out_blocks), places).index
    cells = np.full((places.size, along**2), -1, np.int32)
    cells[number, row % along * along + index.block_columns % along] = np.arange(row.size)
    return Sent(merged), cells


def move(values: DeviceArray, cells: DeviceArray, merged: DeviceArray, to_merged: int) -> None:
    """The blocks to their cells in merged blocks, zeros where there is none; or from there."""
    B = values.shape[1]
    values, merged = (a.span.view(f"uint{8 * a.itemsize}") for a in (values, merged))
    launch(move_kernel, blocks(merged.size), THREADS, values, cells, B, merged, to_merged)


@cuda.jit
def move_kernel(values, cells, B, merged, to_merged):
    at = int64(cuda.grid(1))
    if at < merged.size:
        block, row, column = at // MERGED**2, int32(at // MERGED % MERGED), int32(at % MERGED)
        kept = int64(cells[block, row // B * (MERGED // B) + column // B])
        own = (kept * B + row % B) * B + column % B
        if to_merged:
            merged[at] = values[own] if kept >= 0 else 0
        elif kept >= 0:
            values[own] = merged[at]
