"""Tiles of features that begin between multiples of 16 bytes, as those of an odd batch do.

The copy engine loads no box that begins there. But features as many apart as 16 bytes have values,
RUN, begin equally far behind such a multiple. So there is a box for each of the first RUN of a
tile, of every RUN-th feature from it on, which begins at the multiple before and has RUN rows of
the batch more. Lanes add what a box is skewed by when they read it.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.ptx import tma_load_2d

WIDTH = 32  # features of a tile
LINE = 32  # words: at multiples of which a box begins in shared memory


def words_of(run: int, rows: int) -> tuple[int, int]:
    """(words of a box, of a feature in it) of so many rows of the batch."""
    feature = (rows + run) * 4 // run
    return -(-WIDTH // run * feature // LINE) * LINE, feature


def boxes_of(x: DeviceArray, rows: int) -> tuple[DeviceArray, tuple[int, int]]:
    """What `tensor_maps` takes of x (rows, features): a line for RUN features, one after another."""
    run, stride = 16 // x.itemsize, x.strides[1]
    length = (run - 1) * stride // x.itemsize + x.shape[0]
    shape, strides = (x.shape[1] // run, length), (run * stride, x.itemsize)
    lines = DeviceArray(x.address, shape, x.dtype, strides, x.owner)
    return lines, (WIDTH // run, rows + run)


@cache
def loading(run: int, rows: int) -> Any:
    """load(shared, start, x_map, line, top, pitch, bars, bar): request the boxes of a tile, of rows
    from `top` on, a multiple of RUN; features are `pitch` values apart."""
    BOX, _ = words_of(run, rows)

    @cuda.jit(device=True)
    def load(shared, start, x_map, line, top, pitch, bars, bar):
        first, column = int32(line * (WIDTH // run)), int32(top)
        for r in range(run):
            place, at = uint32(start + r * BOX), int32(column - column % run)
            tma_load_2d(shared, place, x_map, at, first, bars, bar)
            column = int32(column + pitch)

    return load


@cache
def taking_16_bit(rows: int) -> Any:
    """As `tiles.take_across_slab` of a slab: a lane holds four neighbours."""
    BOX, FEATURE = words_of(8, rows)
    UNITS = rows // 32

    @cuda.jit(device=True)
    def take(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        skew = uint32(2 * q * pitch) % 8  # of the even feature of each two, a word or more
        other = uint32(skew + pitch) % 8
        shift = uint32(16 * (other % 2))
        place = start + 2 * q * BOX + 2 * g
        for e in range(2):
            even = place + skew // 2 + (2 * s + e) * FEATURE
            odd = place + other // 2 + (2 * s + e) * FEATURE + BOX
            for u in range(UNITS):
                a, b = even + 16 * u, odd + 16 * u
                first, middle, last = tile[b], tile[b + 1], tile[b + 2]
                for k in range(2):
                    one = uint32(tile[a + k])
                    low, high = (middle, last) if k else (first, middle)
                    two = uint32((uint64(high) << uint64(32) | uint64(low)) >> uint64(shift))
                    raw[4 * u + 2 * k, e] = one & uint32(0xFFFF) | two << uint32(16)
                    raw[4 * u + 2 * k + 1, e] = one >> uint32(16) | two & uint32(0xFFFF0000)

    return take


@cache
def taking_float32(rows: int) -> Any:
    """The same of float32."""
    BOX, FEATURE = words_of(4, rows)
    UNITS = rows // 32

    @cuda.jit(device=True)
    def take(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            box = uint32(2 * q + e) % 4
            at = start + box * BOX + uint32(box * pitch) % 4 + (2 * s + q // 2) * FEATURE + 4 * g
            for u in range(UNITS):
                for k in range(4):
                    raw[4 * u + k, e] = tile[at + 32 * u + k]

    return take
