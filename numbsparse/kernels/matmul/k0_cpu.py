"""All CPU cores: a tile of outputs stays in vector registers until its whole sum is in it.

The three products are one loop around one step,

    tile[r, v] += a[r] * b[v]        R scalars times a row of C: R * C multiply-adds

    product       a                      b                           tile
    forward       a row of a block       x,  the batch along v       R out_features x C of the batch
    input_grad    a column of a block    dy, the batch along v       R in_features  x C of the batch
    weight_grad   a row of x             dy, features along v        R x C of one block's weights

The batch fills the vectors, not the block, so a small block runs as fast as a large one, and a
transposed block is the same block read with its strides swapped. `x` and `dy` are packed first, in
panels C wide, to make each row of `b` one run of memory; for a weight-gradient, whose rows are runs
anyway, only where that pays. An output is summed in one order whatever the batch and the number of
cores. CPUs multiply no 16-bit floats: such operands are copied as float32 first, and the result is
rounded.

Reads per output, from cache: (1/R + 1/C) * steps; steps is the batch for a weight, and else
B * (blocks in the line). With R = 8 and C = 32 they hide behind the arithmetic, and the limit is
how many multiply-adds the cores can do. A GPU does far more of those: the next rung runs there.
Where packing x costs more than it brings, `few_rows` multiplies.
"""

from functools import cache, lru_cache, partial
from math import prod

import numpy as np
from numba import from_dtype, types
from numba.np.unsafe.ndarray import to_fixed_tuple

from numbsparse.kernels.at_address import address_of, call_of
from numbsparse.kernels.cores import (
    DONE,
    compiled,
    cores_for,
    entry_of,
    inner,
    next_share,
    on_cores,
    read_only,
    wait_or_part,
)
from numbsparse.kernels.matmul.few_rows import ALONE, few_product, pays
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.panels import (
    empty_panels,
    has_unit_stride,
    pack_kernel,
    panels_in,
    panels_of,
    places_of_run,
    room_for,
    run_of,
    shortened,
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

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")
AHEAD = 32  # steps, at least, from a block's prefetch to its product
UNPACKED = 1 << 20  # numbers of x and dy, at most, that stay in caches: never faster when packed
READ = 1 << 22  # numbers of x that blocks read, at least, for packing to pay
SLAB = 1 << 21  # numbers packed at a time, to stay in the outer cache
INNER_SLAB = 1 << 18  # the same for the inner cache
OUTER_CACHE = 1 << 24  # bytes, about; larger weights are read once instead of once per panel


unsupported = reach("k0_cpu", "cpu", BLOCK_SIZES, DTYPES)


def in_floats(compute, a, b, out, *how):
    """compute(a, b, out, *how), of 16-bit operands too."""
    a, b = (np.require(x, requirements="A") for x in (a, b))  # fields have strides of no whole item
    if out.itemsize > 2:
        compute(a, b, out, *how)
        return
    wide = np.empty_like(out, np.float32)
    compute(a.astype(np.float32), b.astype(np.float32), wide, *how)
    with np.errstate(over="ignore"):  # infinity, as on a GPU
        out[...] = wide


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    in_floats(_product, x, values, y, index, False)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    in_floats(_product, dy, values, dx, index, True)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    in_floats(_sum_rows, x, dy, dvalues, index)


def again(product, batch, values, index):
    """A product of so many rows as a function of its three arrays: see `few_product`.

    Of `values`, or of `dvalues`, its shape and dtype are asked for.
    """
    if values.itemsize == 2:
        compute = {"forward": forward, "input_grad": input_grad}.get(product, weight_grad)
        return lambda a, b, out: compute(a, b, index, out)
    if product == "weight_grad":
        return sum_of(batch, values, index)
    return product_of(batch, values, index, product == "input_grad")


def _sum_rows(x, dy, dvalues, index):
    sum_of(len(x), dvalues, index)(x, dy, dvalues)


def sum_of(batch, dvalues, index):
    """`_sum_rows` as a function of x, dy and dvalues: see `few_product`.

    Packing pays where several blocks read each of more rows than a cache holds, and where rows are
    no runs of memory. Else they are read where they are. At 436 products of two CPUs these rules
    take 1.03 times as long as the better way.
    """
    (n_blocks, size, _), lines = dvalues.shape, (index.block_rows, index.block_columns)
    blocks = len(index.rows.indptr) - 1, len(index.columns.indptr) - 1
    case = batch, dvalues.shape, dvalues.dtype, lines, blocks
    packed = lru_cache(partial(_sum_packed, *case))  # compiled where it is needed
    alone = cores_for(dvalues.size * batch) == 1
    much = batch * size * sum(blocks) > UNPACKED and batch * size * n_blocks >= READ
    if not alone and much and n_blocks >= 2 * max(blocks):
        return packed()
    unpacked = _sum_unpacked(*case, alone)

    def compute(x, dy, dvalues):
        in_runs = has_unit_stride(x) and has_unit_stride(dy)
        (unpacked if in_runs else packed())(x, dy, dvalues)

    return compute


def _sum_unpacked(batch, shape, of, lines, blocks, alone):
    """`sum_of` rows of x and dy that are runs of memory, by one core `alone` or by all."""
    (n_blocks, size, _), (in_blocks, out_blocks) = shape, blocks
    dtype = from_dtype(of)
    columns = 2 * lanes(dtype)
    width = min(size, columns)
    at = address_of(slab_kernel(dtype, tile_shape(size)[0], columns // width))
    known, kernel = (width, lines, (*_one_run(batch), 1), at), entry_of(unpacked_kernel(dtype))
    how = {"phases": 1, "work": n_blocks, "multiply_adds": prod(shape) * batch}

    def compute(x, dy, dvalues):
        operands = _whole(x, in_blocks * size), _whole(dy, out_blocks * size), *known
        if alone:
            kernel(0, ALONE, n_blocks, dvalues, *operands)
        else:
            on_cores(kernel, (dvalues, *operands), **how)

    return compute


def _one_run(batch):
    """run_ptr, runs: all of the batch."""
    return np.array([0, 1]), np.array([[0, 0, batch]])


def _whole(x, features):
    """x (batch, features), a copy with zeros behind its own features where these are fewer."""
    if x.shape[1] == features:
        return x
    whole = np.zeros((len(x), features), x.dtype)
    whole[:, : x.shape[1]] = x
    return whole


def _sum_packed(batch, shape, of, lines, blocks):
    """`sum_of` rows in any order of memory, packed in panels first."""
    n_blocks, size, _ = shape
    dtype = from_dtype(of)
    columns = 2 * lanes(dtype)
    width = min(size, columns)  # of a panel; several narrow blocks share a tile
    slab = slab_kernel(dtype, tile_shape(size)[0], columns // width)
    at = address_of(pack_kernel(dtype)), address_of(slab)
    x_panels, dy_panels = (size // width * n for n in blocks)
    slab = _slab(width * (x_panels + dy_panels), prod(shape) * of.itemsize)
    length, taps = min(slab, batch), (*_one_run(slab), 1)
    phases = 1 + 3 * max(1, -(-batch // slab))
    how = {"phases": phases, "work": n_blocks, "multiply_adds": prod(shape) * batch}
    kernel = entry_of(weight_grad_kernel(dtype))

    def compute(x, dy, dvalues):
        packed = empty_panels(dy_panels + x_panels, length, width, of)
        packed_x, packed_dy = packed[dy_panels:], packed[:dy_panels]
        x, dy = with_unit_stride(x).T, with_unit_stride(dy).T
        on_cores(kernel, (x, dy, packed_x, packed_dy, lines, dvalues, taps, at), **how)

    return compute


def _slab(features, nbytes):
    """Rows that a weight-gradient packs at a time.

    They are read fastest in the inner cache. But each slab is added to the weights once more, and
    where these are in memory, that takes longer.
    """
    if nbytes > OUTER_CACHE:
        return max(256, SLAB // max(1, features))
    return max(64, INNER_SLAB // max(1, features))


def _product(x, values, y, index, transposed):
    """y[:, line] = sum over the line's blocks of x[:, other line] @ block, or its transpose."""
    product_of(len(x), values, index, transposed)(x, np.ascontiguousarray(values), y)


def product_of(batch, values, index, transposed):
    """`_product` as a function of x, values and y: see `few_product`.

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
    """The compiled loop of `_product`."""
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


def signature_of_slab(dtype):
    return types.void(
        types.int64,  # core
        types.int64[::1],  # counts
        types.int64,  # share
        *[read_only(dtype, 3, "A")] * 2,  # x, dy (panels, length, width), packed or as they are
        types.UniTuple(read_only(types.int32, 1), 2),  # block_rows, block_columns (n_blocks,)
        dtype[:, :, ::1],  # dvalues (n_blocks, B, B)
        types.boolean,  # add to dvalues
        types.Tuple((types.int64[::1], types.int64[:, ::1], types.int64)),  # run_ptr, runs, stride
    )


@cache
def slab_kernel(dtype, rows, pieces):
    """A core's share of the blocks for a slab of the batch, `pieces` of a line in one tile.

    A run joins `length` rows of x, `stride` apart, with as many neighbours in dy: (first of x,
    first of dy, length), as far as the slab goes. Here that is all of it; of a convolution, whose
    block rows are those of one tap after another, each tap has several runs.
    """
    columns = 2 * lanes(dtype)

    @compiled(signature_of_slab(dtype))
    def kernel(core, counts, share, x, dy, lines, dvalues, add, taps):
        (block_rows, block_columns), (run_ptr, runs, stride) = lines, taps
        (x_panels, _, width), all_dy, item = x.shape, dy.shape[1], x.itemsize
        x_panel, x_row = x.strides[0] // item, x.strides[1] // item
        dy_column, dy_row = dy.strides[0] // item // width, dy.strides[1] // item
        n_blocks, size, _ = dvalues.shape
        in_blocks = x_panels * width // size
        b, out = np.empty(pieces, np.int64), np.empty(pieces, np.int64)
        shared = len(counts) > 1
        first, last = next_share(core, counts, share, n_blocks) if shared else (0, n_blocks)
        while first < last:
            block = first
            while block < last:
                line, end = block_rows[block], run_of(block_rows, block, last, pieces)
                tap, line = line // in_blocks, line % in_blocks
                first_run, last_run = run_ptr[tap], run_ptr[tap + 1]
                for v in range(0, size, width):
                    places_of_run(block, end, block_columns, size, dy_column, v, b, out)
                    sources, targets = to_fixed_tuple(b, pieces), to_fixed_tuple(out, pieces)
                    for r in range(0, size, rows):
                        a = (line * size + r) // width * x_panel + r % width
                        if add:
                            tile = load(dvalues, targets, r * size, size, rows, columns)
                        else:
                            tile = zeros(dvalues, rows, columns)
                        for run in range(first_run, last_run):
                            at, to = a + runs[run, 0] * x_row, runs[run, 1] * dy_row
                            for _ in range(min(runs[run, 2], all_dy - runs[run, 1])):
                                tile = multiply_add(tile, x, at, 1, dy, sources, to)
                                at += stride * x_row
                                to += dy_row
                        store(tile, dvalues, targets, r * size, size)
                block = end
            fetch_add(counts, DONE, last - first)
            first, last = next_share(core, counts, share, n_blocks)

    return kernel


@cache
def unpacked_kernel(dtype):
    """dvalues[b] = x[rows of b] @ dy[columns of b].T, of x and dy where they are."""
    of_slabs = signature_of_slab(dtype)
    add_slab = call_of(of_slabs)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        of_slabs.args[6],  # dvalues
        *[read_only(dtype, 2, "A")] * 2,  # x, dy (batch, features)
        types.int64,  # features of a panel
        of_slabs.args[5],  # lines
        of_slabs.args[-1],  # taps
        types.int64,  # where the `slab_kernel` is
    )

    @compiled(signature)
    def kernel(core, progress, share, dvalues, x, dy, width, lines, taps, at):
        x, dy = panels_of(x, width), panels_of(dy, width)
        add_slab(at, (core, progress[0], share, x, dy, lines, dvalues, False, taps))

    return kernel


@cache
def weight_grad_kernel(dtype):
    """dvalues[b] = x[rows of b] @ dy[columns of b].T, slab after slab of the batch."""
    of_slabs, of_pack = signature_of_slab(dtype), signature_of_pack(dtype)
    pack, add_slab = call_of(of_pack), call_of(of_slabs)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress: who parted, then three counts for each slab
        types.int64,  # share
        of_pack.args[2],  # x (in_features, batch)
        of_pack.args[2],  # dy (out_features, batch)
        *[dtype[:, :, ::1]] * 2,  # packed_x, packed_dy (panels, length, width)
        *of_slabs.args[5:-2],
        of_slabs.args[-1],  # taps
        types.UniTuple(types.int64, 2),  # where the `pack_kernel` and the `slab_kernel` are
    )

    @inner(inline="always")
    def pack_slab(core, counts, number, x, packed, at):
        """The slab of this number in the panels' memory; the last one is shorter."""
        start = number * packed.shape[1]
        some = shortened(packed, min(packed.shape[1], x.shape[1] - start))
        pack(at, (core, counts, x[:, start : start + some.shape[1]], some))
        return some

    @compiled(signature)
    def kernel(core, progress, share, x, dy, packed_x, packed_dy, lines, dvalues, taps, at):
        for number in range(len(progress) // 3):
            counts = progress[1 + 3 * number :]
            slab_of_x = pack_slab(core, counts[0], number, x, packed_x, at[0])
            slab_of_dy = pack_slab(core, counts[1], number, dy, packed_dy, at[0])
            operands = slab_of_x, slab_of_dy, lines, dvalues, number > 0, taps
            add_slab(at[1], (core, counts[2], share, *operands))
            if not wait_or_part(core, counts[2], len(dvalues), progress[0]):
                return  # before the panels are packed again

    return kernel
