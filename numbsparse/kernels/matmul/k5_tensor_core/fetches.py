"""How a block of threads brings the tiles of a step to shared memory, 16 bytes a copy.

Each fetch comes with a `find`, which looks up one step ahead, into registers, what to fetch.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int64, uint32

from numbsparse.kernels.ptx import cp_async, cp_async_zero_fill


class Tile(NamedTuple):
    """What a block of threads owns (BM, BN), BK, the length of a step, and stages in the ring."""

    BM: int
    BN: int
    BK: int
    STAGES: int

    @property
    def threads(self) -> int:
        return max(self.BM, 128)

    @property
    def warps(self) -> int:
        return self.threads // 32


class Slots(NamedTuple):
    """How a step holds parts of blocks of w: HEIGHT x WIDTH each, as they are stored.

    COLUMNS of them, side by side in w, for each of the BLOCKS blocks of features in a step; or
    PARTS steps go through a block. DEPTH of a block's features are in a step.
    """

    HEIGHT: int
    WIDTH: int
    COLUMNS: int
    BLOCKS: int
    PARTS: int
    DEPTH: int

    @property
    def size(self) -> int:
        return self.HEIGHT * self.WIDTH


def slots_of(B: int, tile: Tile, turned: bool) -> Slots:
    DEPTH, ACROSS = min(B, tile.BK), min(B, tile.BN)
    HEIGHT, WIDTH = (ACROSS, DEPTH) if turned else (DEPTH, ACROSS)
    return Slots(HEIGHT, WIDTH, tile.BN // ACROSS, tile.BK // DEPTH, B // DEPTH, DEPTH)


@cache
def fetch_rows(tile: Tile, slots: Slots, B: int, PIECE: int, places: Any) -> Any:
    """tile[m] = features of a step's blocks in x's row m, and 0 beyond the edges.

    (begin, find, fetch, how many lines of features a thread looks up).
    """
    PIECES, DEPTH, BLOCKS, PARTS = tile.BK // PIECE, slots.DEPTH, slots.BLOCKS, slots.PARTS
    LINES = tile.threads // PIECES  # fetched at once
    COUNT, BM = tile.BM // LINES, tile.BM
    n_bytes, (place_in, move) = bytes_of(PIECE), places

    @cuda.jit(device=True)
    def begin(stride, top):
        t = uint32(cuda.threadIdx.x)
        return (top + t // PIECES) * stride + t % PIECES * PIECE % DEPTH

    @cuda.jit(device=True)
    def find(indices, first, last, step, in_features, found):
        part = uint32(cuda.threadIdx.x) % PIECES * PIECE // DEPTH
        entry = first + uint32(step) // PARTS * BLOCKS + part
        found[0] = in_features
        if entry < last:
            found[0] = indices[entry] * B + uint32(step) % PARTS * DEPTH

    @cuda.jit(device=True)
    def fetch(x, begins, stride, top, batch, found, in_features, tile, start):
        t = uint32(cuda.threadIdx.x)
        at = start + place_in(t // PIECES, t % PIECES)
        source = begins + found[0]
        if top + BM <= batch and found[0] + DEPTH <= in_features:
            for i in range(COUNT):
                cp_async(tile, move(at, i * LINES, 0), x, source + i * LINES * stride)
            return
        n = n_bytes(in_features - found[0] - t % PIECES * PIECE % DEPTH)
        for i in range(COUNT):
            inside = top + t // PIECES + i * LINES < batch
            row = source + i * LINES * stride if inside else 0
            item = move(at, i * LINES, 0)
            cp_async_zero_fill(tile, item, x, row, n if inside else uint32(0))

    return begin, find, fetch, 1


@cache
def fetch_columns(tile: Tile, slots: Slots, B: int, PIECE: int, places: Any) -> Any:
    """As `fetch_rows`, of feature-major x: tile[k] = the batch's items of the step's feature k."""
    PIECES, DEPTH, BLOCKS, PARTS = tile.BM // PIECE, slots.DEPTH, slots.BLOCKS, slots.PARTS
    LINES = tile.threads // PIECES  # fetched at once; they lie in one block
    COUNT, BM = DEPTH // LINES, tile.BM
    n_bytes, (place_in, move) = bytes_of(PIECE), places

    @cuda.jit(device=True)
    def begin(stride, top):
        t = uint32(cuda.threadIdx.x)
        return t // PIECES * stride + top + t % PIECES * PIECE

    @cuda.jit(device=True)
    def find(indices, first, last, step, in_features, found):
        for p in range(BLOCKS):
            entry = first + uint32(step) // PARTS * BLOCKS + p
            found[p] = in_features
            if entry < last:
                found[p] = indices[entry] * B + uint32(step) % PARTS * DEPTH

    @cuda.jit(device=True)
    def fetch(x, begins, stride, top, batch, found, in_features, tile, start):
        t = uint32(cuda.threadIdx.x)
        at = start + place_in(t // PIECES, t % PIECES)
        whole = top + BM <= batch
        for p in range(BLOCKS):
            whole = whole and found[p] + DEPTH <= in_features
        if whole:
            for p in range(BLOCKS):
                source = begins + found[p] * stride
                for i in range(COUNT):
                    item = move(at, p * DEPTH + i * LINES, 0)
                    cp_async(tile, item, x, source + i * LINES * stride)
            return
        n = n_bytes(int64(batch - top) - int64(t % PIECES * PIECE))
        for p in range(BLOCKS):
            for i in range(COUNT):
                inside = found[p] + i * LINES + t // PIECES < in_features
                source = begins + (found[p] + i * LINES) * stride if inside else 0
                item = move(at, p * DEPTH + i * LINES, 0)
                cp_async_zero_fill(tile, item, x, source, n if inside else uint32(0))

    return begin, find, fetch, BLOCKS


@cache
def fetch_blocks(
    tile: Tile, slots: Slots, B: int, turned: bool, edge: bool, PIECE: int, places: Any
) -> Any:
    """The slots of a step from the stored blocks, and 0 beyond the last feature.

    `blocks` names the block of each slot, -1 where there is none: that slot stays as it was. Only
    with `edge` features end inside the last block. (find, fetch, how many blocks a thread keeps).
    """
    HEIGHT, WIDTH, COLUMNS, BLOCKS, PARTS, DEPTH = slots
    PIECES, SLOTS = WIDTH // PIECE, COLUMNS * BLOCKS
    LINES = min(tile.threads // PIECES, HEIGHT)  # of a slot fetched at once
    AT_ONCE = min(max(tile.threads // (PIECES * HEIGHT), 1), SLOTS)  # slots
    ROUNDS = SLOTS // AT_ONCE
    USED = AT_ONCE * LINES * PIECES  # threads
    n_bytes, (place_in, move) = bytes_of(PIECE), places

    @cuda.jit(device=True)
    def find(blocks, indices, first, last, step, in_features, found, insides):
        entry = first + uint32(step) // PARTS * BLOCKS
        own = uint32(cuda.threadIdx.x) // (LINES * PIECES)
        for r in range(ROUNDS):
            slot = own + r * AT_ONCE
            found[r] = -1
            if slot < SLOTS and entry + slot // COLUMNS < last:
                found[r] = blocks[entry * COLUMNS + slot]
                if edge:
                    c = indices[entry + slot // COLUMNS] * B + uint32(step) % PARTS * DEPTH
                    insides[r] = in_features - c

    @cuda.jit(device=True)
    def fetch(values, found, insides, first, step, tile, start):
        t = uint32(cuda.threadIdx.x)
        piece, line, own = t % PIECES, t // PIECES % LINES, t // (LINES * PIECES)
        offset = uint32(step) % PARTS * DEPTH
        row, column = (first, offset) if turned else (offset, first)
        source = (row + line) * B + column + piece * PIECE
        at = start + own * (HEIGHT * WIDTH) + place_in(line, piece)
        for r in range(ROUNDS):
            if found[r] >= 0 and t < USED:
                block = int64(found[r]) * (B * B) + source
                for i in range(HEIGHT // LINES):
                    n = uint32(16)
                    if edge and turned:
                        n = n_bytes(insides[r] - piece * PIECE)
                    if edge and not turned:
                        n = n_bytes((insides[r] - line - i * LINES) * PIECE)
                    item = move(at + r * (AT_ONCE * HEIGHT * WIDTH), i * LINES, 0)
                    cp_async_zero_fill(tile, item, values, block + i * (LINES * B), n)

    return find, fetch, ROUNDS


@cache
def bytes_of(PIECE: int) -> Any:
    """Bytes of a piece, of which `inside` values lie before the edge."""
    SIZE = 16 // PIECE

    @cuda.jit(device=True)
    def n_bytes(inside):
        return uint32(SIZE * min(max(inside, 0), PIECE))

    return n_bytes
