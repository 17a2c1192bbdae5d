"""Pixels and boxes of them inside kernels, and how boxes are loaded into shared memory.

Threads copy 16 bytes at a time, with `fetch_rows`; or the copy engine loads whole boxes, with
`fetch_box`, into a ring of stages.

A place has three axes. Numbers are below 2^32, because 32-bit division is far faster: loops whose
step is known no sooner than when they run are `while` loops, as `range` divides by it in 64 bits.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.conv.window import Three
from numbsparse.kernels.parts.ring import begin_ring
from numbsparse.kernels.ptx import cp_async_zero_fill, fence_mbarrier_init, tma_load_5d

NONE = -1


@cuda.jit(device=True)
def place_of(number, counts):
    """(image, place in it) of an output, of images of these counts."""
    number = uint32(number)
    a, b, c = uint32(counts[0]), uint32(counts[1]), uint32(counts[2])
    row = uint32(number // c)
    layer = uint32(row // b)
    image = uint32(layer // a)
    return int32(image), (
        int32(layer - image * a),
        int32(row - layer * b),
        int32(number - row * c),
    )


@cuda.jit(device=True)
def moved(o, by, offsets):
    """o * by + offsets."""
    return (
        int32(o[0] * by[0] + offsets[0]),
        int32(o[1] * by[1] + offsets[1]),
        int32(o[2] * by[2] + offsets[2]),
    )


@cuda.jit(device=True)
def plus(a, b):
    return int32(a[0] + b[0]), int32(a[1] + b[1]), int32(a[2] + b[2])


@cuda.jit(device=True)
def pixel(place, sizes):
    """The number of a pixel in its image, -1 outside of it."""
    for axis in range(3):
        if place[axis] < 0 or place[axis] >= sizes[axis]:
            return int32(-1)
    return int32((place[0] * sizes[1] + place[1]) * sizes[2] + place[2])


@cuda.jit(device=True)
def row_of(image, batch, place, sizes):
    """The row of a pixel of an image among all pixels, -1 outside of the image or of the batch."""
    inside = pixel(place, sizes)
    if inside < 0 or image >= batch:
        return int32(-1)
    return int32(image * (sizes[0] * sizes[1] * sizes[2]) + inside)


@cuda.jit(device=True)
def tile_of(number, tiling):
    """(first image, first output) of a tile."""
    tiles = tiling.tiles
    image, at = place_of(number, (tiles[1], tiles[2], tiles[3]))
    return int32(image * tiling.images), moved(at, tiling.tile, (0, 0, 0))


@cuda.jit(device=True)
def spread(places, count, images, box):
    """places[r] = (image, place) of number r of `images` boxes, packed; NONE beyond them."""
    r = uint32(cuda.threadIdx.x)
    while r < count:
        n, q = place_of(r, box)
        packed = int64(n) << 48 | int64(q[0]) << 32 | int64(q[1]) << 16 | int64(q[2])
        places[r] = packed if n < images else NONE
        r = uint32(r + cuda.blockDim.x)


@cuda.jit(device=True)
def unpacked(packed):
    """(image, place) of an item of `spread`."""
    high, low = int32(packed >> 32), int32(packed)
    return high >> 16, (int32(high & 0xFFFF), int32(low >> 16), int32(low & 0xFFFF))


@cuda.jit(device=True)
def row_at(packed, image, batch, top, by, offsets, sizes):
    """The row of images of pixel place * by + offsets; -1 outside of them.

    The place is packed, and counted from `top`.
    """
    n, q = unpacked(packed)
    found = row_of(image + n, batch, moved(plus(top, q), by, offsets), sizes)
    return found if packed >= 0 else int32(-1)


@cuda.jit(device=True)
def find_rows(rows, places, count, image, batch, top, by, offsets, sizes, pieces):
    """rows[r] = where the row of `row_at` begins of place r, in pieces; -1 outside of images."""
    r = uint32(cuda.threadIdx.x)
    while r < count:
        found = row_at(places[r], image, batch, top, by, offsets, sizes)
        rows[r] = found * pieces if found >= 0 else -1
        r = uint32(r + cuda.blockDim.x)


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
    def fetch(x, first, rows, count, ring, start):
        t = uint32(cuda.threadIdx.x)
        piece, r, n = t % PIECES, uint32(t // PIECES), uint32(count)
        if r >= LINES:
            return
        begin = int64(first + piece * PIECE)
        inside = uint32(SIZE * min(max(x.features - begin, 0), PIECE))
        while r < n:
            row, at = rows[r], uint32(start + place_in(r, piece))
            nbytes = inside if row >= 0 else uint32(0)
            cp_async_zero_fill(
                ring, at, x.values, begin + int64(row) * PIECE if nbytes else 0, nbytes
            )
            r = uint32(r + LINES)

    return fetch


def pixel_map(
    x: DeviceArray, sizes: Three, images: int, box: Three, B: int, scale: Three = (1, 1, 1)
) -> DeviceArray:
    """The map of images (batch, pixels, features) for boxes of B features of some images."""
    whole = x.reshape(x.shape[0], *sizes, x.shape[2])
    return tensor_map(whole, (images, *box, B), (1, *scale, 1))


@cuda.jit(device=True)
def start_rings(bars, x_stages, w_stages, consumers):
    """Barriers of each ring, the boxes' first: for full stages, then for emptied ones."""
    if cuda.threadIdx.x == 0:
        begin_ring(bars, 0, x_stages, uint32(1), uint32(consumers))
        begin_ring(bars, 2 * x_stages, w_stages, uint32(1), uint32(consumers))
        fence_mbarrier_init()
    cuda.syncthreads()


@cuda.jit(device=True)
def fetch_box(ring, start, x_map, c, top, tiling, origin, image, bars, full):
    """Features from c on of the box that a chunk of taps sees from the output `top`."""
    z, y, x = moved(top, tiling.scale, origin)
    tma_load_5d(ring, start, x_map, c, x, y, z, image, bars, full)
