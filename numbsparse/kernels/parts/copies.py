"""Tiles copied from global to shared memory by `cp.async`, 16 bytes at a time, edges cut off."""

from functools import cache
from typing import Any

from numba import cuda, int64, uint32

from numbsparse.kernels.ptx import cp_async, cp_async_zero_fill


@cache
def copying(LINES: int, WIDTH: int, PIECE: int, THREADS: int, places: Any) -> tuple[int, Any, Any]:
    """(AT_ONCE, own, copy) for tiles of LINES lines of WIDTH items, PIECE of them in 16 bytes.

    The threads copy AT_ONCE tiles at once, this thread number own() of these.
    copy(x, stride, line, item, lines, items, ring, start) fills the tile at `start`, as `places`
    say (see `banks`), with x from a line and an item of it on, lines being `stride` apart, and with
    0 beyond `lines` lines and `items` items.
    """
    PIECES = WIDTH // PIECE
    AT_ONCE = max(THREADS // (LINES * PIECES), 1)
    STEP = min(THREADS // PIECES, LINES)  # lines copied at once
    COUNT, ITEM = LINES // STEP, 16 // PIECE
    place_in, move = places

    @cuda.jit(device=True)
    def own():
        return uint32(uint32(cuda.threadIdx.x) // (LINES * PIECES)) if AT_ONCE > 1 else uint32(0)

    @cuda.jit(device=True)
    def copy(x, stride, line, item, lines, items, ring, start):
        t = uint32(cuda.threadIdx.x)
        piece, down = t % PIECES, t // PIECES % LINES
        source = (line + down) * stride + piece * PIECE + item
        to = start + place_in(down, piece)
        # Unsigned lines move by shifts and masks, so few that the compiler unrolls the rounds.
        if lines >= LINES and items >= WIDTH:
            for i in range(COUNT):
                cp_async(ring, move(to, uint32(i * STEP), 0), x, source + i * STEP * stride)
            return
        n = uint32(ITEM * min(max(items - int64(piece * PIECE), 0), PIECE))  # bytes of the piece
        for i in range(COUNT):
            there = down + i * STEP < lines
            at, row = move(to, uint32(i * STEP), 0), source + i * STEP * stride if there else 0
            cp_async_zero_fill(ring, at, x, row, n if there else uint32(0))

    return AT_ONCE, own, copy


@cache
def copying_matrix(
    ROWS: int, FEATURES: int, PIECE: int, THREADS: int, transposed: bool, places: Any
) -> tuple[int, Any, Any]:
    """`copying` for tiles of ROWS x FEATURES of a matrix in either order.

    copy(x, stride, row, rows, feature, features, ring, start): from a row and a feature on, up
    to `rows` and `features`. Transposed, x is feature-major, and a tile has a line for a feature.
    """
    shape = (FEATURES, ROWS) if transposed else (ROWS, FEATURES)
    AT_ONCE, own, copy_lines = copying(*shape, PIECE, THREADS, places)

    @cuda.jit(device=True)
    def copy(x, stride, row, rows, feature, features, ring, start):
        across, down = features - feature, rows - row
        if transposed:
            copy_lines(x, stride, feature, row, across, down, ring, start)
        else:
            copy_lines(x, stride, row, feature, down, across, ring, start)

    return AT_ONCE, own, copy
