"""Boxes of pixels and blocks of w on their way to shared memory, 16 bytes a copy."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.conv.places import moved, place_of, plus, row_of
from numbsparse.kernels.ptx import cp_async, cp_async_zero_fill, store_4xu32

NONE = -1


@cuda.jit(device=True)
def tile_of(number, images, tile, tiles):
    """(first image, first output) of a tile."""
    image, at = place_of(number, (tiles[1], tiles[2], tiles[3]))
    return int32(image * images), moved(at, tile, (0, 0, 0))


@cuda.jit(device=True)
def spread(places, count, images, box):
    """places[r] = (image, place) of number r of `images` boxes, packed; NONE of a later one."""
    for r in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        n, q = place_of(r, box)
        packed = int64(n) << 48 | int64(q[0]) << 32 | int64(q[1]) << 16 | int64(q[2])
        places[r] = packed if n < images else NONE


@cuda.jit(device=True)
def unpacked(packed):
    """(image, place) of an item of `spread`."""
    high, low = int32(packed >> 32), int32(packed)
    return high >> 16, (int32(high & 0xFFFF), int32(low >> 16), int32(low & 0xFFFF))


@cuda.jit(device=True)
def see(rows, places, count, image, batch, top, scale, origin, sizes, pieces):
    """rows[r] = where the row of x that pixel r of a box is begins, -1 outside of the image.

    Rows are `pieces` long.
    """
    for r in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        packed = places[r]
        n, q = unpacked(packed)
        found = row_of(image + n, batch, moved(plus(top, q), scale, origin), sizes)
        rows[r] = found * pieces if packed >= 0 and found >= 0 else -1


@cuda.jit(device=True)
def stand(rows, places, count, image, batch, top, counts, step, first, sizes, pieces):
    """rows[m] = where the row of y that output m of a tile is begins, -1 where it is none."""
    for m in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        packed = places[m]
        n, q = unpacked(packed)
        o = plus(top, q)
        inside = packed >= 0 and o[0] < counts[0] and o[1] < counts[1] and o[2] < counts[2]
        found = row_of(image + n, batch, moved(o, step, first), sizes)
        rows[m] = found * pieces if inside else -1


@cuda.jit(device=True)
def in_box(packed, box):
    """Where an output of a tile, packed, begins in the tile's box, before the shift of a tap."""
    n, q = unpacked(packed)
    if packed < 0:
        return int32(0)
    return int32(((n * box[0] + q[0]) * box[1] + q[1]) * box[2] + q[2])


@cache
def fetch_rows(B: int, THREADS: int, PIECE: int, place_in: Any) -> Any:
    """ring[start + .] = B features from `first` on of the rows named in `rows`, 0 for none.

    `rows` has where they begin, in pieces.
    """
    PIECES, SIZE = B // PIECE, 16 // PIECE
    LINES = THREADS // PIECES  # fetched at once

    @cuda.jit(device=True)
    def fetch(x, features, first, rows, count, ring, start):
        t = uint32(cuda.threadIdx.x)
        piece, r, n = t % PIECES, uint32(t // PIECES), uint32(count)
        if r >= LINES:
            return
        begin, zero = int64(first + piece * PIECE), uint32(0)
        inside = uint32(SIZE * min(max(features - begin, 0), PIECE))
        while r < n:
            row, at = rows[r], uint32(start + place_in(r, piece))
            if row < 0:
                store_4xu32(ring, at, zero, zero, zero, zero)
            elif inside == 16:
                cp_async(ring, at, x, begin + int64(row) * PIECE)
            else:
                cp_async_zero_fill(ring, at, x, begin + int64(row) * PIECE if inside else 0, inside)
            r = uint32(r + LINES)

    return fetch


@cache
def fetch_blocks(B: int, THREADS: int, turned: bool, edge: bool, PIECE: int, place_in: Any) -> Any:
    """ring[start + .] = the blocks of w from `entry` on; with `edge` 0 after `inside` features."""
    PIECES, SLOT, SIZE = B // PIECE, B * B, 16 // PIECE
    LINES = min(THREADS // PIECES, B)  # of a block fetched at once
    AT_ONCE = max(THREADS // (B * PIECES), 1)  # blocks
    PARTS = B // LINES

    @cuda.jit(device=True)
    def fetch(values, entry_block, entry, count, inside, ring, start):
        t = uint32(cuda.threadIdx.x)
        piece, line, own = t % PIECES, t // PIECES % LINES, t // (PIECES * LINES)
        if own >= AT_ONCE:
            return
        begin, at = int64(line * B + piece * PIECE), uint32(start + own * SLOT)
        slot, last = uint32(entry + own), uint32(entry + count)
        while slot < last:
            source = begin + int64(entry_block[slot]) * SLOT
            for p in range(PARTS):
                item = uint32(at + place_in(uint32(line + p * LINES), piece))
                row = source + p * (LINES * B)
                if edge:
                    left = inside - piece * PIECE
                    if not turned:
                        left = (inside - line - p * LINES) * PIECE
                    n = uint32(SIZE * min(max(left, 0), PIECE))
                    cp_async_zero_fill(ring, item, values, row, n)
                else:
                    cp_async(ring, item, values, row)
            slot = uint32(slot + AT_ONCE)
            at = uint32(at + AT_ONCE * SLOT)

    return fetch
