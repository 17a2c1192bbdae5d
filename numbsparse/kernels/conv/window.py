"""Which pixels the taps of a convolution join, and how outputs are cut into tiles.

A pass is a grid of outputs that all see the same pattern of pixels. A tile is a box of outputs of a
few images. The pixels that a chunk of taps sees from there are a box too, a little larger: loaded
once, it serves all of them, and a tap is a shift in it. Taps whose offsets differ modulo the scale
see pixels that have nothing in common: they are in other chunks, and then a box holds every
scale-th pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED

Three = tuple[int, int, int]
Four = tuple[int, int, int, int]
LONGEST = 256  # side of a box, as the copy engine takes them
ALIGNED = 8  # rows: a stage ends at a multiple of 128 bytes
SIDE, PIXELS = 8, 64  # of a tile whose rows wgmma reads where they are: 8 groups of 8
MOST_WASTE = 1000.0 if SIMULATED else 4.0  # places in all tiles, over outputs


class Window(NamedTuple):
    """Pixel o of the small image sees, through tap t, pixel o * stride - low + t * dilation.

    Every field has three axes; images of fewer have axes of length 1 in front.
    """

    big: Three
    small: Three
    kernel: Three
    stride: Three
    low: Three  # padding before the first pixel
    dilation: Three

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def is_identity(self) -> bool:
        """Whether each pixel sees only itself: a product of matrices."""
        return self.taps == 1 and self.big == self.small and not any(self.low)

    @lru_cache(maxsize=512)  # noqa: B019  a window is a few numbers
    def passes(self, product: str) -> tuple[Pass, ...]:
        """The outputs of a product, each in one of the passes, without taps that see no pixel."""
        if product == "weight_grad":
            return (_forward(self),)
        if product == "forward":
            return (_forward(self).seeing(),)
        return tuple(of.seeing() for of in _input_grad(self))

    def offsets(self) -> np.ndarray:
        """(taps, 3): what each tap sees from pixel 0 of the small image."""
        taps = np.indices(self.kernel).reshape(3, -1).T
        return taps * self.dilation - self.low


class View(NamedTuple):
    """What a kernel knows of a `Pass`."""

    counts: Three
    step: Three
    first: Three
    scale: Three
    sizes: Three  # of the images that it sees
    out_sizes: Three  # of those that it writes


class Pass(NamedTuple):
    """Outputs o * step + first for o below counts; taps[k] sees o * scale + offsets[k]."""

    counts: Three
    step: Three
    first: Three
    scale: Three
    sizes: Three
    out_sizes: Three
    taps: tuple[int, ...]
    offsets: tuple[Three, ...]

    @property
    def view(self) -> View:
        return View(*self[:6])

    def seeing(self) -> Pass:
        """Without the taps that see no pixel."""
        offsets = np.reshape(self.offsets, (-1, 3))
        first = np.maximum(-(offsets // self.scale), 0)  # that sees pixel 0, or one beyond
        meets = (first < self.counts) & (first * self.scale + offsets < self.sizes)
        kept = np.flatnonzero(meets.all(axis=1))
        taps = tuple(self.taps[k] for k in kept)
        return self._replace(taps=taps, offsets=_threes(offsets[kept]))

    def outputs(self) -> np.ndarray:
        """The pixel of each output, (outputs,)."""
        places = np.indices(self.counts).reshape(3, -1).T * self.step + self.first
        return np.ravel_multi_index(tuple(places.T), self.out_sizes)

    def sources(self, k: int) -> np.ndarray:
        """The pixel that each output sees through taps[k], (outputs,), or -1 outside the image."""
        places = np.indices(self.counts).reshape(3, -1).T * self.scale + self.offsets[k]
        inside = ((places >= 0) & (places < self.sizes)).all(axis=1)
        _, height, width = self.sizes
        return np.where(inside, places @ (height * width, width, 1), -1)


def _forward(window: Window) -> Pass:
    sizes, taps = (window.big, window.small), tuple(range(window.taps))
    offsets = _threes(window.offsets())
    return Pass(window.small, (1, 1, 1), (0, 0, 0), window.stride, *sizes, taps, offsets)


def _input_grad(window: Window) -> Iterator[Pass]:
    """A pass for the pixels of each residue modulo the stride: the same taps reach all of them."""
    for first in np.ndindex(*np.minimum(window.stride, window.big)):
        (counts,) = _threes(-(np.subtract([first], window.big) // window.stride))
        steps, rest = np.divmod(first - window.offsets(), window.stride)
        taps = np.flatnonzero((rest == 0).all(axis=1))
        sizes, offsets = (window.small, window.big), _threes(steps[taps])
        yield Pass(counts, window.stride, first, (1, 1, 1), *sizes, tuple(taps.tolist()), offsets)


def _threes(rows: Any) -> tuple[Three, ...]:
    return tuple((a, b, c) for a, b, c in rows.tolist())


class Chunk(NamedTuple):
    """Taps that share a box, whose first pixel is that of output 0 plus `origin`."""

    taps: tuple[int, ...]  # as the pass counts them
    shifts: tuple[Three, ...]  # of each tap, in pixels of the box
    origin: Three


class Tiling(NamedTuple):
    """What a kernel knows of a `Cut`, and the scale; `rows` of a stage hold a box."""

    images: int
    tile: Three
    box: Three
    rows: int
    tiles: Four
    scale: Three


class Cut(NamedTuple):
    """A pass in tiles of `tile` outputs of `images` images, and the chunks of its taps."""

    images: int
    tile: Three
    box: Three  # of one size for every chunk
    tiles: Four  # along the batch and each axis
    chunks: tuple[Chunk, ...]
    scale: Three

    @property
    def rows(self) -> int:
        """Rows of a stage that holds a box."""
        return -(-self.images * prod(self.box) // ALIGNED) * ALIGNED

    def tiling(self, line: int = 128) -> Tiling:
        """With boxes that end where the pattern of swizzled lines of `line` bytes repeats."""
        together = max(1024 // line, ALIGNED)
        rows = -(-self.rows // together) * together
        return Tiling(self.images, self.tile, self.box, rows, self.tiles, self.scale)

    @property
    def group(self) -> int:
        """Rows of a box from one group of 8 outputs to the next, of `square_shapes`."""
        return SIDE if self.tile[2] > SIDE else self.box[2]

    def is_filled(self, of: Pass, batch: int, rows: int) -> bool:
        """Whether most rows of such tiles, `rows` in each, are outputs."""
        return prod(self.tiles) * rows <= MOST_WASTE * batch * prod(of.counts)

    def fills(self, of: Pass, rows: int) -> bool:
        """Whether all `rows` of every tile are outputs.

        In a weight-gradient the others are zeros times pixels of the image, NaN if these are not
        finite.
        """
        along = zip(of.counts, self.tile, strict=True)
        return self.images * prod(self.tile) == rows and all(n % t == 0 for n, t in along)


Shapes = Iterator[tuple[int, Three]]


def any_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """(images, tile) of up to `rows` outputs: sides are powers of two, or whole images."""
    sides = [
        sorted({min(n, 1 << k) for k in range(rows.bit_length())}) for n in (*of.counts, batch)
    ]
    for z in sides[0]:
        for y in sides[1]:
            for x in sides[2]:
                if z * y * x <= rows:
                    yield min(batch, rows // (z * y * x)), (z, y, x)


def square_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """(images, tile): columns of 8 x 8 pixels; of images of one line, lines of 64."""
    if of.counts[0] == of.counts[1] == 1:
        for x in (PIXELS << k for k in range(rows.bit_length())):
            if x <= rows:
                yield min(batch, rows // x), (1, 1, x)
        return
    for z in {min(of.counts[0], 1 << k) for k in range(rows.bit_length())}:
        for y in (SIDE << k for k in range(rows.bit_length())):
            if z * y * SIDE <= rows:
                yield min(batch, rows // (z * y * SIDE)), (z, y, SIDE)


@lru_cache(maxsize=1024)
def cut(
    of: Pass,
    batch: int,
    rows: int,
    most_taps: int,
    most_rows: int,
    shapes: Callable[[Pass, int, int], Shapes] = any_shapes,
) -> Cut:
    """The cheapest cut: tiles of up to `rows` outputs, boxes of up to `most_rows` pixels."""
    while True:
        chunks = chunks_of(of, most_taps)
        spread = [
            max((shift[axis] for chunk in chunks for shift in chunk.shifts), default=0)
            for axis in range(3)
        ]
        best = min(
            (_cost(of, batch, shape, spread, rows, most_rows) for shape in shapes(of, batch, rows)),
            default=None,
        )
        if best is not None and best[0] < np.inf:
            _, images, tile = best
            box = tuple(t + s for t, s in zip(tile, spread, strict=True))
            along = tuple(-(-n // t) for n, t in zip(of.counts, tile, strict=True))
            tiles = (-(-batch // images), *along)
            return Cut(images, tile, box, tiles, chunks, of.scale)  # type: ignore[arg-type]
        most_taps = (most_taps + 1) // 2


def chunks_of(of: Pass, most: int) -> tuple[Chunk, ...]:
    """The taps of a pass, at most `most` together."""
    groups: dict[Three, list[tuple[Three, int]]] = {}
    shifts, rests = map(_threes, np.divmod(np.reshape(of.offsets, (-1, 3)), of.scale))
    for k, (shift, rest) in enumerate(zip(shifts, rests, strict=True)):
        groups.setdefault(rest, []).append((shift, k))
    chunks = []
    for rest, taps in groups.items():
        taps.sort()
        for start in range(0, len(taps), most):
            some, numbers = zip(*taps[start : start + most], strict=True)
            low = np.min(some, axis=0)
            (origin,) = _threes(np.array([low * of.scale + rest]))
            chunks.append(Chunk(numbers, _threes(some - low), origin))
    return tuple(chunks)


def _cost(of: Pass, batch: int, shape: Any, spread: Any, rows: int, most_rows: int) -> Any:
    """Of all tiles, in rows: those multiplied, counted for every tap, and those loaded, once."""
    images, tile = shape
    tiles = -(-batch // images) * prod(-(-n // t) for n, t in zip(of.counts, tile, strict=True))
    box = images * prod(t + s for t, s in zip(tile, spread, strict=True))
    longest = max((t + s) * by for t, s, by in zip(tile, spread, of.scale, strict=True))
    if box > most_rows or longest > LONGEST:
        return np.inf, images, tile
    uneven = 1 if tile[2] % ALIGNED == 0 else 1.25  # rows read together use fewer banks
    return tiles * (rows * max(len(of.taps), 1) * uneven + 2 * box), images, tile
