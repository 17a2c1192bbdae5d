"""The weight-gradient: R features of x times C of dy in registers, over runs of pixels."""

from functools import cache, lru_cache

import numpy as np
from numba import from_dtype, types
from numba.np.unsafe.ndarray import to_fixed_tuple

from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.cores import DONE, compiled, next_share, on_cores, read_only
from numbsparse.kernels.matmul.k0_cpu import SLAB, tile_shape
from numbsparse.kernels.panels import empty_panels, pack, places_of_run, run_of
from numbsparse.kernels.simd import fetch_add, lanes, load, multiply_add, store, zeros


def sum_pixels(x, dy, dvalues, index, window):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    n_blocks, size, _ = dvalues.shape
    dtype = from_dtype(dvalues.dtype)
    columns = 2 * lanes(dtype)
    width = min(size, columns)  # of a panel; several narrow blocks share a tile
    kernel = weight_grad_kernel(dtype, tile_shape(size)[0], columns // width)
    batch, pixels, in_features = x.shape
    out_pixels, out_features = dy.shape[1:]
    in_blocks = (len(index.rows.indptr) - 1) // window.taps
    x_panels = size // width * in_blocks
    dy_panels = size // width * (len(index.columns.indptr) - 1)
    run_ptr, runs = runs_of(window)
    slab = max(1, SLAB // (width * (x_panels * pixels + dy_panels * out_pixels)))
    for start in range(0, max(1, batch), slab):
        x_slab = x[start : start + slab].reshape(-1, in_features)
        dy_slab = dy[start : start + slab].reshape(-1, out_features)
        packed_x = empty_panels(x_panels, len(x_slab), width, dvalues.dtype)
        packed_dy = empty_panels(dy_panels, len(dy_slab), width, dvalues.dtype)
        on_cores(
            kernel,
            (
                x_slab.T, dy_slab.T, packed_x, packed_dy, index.block_rows, index.block_columns,
                in_blocks, run_ptr, runs, (pixels, out_pixels, window.stride[2]), dvalues,
                start > 0,
            ),
            phases=3,
            work=n_blocks,
            multiply_adds=dvalues.size * len(dy_slab),
        )  # fmt: skip


@lru_cache(maxsize=256)
def runs_of(window: Window) -> tuple[np.ndarray, np.ndarray]:
    """(run_ptr (taps + 1,), runs (., 3)): where a tap joins pixels that are in a row.

    A run joins `length` outputs from `out` on with the pixels from `pixel` on, `stride` apart.
    """
    (of,) = window.passes("weight_grad")
    width = window.small[2]
    run_ptr, runs = [0], []
    for k in range(window.taps):
        sources = of.sources(k, window.big).reshape(-1, width)
        for row, seen in enumerate(sources):
            inside = np.flatnonzero(seen >= 0)
            if inside.size:
                runs.append((seen[inside[0]], row * width + inside[0], inside.size))
        run_ptr.append(len(runs))
    return np.array(run_ptr), np.array(runs, np.int64).reshape(-1, 3)


@cache
def weight_grad_kernel(dtype, rows, pieces):
    """`pieces` blocks of a line of blocks, of one tap, in one tile."""
    columns = 2 * lanes(dtype)
    width = columns // pieces
    integers, flat = read_only(types.int32, 1), read_only(dtype, 2, "A")
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        *(flat, flat),  # x (in_features, rows), dy (out_features, rows)
        *(dtype[:, :, ::1], dtype[:, :, ::1]),  # packed (panels, rows, width)
        *(integers, integers),  # block_rows, block_columns (n_blocks,)
        types.int64,  # in_blocks
        *(types.int64[::1], types.int64[:, ::1]),  # run_ptr, runs
        types.UniTuple(types.int64, 3),  # pixels, out_pixels, stride
        dtype[:, :, ::1],  # dvalues (n_blocks, B, B)
        types.boolean,  # add to dvalues
    )

    @compiled(signature)
    def kernel(
        core, progress, share, x, dy, packed_x, packed_dy, block_rows, block_columns, in_blocks,
        run_ptr, runs, image, dvalues, add,
    ):  # fmt: skip
        pixels, out_pixels, stride = image
        all_pixels, all_outputs = x.shape[1], dy.shape[1]
        n_blocks, size, _ = dvalues.shape
        b, out = np.empty(pieces, np.int64), np.empty(pieces, np.int64)
        pack(core, progress[0], x, packed_x)
        pack(core, progress[1], dy, packed_dy)
        first, last = next_share(core, progress[2], share, n_blocks)
        while first < last:
            block = first
            while block < last:
                line, end = block_rows[block], run_of(block_rows, block, last, pieces)
                tap, i_block = line // in_blocks, line % in_blocks
                for v in range(0, size, width):
                    places_of_run(block, end, block_columns, size, all_outputs, v, b, out)
                    sources, targets = to_fixed_tuple(b, pieces), to_fixed_tuple(out, pieces)
                    for r in range(0, size, rows):
                        a = (i_block * size + r) // width * width * all_pixels + r % width
                        if add:
                            tile = load(dvalues, targets, r * size, size, rows, columns)
                        else:
                            tile = zeros(dvalues, rows, columns)
                        for n in range(all_outputs // out_pixels):
                            for run in range(run_ptr[tap], run_ptr[tap + 1]):
                                at = a + (n * pixels + runs[run, 0]) * width
                                to = (n * out_pixels + runs[run, 1]) * width
                                for _ in range(runs[run, 2]):
                                    tile = multiply_add(
                                        tile, packed_x, at, 1, packed_dy, sources, to
                                    )
                                    at += stride * width
                                    to += width
                        store(tile, dvalues, targets, r * size, size)
                block = end
            fetch_add(progress[2], DONE, last - first)
            first, last = next_share(core, progress[2], share, n_blocks)

    return kernel
