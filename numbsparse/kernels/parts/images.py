"""Images: float32 blocks of w, split into two tf32 each and laid out once as wgmma reads them.

A block is small against the rows that it multiplies, so it pays to split it before the product.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.split import round_in_one, split_in_two
from numbsparse.kernels.ptx import (
    as_float32,
    bulk_load,
    let_next_kernel_start,
    store_4xf32,
    wait_for_earlier_kernels,
)

THREADS = 256


def images_of(
    values: DeviceArray,
    strides: tuple[int, int],
    block_rows: DeviceArray | None,
    in_features: int,
    N: int,
    DEPTH: int,
    by_eights: bool,
    gates: DeviceArray | None = None,
    alone: bool = False,
) -> DeviceArray:
    """Block by block (B, B): its parts of N columns, and in each of these DEPTH terms at a time.

    The next kernel may start while this one runs, and then finds what was there before this one.

    (blocks, B / N, B / DEPTH, N / 8, 2, DEPTH / 4, 8, 4): of 8 columns hi, then lo, and of each the
    terms four by four, column by column; see `wgmma_split`. Rows beyond the last feature are zeros;
    without `block_rows` none is.

    strides : within a block, along the sum and across: that of w.T has them exchanged
    by_eights : whether lane q of a product has terms 2 q and 2 q + 1 of every 8, else its four
        neighbours of every 16
    gates : what each block is multiplied by; of one that is 0 there is none
    alone : hi without lo, the nearest tf32
    """
    images = empty(((1 if alone else 2) * values.size,), values.dtype)
    grid = -(-values.size // (4 * THREADS))
    gated, ends = gates is not None, block_rows is not None
    kernel = image_kernel(values.shape[-1], N, DEPTH, by_eights, gated, alone, ends)
    more = block_rows if ends else (), in_features, gates if gated else (), images
    launch(kernel, grid, THREADS, values.span, strides, *more, overlap=True)
    return images


@cache
def load_image(BYTES: int) -> Any:
    """load(images, number, shared, place, bars, stage): a part of a block."""

    @cuda.jit(device=True)
    def load(images, number, shared, place, bars, stage):
        at = int64(number) * (BYTES // 4)
        bulk_load(shared, place, images, at, uint32(BYTES), bars, stage)

    return load


@cache
def image_kernel(
    B: int,
    N: int,
    DEPTH: int,
    by_eights: bool,
    gated: bool = False,
    alone: bool = False,
    ends: bool = True,
) -> Any:
    PARTS, ACROSS, HALF = B // DEPTH, B // N, 8 * DEPTH  # of 8 columns, hi or lo
    HALVES, split = (1, round_in_one) if alone else (2, split_in_two)  # a NaN stays one in hi

    @cuda.jit
    def kernel(values, strides, block_rows, in_features, gates, images):
        wait_for_earlier_kernels()
        let_next_kernel_start()
        at = 4 * int64(cuda.grid(1))  # of four terms of a column
        if at >= values.size:
            return
        g, terms, eight = at // 4 % 8, at // 32 % (DEPTH // 4), at // HALF % (N // 8)
        part, across = at // (N * DEPTH) % PARTS, at // (N * B) % ACROSS
        block, n = at // (B * B), across * N + 8 * eight + g
        gate = gates[block] if gated else float32(1)
        if gated and gate == 0:
            return
        his, los = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for q in range(4):
            k = part * DEPTH + terms // 4 * 16
            k += 2 * q + terms % 2 + terms % 4 // 2 * 8 if by_eights else 4 * q + terms % 4
            value = float32(0)
            if not ends or block_rows[block] * B + k < in_features:
                value = values[block * (B * B) + k * strides[0] + n * strides[1]] * gate
            hi, lo = split(value)
            his[q], los[q] = as_float32(hi), as_float32(lo)
        to = at // HALF * (HALVES * HALF) + at % HALF
        store_4xf32(images, to, his[0], his[1], his[2], his[3])
        if not alone:
            store_4xf32(images, to + HALF, los[0], los[1], los[2], los[3])

    return kernel
