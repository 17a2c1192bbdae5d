"""Which pixels the taps of a convolution join, and how outputs are cut into tiles.

A pass is a grid of outputs that all see the same pattern of pixels. An output of an input-gradient
at a stride is a square of pixels, one of each residue, with lines of its own for each. A tile is a
box of outputs of a few images. The pixels that a chunk of taps sees from there are a box too, a
little larger: loaded once, it serves all of them, and a tap is a shift in it. Taps whose offsets
differ modulo the scale see pixels that have nothing in common: they are in other chunks, and then a
box holds every scale-th pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED

Three = tuple[int, int, int]
Four = tuple[int, int, int, int]
ONE = (1, 1, 1)
LONGEST = 256  # side of a box, as the copy engine takes them
ALIGNED = 8  # rows: a stage ends at a multiple of 128 bytes
SIDE, PIXELS = 8, 64  # of a tile whose rows wgmma reads where they are: 8 groups of 8
MOST_TAPS = 12  # of a box in `k6_strips`, lest a column has more steps than a stage counts
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
        # Padding behind can make up for a stride; on an axis of one pixel that says nothing.
        steps = all(s == 1 or n == 1 for s, n in zip(self.stride, self.small, strict=True))
        return self.taps == 1 and self.big == self.small and steps and not any(self.low)

    @lru_cache(maxsize=512)  # noqa: B019  a window is a few numbers
    def whole(self, product: str) -> Pass:
        """The outputs of a product, and all taps."""
        return _input_grad(self) if product == "input_grad" else _forward(self)

    @lru_cache(maxsize=512)  # noqa: B019
    def seeing(self, product: str) -> Pass:
        """The same without the taps that see no pixel."""
        of = self.whole(product)
        (counts, _, scale, sizes, *_), offsets = of.view, np.array(of.offsets)
        first = np.maximum(-(offsets // scale), 0)  # that sees pixel 0, or one beyond
        meets = (first < counts) & (first * scale + offsets < sizes)
        return of.some(np.flatnonzero(meets.all(axis=1)).tolist())

    def sources(self, product: str) -> np.ndarray:
        """(taps, pixels of the result, or dy): the pixel that each one sees, or -1: none."""
        of = self.whole(product)
        sources = np.full((self.taps, prod(of.view.out_sizes)), -1)
        for tap, offset, residue in zip(*of[1:], strict=True):
            outputs, seen = of.outputs(residue), of.sources(offset)
            sources[tap, outputs[outputs >= 0]] = seen[outputs >= 0]
        return sources

    def offsets(self) -> np.ndarray:
        """(taps, 3): what each tap sees from pixel 0 of the small image."""
        taps = np.indices(self.kernel).reshape(3, -1).T
        return taps * self.dilation - self.low


class View(NamedTuple):
    """What a kernel knows of a `Pass`: output o, below counts, is o * step and what follows it."""

    counts: Three
    step: Three
    scale: Three
    sizes: Three  # of the images that it sees
    out_sizes: Three  # of those that it writes
    residues: Three  # pixels of an output along each axis


class Pass(NamedTuple):
    """Outputs whose pixel residues[k] sees o * scale + offsets[k] through taps[k]."""

    view: View
    taps: tuple[int, ...]
    offsets: tuple[Three, ...]
    residues: tuple[int, ...]

    def some(self, which: Sequence[int]) -> Pass:
        """With these of its taps."""
        lists: Any = ([of_taps[k] for k in which] for of_taps in self[1:])
        return Pass(self.view, *map(tuple, lists))

    def rows(self) -> Pass:
        """The same of rows of pixels: of images that are one pixel wide."""
        view = View(*((*axes[:2], 1) for axes in self.view))
        offsets = tuple((z, y, 0) for z, y, _ in self.offsets)
        return Pass(
            view, self.taps, offsets, tuple(n // self.view.residues[2] for n in self.residues)
        )

    @property
    def seen(self) -> tuple[tuple[Three, ...], np.ndarray]:
        """The offsets, each once, and which of them each tap has."""
        return _once(self.offsets)

    @property
    def reached(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The residues that taps reach, each once, and which of them each tap does."""
        return _once(self.residues)

    def sources(self, offset: Three) -> np.ndarray:
        """The pixel that each output sees at an offset, (outputs,), or -1 outside the image."""
        return _pixels(self.view.counts, self.view.scale, offset, self.view.sizes)

    def outputs(self, residue: int) -> np.ndarray:
        """The pixel of each output that is this residue, (outputs,), or -1 outside the image."""
        first = np.unravel_index(residue, self.view.residues)
        return _pixels(self.view.counts, self.view.step, first, self.view.out_sizes)


def _once(of_taps: tuple[Any, ...]) -> tuple[tuple[Any, ...], np.ndarray]:
    each = tuple(sorted(set(of_taps)))
    return each, np.array([each.index(value) for value in of_taps], int)


def _forward(window: Window) -> Pass:
    view = View(window.small, ONE, window.stride, window.big, window.small, ONE)
    taps = tuple(range(window.taps))
    return Pass(view, taps, _threes(window.offsets()), (0,) * window.taps)


def _input_grad(window: Window) -> Pass:
    """An output is as many pixels as the stride is long: a tap reaches one of them."""
    offsets, sizes = window.offsets(), np.array(window.big)
    residues, taps = np.minimum(window.stride, sizes), np.arange(window.taps)
    first = offsets % window.stride
    steps, none = (first - offsets) // window.stride, (first >= residues).any(axis=1)
    first[none], steps[none, 0] = 0, window.small[0] + taps[none]  # each beyond the images
    reached = np.ravel_multi_index(tuple(first.T), residues)
    counts, residues = _threes(np.stack([-(-sizes // window.stride), residues]))
    view = View(counts, window.stride, ONE, window.small, window.big, residues)
    return Pass(view, tuple(taps.tolist()), _threes(steps), tuple(reached.tolist()))


def _pixels(counts: Three, scale: Three, offset: Any, sizes: Three) -> np.ndarray:
    """Of each output the number of a pixel in images of these sizes, -1 outside of them."""
    places = np.indices(counts).reshape(3, -1).T * scale + offset
    inside = ((places >= 0) & (places < sizes)).all(axis=1)
    return np.where(inside, places @ (sizes[1] * sizes[2], sizes[2], 1), -1)


def _threes(rows: Any) -> tuple[Three, ...]:
    return tuple((a, b, c) for a, b, c in rows.tolist())


class Chunk(NamedTuple):
    """Taps that share a box, whose first pixel is that of output 0 plus `origin`."""

    taps: tuple[int, ...]  # as the pass counts them
    shifts: tuple[Three, ...]  # of each tap, in pixels of the box
    origin: Three


class Cut(NamedTuple):
    """A pass in tiles of `tile` outputs of `images` images, for kernels: their `tiling`."""

    images: int
    tile: Three
    box: Three  # of one size for every chunk
    rows: int  # of a stage that holds a box
    tiles: Four  # along the batch and each axis
    scale: Three

    @property
    def group(self) -> int:
        """Rows of a box from one group of 8 outputs to the next, of `square_shapes`."""
        return SIDE if self.tile[2] > SIDE else self.box[2]

    def is_filled(self, of: Pass, batch: int, rows: int) -> bool:
        """Whether most rows of such tiles, `rows` in each, are outputs."""
        return prod(self.tiles) * rows <= MOST_WASTE * batch * prod(of.view.counts)


Shapes = Iterator[tuple[int, Three]]


def any_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """(images, tile) of up to `rows` outputs: sides are powers of two, or whole images."""
    return _shapes(batch, rows, *(_powers(rows, n) for n in of.view.counts))


def even_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """The same, of sides that divide images evenly too; a quarter filled, where there are so many
    outputs."""
    least = min(rows, batch * prod(of.view.counts)) // 4
    shapes = _shapes(batch, rows, *(_even(rows, n) for n in of.view.counts))
    return ((images, tile) for images, tile in shapes if images * prod(tile) >= least)


def square_shapes(of: Pass, batch: int, rows: int) -> Shapes:
    """(images, tile): columns of 8 x 8 pixels; of images of one line, lines of 64."""
    depth, height, _ = of.view.counts
    if depth == height == 1:
        return _shapes(batch, rows, [1], [1], [PIXELS * n for n in _powers(rows, rows)])
    columns = [SIDE * n for n in _powers(rows, rows)]
    return _shapes(batch, rows, _powers(rows, depth), columns, [SIDE])


def _shapes(batch: int, rows: int, *sides: list[int]) -> Shapes:
    for z, y, x in product(*sides):
        if z * y * x <= rows:
            yield min(batch, rows // (z * y * x)), (z, y, x)


def _powers(rows: int, most: int) -> list[int]:
    return sorted({min(most, 1 << k) for k in range(rows.bit_length())})


def _even(rows: int, most: int) -> list[int]:
    return sorted({*_powers(rows, most), *(-(-most // parts) for parts in range(1, most + 1))})


@lru_cache(maxsize=1024)
def cut(
    of: Pass,
    batch: int,
    rows: int,
    most_taps: int,
    most_rows: int,
    shapes: Callable[[Pass, int, int], Shapes] = any_shapes,
    line: int = 128,
) -> tuple[Cut, tuple[Chunk, ...]]:
    """The cheapest cut: tiles of up to `rows` outputs, boxes of up to `most_rows` pixels.

    And the chunks of its taps: as many taps together as there is room for, or half of them where
    `even_shapes` then load less. A stage ends where the pattern of swizzled lines of `line` bytes
    repeats.
    """
    together, found = max(1024 // line, ALIGNED), list[Any]()
    tries = 2 if shapes is even_shapes else 1
    while tries:
        chunks = chunks_of(of, most_taps)
        spread, boxes = spread_of(chunks), len(chunks) if shapes is even_shapes else 1
        how = spread, rows, most_rows, boxes
        each = (_cost(of, batch, shape, *how) for shape in shapes(of, batch, rows))
        best = min(each, default=(np.inf,))
        if best[0] < np.inf:
            found.append((best[0], len(found), best[1:], spread, chunks))
        tries, most_taps = tries - len(found[:1]), (most_taps + 1) // 2
    _, _, (images, tile), spread, chunks = min(found)
    box: Any = tuple(t + s for t, s in zip(tile, spread, strict=True))
    along = tuple(-(-n // t) for n, t in zip(of.view.counts, tile, strict=True))
    stage = -(-images * prod(box) // together) * together
    tiles: Any = -(-batch // images), *along
    return Cut(images, tile, box, stage, tiles, of.view.scale), chunks


def chunks_of(of: Pass, most: int) -> tuple[Chunk, ...]:
    """The taps of a pass, at most `most` together."""
    groups: dict[Three, list[tuple[Three, int]]] = {}
    shifts, rests = map(_threes, np.divmod(np.reshape(of.offsets, (-1, 3)), of.view.scale))
    for k, (shift, rest) in enumerate(zip(shifts, rests, strict=True)):
        groups.setdefault(rest, []).append((shift, k))
    chunks = []
    for rest, taps in groups.items():
        taps.sort()
        for start in range(0, len(taps), most):
            some, numbers = zip(*taps[start : start + most], strict=True)
            low = np.min(some, axis=0)
            (origin,) = _threes(np.array([low * of.view.scale + rest]))
            chunks.append(Chunk(numbers, _threes(some - low), origin))
    return tuple(chunks)


class Boxes(NamedTuple):
    """Boxes of pixels, of this size, that the taps of a chunk share."""

    chunks: tuple[Chunk, ...]
    box: Three
    shifts: int  # more than the pixel that each tap sees from output 0, a power of two


def boxes_of_chunks(chunks: tuple[Chunk, ...], box: Three) -> Boxes:
    return Boxes(chunks, box, 1 << int(seen_in_boxes(chunks, box)[1].max()).bit_length())


def seen_in_boxes(chunks: tuple[Chunk, ...], box: Three) -> np.ndarray:
    """(2, taps): the chunk of each, and which pixel of a box it sees from output 0."""
    found = np.zeros((2, sum(len(chunk.taps) for chunk in chunks)), int)
    for number, (taps, shifts, _) in enumerate(chunks):
        found[0, list(taps)] = number
        found[1, list(taps)] = np.ravel_multi_index(tuple(zip(*shifts, strict=True)), box)
    return found


@lru_cache(maxsize=1024)
def even_chunks(of: Pass) -> tuple[Chunk, ...]:
    """Of up to MOST_TAPS each."""
    n = max(len(of.taps), 1)
    return chunks_of(of, -(-n // -(-n // MOST_TAPS)))


def spread_of(chunks: tuple[Chunk, ...]) -> Three:
    """How much larger than a tile a box is that each of them fits."""
    shifts = [shift for chunk in chunks for shift in chunk.shifts]
    spread: Any = tuple(np.max(shifts or [(0, 0, 0)], axis=0).tolist())
    return spread


def _cost(
    of: Pass, batch: int, shape: Any, spread: Any, rows: int, most_rows: int, boxes: int
) -> Any:
    """Of all tiles, in rows: those multiplied, counted for every tap, and those of `boxes`."""
    images, tile = shape
    tiles = -(-batch // images) * prod(
        -(-n // t) for n, t in zip(of.view.counts, tile, strict=True)
    )
    box = images * prod(t + s for t, s in zip(tile, spread, strict=True))
    longest = max((t + s) * by for t, s, by in zip(tile, spread, of.view.scale, strict=True))
    if box > most_rows or longest > LONGEST:
        return np.inf, images, tile
    uneven = 1 if tile[2] % ALIGNED == 0 else 1.25  # rows read together use fewer banks
    return tiles * (rows * max(len(of.taps), 1) * uneven + 2 * box * boxes), images, tile
