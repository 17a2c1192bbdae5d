"""Tiles of features that begin between multiples of 16 bytes, as those of an odd batch do.

They are loaded from the multiple before on. Features as many apart as 16 bytes have values, RUN,
begin equally far behind one, so what each of a tile is skewed by is known without a look at its
address. Lanes copy pieces of 16 bytes, one more for each feature; or the copy engine, which loads
no box that begins elsewhere, has a box for each of the first RUN features, of every RUN-th from
there on.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.ptx import tma_load_2d

WIDTH = 32  # features of a tile, terms of a sum
LINE = 32  # words: at multiples of which a box begins in shared memory
BOXES, PIECES = "boxes", "pieces"  # by which it is loaded


class Places(NamedTuple):
    """Where features of a tile are, in words: number i at i % RUN * box + i // RUN * further."""

    run: int  # values in 16 bytes
    box: int
    further: int
    words: int  # of all


def places_of(run: int, rows: int, by: str) -> Places:
    """Of so many rows of the batch."""
    feature = (rows + run) * 4 // run
    if by == PIECES:
        return Places(run, feature, run * feature, WIDTH * feature)
    box = -(-WIDTH // run * feature // LINE) * LINE
    return Places(run, box, feature, run * box)


def boxes_of(x: DeviceArray, rows: int) -> tuple[Any, ...]:
    """What `tensor_maps` takes of x (rows, features): lines of RUN features, one after another."""
    run, stride = 16 // x.itemsize, x.strides[1]
    length = (run - 1) * stride // x.itemsize + x.shape[0]
    shape, strides = (x.shape[1] // run, length), (run * stride, x.itemsize)
    lines = DeviceArray(x.address, shape, x.dtype, strides, x.owner)
    return lines, (WIDTH // run, rows + run), (), True


@cache
def loading(run: int, rows: int) -> Any:
    """load(shared, start, x_map, line, top, pitch, bars, bar): request the boxes of a tile, of rows
    from `top` on, a multiple of RUN; features are `pitch` values apart."""
    BOX = places_of(run, rows, BOXES).box

    @cuda.jit(device=True)
    def load(shared, start, x_map, line, top, pitch, bars, bar):
        first, column = int32(line * (WIDTH // run)), int32(top)
        for r in range(run):
            place, at = uint32(start + r * BOX), int32(column - column % run)
            tma_load_2d(shared, place, x_map, at, first, bars, bar)
            column = int32(column + pitch)

    return load


@cuda.jit(device=True)
def take_four(tile, even, odd, shift, raw, first, e):
    """raw[first : first + 4, e]: four 16-bit neighbours of a term, and of the next one beside them.

    even, odd : their words; those of the odd term begin `shift` bits behind
    """
    before, middle, last = tile[odd], tile[odd + 1], tile[odd + 2]
    for k in range(2):
        one = uint32(tile[even + k])
        low, high = (middle, last) if k else (before, middle)
        other = uint32((uint64(high) << uint64(32) | uint64(low)) >> uint64(shift))
        raw[first + 2 * k, e] = one & uint32(0xFFFF) | other << uint32(16)
        raw[first + 2 * k + 1, e] = one >> uint32(16) | other & uint32(0xFFFF0000)


@cache
def taking_16_bit(rows: int, by: str) -> Any:
    """As `tiles.take_across_slab` of a slab: a lane holds four neighbours."""
    alone = by == PIECES  # are 32 rows
    _, BOX, FURTHER, TILE = places_of(8, WIDTH if alone else rows, by)
    UNITS, NEXT = rows // WIDTH, TILE if alone else WIDTH // 2

    @cuda.jit(device=True)
    def take(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        skew = uint32(2 * q * pitch) % 8  # of the even feature of each two: words
        other = uint32(skew + pitch) % 8
        shift = uint32(16 * (other % 2))
        place = start + 2 * q * BOX + 2 * g
        for e in range(2):
            even = place + skew // 2 + (2 * s + e) * FURTHER
            odd = place + other // 2 + (2 * s + e) * FURTHER + BOX
            for u in range(UNITS):
                take_four(tile, even + u * NEXT, odd + u * NEXT, shift, raw, 4 * u, e)

    return take


@cache
def taking_along(groups: int, line_of: Any) -> Any:
    """As `tiles.take_along_slab` of a slab, of 16 bits in pieces. `how` is 8 times the terms that
    there are, and the pitch, less its eights: further terms are 0."""
    FEATURE = places_of(8, WIDTH, PIECES).box

    @cuda.jit(device=True)
    def take(tile, start, s, how, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        left = uint32(how // 8)
        for j in range(groups):
            line = uint32(line_of(j, g))
            skew = uint32(line * how) % 8
            at, shift = start + line * FEATURE + skew // 2, uint64(16 * (skew % 2))
            for e in range(2):
                term = uint32(16 * s + 8 * e + 2 * q)
                word = at + term // 2
                two = uint64(tile[word + 1]) << uint64(32) | uint64(tile[word])
                pair = uint32(two >> shift)
                pair = pair if term + 1 < left else pair & uint32(0xFFFF)
                raw[j, e] = pair if term < left else uint32(0)

    return take


@cache
def taking_float32(rows: int) -> Any:
    """The same of float32, from boxes."""
    _, BOX, FURTHER, _ = places_of(4, rows, BOXES)

    @cuda.jit(device=True)
    def take(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            box = uint32(2 * q + e) % 4
            skew = uint32(box * pitch) % 4
            at = start + box * BOX + skew + (2 * s + q // 2) * FURTHER + 4 * g
            for j in range(rows // 8):
                raw[j, e] = tile[at + j // 4 * WIDTH + j % 4]

    return take
