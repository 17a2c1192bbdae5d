"""Rows of pixels, packed: features down, pixels and images across, the padding's zeros at the ends.

A strip is a part of a row of the image, of `width` outputs; its lanes are (pixel, image): what taps
see, every `scale`-th pixel of the row from each residue on, of each of `images` images.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from numbsparse.kernels.conv.window import Pass
from numbsparse.kernels.cores import DONE, inner, next_share, wait
from numbsparse.kernels.simd import fetch_add, load, store_transposed

MOST_WIDTH = 128  # outputs of a strip
MOST_IMAGES = 32
SQUARE = 4  # lanes and features that are transposed at once


class Strips(NamedTuple):
    """How the outputs of a pass are arranged in vectors."""

    images: int  # of a group, next to each other
    width: int  # outputs of a strip, each of every image
    strips: int  # in a row
    features: int  # R of a tile
    columns: int  # C, lanes of a tile
    lanes: int  # of a strip, packed, in whole squares
    pixels: (
        np.ndarray
    )  # (lanes / images,) int64: which each lane has, as output 0 of a row sees them
    tap_lane: np.ndarray  # (taps,) int64: the lane that holds what output 0 sees
    tap_row: np.ndarray  # (taps, rows of outputs) int64: the row of the image, or -1
    out_rows: np.ndarray  # (residues, rows of outputs) int64: where these rows are, or -1
    first: np.ndarray  # (residues,) int64: the first pixel of a row


@lru_cache(maxsize=256)
def strips_of(of: Pass, batch: int, shapes: tuple[tuple[float, int, int], ...]) -> Strips:
    """`shapes`: what a lane costs in tiles of so many features and lanes."""
    scale, count = of.view.scale[2], of.view.counts[2]
    seen = [divmod(offset[2], scale) for offset in of.offsets] or [(0, 0)]
    width = -(-count // -(-count // MOST_WIDTH))
    _, images, columns, features = min(
        (-(-batch // n) * -(-width * n // columns) * columns * price, n, columns, features)
        for n in range(1, min(batch, MOST_IMAGES) + 1)
        for price, features, columns in shapes
    )
    shifts = range(min(seen)[0], max(seen)[0] + width)
    residues = sorted({residue for _, residue in seen})
    pixels = [shift * scale + residue for residue in residues for shift in shifts]
    tap_lane = [pixels.index(offset[2]) * images for offset in of.offsets]
    tap_row = [of.rows().sources(offset) for offset in of.rows().offsets]
    in_row = of.view.residues[2]
    out_rows = [of.rows().outputs(n // in_row) for n in range(prod(of.view.residues))]
    return Strips(
        images,
        width,
        -(-count // width),
        features,
        columns,
        -(-len(pixels) * images // SQUARE) * SQUARE,
        np.array(pixels),
        np.array(tap_lane, np.int64),
        np.array(tap_row, np.int64).reshape(len(of.taps), prod(of.view.counts[:2])),
        np.array(out_rows),
        np.arange(len(out_rows)) % in_row,
    )


@inner()
def pack_rows(core, counts, x, images, strips, width, scale, pixels, first, packed):
    """packed[group, row, strip] = (features, lanes) of the images from `first` on.

    x is (batch, rows, pixels, features); those that are packed end with a square. Returns when all
    is packed, by whichever core.
    """
    groups, rows, _, rounded, lanes = packed.shape
    batch, _, row_length, features = x.shape
    line = np.zeros((SQUARE, rounded), packed.dtype)
    work = groups * rows * strips
    item, end = next_share(core, counts, 1, work)
    while item < end:
        group, row, strip = item // (rows * strips), item // strips % rows, item % strips
        begin = item * rounded * lanes
        for lane in range(0, lanes, SQUARE):
            for v in range(SQUARE):
                n = first + group * images + (lane + v) % images
                p, pixel = (lane + v) // images, np.int64(-1)
                if n < batch and p < len(pixels):
                    pixel = strip * width * scale + pixels[p]
                if 0 <= pixel < row_length:
                    for c in range(features):  # as rows, they would compile twice as long
                        line[v, c] = x[n, row, pixel, c]
                else:
                    line[v, :] = 0
            for c in range(0, rounded, SQUARE):
                square = load(line, (c,), 0, rounded, SQUARE, SQUARE)
                store_transposed(square, packed, begin + c * lanes + lane, lanes)
        fetch_add(counts, DONE, 1)
        item, end = next_share(core, counts, 1, work)
    wait(counts, work)
