"""Where a pixel is: numbers, places and windows, inside kernels.

Places have three axes. Numbers are below 2^32, and whole numbers of 32 bits divide far faster.
"""

from __future__ import annotations

from numba import cuda, int32, uint32


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
