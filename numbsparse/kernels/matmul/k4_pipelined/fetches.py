"""Copies of a step's tiles of x, dy and w, 16 bytes at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.kernels.matmul.k3_registers import QUAD, Tile
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.ptx import cp_async_zero_fill

STAGES = 3
RUNS = 4  # copies in a line of x


@cache
def locate_in(B: int, DEPTH: int) -> Any:
    """Where term k of a step is: its block, its feature, and how many features there are on."""

    @cuda.jit(device=True)
    def locate(k, line, indices, blocks):
        first, end, offset, features = line
        position = first + k // DEPTH
        block, c, inside = 0, 0, 0
        if position < end:
            block, c = blocks[position], indices[position] * B + offset + k % DEPTH
            inside = features - c
        return block, c, inside

    return locate


@cache
def fetch_lines(WIDTH: int, ACROSS: int, THREADS: int, dtype: Any) -> Any:
    """tile[k] = source[start + j * stride :] for row j, a run per thread, and 0 from `inside` on.

    Line k holds a row of thread k % ACROSS, so that these read lines side by side.
    """
    ITEM = dtype.itemsize
    RUN = BYTES // ITEM
    LINE, LINES = (RUNS + 1) * RUN, min(THREADS // RUNS, WIDTH)  # its length; fetched at once

    @cuda.jit(device=True)
    def fetch(source, start, stride, last, inside, tile):
        t = uint32(cuda.threadIdx.x)
        i, n = t % RUNS * RUN, min(max(inside, 0) * ITEM, BYTES)
        for step in range(WIDTH // LINES):
            k = uint32(t // RUNS + step * LINES)
            m, thread = k // ACROSS, k % ACROSS
            j = uint32((thread + m // QUAD * ACROSS) * QUAD + m % QUAD)
            # Beyond the last row its values are read again, for outputs that are not written.
            source_at = start + min(j, uint32(last)) * stride
            if k < WIDTH:
                cp_async_zero_fill(tile, k * LINE + i, source, source_at, n)

    return fetch


@cache
def fetch_transposed(B: int, tile: Tile, dtype: Any) -> Any:
    """tile[k] = the terms of a step in a column of w.T, from j on, in the order of the lines."""
    RUN, BK, BN = BYTES // dtype.itemsize, tile.BK, tile.BN
    DEPTH = min(B, BK)
    locate = locate_in(B, DEPTH)
    fetch_columns = fetch_lines(BN, BN // tile.TN, tile.threads, dtype)

    @cuda.jit(device=True)
    def fetch(values, j, line, indices, blocks, tile):
        k = uint32(cuda.threadIdx.x) % RUNS * RUN
        block, _, inside = locate(k, line, indices, blocks)
        start = (block * B + j) * B + line[2] + k % DEPTH
        fetch_columns(values, start, B, BN - 1, inside, tile)

    return fetch


@cache
def fetch_straight(B: int, tile: Tile, dtype: Any) -> Any:
    """tile[k] = the row of w at term k of a step, from column j on, and 0 beyond the features."""
    RUN, BK, BN = BYTES // dtype.itemsize, tile.BK, tile.BN
    DEPTH = min(B, BK)
    ACROSS = BN // RUN  # runs in a row
    ROWS = min(tile.threads // ACROSS, BK)  # fetched at once
    locate = locate_in(B, DEPTH)

    @cuda.jit(device=True)
    def fetch(values, j, line, indices, blocks, tile):
        t = uint32(cuda.threadIdx.x)
        for step in range(BK // ROWS):
            k, i = uint32(t // ACROSS + step * ROWS), t % ACROSS * RUN
            if k < BK:
                block, _, inside = locate(k, line, indices, blocks)
                start = (block * B + line[2] + k % DEPTH) * B + j + i
                cp_async_zero_fill(tile, k * BN + i, values, start, BYTES if inside > 0 else 0)

    return fetch


@cuda.jit(device=True)
def slot_of(lines, first_block, p):
    """The line of block first_block + p, and whose features in the tile it reads.

    Neighbours in a row of blocks read the same columns of x: they are fetched once, for the first.
    """
    line = lines[min(first_block + p, lines.shape[0] - 1)]
    return line, uint32(0) if line == lines[first_block] else uint32(p)


@cache
def fetch_blocks(B: int, BLOCKS: int, tile: Tile, dtype: Any) -> Any:
    """tile[m] = x[first + m, features of some blocks] side by side, and 0 beyond the batch."""
    ITEM = dtype.itemsize
    RUN, BN, BK, THREADS = BYTES // ITEM, tile.BN, tile.BK, BLOCKS * tile.threads
    WIDTH = BLOCKS * BN
    LANES = WIDTH // RUN
    ROWS = min(THREADS // LANES, BK)  # fetched at once

    @cuda.jit(device=True)
    def fetch(side, lines, ahead, start, tile):
        (x, stride, features), (first, rows, first_block) = side, ahead
        t = uint32(cuda.threadIdx.x)
        i = t % LANES * RUN
        line, slot = slot_of(lines, first_block, i // BN)
        c = line * B + start + i % BN
        n = min(max(features - c, 0) * ITEM, BYTES)
        for step in range(BK // ROWS):
            m = uint32(t // LANES + step * ROWS)
            if m < BK and slot == i // BN:
                source_at = (first + m) * stride + c
                cp_async_zero_fill(tile, m * WIDTH + i, x, source_at, n if m < rows else 0)

    return fetch
