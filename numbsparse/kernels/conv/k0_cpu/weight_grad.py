"""The weight-gradient: R features of x times C of dy in registers, over runs of pixels."""

from functools import lru_cache
from math import prod

import numpy as np
from numba import from_dtype

from numbsparse.kernels.at_address import address_of
from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.cores import entry_of, on_cores
from numbsparse.kernels.matmul.k0_cpu.lines import SLAB, tile_shape
from numbsparse.kernels.matmul.k0_cpu.weight_grad import slab_kernel, weight_grad_kernel
from numbsparse.kernels.panels import empty_panels, pack_kernel
from numbsparse.kernels.simd import lanes


def pixels_of(batch, dvalues, index, window):
    """The sum over pixels of (what a tap sees in x).T @ dy as a function of x, dy and dvalues."""
    n_blocks, size, _ = dvalues.shape
    of, dtype = dvalues.dtype, from_dtype(dvalues.dtype)
    columns = 2 * lanes(dtype)
    width = min(size, columns)  # of a panel; several narrow blocks share a tile
    x_panels = size // width * (len(index.rows.indptr) - 1) // window.taps
    dy_panels = size // width * (len(index.columns.indptr) - 1)
    pixels, outputs = prod(window.big), prod(window.small)
    slab = max(1, SLAB // (width * (x_panels * pixels + dy_panels * outputs)))
    images, rows = min(slab, batch), tile_shape(size)[0]
    lines, taps = (
        (index.block_rows, index.block_columns),
        (*runs_of(window, images), window.stride[2]),
    )
    at = address_of(pack_kernel(dtype)), address_of(slab_kernel(dtype, rows, columns // width))
    phases = 1 + 3 * max(1, -(-batch // slab))
    multiply_adds = dvalues.size * batch * outputs
    how = {"phases": phases, "work": n_blocks, "multiply_adds": multiply_adds}
    kernel = entry_of(weight_grad_kernel(dtype))

    def compute(x, dy, dvalues):
        packed_x = empty_panels(x_panels, images * pixels, width, of)
        packed_dy = empty_panels(dy_panels, images * outputs, width, of)
        x, dy = x.reshape(-1, x.shape[2]).T, dy.reshape(-1, dy.shape[2]).T
        on_cores(kernel, (x, dy, packed_x, packed_dy, lines, dvalues, taps, at), **how)

    return compute


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
