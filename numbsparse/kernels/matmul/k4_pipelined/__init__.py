"""Rung 4: load the next tiles while these are multiplied.

`cp.async` copies 16 bytes from global to shared memory beside the threads, through none of their
registers. The tiles in shared memory are a ring of STAGES: in each step a block of threads waits
for the oldest, asks for those of the step STAGES - 1 ahead, in place of the ones it has just left,
and multiplies. One barrier per step says both that the tiles came and that all left the last ones.

What changed since the rung before: copies that take 16 bytes as they lie cannot turn a tile on the
way. x (batch, in), and w for the input-gradient, stay rows along the sum; a thread reads four terms
of it at once, and a line is 16 bytes longer than the tile, so that the lines which neighbouring
threads read meet different banks. Rows that do not start at multiples of 16 bytes are copied to
ones that do before the launch. float16 stays float16 in shared memory, and is widened when read.

Reads per output, for a sum of K products: K / BM + K / BN from global and K / TM + K / TN from
shared memory as before, but no thread stops for the first. What limits now is the arithmetic
itself, one multiplication and addition per thread and instruction: the next rung hands it to the
tensor cores.
"""

from __future__ import annotations

from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import BYTES, aligned_rows
from numbsparse.kernels.matmul.k3_registers import FEW, LEAST_THREADS, QUAD, Tile
from numbsparse.kernels.matmul.k4_pipelined.blocks import weight_grad_kernel
from numbsparse.kernels.matmul.k4_pipelined.fetches import RUNS
from numbsparse.kernels.matmul.k4_pipelined.lines import (
    forward_kernel,
    input_grad_kernel,
    store_narrow,
    store_wide,
)
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (8, 16, 32, 64, 128)  # a row of 4 float16 is shorter than a copy
DTYPES = ("float16", "float32")  # tiles are copied as they are, and bfloat16 would be bits there
STAGE_WIDTH = 1024  # values of one operand in a step of the weight-gradient

unsupported = reach("k4_pipelined", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def forward(x, values, index, y, precision="highest", tile=0):
    """y[:] = x @ w."""
    _along_lines(forward_kernel, x, values, index.columns, y, tile)


def input_grad(dy, values, index, dx, precision="highest", tile=0):
    """dx[:] = dy @ w.T."""
    _along_lines(input_grad_kernel, dy, values, index.rows, dx, tile)


def _along_lines(kernel_for, x, values, lines, y, number):
    (batch, out_features), (_, in_features), size = y.shape, x.shape, values.shape[1]
    tile = line_tiles(size, batch, x.itemsize)[number]
    grid = -(-batch // tile.BM) * -(-out_features // tile.BN)
    kernel = kernel_for(size, tile, x.dtype, _store_for(y))
    (x, stride), (values, _) = aligned_rows(x), aligned_rows(values.reshape(-1, size))
    launch(kernel, grid, tile.threads, x, stride, in_features, values, *lines, y)


def weight_grad(x, dy, index, dvalues, precision="highest", tile=0):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    (batch, in_features), (_, out_features) = x.shape, dy.shape
    tile = block_tiles(size)[tile]
    threads = max(tile.threads, LEAST_THREADS)
    grid = -(-n_blocks * tile.threads // threads) * (size // tile.BN) ** 2
    kernel = weight_grad_kernel(size, tile, x.dtype)
    sides = *aligned_rows(x), in_features, *aligned_rows(dy), out_features
    launch(kernel, grid, threads, batch, *sides, index.block_rows, index.block_columns, dvalues)


def _store_for(y):
    aligned = y.is_contiguous and y.shape[1] % QUAD == 0 and y.address % BYTES == 0
    return store_wide if aligned and y.dtype == "float32" else store_narrow


def tile_choices(product, block_size, dtype, batch, precision="highest"):
    if product == "weight_grad":
        return block_tiles(block_size)
    return line_tiles(block_size, batch, dtype.itemsize)


def line_tiles(size: int, batch: int, itemsize: int) -> list[Tile]:
    """Tiles of a (batch, features) output."""
    BN, BK = min(size, 64), RUNS * BYTES // itemsize
    few = Tile(512 // min(size, 16), BN, BK, 4, 4)
    many = Tile(128, BN, BK, 4 if size <= 8 else 8, 4 if size <= 16 else 8)
    return [few] if batch <= FEW else [many, few]


def block_tiles(size: int) -> list[Tile]:
    """Tiles of a (B, B) output; where one takes few threads, LEAST_THREADS share several."""
    return [_block_tile(side) for side in ((64, 32) if size > 32 else (size,))]


def _block_tile(side: int) -> Tile:
    TM, TN = 4 if side <= 8 else 8, 4 if side <= 16 else 8
    threads = side // TM * (side // TN)
    return Tile(side, side, STAGE_WIDTH // side // max(LEAST_THREADS // threads, 1), TM, TN)
