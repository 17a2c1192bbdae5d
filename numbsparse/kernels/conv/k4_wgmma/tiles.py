"""Tiles of 8 x 8 pixels: 64 rows of a product, in groups of 8 at equal distances."""

from __future__ import annotations

from math import prod

from numbsparse.device import SIMULATED
from numbsparse.kernels.conv.k2_tensor_core.tiles import Cut, Shapes
from numbsparse.kernels.conv.window import Pass

SIDE = 8
PIXELS = 64  # of a product
LARGEST = 64  # features of a block; larger ones are taken as several
MOST_WASTE = 1000.0 if SIMULATED else 1.5  # outputs of all tiles, over those that there are


def square_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """(images, tile): columns of 8 x 8 pixels; of pictures of one line, lines of 64."""
    if of.counts[0] == of.counts[1] == 1:
        for x in (PIXELS << k for k in range(rows.bit_length())):
            if x <= rows:
                yield min(batch, rows // x), (1, 1, x)
        return
    for z in {min(of.counts[0], 1 << k) for k in range(rows.bit_length())}:
        for y in (SIDE << k for k in range(rows.bit_length())):
            if z * y * SIDE <= rows:
                yield min(batch, rows // (z * y * SIDE)), (z, y, SIDE)


def group_lines(how: Cut) -> int:
    """Lines of a box from one group of 8 to the next of a product."""
    return SIDE if how.tile[2] > SIDE else how.box[2]


def is_filled(how: Cut, rows: int, of: Pass, batch: int) -> bool:
    """Whether most of what tiles of so many rows compute are outputs."""
    return prod(how.tiles) * rows <= MOST_WASTE * batch * prod(of.counts)
