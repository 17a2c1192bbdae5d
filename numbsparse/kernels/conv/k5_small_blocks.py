"""Rung 5: blocks too small for tensor cores, merged into larger ones.

A block of 16 or 32 is kept where any of the blocks in it is; what is not kept in it is zero,
multiplied like the rest, and left out of a weight-gradient. On a random layout of density 0.1 a
third of all blocks of 16 hold a kept block of 8, and of all blocks of 32 one of 16. Earlier rungs
multiply: a tap of a block takes `wgmma` as long, whether that has 16 features or 32. Where an
infinity met such a zero, the output is summed again.
"""

from functools import cache, partial
from typing import Any

import numpy as np
from numba import cuda, int32, int64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.conv import fastest, rung
from numbsparse.kernels.conv.costs import OTHERS, larger
from numbsparse.kernels.conv.k1_naive import repair_lines
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.plans import Sent, planned
from numbsparse.layout import Index, layout_of

BLOCK_SIZES = (4, 8, 16)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out

unsupported = reach("k5_small_blocks", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest", by=None):
    """y[:] = conv(x, w), or conv_transpose(x, w); `by` is the merged size, or the best."""
    small, big = (y, x) if product == "forward" else (x, y)
    how = product, x, precision, window, big.shape[2], small.shape[2]
    of, merged, cells, size = merged_for(index, values, by, *how)
    whole = empty((cells.shape[0], size, size), values.dtype)
    move(values, cells, whole, 1)
    getattr(of, product)(x, whole, merged, window, y, precision)
    repair_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest", by=None):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    how = "weight_grad", x, precision, window, x.shape[2], dy.shape[2]
    of, merged, cells, size = merged_for(index, dvalues, by, *how)
    whole = empty((cells.shape[0], size, size), dvalues.dtype)
    of.weight_grad(x, dy, merged, window, whole, precision)
    move(dvalues, cells, whole, 0)


def merged_for(
    index: Index,
    values: DeviceArray,
    by: str | None,
    product: str,
    x: DeviceArray,
    precision: str,
    window: Any,
    *features: int,
) -> tuple[Any, Index, DeviceArray, int]:
    """(the rung that multiplies, merged index, cells, size): of the sizes the fastest."""
    B, found = values.shape[1], []
    for size in larger(B) if by is None else (int(by),):
        merged, cells = planned(index, merge, window.taps, B, size)
        case = product, size, x.dtype, "cuda", x.shape[0], precision, window, *features
        found.append((*fastest(OTHERS, merged.block_rows.size, *case), merged, cells, size))
    _, name, *rest = min(found, key=lambda each: each[0])
    return rung(name), *rest


def merge(index: Index, n_taps: int, B: int, size: int) -> tuple[Any, ...]:
    """(merged index on the GPU, cells (merged blocks, along * along)).

    A merged block holds along * along blocks: `cells` says which, -1 for none.
    """
    along = size // B
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
    B, size = values.shape[1], merged.shape[1]
    values, merged = (a.span.view(f"uint{8 * a.itemsize}") for a in (values, merged))
    kernel = move_kernel(B, size)
    launch(kernel, blocks(merged.size), THREADS, values, cells, merged, to_merged)


@cache
def move_kernel(B: int, SIZE: int) -> Any:
    @cuda.jit
    def kernel(values, cells, merged, to_merged):
        at = int64(cuda.grid(1))
        if at < merged.size:
            block, row, column = at // SIZE**2, int32(at // SIZE % SIZE), int32(at % SIZE)
            kept = int64(cells[block, row // B * (SIZE // B) + column // B])
            own = (kept * B + row % B) * B + column % B
            if to_merged:
                merged[at] = values[own] if kept >= 0 else 0
            elif kept >= 0:
                values[own] = merged[at]

    return kernel
