"""16-bit accumulators to y by the copy engine, from matrices in shared memory.

A warp writes 16 rows of a panel of columns as matrices, and goes on while the copy engine stores
them.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.parts.pieces import joining, slice_of
from numbsparse.kernels.parts.store import ANY, FEATURES, ROWS, Sums, packed, storer
from numbsparse.kernels.ptx import (
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    stmatrix_x4,
    stmatrix_x4_trans,
    sync_warp,
    tma_store_2d,
)


@cache
def finishing(of: Sums, order: str, BUFFERS: int, ENDS: bool, SPLIT: int) -> Any:
    """finish(sums, columns, row, end, base, shared, buffer, y, y_map): by `box_storer`, or where y
    has no order by `store.storer`, up to row `end` where a tile ENDS before its last panel.

    Of sums that SPLIT blocks of a cluster have parts of, from byte `base` of shared memory on, each
    stores a slice.
    """
    own = slice_of(of, SPLIT)
    store_boxes, store_items = box_storer(own, order, BUFFERS, ENDS), storer(own, ANY)
    join, boxes = joining(SPLIT, of), order != ANY

    @cuda.jit(device=True)
    def finish(sums, columns, row, end, base, shared, buffer, y, y_map):
        if SPLIT > 1:
            row += join(sums, columns, base)
        if boxes:
            store_boxes(sums, columns, row, end, shared, buffer, y_map)
        elif ENDS:
            inside = y[0], y[1], y[2], min(y[3], end), y[4]
            store_items(sums, columns, row, inside)
        else:
            store_items(sums, columns, row, y)

    return finish


def y_box(of: Sums, order: str) -> tuple[int, int]:
    """The box of y that one copy writes; of y.T in the order of features."""
    return (of.WIDTH, 16) if order == FEATURES else (16, of.WIDTH)


@cache
def panel_writer(of: Sums, order: str = ROWS, UNIT: int = 1) -> Any:
    """write(sums, tile, strip, shared, place): a panel of a tile, from a strip on, as matrices.

    They are swizzled as the copy engine takes them. UNIT : bytes of what `shared` holds
    """
    STRIPS, LINE, by_features = of.WIDTH // 8, 2 * y_box(of, order)[1], order == FEATURES
    SWAPS, pair = LINE // 16 - 1, packed(of)
    store_matrices = stmatrix_x4_trans if by_features else stmatrix_x4

    @cuda.jit(device=True)
    def write(sums, tile, first, shared, place):
        lane = uint32(cuda.threadIdx.x) % 32
        # A lane has a line of one of four matrices: two strips, and in each two halves.
        strip, half, line = lane // 16, lane // 8 % 2, lane % 8
        if by_features:
            byte = uint32((8 * strip + line) * LINE + 16 * half)
        else:
            byte = uint32((8 * half + line) * LINE + 16 * strip)
        byte = uint32(byte ^ (byte >> 7 & SWAPS) << 4)
        for s in range(0, STRIPS, 2):
            to = byte + 8 * s * LINE if by_features else byte ^ (16 * s)
            store_matrices(
                shared,
                place + to // UNIT,
                pair(sums, tile, first + s, 0),
                pair(sums, tile, first + s, 1),
                pair(sums, tile, first + s + 1, 0),
                pair(sums, tile, first + s + 1, 1),
            )

    return write


@cache
def box_storer(of: Sums, order: str, BUFFERS: int, ENDS: bool = False) -> Any:
    """store(sums, columns, row, end, shared, buffer, y_map): as `storer`, by the copy engine.

    A warp has BUFFERS panels of its own from byte `buffer` of shared memory on. It goes on, to the
    next tile if that was the last panel, while the copy engine still reads them: so the
    multiprocessor writes y while it fetches x. Where a tile ENDS before its last panel, panels from
    row `end` on are not stored.
    """
    TILES, COLUMNS, WIDTH, B, APART = of.TILES, of.COLUMNS, of.WIDTH, of.B, of.APART
    PANELS, STRIPS, PANEL_BYTES = B // WIDTH, WIDTH // 8, of.PANEL_BYTES
    write, by_features = panel_writer(of, order), order == FEATURES

    @cuda.jit(device=True)
    def store(sums, columns, row, end, shared, buffer, y_map):
        for m in range(TILES):
            inside = not ENDS or row + APART * m < end
            for c in range(COLUMNS):
                for p in range(PANELS):
                    number = (m * COLUMNS + c) * PANELS + p
                    place = uint32(buffer + number % BUFFERS * PANEL_BYTES)
                    if number % BUFFERS == 0:
                        bulk_wait_read()
                        sync_warp()
                    write(sums, m, number % (COLUMNS * PANELS) * STRIPS, shared, place)
                    fence_proxy_async()
                    sync_warp()
                    if elect() != 0 and columns[c] >= 0 and inside:
                        n, k = int32(row + APART * m), int32(columns[c] * B + p * WIDTH)
                        if by_features:
                            tma_store_2d(shared, place, y_map, n, k)
                        else:
                            tma_store_2d(shared, place, y_map, k, n)
                        bulk_commit()

    return store
