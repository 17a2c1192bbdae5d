"""The weight-gradient: R features of x times C of dy in registers, over runs of pixels."""

from functools import lru_cache
from math import prod

import numpy as np
from numba import from_dtype

from numbsparse.kernels.at_address import address_of
from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.cores import on_cores
from numbsparse.kernels.matmul.k0_cpu.lines import SLAB, tile_shape
from numbsparse.kernels.matmul.k0_cpu.weight_grad import slab_kernel, weight_grad_kernel
from numbsparse.kernels.panels import empty_panels, pack_kernel
from numbsparse.kernels.simd import lanes


def sum_pixels(x, dy, dvalues, index, window):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    n_blocks, size, _ = dvalues.shape
    dtype = from_dtype(dvalues.dtype)
    columns = 2 * lanes(dtype)
    width = min(size, columns)  # of a panel; several narrow blocks share a tile
    x_panels = size // width * (len(index.rows.indptr) - 1) // window.taps
    dy_panels = size // width * (len(index.columns.indptr) - 1)
    (batch, pixels, _), outputs = x.shape, dy.shape[1]
    slab = max(1, SLAB // (width * (x_panels * pixels + dy_panels * outputs)))
    images, kernel = min(slab, batch), slab_kernel(dtype, tile_shape(size)[0], columns // width)
    on_cores(
        weight_grad_kernel(dtype),
        (
            x.reshape(-1, x.shape[2]).T,
            dy.reshape(-1, dy.shape[2]).T,
            empty_panels(x_panels, images * pixels, width, dvalues.dtype),
            empty_panels(dy_panels, images * outputs, width, dvalues.dtype),
            (index.block_rows, index.block_columns),
            dvalues,
            (*runs_of(window, images), window.stride[2]),
            (address_of(pack_kernel(dtype)), address_of(kernel)),
        ),
        phases=1 + 3 * max(1, -(-batch // slab)),
        work=n_blocks,
        multiply_adds=dvalues.size * batch * outputs,
    )


@lru_cache(maxsize=64)
def runs_of(window: Window, images: int) -> tuple[np.ndarray, np.ndarray]:
    """(run_ptr (taps + 1,), runs (., 3)): where a tap joins pixels that are in a row.

    A run joins `length` outputs from `out` on with the pixels from `pixel` on, `stride` apart.
    """
    width, apart = window.small[2], (prod(window.big), prod(window.small), 0)
    every, found = np.arange(images)[:, None, None] * apart, []
    for sources in window.sources("weight_grad").reshape(window.taps, -1, width):
        inside = sources >= 0
        (rows,) = np.nonzero(inside.any(axis=1))
        first = inside[rows].argmax(axis=1)
        one = rows * width + first, inside[rows].sum(axis=1)
        found.append((every + np.stack([sources[rows, first], *one], 1)).reshape(-1, 3))
    run_ptr = np.append(0, np.cumsum([len(runs) for runs in found]))
    return run_ptr, np.concatenate(found)
