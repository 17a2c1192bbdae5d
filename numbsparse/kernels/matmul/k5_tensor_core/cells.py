"""The cells of a region: how their tiles are fetched, and where their sums go."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k5_tensor_core import singles
from numbsparse.kernels.matmul.k5_tensor_core.fetches import bytes_of
from numbsparse.kernels.matmul.k5_tensor_core.regions import WIDTH, Region
from numbsparse.kernels.matmul.k5_tensor_core.repair import any_nan
from numbsparse.kernels.ptx import cp_async, cp_async_zero_fill, store_4xf32

PIECE = singles.PIECE


class Cells(NamedTuple):
    """What a kernel is made for."""

    B: int
    height: int  # of a cell, along the features of x
    width: int
    region: Region
    precision: str
    x_turned: bool  # x is feature-major
    dy_turned: bool
    wide: bool  # dvalues starts at a multiple of 16 bytes


@cache
def fetch_tile(NT: int, THREADS: int, turned: bool, places: Any) -> Any:
    """Tiles r, r + 1, ... of a step, NT rows of WIDTH features, or their transposes; 0 outside."""
    LINES, PIECES = (WIDTH, NT // PIECE) if turned else (NT, WIDTH // PIECE)
    COUNT = max(LINES * PIECES // THREADS, 1)
    STEP = THREADS // PIECES
    n_bytes, (place_in, move) = bytes_of(PIECE), places

    @cuda.jit(device=True)
    def fetch(x, stride, batch, first, width, inside, features, r, last, ring, start):
        t = uint32(cuda.threadIdx.x)
        piece, line, tile = t % PIECES, t // PIECES % LINES, r + t // PIECES // LINES
        feature = features[tile] if tile < last else -1
        at = start + tile * (NT * WIDTH) + place_in(line, piece)
        # The tiles of a step differ by their first feature alone.
        if turned:
            source = line * stride + first + piece * PIECE + feature * stride
        else:
            source = (first + line) * stride + piece * PIECE + feature
        if feature >= 0 and inside:
            for i in range(COUNT):
                cp_async(ring, move(at, i * STEP, 0), x, source + i * STEP * stride)
        elif feature >= 0:
            down = line + (feature if turned else first)
            across = piece * PIECE + (first if turned else feature)
            n = n_bytes((batch if turned else width) - int64(across))
            for i in range(COUNT):
                there = down + i * STEP < (width if turned else batch)
                row = source + i * STEP * stride if there else 0
                n_there = n if there else uint32(0)
                cp_async_zero_fill(ring, move(at, i * STEP, 0), x, row, n_there)

    return fetch


@cache
def finish_cells(cells: Cells, CELLS: int) -> Any:
    """dvalues of CELLS of a warp's cells = acc, and plain sums where that is NaN (see `repair`)."""
    B, height, width, region, precision, x_turned, dy_turned, wide = cells
    TA, TB, XT = height // 16, width // 8, region.XT
    PARTS = B // width
    fours = wide and TB % 4 == 0
    repairs, nan_in = precision == "highest", any_nan(CELLS, TA, TB, 4)
    row_in, column_in = singles.coordinates(2 * TA), singles.coordinates(TB)

    @cuda.jit(device=True)
    def repair(
        x, x_stride, in_features, dy, dy_stride, out_features, batch, tiles, codes, targets,
        dvalues, item, cell,
    ):  # fmt: skip
        lane = cuda.threadIdx.x % 32
        code = codes[item, cell]
        x_at, y_at = code & 0xFFFF, code >> 16
        for number in range(lane, height * width, 32):
            row, column = number // width, number % width
            target = int64(targets[item, cell])
            at = (target + row * PARTS) * width + column
            if target >= 0 and dvalues[at] != dvalues[at]:
                i = tiles[item, x_at // WIDTH] + x_at % WIDTH + row
                j = tiles[item, XT + y_at // WIDTH] + y_at % WIDTH + column
                total = float32(0)
                inside = i < in_features and j < out_features
                for n in range(batch if inside else 0):
                    left = x[i * x_stride + n if x_turned else n * x_stride + i]
                    total += left * dy[j * dy_stride + n if dy_turned else n * dy_stride + j]
                dvalues[at] = total

    @cuda.jit(device=True)
    def finish(
        x, x_stride, in_features, dy, dy_stride, out_features, batch, tiles, codes, targets,
        dvalues, item, first, acc,
    ):  # fmt: skip
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for cell in range(CELLS):
            for m in range(TA):
                for i in range(4):
                    target = int64(targets[item, first + cell])
                    row = row_in(2 * m + i // 2, g)
                    for n in range(TB):
                        at = (target + row * PARTS) * width + column_in(n, 2 * q + i % 2)
                        if target >= 0:
                            if fours:
                                if n % 4 == 0:
                                    store_4xf32(
                                        dvalues, at, acc[cell, m, n, i], acc[cell, m, n + 1, i],
                                        acc[cell, m, n + 2, i], acc[cell, m, n + 3, i],
                                    )  # fmt: skip
                            else:
                                dvalues[at] = acc[cell, m, n, i]
        if repairs and cuda.syncthreads_or(nan_in(acc)):
            for cell in range(first, first + CELLS):
                if codes[item, cell] >= 0:
                    repair(
                        x, x_stride, in_features, dy, dy_stride, out_features, batch, tiles, codes,
                        targets, dvalues, item, cell,
                    )  # fmt: skip

    return finish


@cache
def sum_kernel(cells: Cells) -> Any:
    """dvalues of the regions that were cut: a warp adds the pieces of a cell in their order."""
    PER_WARP, WARPS, CAPACITY = cells.region.CELLS, cells.region.WARPS, cells.region.capacity
    TA, TB, SIZE = cells.height // 16, cells.width // 8, cells.height * cells.width
    ACC, finish = (1, TA, TB, 4), finish_cells(cells, 1)

    @cuda.jit
    def kernel(
        x,
        x_stride,
        in_features,
        dy,
        dy_stride,
        out_features,
        batch,
        tiles,
        codes,
        targets,
        dvalues,
        parts,
        whole,
        pieces,
    ):
        t = uint32(cuda.threadIdx.x)
        number = int64(cuda.blockIdx.x)
        cell = number % PER_WARP * WARPS + t // 32
        cut_item = number // PER_WARP
        acc = cuda.local.array(ACC, float32)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    at = (cut_item * pieces * CAPACITY + cell) * SIZE
                    total = float32(0)
                    for p in range(pieces):
                        total += parts[
                            at + p * (CAPACITY * SIZE) + ((m * TB + n) * 4 + i) * 32 + t % 32
                        ]
                    acc[0, m, n, i] = total
        finish(
            x, x_stride, in_features, dy, dy_stride, out_features, batch, tiles, codes, targets,
            dvalues, whole + cut_item, cell, acc,
        )  # fmt: skip

    return kernel
