"""Rung 1: a GPU thread per output.

Thread (pixel, feature) walks the entries (tap, other block, stored block) of its line, finds the
pixel that the tap sees, and sums B products unless that lies outside the image. 16-bit numbers are
`widened` to float32 where they are read, and the sum is `rounded` where it is stored.

Reads per output, from global memory: 2 * B * (entries of the line). Every tap reads the same rows
of x again, one pixel on: the next rung removes that.
"""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.conv.places import moved, pixel, place_of
from numbsparse.kernels.conv.walks import line_walk, planned
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.matmul.reach import reach

DTYPES = ("float16", "bfloat16", "float32")
THREADS = (32, 4)  # along the features, along the pixels


unsupported = reach("k1_naive", "cuda", (), DTYPES)


def forward(x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w)."""
    _lines("forward", x, values, index, window, y)


def input_grad(dy, values, index, window, dx, precision="highest"):
    """dx[:] = conv_transpose(dy, w)."""
    _lines("input_grad", dy, values, index, window, dx)


def _lines(product, x, values, index, window, y):
    sizes, out_sizes = window.big, window.small
    if product == "input_grad":
        sizes, out_sizes = out_sizes, sizes
    for of in window.passes(product):
        walk = planned(index, window, line_walk, product, of)
        rows = y.shape[0] * of.counts[0] * of.counts[1] * of.counts[2]
        grid = -(-y.shape[2] // THREADS[0]) * -(-rows // THREADS[1])
        launch(
            line_kernel, grid, THREADS,
            x, values, int(product == "input_grad"), *walk, sizes, out_sizes,
            of.counts, of.step, of.first, of.scale, y,
        )  # fmt: skip


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    _blocks(x, dy, index, window, dvalues, False)


def repair_blocks(x, dy, index, window, dvalues):
    """The values of blocks that are NaN, computed anew."""
    _blocks(x, dy, index, window, dvalues, True)


def _blocks(x, dy, index, window, dvalues, repairs):
    n_blocks, size, _ = dvalues.shape
    (of,) = window.passes("weight_grad")
    offsets = planned(index, window, line_walk, "forward", of)[-1]
    grid = -(-size // THREADS[0]) * -(-n_blocks * size // THREADS[1])
    launch(
        weight_grad_kernel, grid, THREADS,
        x, dy, index.block_rows, index.block_columns, offsets, window.big, of.counts, of.scale,
        dvalues, int(repairs),
    )  # fmt: skip


@cuda.jit(device=True)
def line_and_column(height):
    """The output of this thread: blocks of threads go down the lines first."""
    blocks = -(-height // cuda.blockDim.y)
    line = cuda.blockIdx.x % blocks * cuda.blockDim.y + cuda.threadIdx.y
    return line, cuda.blockIdx.x // blocks * cuda.blockDim.x + cuda.threadIdx.x


@cuda.jit(device=True)
def output_of(x, values, turned, indptr, taps, others, blocks, offsets, sizes, scale, n, o, k):
    """Feature k of the output o of image n."""
    size = values.shape[1]
    line, j = k // size, k % size
    acc = float32(0)
    for position in range(indptr[line], indptr[line + 1]):
        source = pixel(moved(o, scale, offsets[taps[position]]), sizes)
        if source < 0:
            continue
        block, begin = blocks[position], others[position] * size
        for i in range(min(size, x.shape[2] - begin)):
            w = values[block, j, i] if turned else values[block, i, j]
            acc += widened(x[n, source, begin + i]) * widened(w)
    return acc


@cuda.jit
def line_kernel(
    x, values, turned, indptr, taps, others, blocks, offsets, sizes, out_sizes, counts, step, first,
    scale, y,
):  # fmt: skip
    rows = y.shape[0] * counts[0] * counts[1] * counts[2]
    row, k = line_and_column(rows)
    if row >= rows or k >= y.shape[2]:
        return
    n, o = place_of(row, counts)
    target = pixel(moved(o, step, first), out_sizes)
    total = output_of(
        x, values, turned, indptr, taps, others, blocks, offsets, sizes, scale, n, o, k
    )
    y[n, target, k] = rounded(total, y)


@cuda.jit
def weight_grad_kernel(
    x, dy, block_rows, block_columns, offsets, sizes, counts, scale, dvalues, repairs
):
    # The blocks lie one under the other: line = block * B + i.
    n_blocks, size = dvalues.shape[0], dvalues.shape[1]
    line, j = line_and_column(n_blocks * size)
    if line >= n_blocks * size or j >= size:
        return
    block, i = line // size, line % size
    if repairs:
        value = widened(dvalues[block, i, j])
        if value == value:
            return
    in_blocks = -(-x.shape[2] // size)
    tap = block_rows[block] // in_blocks
    c, k = block_rows[block] % in_blocks * size + i, block_columns[block] * size + j
    acc = float32(0)
    if c < x.shape[2] and k < dy.shape[2]:
        for row in range(x.shape[0] * counts[0] * counts[1] * counts[2]):
            n, o = place_of(row, counts)
            source = pixel(moved(o, scale, offsets[tap]), sizes)
            if source >= 0:
                target = (o[0] * counts[1] + o[1]) * counts[2] + o[2]
                acc += widened(x[n, source, c]) * widened(dy[n, target, k])
    dvalues[block, i, j] = rounded(acc, dvalues)
