"""How the outputs of a pass are cut into tiles, and its taps into chunks that share a box of input.

A tile is a box of outputs of a few images. The pixels that a chunk of taps sees from there are a
box too, a little larger: loaded once, it serves all of them, and a tap is a shift in it. Taps whose
offsets differ modulo the scale see pixels that have nothing in common: they are in other chunks,
and then a box holds every scale-th pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.conv.walks import entries
from numbsparse.kernels.conv.window import Pass, Three
from numbsparse.layout import Index

Four = tuple[int, int, int, int]
LONGEST = 256  # side of a box, as the copy engine takes them
ALIGNED = 8  # rows: a stage ends at a multiple of 128 bytes


class Chunk(NamedTuple):
    """Taps that share a box, whose first pixel is that of output 0 plus `origin`."""

    taps: tuple[int, ...]  # as the pass counts them
    shifts: tuple[Three, ...]  # of each tap, in pixels of the box
    origin: Three


class Cut(NamedTuple):
    """A pass in tiles of `tile` outputs of `images` images, and the chunks of its taps."""

    images: int
    tile: Three
    box: Three  # as large for every chunk
    tiles: Four  # along the batch and each axis
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        """Rows of a stage that holds a box."""
        return -(-self.images * prod(self.box) // ALIGNED) * ALIGNED

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
            return Cut(images, tile, box, (-(-batch // images), *along), chunks)  # type: ignore[arg-type]
        most_taps = (most_taps + 1) // 2


def chunks_of(of: Pass, most: int) -> tuple[Chunk, ...]:
    """The taps of a pass, at most so many together."""
    groups: dict[Three, list[tuple[Three, int]]] = {}
    for k, offset in enumerate(of.offsets):
        parts = [divmod(n, scale) for n, scale in zip(offset, of.scale, strict=True)]
        shift, rest = zip(*parts, strict=True)
        groups.setdefault(rest, []).append((shift, k))  # type: ignore[arg-type]
    chunks = []
    for rest, taps in groups.items():
        taps.sort()
        for start in range(0, len(taps), most):
            few = taps[start : start + most]
            low = [min(shift[axis] for shift, _ in few) for axis in range(3)]
            shifts = tuple(tuple(np.subtract(shift, low).tolist()) for shift, _ in few)
            origin = tuple(n * s + r for n, s, r in zip(low, of.scale, rest, strict=True))
            chunks.append(Chunk(tuple(k for _, k in few), shifts, origin))  # type: ignore[arg-type]
    return tuple(chunks)


def line_units(
    index: Index, n_taps: int, product: str, of: Pass, box: Three, chunks: Any, parts: int = 1
) -> Any:
    """What each line multiplies, int32: a unit is a block of features, a chunk, and blocks of w.

    (unit_ptr (lines + 1), unit_line, unit_other, unit_chunk, entry_ptr (units + 1), entry_block,
    entry_shift, origins (chunks, 3)); every line has a unit, if only one without entries.
    """
    found = entries(index, n_taps, product, parts).of(of.taps)
    chunk, shift = _of_taps(chunks, box, len(of.taps))
    line, other, block = found.line, found.other, found.block
    chunk, shift = chunk[found.tap], shift[found.tap]
    order = np.lexsort((shift, other, chunk, line))
    line, other, block, chunk, shift = (a[order] for a in (line, other, block, chunk, shift))
    begins = np.flatnonzero(_changes(line, chunk, other))
    sizes = np.diff(np.append(begins, line.size))
    empty = np.setdiff1d(np.arange(found.lines), line)
    unit_line = np.append(line[begins], empty)
    order = np.argsort(unit_line, kind="stable")
    none = np.zeros(empty.size, int)
    unit_other, unit_chunk, sizes = (
        np.append(a, none)[order] for a in (other[begins], chunk[begins], sizes)
    )
    unit_line = unit_line[order]
    unit_ptr = np.searchsorted(unit_line, np.arange(found.lines + 1))
    return _int32(
        unit_ptr, unit_line, unit_other, unit_chunk, _starts(sizes), block, shift, _origins(chunks)
    )


def block_items(
    index: Index, n_taps: int, of: Pass, box: Three, chunks: Any, parts: int = 1
) -> Any:
    """Pairs of blocks of features, each with a chunk and its kept blocks of w, int32.

    (item_row, item_column, item_chunk, entry_ptr (items + 1), entry_block, entry_shift, origins).
    """
    found = entries(index, n_taps, "forward", parts).of(of.taps)
    chunk, shift = _of_taps(chunks, box, len(of.taps))
    column, row, block = found.line, found.other, found.block
    chunk, shift = chunk[found.tap], shift[found.tap]
    order = np.lexsort((shift, column, row, chunk))
    row, column, block, chunk, shift = (a[order] for a in (row, column, block, chunk, shift))
    begins = np.flatnonzero(_changes(chunk, row, column))
    sizes = np.diff(np.append(begins, row.size))
    heaviest = np.argsort(-sizes, kind="stable")
    items = tuple(a[begins] for a in (row, column, chunk))
    entry_ptr = _starts(sizes)
    return _int32(*items, heaviest, entry_ptr, block, shift, _origins(chunks))


def _of_taps(chunks: Any, box: Three, n_taps: int) -> tuple[np.ndarray, np.ndarray]:
    """The chunk of each tap, and its shift in rows of the box."""
    chunk, shift = np.zeros(n_taps, int), np.zeros(n_taps, int)
    for number, (taps, shifts, _) in enumerate(chunks):
        chunk[list(taps)] = number
        shift[list(taps)] = [(z * box[1] + y) * box[2] + x for z, y, x in shifts]
    return chunk, shift


def _origins(chunks: Any) -> np.ndarray:
    return np.array([chunk.origin for chunk in chunks] or [(0, 0, 0)])


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(sizes))


def _int32(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array.astype(np.int32) for array in arrays)


def _changes(*keys: np.ndarray) -> np.ndarray:
    """Where a run of equal keys begins."""
    begins = np.ones(keys[0].size, bool)
    begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return begins


def _cost(of: Pass, batch: int, shape: Any, spread: Any, rows: int, most_rows: int) -> Any:
    """Of all tiles, in rows: those multiplied by every tap, and those loaded once for all."""
    images, tile = shape
    tiles = -(-batch // images) * prod(-(-n // t) for n, t in zip(of.counts, tile, strict=True))
    box = images * prod(t + s for t, s in zip(tile, spread, strict=True))
    if box > most_rows or max(map(sum, zip(tile, spread, strict=True))) > LONGEST:
        return np.inf, images, tile
    uneven = 1 if tile[2] % ALIGNED == 0 else 1.25  # rows read together lie in fewer banks
    return tiles * (rows * max(len(of.taps), 1) * uneven + 2 * box), images, tile
