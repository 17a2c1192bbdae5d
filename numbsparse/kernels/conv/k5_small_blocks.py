"""Rung 5: blocks too small for tensor cores, merged into blocks of 16.

A block of 16 is kept where any of the blocks in it is; what is not kept in it is zero, multiplied
like the rest, and left out of a weight-gradient. On a random layout of density 0.1 a third of all
blocks of 16 hold a kept block of 8. Earlier rungs multiply; where an infinity met such a zero,
the output is summed again.
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
from numbsparse.layout import Index, Layout

BLOCK_SIZES = (4, 8)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out
MERGED = 16
OTHERS = ("k2_unfolded", "k3_tensor_core", "k4_wgmma", "k6_strips")

unsupported = reach("k5_small_blocks", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    small, big = (y, x) if product == "forward" else (x, y)
    features = big.shape[2], small.shape[2]
    merged, cells, _ = planned(index, merge, window.taps, values.shape[1])
    of = rung_for(merged, product, x, precision, window, *features)
    compute = getattr(of, product)
    compute(x, packed(values, cells), merged, window, y, precision)
    repair_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    merged, cells, homes = planned(index, merge, window.taps, dvalues.shape[1])
    whole = empty((cells.shape[0], MERGED, MERGED), dvalues.dtype)
    of = rung_for(merged, "weight_grad", x, precision, window, x.shape[2], dy.shape[2])
    of.weight_grad(x, dy, merged, window, whole, precision)
    source, target = bits(whole), bits(dvalues)
    launch(take_out, blocks(target.size), THREADS, source, homes, dvalues.shape[1], target)


def rung_for(merged: Index, product: str, x: DeviceArray, precision: str, *call: Any) -> Any:
    """The best of the other rungs that serves this call with blocks of 16."""
    case = product, MERGED, x.dtype, "cuda", x.shape[0], precision
    return chosen(OTHERS, merged.block_rows.size, *case, *call)


def merge(index: Index, n_taps: int, B: int) -> tuple[Any, ...]:
    """(merged index on the GPU, cells (merged blocks, along * along), homes (blocks)).

    A merged block holds along * along blocks: `cells` says which, -1 for none, and `homes` in which
    cell each is.
    """
    along = MERGED // B
    rows, columns = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    tap, row = np.divmod(index.block_rows, rows // n_taps)
    in_blocks, out_blocks = -(-(rows // n_taps) // along), -(-columns // along)
    down, across = tap * in_blocks + row // along, index.block_columns // along
    pattern = np.zeros((n_taps * in_blocks, out_blocks), bool)
    pattern[down, across] = True
    merged = Layout(pattern).index
    number = np.cumsum(pattern).reshape(pattern.shape) - 1
    cell = row % along * along + index.block_columns % along
    homes = number[down, across] * along**2 + cell
    cells = np.full((merged.block_rows.size, along**2), -1, np.int32)
    cells.reshape(-1)[homes] = np.arange(homes.size)
    return Sent(merged), cells, homes.astype(np.int32)


def packed(values: DeviceArray, cells: DeviceArray) -> DeviceArray:
    """The merged blocks, (merged blocks, MERGED, MERGED)."""
    out = empty((cells.shape[0], MERGED, MERGED), values.dtype)
    source, target = bits(values), bits(out)
    launch(put_in, blocks(target.size), THREADS, source, cells, values.shape[1], target)
    return out


def bits(array: DeviceArray) -> DeviceArray:
    """All values as integers, along one axis."""
    return array.span.view(np.dtype(f"uint{8 * array.itemsize}"))


@cuda.jit
def put_in(values, cells, B, merged):
    """merged = the values of the block in each cell, zero where there is none."""
    at = int64(cuda.grid(1))
    if at < merged.size:
        block, row, column = at // MERGED**2, int32(at // MERGED % MERGED), int32(at % MERGED)
        kept = int64(cells[block, row // B * (MERGED // B) + column // B])
        merged[at] = 0
        if kept >= 0:
            merged[at] = values[(kept * B + row % B) * B + column % B]


@cuda.jit
def take_out(merged, homes, B, values):
    """values = what is in the cell of each block."""
    at = int64(cuda.grid(1))
    if at < values.size:
        home, along = int64(homes[at // (B * B)]), MERGED // B
        block, cell = home // along**2, home % along**2
        row = cell // along * B + at // B % B
        values[at] = merged[(block * MERGED + row) * MERGED + cell % along * B + at % B]
