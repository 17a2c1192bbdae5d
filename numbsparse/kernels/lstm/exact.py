"""float32 with all its bits: weights are split into tf32 before the steps, rows in registers.

The three products of `parts.split` are added in float32 for each block, as long sums lose bits in
the tensor cores.
"""

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.lstm.deal import B
from numbsparse.kernels.lstm.producers import Ring
from numbsparse.kernels.lstm.units import row_of
from numbsparse.kernels.parts.images import images_of
from numbsparse.kernels.parts.split import split_in_two
from numbsparse.kernels.ptx import load_4xf32, wgmma_split

IMAGE, LINES = 2 * B * B, 8  # items of a block's two parts, which are copied as so many lines
OF_ROWS = B // 2  # registers of a thread: of 16 rows of a warp 32 terms


def weights(values: DeviceArray, ring: Ring) -> Any:
    """The operand of `run_steps`: images of blocks."""
    strides = (1, B) if ring.transposed else (B, 1)
    images = images_of(values, strides, None, 0, B, B, False)
    return images.reshape(-1, LINES, IMAGE // LINES), (ring.FEW, LINES, IMAGE // LINES), (), True


@cache
def multiplying_read(ring: Ring) -> Any:
    """multiply(sums, shared, rows, weights): sums (groups, *units.SUMS) += products of a read.

    Its blocks are of a line's gates, which all meet the same rows, or each meets 32 rows' own.
    """
    BACK, PARTS = ring.transposed, ring.FEW if ring.transposed else 1
    product = wgmma_split(B if BACK else ring.FEW * B, B // 8, True, apart=True)
    read, NEXT = reading_rows(ring.tile), ring.tile * B

    @cuda.jit(device=True)
    def multiply(sums, shared, rows, weights):
        hi, lo = cuda.local.array(OF_ROWS, uint32), cuda.local.array(OF_ROWS, uint32)
        for k in range(PARTS):
            read(shared, rows + k * NEXT, hi, lo)
            product(sums, hi, lo, shared, weights + k * IMAGE)

    return multiply


@cache
def reading_rows(TILE: int) -> Any:
    """read(shared, start, hi, lo): 32 terms of a thread's two rows, split as `images_of` has."""

    @cuda.jit(device=True)
    def read(shared, start, hi, lo):
        g, q = cuda.threadIdx.x % 32 // 4, cuda.threadIdx.x % 4
        for down in range(2):
            line = start + row_of(down, TILE) * B
            for c in range(2):
                run = load_4xf32(shared, line + (4 * c + q ^ g) * 4)
                for j in range(4):
                    k = (2 * c + j // 2) * 4 + j % 2 * 2 + down
                    hi[k], lo[k] = split_in_two(run[j])

    return read
