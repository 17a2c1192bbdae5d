"""16-bit accumulators to y by the copy engine, from matrices in shared memory.

A warp writes 16 rows of a panel of columns as matrices, and goes on while the copy engine stores
them.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint16, uint32, uint64

from numbsparse.kernels.parts.pieces import joining, slice_of
from numbsparse.kernels.parts.store import (
    ANY,
    AT_ONCE,
    FEATURES,
    LINES,
    ROWS,
    Sums,
    by_boxes,
    packed,
    storer,
)
from numbsparse.kernels.ptx import (
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    stmatrix_x4,
    stmatrix_x4_trans,
    sync_some,
    sync_warp,
    tma_store_2d,
)

LINE = 128  # bytes of the 64 rows of a warpgroup, in a column


@cache
def finishing(of: Sums, order: str, ENDS: bool, SPLIT: int) -> Any:
    """finish(sums, columns, row, end, base, shared, buffer, y, y_map): by `box_storer`, or where y
    has no order by `store.storer`, up to row `end` where a tile ENDS before its last panel.

    Of sums that SPLIT blocks of a cluster have parts of, from byte `base` of shared memory on, each
    stores a slice.
    """
    own = slice_of(of, SPLIT)
    store_boxes, store_items = box_storer(own, order, ENDS), storer(own, ANY)
    store_lines, join, lines = line_storer(own, of.PANEL_BYTES), joining(SPLIT, of), order == LINES
    boxes = by_boxes(order)
    CUTS = ENDS and not boxes

    @cuda.jit(device=True)
    def finish(sums, columns, row, end, base, shared, buffer, y, y_map):
        if SPLIT > 1:
            row += join(sums, columns, base)
        if CUTS:
            y = y[0], y[1], y[2], min(y[3], end), y[4]
        if boxes:
            store_boxes(sums, columns, row, end, shared, buffer, y_map)
        elif lines:
            store_lines(sums, columns, row, shared, buffer, y)
        else:
            store_items(sums, columns, row, y)

    return finish


def y_box(of: Sums, order: str) -> tuple[int, int]:
    """The box of y that one copy writes; of y.T in the order of features."""
    return (of.WIDTH, 16) if order == FEATURES else (16, of.WIDTH)


@cache
def panel_writer(of: Sums, order: str = ROWS, UNIT: int = 1, WARPS: int = 1) -> Any:
    """write(sums, tile, strip, shared, place): a panel of a tile, from a strip on, as matrices.

    They are swizzled as the copy engine takes them.

    UNIT : bytes of what `shared` holds
    WARPS : whose rows are side by side in lines of columns
    """
    STRIPS, LINE, by_features = of.WIDTH // 8, 2 * y_box(of, order)[1] * WARPS, order == FEATURES
    SWAPS, pair = LINE // 16 - 1, packed(of)
    store_matrices = stmatrix_x4_trans if by_features else stmatrix_x4

    @cuda.jit(device=True)
    def write(sums, tile, first, shared, place):
        lane = uint32(cuda.threadIdx.x) % 32
        # A lane has a line of one of four matrices: two strips, and in each two halves.
        strip, half, line = lane // 16, lane // 8 % 2, lane % 8
        if by_features:
            byte = uint32((8 * strip + line) * LINE + 16 * half)
            if WARPS > 1:
                byte = uint32(byte + uint32(cuda.threadIdx.x) // 32 % WARPS * 32)
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
def box_storer(of: Sums, order: str, ENDS: bool = False) -> Any:
    """store(sums, columns, row, end, shared, buffer, y_map): as `storer`, by the copy engine.

    A warp has a panel of its own from byte `buffer` of shared memory on. It goes on, to the next
    tile if that was the last panel, while the copy engine still reads it: so the multiprocessor
    writes y while it fetches x. Where a tile ENDS before its last panel, panels from row `end` on
    are not stored.
    """
    TILES, COLUMNS, WIDTH, B, APART = of.TILES, of.COLUMNS, of.WIDTH, of.B, of.APART
    PANELS, STRIPS = B // WIDTH, WIDTH // 8
    write, by_features = panel_writer(of, order), order == FEATURES

    @cuda.jit(device=True)
    def store(sums, columns, row, end, shared, buffer, y_map):
        for m in range(TILES):
            inside = not ENDS or row + APART * m < end
            for c in range(COLUMNS):
                for p in range(PANELS):
                    bulk_wait_read()
                    sync_warp()
                    write(sums, m, (c * PANELS + p) * STRIPS, shared, buffer)
                    fence_proxy_async()
                    sync_warp()
                    if elect() != 0 and columns[c] >= 0 and inside:
                        n, k = int32(row + APART * m), int32(columns[c] * B + p * WIDTH)
                        if by_features:
                            tma_store_2d(shared, buffer, y_map, n, k)
                        else:
                            tma_store_2d(shared, buffer, y_map, k, n)
                        bulk_commit()

    return store


@cache
def line_storer(of: Sums, GIVEN: int) -> Any:
    """store(sums, columns, row, shared, buffer, y): in the order of `LINES`, by the lanes.

    GIVEN : bytes from the buffer of a warp to that of the next

    The four warps of a warpgroup put 64 rows of a panel side by side, and each writes a quarter of
    its columns, 32 neighbours of one at once: of its own 16 rows a third more sectors of memory
    would be written in part (40 MB by lanes alone: 19 us, so 27, H200).
    """
    TILES, COLUMNS, WIDTH, B, APART = of.TILES, of.COLUMNS, of.WIDTH, of.B, of.APART
    PANELS, STRIPS, OWN = B // WIDTH, WIDTH // 8, WIDTH // 4
    SOME, write = (min(OWN, AT_ONCE), 2), panel_writer(of, FEATURES, WARPS=4)

    @cuda.jit(device=True)
    def store(sums, columns, row, shared, buffer, y):
        panel, some = cuda.shared.array(0, uint16), cuda.local.array(SOME, uint16)
        values, _, stride, batch, features = y
        t = uint32(cuda.threadIdx.x)
        lane, warp, barrier = t % 32, t // 32 % 4, t // 128 + 1
        place = uint32(buffer - warp * GIVEN)
        for m in range(TILES):
            n = int64(row) - 16 * warp + APART * m + lane
            for c in range(COLUMNS):
                for p in range(PANELS):
                    sync_some(barrier, 128)
                    write(sums, m, (c * PANELS + p) * STRIPS, shared, place)
                    sync_some(barrier, 128)
                    k = int64(columns[c]) * B + p * WIDTH + warp * OWN
                    left = features - k if columns[c] >= 0 else int64(0)
                    at = k * stride + n
                    for i in range(0, OWN if left > 0 else 0, SOME[0]):
                        for e in range(SOME[0]):
                            line = uint32(warp * OWN + i + e)
                            for u in range(2):
                                piece = uint32((4 * u + lane // 8) ^ line % 8)
                                there = place // 2 + line * (LINE // 2) + piece * 8 + lane % 8
                                some[e, u] = panel[uint64(uint32(there))]
                        for e in range(SOME[0]):
                            for u in range(2):
                                if i + e < left and n + 32 * u < batch:
                                    values[uint64(at + 32 * u)] = some[e, u]
                            at += stride

    return store
