"""From accumulators to y: rounded, as matrices into shared memory, and on by the copy engine.

Each warp has 16 rows of 64 columns or fewer at a time, a panel, and room for ROOMS of them beside
the ring. It goes on, to the next tile if that was the last panel, while the copy engine still reads
them: so the multiprocessor writes y while it fetches x. Where y has no whole pieces of 16 bytes the
warp writes item by item.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint16, uint32

from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.kernels.ptx import (
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    pack_bfloat2,
    pack_half2,
    stmatrix_x4,
    stmatrix_x4_trans,
    sync_warp,
    tma_store_2d,
)

ROWS, FEATURES, ANY = "rows", "features", "any"  # how y lies: in which pieces it takes 16 bytes


def y_box(tile: Tile, y_lies: str) -> tuple[int, int]:
    """The box of y that one copy writes; of y.T where y lies feature by feature."""
    return (tile.WIDTH, 16) if y_lies == FEATURES else (16, tile.WIDTH)


@cache
def storer(tile: Tile, kind: str, y_lies: str) -> Any:
    """store(sums, columns, row, shared, room, y): a warp's rows, `row` the first one's number.

    columns : (SHARE,), block columns of y, negative where there is none
    room : byte of shared memory
    y : (y_map, values, row stride, column stride, batch, features)
    """
    if y_lies == ANY:
        return store_items(tile, kind)
    return store_panels(tile, kind, y_lies == FEATURES)


# In the accumulators of a warp, M strips of 16 x 8, lane 4 r + q holds columns 2 q and 2 q + 1 of
# rows r, the upper half, and r + 8.


@cache
def packed(tile: Tile, kind: str) -> Any:
    """The pair of a lane in a strip of a block column: half 0 is the upper one."""
    M_TILES, N = tile.M_TILES, tile.B // 2
    pack = pack_half2 if kind == "f16" else pack_bfloat2

    @cuda.jit(device=True)
    def pair(sums, m, column, strip, half):
        i = (column * M_TILES + m) * N + strip * 4 + 2 * half
        return pack(sums[i], sums[i + 1])

    return pair


@cache
def store_panels(tile: Tile, kind: str, turned: bool) -> Any:
    M_TILES, SHARE, WIDTH, B = tile.M_TILES, tile.SHARE, tile.WIDTH, tile.B
    PANELS, STRIPS, ROOMS, ROOM_BYTES = B // WIDTH, WIDTH // 8, tile.ROOMS, tile.ROOM_BYTES
    LINE = 2 * y_box(tile, FEATURES if turned else ROWS)[1]
    SWAPS = LINE // 16 - 1
    store_matrices = stmatrix_x4_trans if turned else stmatrix_x4
    pair = packed(tile, kind)

    @cuda.jit(device=True)
    def store(sums, columns, row, shared, room, y):
        lane = uint32(cuda.threadIdx.x) % 32
        # A lane has a line of one of four matrices: two strips, and in each two halves.
        strip, half, line = lane // 16, lane // 8 % 2, lane % 8
        if turned:
            byte = uint32((8 * strip + line) * LINE + 16 * half)
        else:
            byte = uint32((8 * half + line) * LINE + 16 * strip)
        byte = uint32(byte ^ (byte >> 7 & SWAPS) << 4)
        for m in range(M_TILES):
            for c in range(SHARE):
                for p in range(PANELS):
                    number = (m * SHARE + c) * PANELS + p
                    place = uint32(room + number % ROOMS * ROOM_BYTES)
                    if number % ROOMS == 0:
                        bulk_wait_read()
                        sync_warp()
                    for s in range(0, STRIPS, 2):
                        at = s + p * STRIPS
                        to = byte + 8 * s * LINE if turned else byte ^ (16 * s)
                        store_matrices(
                            shared,
                            place + to,
                            pair(sums, m, c, at, 0),
                            pair(sums, m, c, at, 1),
                            pair(sums, m, c, at + 1, 0),
                            pair(sums, m, c, at + 1, 1),
                        )
                    fence_proxy_async()
                    sync_warp()
                    if elect() != 0 and columns[c] >= 0:
                        n, k = int32(row + 64 * m), int32(columns[c] * B + p * WIDTH)
                        if turned:
                            tma_store_2d(shared, place, y[0], n, k)
                        else:
                            tma_store_2d(shared, place, y[0], k, n)
                        bulk_commit()

    return store


@cache
def store_items(tile: Tile, kind: str) -> Any:
    """Item by item, wherever y has them."""
    M_TILES, SHARE, B, STRIPS = tile.M_TILES, tile.SHARE, tile.B, tile.B // 8
    pair = packed(tile, kind)

    @cuda.jit(device=True)
    def store(sums, columns, row, shared, room, y):
        _, values, row_stride, column_stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(M_TILES):
            for half in range(2):
                n = row + 64 * m + 8 * half + lane // 4
                for c in range(SHARE):
                    for s in range(STRIPS):
                        two = pair(sums, m, c, s, half)
                        k = columns[c] * B + s * 8 + lane % 4 * 2
                        for i in range(2):
                            if n < batch and columns[c] >= 0 and k + i < features:
                                at = n * row_stride + (k + i) * column_stride
                                values[at] = uint16(two >> (16 * i) & 0xFFFF)

    return store
