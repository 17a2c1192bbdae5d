"""Rung 1: a GPU thread per output.

Thread (pixel, feature) walks the entries (tap, other block, stored block) of its line, finds the
pixel that the tap sees, and sums B products unless that is outside the image. 16-bit numbers are
`widened` to float32 where they are read, and the sum is `rounded` where it is stored.

Reads per output, from global memory: 2 * B * (entries of the line). Every tap reads the same rows
of x again, one pixel on: the next rung removes that.

The rungs after this one use it to repair their NaNs: an infinity split in two becomes NaN, and so
does one times the zeros that fill up a tile or a block. `repair_lines` and `repair_blocks` look at
every output, in the order of memory, and compute again those that are NaN; they are rare.
"""

from functools import cache, partial
from typing import Any

from numba import cuda, float32, int32, int64

from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.conv.boxes import moved, pixel, place_of
from numbsparse.kernels.conv.walks import Walk, line_walk
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels

DTYPES = ("float16", "bfloat16", "float32")
THREADS, RUN = 128, 8  # of a block, and the outputs that each looks at to repair them

unsupported = reach("k1_naive", "cuda", (), DTYPES)


def _lines(product, x, values, index, window, y, precision="highest", repairs=False):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    of = window.whole("weight_grad")
    walk = Walk(*planned(index, line_walk, window.taps, product, of))
    of_outputs(
        line_kernel, y.size, repairs,
        x, values, int(product == "input_grad"), walk, of.view, y.span, y.shape[2],
    )  # fmt: skip


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")
repair_lines = partial(_lines, repairs=True)


def weight_grad(x, dy, index, window, dvalues, precision="highest", repairs=False):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    of = window.whole("weight_grad")
    walk = Walk(*planned(index, line_walk, window.taps, "forward", of))
    of_outputs(
        weight_grad_kernel, dvalues.size, repairs,
        x, dy, index.block_rows, index.block_columns, walk.offsets, of.view, dvalues.span,
        dvalues.shape[1],
    )  # fmt: skip


repair_blocks = partial(weight_grad, repairs=True)


def of_outputs(kernel: Any, count: int, repairs: bool, *args: Any) -> None:
    overlap = repairs and copy_engine()
    blocks = -(-count // (THREADS * (RUN if repairs else 1)))
    launch(kernel(repairs, overlap), blocks, THREADS, *args, overlap=overlap)


@cache
def wanting(repairs: bool, overlap: bool) -> Any:
    """wanted(out): an output, a bit for it and for each after, THREADS apart, to be computed."""

    @cuda.jit(device=True)
    def wanted(out):
        only = int64(cuda.grid(1))
        return only, int32(only < out.size)

    @cuda.jit(device=True)
    def wanted_if_nan(out):
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        first, found = int64(cuda.blockIdx.x) * (THREADS * RUN) + cuda.threadIdx.x, int32(0)
        for r in range(RUN):  # all are under way at once
            at = first + r * THREADS
            value = widened(out[min(at, out.size - 1)])
            found |= int32(value != value and at < out.size) << r
        return first, found

    return wanted_if_nan if repairs else wanted


@cuda.jit(device=True)
def output_of(x, values, transposed, walk, view, n, place, k):
    """Feature k of the output at a place of image n."""
    size = values.shape[1]
    line, j = k // size, k % size
    acc = float32(0)
    for position in range(walk.indptr[line], walk.indptr[line + 1]):
        offset = walk.offsets[walk.taps[position]]
        if transposed:
            source = seeing(place, offset, view)
        else:
            source = pixel(moved(place, view.scale, offset), view.sizes)
        if source < 0:
            continue
        block, begin = walk.blocks[position], walk.others[position] * size
        for i in range(min(size, x.shape[2] - begin)):
            w = values[block, j, i] if transposed else values[block, i, j]
            acc += widened(x[n, source, begin + i]) * widened(w)
    return acc


@cuda.jit(device=True)
def seeing(place, offset, view):
    """The output that sees a pixel through a tap, -1 where none does."""
    a, b, c = place[0] - offset[0], place[1] - offset[1], place[2] - offset[2]
    s, t, u = view.scale
    if a % s != 0 or b % t != 0 or c % u != 0:
        return int32(-1)
    return pixel((int32(a // s), int32(b // t), int32(c // u)), view.counts)


@cache
def line_kernel(repairs: bool, overlap: bool) -> Any:
    wanted = wanting(repairs, overlap)

    @cuda.jit
    def kernel(x, values, transposed, walk, view, y, features):
        sizes = view.sizes if transposed else view.counts
        first, which = wanted(y)
        for r in range(RUN if which else 0):
            at = first + r * THREADS
            if which >> r & 1:
                n, place = place_of(at // features, sizes)
                total = output_of(x, values, transposed, walk, view, n, place, at % features)
                y[at] = rounded(total, y)

    return kernel


@cache
def weight_grad_kernel(repairs: bool, overlap: bool) -> Any:
    wanted = wanting(repairs, overlap)

    @cuda.jit
    def kernel(x, dy, block_rows, block_columns, offsets, view, dvalues, size):
        in_blocks, counts = -(-x.shape[2] // size), view.counts
        first, which = wanted(dvalues)
        for r in range(RUN if which else 0):
            at = first + r * THREADS
            if which >> r & 1:
                line, j = at // size, at % size
                block, i = line // size, line % size
                tap = block_rows[block] // in_blocks
                c, k = block_rows[block] % in_blocks * size + i, block_columns[block] * size + j
                acc = float32(0)
                if c < x.shape[2] and k < dy.shape[2]:
                    for row in range(x.shape[0] * counts[0] * counts[1] * counts[2]):
                        n, o = place_of(row, counts)
                        source = pixel(moved(o, view.scale, offsets[tap]), view.sizes)
                        if source >= 0:
                            target = (o[0] * counts[1] + o[1]) * counts[2] + o[2]
                            acc += widened(x[n, source, c]) * widened(dy[n, target, k])
                dvalues[at] = rounded(acc, dvalues)

    return kernel
