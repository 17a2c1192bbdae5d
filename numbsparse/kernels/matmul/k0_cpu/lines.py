"""forward and input_grad: y[:, line] = sum over the line's blocks of x[:, other line] @ block.

`x` is packed in panels C wide, so that each row of `b` is one run of memory. Then cores take tiles,
whose sums go down a line.
"""

from functools import cache

import numpy as np
from numba import from_dtype, types

from numbsparse.kernels.at_address import address_of, call_of
from numbsparse.kernels.cores import (
    DONE,
    compiled,
    entry_of,
    inner,
    next_share,
    on_cores,
    read_only,
)
from numbsparse.kernels.matmul.k0_cpu.few_rows import few_product, pays
from numbsparse.kernels.panels import (
    pack_kernel,
    panels_in,
    room_for,
    signature_of_pack,
    with_unit_stride,
)
from numbsparse.kernels.simd import (
    fetch_add,
    lanes,
    load,
    multiply_add,
    prefetch,
    store,
    store_transposed,
    vector_registers,
    zeros,
)

AHEAD = 32  # steps, at least, from a block's prefetch to its product
SLAB = 1 << 21  # numbers packed at a time, to stay in the outer cache
OUTER_CACHE = 1 << 24  # bytes, about; larger weights are read once instead of once per panel


def product_of(batch, values, index, transposed):
    """The product as a function of x, values and y: see `few_product`.

    Whole tiles of the batch first; the last few rows follow by themselves.
    """
    size, dtype = values.shape[1], from_dtype(values.dtype)
    lines, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    features = size * (len(others.indptr) - 1)
    if pays(batch, values, features, transposed):
        return few_product(batch, values, index, transposed)
    rows, vectors = tile_shape(size)
    wide, narrow = vectors * lanes(dtype), lanes(dtype)
    slab = max(1, SLAB // (wide * max(1, features))) * wide
    parts, start = [], 0
    while start < batch:
        left = batch - start
        if start and pays(left, values, features, transposed, 0):
            break
        count, columns = min(slab, left), wide
        if count <= narrow:
            columns = narrow
        elif (rest := count % wide) and (
            rest <= narrow or pays(rest, values, features, transposed, 0)
        ):
            count -= rest
        panels = -(-count // columns)
        work = panels * (len(lines.indptr) - 1) * (size // rows)
        how = {"phases": 2, "work": work, "multiply_adds": values.size * panels * columns}
        at = address_of(pack_kernel(dtype)), address_of(tiles_kernel(dtype, size, columns))
        parts.append((start, start + count, panels, columns, at, how))
        start += count
    last = few_product(batch - start, values, index, transposed) if start < batch else None
    walk, by_line = tuple(lines), values.nbytes > OUTER_CACHE
    kernel = entry_of(product_kernel(dtype))

    def compute(x, values, y):
        x = with_unit_stride(x)
        for first, end, panels, columns, at, how in parts:
            rows = (x, y) if end == batch == end - first else (x[first:end], y[first:end])
            room = room_for(panels, x.shape[1], columns, values.dtype)
            some = *rows, room, panels, columns, values, transposed, walk, by_line, at
            on_cores(kernel, some, **how)
        if last is not None:
            last(x[start:], values, y[start:])

    return compute


def tile_shape(size):
    """R, and C in vectors: with a row of `b` and a scalar of `a`, what the registers hold."""
    rows, vectors = (8, 2) if vector_registers() == 32 else (4, 3)
    return min(rows, size), vectors


def signature_of_tiles(dtype):
    return types.int64(
        types.int64,  # core
        types.int64[::1],  # counts
        types.int64,  # share
        dtype[:, :, ::1],  # packed (panels, features, columns)
        read_only(dtype, 3),  # values (n_blocks, B, B)
        types.boolean,  # blocks are transposed
        types.UniTuple(read_only(types.int32, 1), 3),  # indptr (lines + 1,), indices, blocks
        dtype[:, :],  # y (batch, features of the lines)
        types.boolean,  # line by line, or panel by panel
    )


@cache
def tiles_kernel(dtype, size, columns):
    """A core's share of a product's tiles, `rows` x `columns`; gives how many there are in all."""
    rows, ahead = tile_shape(size)[0], max(1, AHEAD // size)

    @inner(inline="always")
    def add(tile, values, packed, places, to_step, to_output, steps):
        """The tile and a block's products; what a later block needs is prefetched."""
        a, b, next_a, next_b = places
        for step in range(steps):
            prefetch(values, next_a + step * max(to_step, rows), rows)
            prefetch(packed, next_b + step * columns, columns)
            start = (b + step * columns,)
            tile = multiply_add(tile, values, a + step * to_step, to_output, packed, start, 0)
        return tile

    @compiled(signature_of_tiles(dtype))
    def kernel(core, counts, share, packed, values, transposed, walk, y, by_line):
        strides = (1, size) if transposed else (size, 1)  # to the next step, to the next output
        indptr, indices, blocks = walk
        batch, n_outputs = y.shape
        panels, features, _ = packed.shape
        lines = len(indptr) - 1
        tiles_in_line = size // rows
        n_stride, k_stride = y.strides[0] // y.itemsize, y.strides[1] // y.itemsize
        corner = np.empty((columns, rows), y.dtype)
        tiles = panels * lines * tiles_in_line
        first, last = next_share(core, counts, share, tiles)
        while first < last:
            for number in range(first, last):
                pair, r = number // tiles_in_line, number % tiles_in_line * rows
                line, panel = pair % lines, pair // lines
                if by_line:
                    line, panel = pair // panels, pair % panels
                tile = zeros(packed, rows, columns)
                for position in range(indptr[line], indptr[line + 1]):
                    other = indices[position] * size
                    a = blocks[position] * size * size + r * strides[1]
                    b = (panel * features + other) * columns
                    following = min(position + ahead, len(blocks) - 1)
                    next_a = blocks[following] * size * size + r * strides[1]
                    next_b = (panel * features + indices[following] * size) * columns
                    steps = min(size, features - other)
                    places = a, b, next_a, next_b
                    if steps < size:  # the last features
                        tile = add(tile, values, packed, places, strides[0], strides[1], steps)
                    elif transposed:
                        tile = add(tile, values, packed, places, 1, size, size)
                    else:
                        tile = add(tile, values, packed, places, size, 1, size)
                n, k = panel * columns, line * size + r
                inside = n + columns <= batch and k + rows <= n_outputs
                if inside and k_stride == 1:
                    store_transposed(tile, y, n * n_stride + k, n_stride)
                elif inside and n_stride == 1:  # feature-major
                    store(tile, y, (k * k_stride + n,), 0, k_stride)
                elif k_stride == 1 and k + rows <= n_outputs:  # over the end of the batch
                    store_transposed(tile, corner, 0, rows)
                    for v in range(batch - n):
                        row = load(corner, (v * rows,), 0, rows, 1, rows)
                        store(row, y, ((n + v) * n_stride + k,), 0, n_stride)
                else:  # over the edge of y
                    store_transposed(tile, corner, 0, rows)
                    for v in range(min(columns, batch - n)):
                        for i in range(min(rows, n_outputs - k)):
                            y[n + v, k + i] = corner[v, i]
            fetch_add(counts, DONE, last - first)
            first, last = next_share(core, counts, share, tiles)
        return tiles

    return kernel


@cache
def product_kernel(dtype):
    """The compiled loop of `product_of`."""
    of_tiles, of_pack = signature_of_tiles(dtype), signature_of_pack(dtype)
    pack, multiply = call_of(of_pack), call_of(of_tiles)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        of_pack.args[2],  # x (batch, features)
        of_tiles.args[-2],  # y
        dtype[::1],  # of `room_for`
        *[types.int64] * 2,  # panels, columns
        *of_tiles.args[4:-2],
        of_tiles.args[-1],
        types.UniTuple(types.int64, 2),  # where the `pack_kernel` and the `tiles_kernel` are
    )

    @compiled(signature)
    def kernel(
        core, progress, share, x, y, room, panels, columns, values, transposed, walk, by_line, at
    ):  # fmt: skip
        packed = panels_in(room, panels, x.shape[1], columns)
        pack(at[0], (core, progress[0], x, packed))
        operands = packed, values, transposed, walk, y, by_line
        multiply(at[1], (core, progress[1], share, *operands))

    return kernel
