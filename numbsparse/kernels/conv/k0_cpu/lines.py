"""forward and input-gradient: R features x C pixels in registers, over the entries of a line."""

from functools import cache
from math import prod

import numpy as np
from numba import from_dtype, types

from numbsparse.kernels.conv.k0_cpu.rows import SQUARE, pack_rows, strips_of
from numbsparse.kernels.conv.walks import line_walk
from numbsparse.kernels.cores import DONE, compiled, entry_of, next_share, on_cores, read_only
from numbsparse.kernels.matmul.k0_cpu.lines import SLAB, tile_shape
from numbsparse.kernels.panels import empty_panels
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.simd import (
    fetch_add,
    lanes,
    multiply_add,
    prefetch,
    store_transposed,
    zeros,
)

TALL = 8  # features of a tile of one vector
READY = 8  # multiply-adds that start before the first of them ends


def lines_of(batch, features, values, index, window, product):
    """conv(x, w), or conv_transpose(x, w), of so many images, as a function of x, values and y."""
    backward = product == "input_grad"
    of, size, dtype = window.seeing(product), values.shape[1], values.dtype
    (*in_rows, width), (*out_rows, out_width) = of.view.sizes, of.view.out_sizes
    of_x, of_y = (batch, prod(in_rows), width, features), (batch, prod(out_rows), out_width)
    walk = planned(index, line_walk, window.taps, product, of)[:4]
    how = strips_of(of, max(batch, 1), shapes_of(size, dtype))
    kernel = entry_of(line_kernel(dtype, how.features, how.columns))
    rounded = -(-features // SQUARE) * SQUARE
    groups, of_group = -(-batch // how.images), prod(in_rows) * how.strips * rounded * how.lanes
    slab = max(1, SLAB // of_group)
    chunks = -(-how.width * how.images // how.columns)
    lines = (len(walk[0]) - 1) * (size // how.features)
    parts = []
    for group in range(0, groups, slab):
        count = min(slab, groups - group)
        tiles = count * how.out_rows.shape[1] * how.strips * chunks
        work, adds = tiles * lines, values.size * tiles * how.columns
        parts.append((count, group * how.images, {"work": work, "multiply_adds": adds}))
    strides, scale = (1, size) if backward else (size, 1), of.view.scale[2]
    places = *how[6:], of.view.step[2]

    def compute(x, values, y):
        x, y = x.reshape(of_x), y.reshape(*of_y, y.shape[2])
        for count, image, much in parts:
            packed = _room(count, of_x[1], how, rounded, dtype)
            shape = *how[:2], scale, of.view.counts[2], image
            some = x, packed, values, strides, walk, shape, *places, y
            on_cores(kernel, some, phases=2, **much)

    return compute


@cache
def shapes_of(size, dtype):
    """(what a lane costs, R, C) of the tiles that registers hold.

    A step takes as long as its products, or its loads and a prefetch, or as a sum takes to be ready
    for the next one. So short rows, of one vector, are those of more features.
    """
    (rows, vectors), width = tile_shape(size), lanes(from_dtype(dtype))
    tiles = [(rows, v) for v in range(vectors, 1, -1)] + [(min(TALL, size), 1)]
    return tuple((max(r * v, r + v + 1, READY) / (r * v), r, v * width) for r, v in tiles)


def _room(groups, rows, how, features, dtype):
    """Space for packed strips, and a tile's width more: a tile may read past the last one."""
    shape = (groups, rows, how.strips, features, how.lanes)
    flat = empty_panels(1, 1, prod(shape) + how.columns, dtype).reshape(-1)
    flat[prod(shape) :] = 0
    return flat[: prod(shape)].reshape(shape)


@cache
def line_kernel(of, rows, columns):
    """The compiled loop for tiles of `rows` features x `columns` pixels."""
    dtype = from_dtype(of)
    integers = types.Array(types.int64, 1, "C", readonly=False)
    fixed = types.Array(types.int32, 1, "C", readonly=False)
    pair = types.UniTuple(types.int64, 2)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        read_only(dtype, 4),  # x (batch, rows, pixels, features)
        dtype[:, :, :, :, ::1],  # packed (groups, rows, strips, features, lanes)
        read_only(dtype, 3),  # values (n_blocks, B, B)
        pair,  # sum_stride, out_stride: in a block, to the next step and to the next output
        types.UniTuple(fixed, 4),  # indptr (lines + 1,), taps, others, blocks (entries,)
        types.UniTuple(types.int64, 5),  # images, width, scale, count, first image
        *(integers, integers),  # pixels, tap_lane
        types.int64[:, ::1],  # tap_row (taps, out rows)
        types.int64[:, ::1],  # out_rows (residues, out rows)
        integers,  # first
        types.int64,  # step
        dtype[:, :, :, ::1],  # y (batch, rows, pixels, features)
    )

    @compiled(signature)
    def kernel(
        core, progress, share, x, packed, values, strides, walk, shape, pixels, tap_lane, tap_row,
        out_rows, first, step, y,
    ):  # fmt: skip
        sum_stride, out_stride = strides
        indptr, taps, others, blocks = walk
        images, width, scale, count, first_image = shape
        groups, in_rows, strips, rounded, lanes = packed.shape
        features, size = x.shape[3], values.shape[1]
        pack_rows(core, progress[0], x, images, strips, width, scale, pixels, first_image, packed)
        tiles_in_line = size // rows
        lines = (len(indptr) - 1) * tiles_in_line
        of_residue = (len(indptr) - 1) // len(out_rows)
        chunks = (width * images + columns - 1) // columns
        corner = np.empty((columns, rows), y.dtype)
        work = groups * out_rows.shape[1] * strips * chunks * lines
        number, last = next_share(core, progress[1], share, work)
        while number < last:
            taken = last - number
            for item in range(number, last):
                r, where = item % lines % tiles_in_line * rows, item // lines
                line_number = item % lines // tiles_in_line
                chunk, where = where % chunks * columns, where // chunks
                strip, where = where % strips, where // strips
                out_row, group = where % out_rows.shape[1], where // out_rows.shape[1]
                residue, k = line_number // of_residue, line_number % of_residue * size + r
                place = out_rows[residue, out_row]
                if place < 0:
                    continue
                tile = zeros(packed, rows, columns)
                for position in range(indptr[line_number], indptr[line_number + 1]):
                    tap = taps[position]
                    row = tap_row[tap, out_row]
                    if row < 0:
                        continue
                    other = others[position] * size
                    a = blocks[position] * size * size + r * out_stride
                    b = ((group * in_rows + row) * strips + strip) * rounded + other
                    b = b * lanes + tap_lane[tap] + chunk
                    following = blocks[min(position + 1, len(blocks) - 1)]
                    next_a = following * size * size + r * out_stride
                    for i in range(min(size, features - other)):
                        prefetch(values, next_a + i * max(sum_stride, rows), rows)
                        tile = multiply_add(tile, values, a, out_stride, packed, (b,), 0)
                        a += sum_stride
                        b += lanes
                store_transposed(tile, corner, 0, rows)
                inside = min(rows, y.shape[3] - k)
                for v in range(min(columns, width * images - chunk)):
                    o = strip * width + (chunk + v) // images
                    n = first_image + group * images + (chunk + v) % images
                    pixel = o * step + first[residue]
                    if o < count and pixel < y.shape[2] and n < len(y):
                        for i in range(inside):
                            y[n, place, pixel, k + i] = corner[v, i]
            fetch_add(progress[1], DONE, taken)
            number, last = next_share(core, progress[1], share, work)

    return kernel
