"""The warpgroups that multiply, in forward and input_grad of float32.

A lane reads its values of a tile of x, splits them, and gives them to wgmma for one block of w or
for two that lie side by side; the images of these come from shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k5_tensor_core.store import any_nan, store_float32, store_neighbours
from numbsparse.kernels.matmul.k6_hopper.split_plan import BOX, DEPTH, Tile
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    as_float32,
    load_2xu32,
    load_4xf32,
    mbarrier_arrive,
    mbarrier_wait,
    redux_or,
    sync_warp,
    wgmma_split,
)


@cache
def consumer(tile: Tile, precision: str, x_turned: bool, y_turned: bool, wide: bool) -> Any:
    STAGES, STAGE, X_SIZE, ROWS = tile.STAGES, tile.STAGE, tile.X_SIZE, tile.ROWS
    COLUMNS, N, STRIPS = tile.COLUMNS, tile.N, tile.COLUMNS * tile.N // 32
    ACC, SPLIT, ALL = (STRIPS, 1, 4, 4), DEPTH // 2, (1 << tile.COLUMNS) - 1
    exact = precision == "highest"
    read, row_in = reader(x_turned, exact)
    multiply = multiplier(tile, exact)
    store = store_float32(1, 4, y_turned, wide, row_in)
    if x_turned and y_turned and wide:
        store = store_neighbours(4, row_in)
    mend, nan_in = mender(tile.B, y_turned), any_nan(*ACC)

    @cuda.jit(device=True)
    def consume(warp, strips, tiles, first, last, ring, bars, masks, out, dense):
        y, batch, features = out
        lane = uint32(cuda.threadIdx.x) % 32
        acc = cuda.local.array(ACC, float32)
        hi, lo = cuda.local.array(SPLIT, uint32), cuda.local.array(SPLIT, uint32)
        stage, phase = uint32(0), uint32(0)
        for i in range(first, last):
            for s in range(STRIPS):
                for n in range(4):
                    for k in range(4):
                        acc[s, 0, n, k] = 0
            # A warpgroup below the last row of y only waits.
            own = uint32(ALL if tiles[i, 1] * ROWS < batch - warp // 4 * 64 else 0)
            for _ in range(tiles[i, 2], tiles[i, 3]):
                mbarrier_wait(bars, stage, phase)
                mask = uint32(0)
                if lane == 0:  # who gives the stage back
                    mask = masks[stage]
                mask = uint32(redux_or(mask) & own)
                start = uint32(stage * STAGE)
                if mask != 0:  # after a product all lanes have read
                    read(ring, start, warp, hi, lo)
                    multiply(mask, acc, hi, lo, ring, uint32(start + X_SIZE))
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, STAGES + stage)
                stage, phase = following(stage, phase, STAGES)
            row = int64(tiles[i, 1]) * ROWS + warp * 16
            for s in range(STRIPS):
                column = int64(strips[tiles[i, 0], s * 32 // N])
                if column >= 0:
                    store(acc[s], y, row, column + s * 32 % N, batch, features)
            if exact and redux_or(uint32(nan_in(acc))) != 0:
                sync_warp()
                for c in range(COLUMNS):
                    mend(y, row, strips[tiles[i, 0], c], N, batch, features, dense)

    return consume


@cache
def multiplier(tile: Tile, exact: bool) -> Any:
    """multiply(mask, acc, hi, lo, ring, w_at): by the images of a step, for those strips."""
    ALL, LAST = (1 << tile.COLUMNS) - 1, tile.COLUMNS - 1
    one = wgmma_split(tile.N, DEPTH // 8, exact, 1, True)
    both = wgmma_split(64, DEPTH // 8, exact, 1, True)

    @cuda.jit(device=True)
    def multiply(mask, acc, hi, lo, ring, w_at):
        if mask == ALL:
            both(acc, hi, lo, ring, w_at)
        elif mask == 1:
            one(acc[0], hi, lo, ring, w_at)
        elif mask == 2:
            one(acc[LAST], hi, lo, ring, w_at)

    return multiply


@cache
def reader(x_turned: bool, exact: bool) -> tuple[Any, Any]:
    """(read, row_in): what a lane has of a tile of x, split: terms as in `fragments_tf32`.

    Line g of unit u of a warp is row `row_in(u, g)`: such that lanes meet no bank twice.
    """
    split = singles.split_exact if exact else singles.round_to_tf32

    @cuda.jit(device=True)
    def read_rows(ring, start, warp, hi, lo):
        lane = uint32(cuda.threadIdx.x) % 32
        row, q = row_of_rows(0, lane // 4), lane % 4
        line = uint32(start + (16 * warp + row) * DEPTH)
        for c in range(2):
            piece = int64(line + ((4 * c + q) ^ row) * 4)  # and 8 rows below
            for u in range(2):
                run = load_4xf32(ring, piece + u * (8 * DEPTH))
                for j in range(4):
                    k = (2 * c + j // 2) * 4 + j % 2 * 2 + u
                    hi[k], lo[k] = split(run[j])

    @cuda.jit(device=True)
    def read_columns(ring, start, warp, hi, lo):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        box = uint32(start + warp // 2 * (BOX * DEPTH) + g % 2 * 2)
        for j in range(2):
            line = 2 * q + j
            piece = int64(box + line * BOX + (warp % 2 * 4 + g // 2 ^ line) * 4)
            for c in range(4):  # and 8, 16 and 24 lines below
                a, b = load_2xu32(ring, piece + c * (8 * BOX))
                k = 4 * c + 2 * j
                hi[k], lo[k] = split(as_float32(a))
                hi[k + 1], lo[k + 1] = split(as_float32(b))

    @cuda.jit(device=True)
    def row_of_rows(u, g):
        return 8 * u + g // 2 + g % 2 * 4

    @cuda.jit(device=True)
    def row_of_columns(u, g):
        return 2 * g + u

    return (read_columns, row_of_columns) if x_turned else (read_rows, row_of_rows)


@cache
def mender(B: int, y_turned: bool) -> Any:
    """mend(y, row, column, N, ...): of 16 x N values that a warp wrote those that are NaN, by plain
    sums: a split makes NaN of infinities."""

    @cuda.jit(device=True)
    def mend(y, row, column, N, batch, features, dense):
        x, x_strides, in_features, values, w_strides, indptr, indices, blocks = dense
        for item in range(cuda.threadIdx.x % 32, 16 * N, 32):
            n, feature = row + item // N, int64(column + item % N)
            if column < 0 or n >= batch or feature >= features:
                continue
            at = feature * batch + n if y_turned else n * features + feature
            if y[at] == y[at]:
                continue
            total = float32(0)
            for entry in range(indptr[feature // B], indptr[feature // B + 1]):
                c, w = indices[entry] * B, int64(blocks[entry]) * (B * B)
                w += feature % B * w_strides[1]
                for i in range(min(B, in_features - c)):
                    value = x[n * x_strides[0] + (c + i) * x_strides[1]]
                    total += value * values[w + i * w_strides[0]]
            y[at] = total

    return mend
