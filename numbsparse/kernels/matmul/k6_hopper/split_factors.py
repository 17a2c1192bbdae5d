"""The factors of a weight-gradient of float32: x in registers, dy as images of its strips.

Lane 4 g + q of a warp has the rows g and g + 8 of an mma of 16 rows, and of every 8 terms of the
sum the q-th and the (q + 4)-th. Which terms these are is free as long as both factors agree: here
rows 2 q and 2 q + 1 of the batch. Rows g and g + 8 are two neighbouring features. So what is read
together from swizzled tiles of 32 lines of 128 bytes meets in no bank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k6_hopper.split_items import NT, TILE, Work
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.ptx import as_float32, load_2xu32, load_4xf32, store_4xf32

LINE = 32  # values of a line of a tile


@cache
def rows_of(x_turned: bool) -> Any:
    @cuda.jit(device=True)
    def row_of(images, item, group, warp, m):
        """(tile, row, step): of product m, lane g of a warp has rows row + step g and the next.

        Products of the same strip are taken together, a tile for each warp; else a warp has a half
        of a tile.
        """
        if images[item, group, 0] != images[item, group, 1]:
            return 2 * m + warp // 2, warp % 2 * 16, 2
        if x_turned:
            return warp, 16 * m, 2
        return warp, 2 * m, 4

    return row_of


@cache
def reader(x_turned: bool) -> Any:
    """read(ring, start, images, item, group, warp, raw): raw[m, .] = what a lane has of x."""
    TILE_SIZE = NT * TILE
    row_of = rows_of(x_turned)

    @cuda.jit(device=True)
    def read_whole(ring, start, raw):
        """Four neighbouring features: two of each product."""
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for k in range(2):
            line = 2 * q + k
            at = start + line * LINE + (g ^ line) * 4
            for s in range(NT // 8):
                four = load_4xf32(ring, at + s * (8 * LINE))
                for e in range(4):
                    raw[e // 2, 4 * s + 2 * k + e % 2] = four[e]

    @cuda.jit(device=True)
    def read_half(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for k in range(2):
            line = 2 * q + k
            at = start + line * LINE + ((row // 4 + g // 2) ^ line) * 4 + g % 2 * 2
            for s in range(NT // 8):
                a, b = load_2xu32(ring, at + s * (8 * LINE))
                raw[4 * s + 2 * k], raw[4 * s + 2 * k + 1] = as_float32(a), as_float32(b)

    @cuda.jit(device=True)
    def read_turned(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(2):
            line = 2 * g + u  # and of 16 rows, so that these shift no piece
            own = uint32(line * LINE + (q // 2 ^ line % 8) * 4 + q % 2 * 2)
            for s in range(NT // 8):
                a, b = load_2xu32(ring, start + row * LINE + int64(own ^ 8 * s))
                raw[4 * s + u], raw[4 * s + 2 + u] = as_float32(a), as_float32(b)

    @cuda.jit(device=True)
    def read(ring, start, images, item, group, warp, raw):
        start = start + group * (4 * TILE_SIZE)
        upper, upper_row, step = row_of(images, item, group, warp, 0)
        lower, lower_row, _ = row_of(images, item, group, warp, 1)
        if x_turned:
            read_turned(ring, start + upper * TILE_SIZE, upper_row, raw[0])
            read_turned(ring, start + lower * TILE_SIZE, lower_row, raw[1])
        elif step == 4:
            read_whole(ring, start + upper * TILE_SIZE, raw)
        else:
            read_half(ring, start + upper * TILE_SIZE, upper_row, raw[0])
            read_half(ring, start + lower * TILE_SIZE, lower_row, raw[1])

    return read


@cache
def turner(work: Work, exact: bool, dy_turned: bool) -> Any:
    """turn(ring, start, warp, count, room): images of so many strips; see `ptx.wgmma_split`.

    Column 4 g + e of each 32 stands in the e-th matrix of 8 columns, there in line g. A lane has
    four terms of each of four columns, or, where dy lies column by column, 16 terms of one.
    """
    N, TURNERS, HALF = work.N, work.TURNERS, NT * work.N
    TILE_SIZE, PER_IMAGE, IMAGE = NT * TILE, N // 16, work.IMAGE
    RAW = (4, 4)
    split = singles.split_exact if exact else singles.round_to_tf32

    @cuda.jit(device=True)
    def store(ring, at, a, b, c, d):
        (ah, al), (bh, bl), (ch, cl), (dh, dl) = split(a), split(b), split(c), split(d)
        store_4xf32(ring, at, as_float32(ah), as_float32(bh), as_float32(ch), as_float32(dh))
        if exact:
            at = at + HALF
            store_4xf32(ring, at, as_float32(al), as_float32(bl), as_float32(cl), as_float32(dl))

    @cuda.jit(device=True)
    def turn_rows(ring, tile, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        raw = cuda.local.array(RAW, float32)
        for j in range(4):
            line = 8 * (high // 2) + high % 2 + 2 * j
            four = load_4xf32(ring, tile + (16 * chunk + line) * LINE + (low ^ line % 8) * 4)
            for e in range(4):
                raw[j, e] = four[e]
        to = image + (4 * chunk + high) * (4 * N) + 4 * low
        for e in range(4):
            store(ring, to + e * 32, raw[0, e], raw[1, e], raw[2, e], raw[3, e])

    @cuda.jit(device=True)
    def turn_columns(ring, tile, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        line, raw = 4 * low + high, cuda.local.array(RAW, float32)
        # Half of the lanes begin with the other 8 terms: they would meet in the same banks.
        start, begin = tile + line * LINE, low // 4
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            for u in range(2):
                four = load_4xf32(ring, start + ((2 * eight + u) ^ line % 8) * 4)
                for e in range(4):
                    raw[2 * j + u, e] = four[e]
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            to, k = image + eight * (8 * N) + high * 32 + 4 * low, 2 * j
            for u in range(2):
                terms = raw[k, u], raw[k, u + 2], raw[k + 1, u], raw[k + 1, u + 2]
                store(ring, to + u * (4 * N), *terms)

    @cuda.jit(device=True)
    def turn(ring, start, warp, count, room):
        for unit in range(warp, count * PER_IMAGE, TURNERS):
            tile, chunk = unit // 2, unit % 2
            image = room + unit // PER_IMAGE * IMAGE + tile % (N // TILE) * 128
            if dy_turned:
                turn_columns(ring, start + tile * TILE_SIZE, chunk, image)
            else:
                turn_rows(ring, start + tile * TILE_SIZE, chunk, image)

    return turn
