"""weight_grad: a tile of a block's weights, over all rows of the batch.

The rows of x and dy are runs of memory already; they are packed only where that pays.
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
from numbsparse.kernels.matmul.k0_cpu.few_rows import ALONE
from numbsparse.kernels.matmul.k0_cpu.lines import OUTER_CACHE, SLAB, tile_shape
from numbsparse.kernels.panels import (
    empty_panels,
    has_unit_stride,
    pack_kernel,
    panels_of,
    places_of_run,
    run_of,
    shortened,
    signature_of_pack,
    with_unit_stride,
)
from numbsparse.kernels.simd import fetch_add, lanes, load, multiply_add, store, zeros

UNPACKED = 1 << 20  # numbers of x and dy, at most, that stay in caches: never faster when packed
READ = 1 << 22  # numbers of x that blocks read, at least, for packing to pay
INNER_SLAB = 1 << 18  # numbers packed at a time, to stay in the inner cache


def sum_of(batch, dvalues, index):
    """The product as a function of x, dy and dvalues: see `few_product`.

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
