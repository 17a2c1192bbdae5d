"""A recurrent weight in other forms than blocks of 32 x 32: copied into these, or split in two.

Small blocks that fall into one of 32 x 32 are put together, from step to step, with zeros where
none is kept; larger ones are cut. Of small ones a block's terms of the sum are grains from
anywhere, see `gathered`. Forward, the columns of a line are gate by gate, as its sums are; backward
they are in the order of memory, as the gates' gradient is.

float32 with all its bits: weights are split into tf32 before the steps, rows in registers. The
three products of `parts.split` are added in float32 for each block, as long sums lose bits in the
tensor cores.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.deal import B, few_of, gathered
from numbsparse.kernels.lstm.producers import Ring
from numbsparse.kernels.lstm.units import row_of
from numbsparse.kernels.parts.images import images_of
from numbsparse.kernels.parts.split import split_in_two
from numbsparse.kernels.ptx import load_4xf32, wgmma_split
from numbsparse.layout import Index

IMAGE, LINES = 2 * B * B, 8  # items of a block's two parts, which are copied as so many lines
OF_ROWS = B // 2  # registers of a thread: of 16 rows of a warp 32 terms


def parts_of(index: Index, size: int, transposed: bool, itemsize: int) -> tuple[np.ndarray]:
    """Where each part of the blocks of all reads begins among the values, or -1.

    A part is as much as a block of `size` gives to one of 32: (blocks, parts down * parts across).
    """
    few, side = few_of(transposed, itemsize), min(size, B)
    of = gathered(index, transposed, size, itemsize)
    part, line = np.arange(0, B, side), of.lines[:, None, None, None] * B
    items = of.units * (GATES if transposed else 1)  # along the sum, of a grain
    along = of.grains[:, :, None] * items + np.arange(0, items, side)
    there = np.repeat(of.there, items // side, axis=1)
    if transposed:
        row, column = line + part[:, None], along.reshape(-1, few, 1, part.size)
        there = there.reshape(column.shape)
    else:
        unit, gate = line + part, np.arange(GATES)[:, None, None]
        row, column = along.reshape(-1, 1, part.size, 1), unit // size * (GATES - 1) + gate
        column = unit + column * size
        there = there.reshape(row.shape)
    width = index.columns.indptr.size - 1
    names = index.block_rows.astype(np.int64) * width + index.block_columns
    wanted = row // size * width + column // size
    found = np.minimum(np.searchsorted(names, wanted), names.size - 1)
    there = there & (names[found] == wanted) & (column < width * size)
    at = np.where(there, found * size**2 + row % size * size + column % size, -1)
    return (at.reshape(-1, part.size**2),)


def as_blocks(values: DeviceArray, parts: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of values (n, size, size), by `parts_of` them."""
    out, size = empty((parts.shape[0], B, B), values.dtype), values.shape[1]
    words, parts_of_all = (a.span.view("uint32") for a in (values, out)), parts.span
    launch(
        copying_kernel(size, 4 // values.itemsize),
        blocks(out.nbytes // 4),
        THREADS,
        *words,
        parts_of_all,
    )
    return out


@cache
def copying_kernel(size: int, ITEMS: int) -> Any:
    """Of so many items a word."""
    SIDE, ACROSS, WORDS, LINE = min(size, B), B // min(size, B), B // ITEMS, size // ITEMS

    @cuda.jit
    def kernel(values, out, parts):
        i = int64(cuda.grid(1))
        if i < out.size:
            block, row, word = i // (B * WORDS), i // WORDS % B, i % WORDS
            part = (block * ACROSS + row // SIDE) * ACROSS + word // (SIDE // ITEMS)
            at = parts[part]
            own = at // ITEMS + row % SIDE * LINE + word % (SIDE // ITEMS)
            out[i] = values[own] if at >= 0 else uint32(0)

    return kernel


def images_of_blocks(values: DeviceArray, ring: Ring) -> Any:
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
