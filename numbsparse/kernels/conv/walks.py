"""What each line of a product, or pair of blocks of features, multiplies: worked out per layout.

Kernels read these arrays, int32, and know nothing of layouts. Arrays that belong together are a
NamedTuple, which is one argument of a kernel.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.conv.window import Pass, Three, seen_in_boxes
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import dealt, in_turn
from numbsparse.layout import Index

START = 4  # what a line of a tile costs besides its taps, in taps
NONE = -1  # no kept block


class Entries(NamedTuple):
    """Every kept block seen from its outputs: line, tap, other block, stored block; by line."""

    line: np.ndarray
    tap: np.ndarray
    other: np.ndarray
    block: np.ndarray
    lines: int

    def of(self, some: Pass) -> Entries:
        """Those of the rising taps of a pass, which then count by their place among these.

        The lines of a residue follow all those of the one before.
        """
        kept = np.isin(self.tap, some.taps)
        line, tap, other, block = (a[kept] for a in self[:4])
        tap = np.searchsorted(some.taps, tap)
        line = line + np.array(some.residues, int)[tap] * self.lines
        order = np.argsort(line, kind="stable")
        line, tap, other, block = (a[order] for a in (line, tap, other, block))
        return Entries(line, tap, other, block, self.lines * prod(some.view.residues))


def entries(index: Index, n_taps: int, product: str, parts: int = 1) -> Entries:
    """Of a product's lines: out-blocks for forward, in-blocks for input_grad; sorted by other, tap.

    `index` is one of NumPy arrays, with block rows (tap, in_block). With `parts` each block stands
    for parts x parts smaller ones, whose numbers are (block * parts + part of the line) * parts +
    part of the other.
    """
    in_blocks = (index.rows.indptr.size - 1) // n_taps
    tap, row = np.divmod(index.block_rows, in_blocks)
    line, other, lines = index.block_columns, row, index.columns.indptr.size - 1
    if product == "input_grad":
        line, other, lines = row, line, in_blocks
    block, *of_part = np.indices((tap.size, parts, parts)).reshape(3, -1)
    line, other = (a[block] * parts + part for a, part in zip((line, other), of_part, strict=True))
    tap, block = tap[block], np.arange(block.size)
    order = np.lexsort((tap, other, line))
    return Entries(line[order], tap[order], other[order], block[order], lines * parts)


class Walk(NamedTuple):
    """The entries of each line, and the offsets of each tap."""

    indptr: Any  # (lines + 1)
    taps: Any
    others: Any
    blocks: Any
    offsets: Any  # (taps, 3)


def line_walk(index: Index, n_taps: int, product: str, of: Pass) -> Walk:
    found = entries(index, n_taps, product).of(of)
    indptr = np.searchsorted(found.line, np.arange(found.lines + 1))
    offsets = np.reshape(of.offsets, (-1, 3))
    return Walk(*_int32(indptr, found.tap, found.other, found.block, offsets))


class Units(NamedTuple):
    """What each line multiplies: a unit is a block of features, a chunk of taps, and entries.

    Every line has a unit, if only one without entries. An entry is a block of w, and the shift of
    its tap in rows of the box.
    """

    ptr: Any  # (lines + 1)
    line: Any  # (units)
    other: Any
    chunk: Any
    entry_ptr: Any  # (units + 1)
    block: Any  # (entries)
    shift: Any
    origins: Any  # (chunks, 3)


def line_units(
    index: Index, n_taps: int, product: str, of: Pass, box: Three, chunks: Any, parts: int = 1
) -> Units:
    found = entries(index, n_taps, product, parts).of(of)
    names = "line", "chunk", "other"
    (line, chunk, other), sizes, block, shift, origins = _runs(found, box, chunks, *names)
    empty = np.setdiff1d(np.arange(found.lines), line)
    order = np.argsort(np.append(line, empty), kind="stable")
    ends = zip((line, other, chunk, sizes), (empty, *[np.zeros(empty.size, int)] * 3), strict=True)
    line, other, chunk, sizes = (np.append(*parts)[order] for parts in ends)
    ptr = np.searchsorted(line, np.arange(found.lines + 1))
    return Units(*_int32(ptr, line, other, chunk, _starts(sizes), block, shift, origins))


class Schedule(NamedTuple):
    """Of each block of threads what it computes, one after another."""

    items: Any  # (n, 4): tile, line, residue, which of its lines
    ptr: Any  # (blocks + 1)


def line_items(
    index: Index,
    n_taps: int,
    product: str,
    of: Pass,
    box: Three,
    chunks: Any,
    tiles: int,
    places: int,
    parts: int,
) -> tuple[np.ndarray, ...]:
    """(*Units, *Schedule).

    Blocks of threads run in parallel, one in each of the places. Tiles vary slowest, so that all
    lines of one, on many multiprocessors, find its pixels in the L2 cache and write whole rows of y
    there; each item is dealt to the block that is free first.
    """
    units = line_units(index, n_taps, product, of, box, chunks, parts)
    taps = np.diff(units.entry_ptr[units.ptr])
    lines = np.argsort(-taps, kind="stable")
    of_line = np.stack([lines, *np.divmod(lines, lines.size // prod(of.view.residues))], 1)
    items = np.column_stack([np.repeat(np.arange(tiles), lines.size), np.tile(of_line, (tiles, 1))])
    places = min(places, len(items))
    order, ptr = in_turn(dealt(taps[items[:, 1]] + START, places)[0], places)
    return *units, items[order].astype(np.int32), ptr


class Items(NamedTuple):
    """Pairs of blocks of features, each with a chunk and units of its taps; most first.

    A unit is the taps of a product, one or several whose shifts in the box are at equal distances:
    the shift of the first one in rows of the box, and 2^16 times the distance.
    """

    items: Any  # (n, 3): row, column, chunk
    ptr: Any  # (n + 1)
    blocks: Any  # kept blocks of w, of unit after unit; NONE where a unit has fewer taps
    where: Any  # (units)
    origins: Any  # (chunks, 3)


def block_items(
    index: Index,
    n_taps: int,
    of: Pass,
    box: Three,
    chunks: Any,
    together: int,
    parts: int,
    most: int,
) -> Items:
    """Units of up to `together` taps, of which an item has at most `most`."""
    found = entries(index, n_taps, "input_grad", parts).of(of)
    names = "chunk", "line", "other"
    (chunk, row, column), sizes, block, shift, origins = _runs(found, box, chunks, *names)
    heaviest = np.argsort(-sizes, kind="stable")
    items, begins = np.stack([row, column, chunk], 1)[heaviest], _starts(sizes)[heaviest]
    where, blocks = np.empty(block.size, np.int64), np.full((block.size, together), NONE)
    counts = np.empty(len(items), np.int64)
    _take_units(begins, begins + sizes[heaviest], shift, block, where, blocks, counts)
    pieces, n = -(-counts // most), counts.sum()
    which = np.repeat(np.arange(counts.size), pieces)
    nth = np.arange(which.size) - (np.cumsum(pieces) - pieces)[which]
    sizes = np.minimum(counts[which] - nth * most, most)
    ptr, blocks = _starts(sizes), blocks[:n].ravel()
    return Items(*_int32(items[which], ptr, blocks, where[:n], origins))


@compiled(error_model="numpy")
def _take_units(begins, ends, shifts, kept, where, blocks, counts):
    """Of each item (first shift, distance, blocks): the next tap, and those as far apart."""
    n, together, taken = 0, blocks.shape[1], np.zeros(kept.size, np.bool_)
    for k in range(counts.size):
        before = n
        for first in range(begins[k], ends[k]):
            if taken[first]:
                continue
            apart = 0
            for other in range(first, ends[k] if together > 1 else first + 1):
                if taken[other]:
                    continue
                away = shifts[other] - shifts[first]
                apart = apart if apart > 0 else away
                tap = away // max(apart, 1)
                if tap * apart == away and tap < together:
                    blocks[n, tap], taken[other] = kept[other], True
            where[n] = shifts[first] | apart << 16
            n += 1
        counts[k] = n - before


def _runs(found: Entries, box: Three, chunks: Any, *names: str) -> tuple[Any, ...]:
    """(keys (3, runs), entries of each, blocks, shifts) of the entries that agree in all names.

    They are in the order of the names, and entries of a run in that of their shifts. And the
    origins of the chunks.
    """
    chunk, shifts = seen_in_boxes(chunks, box)[:, found.tap]
    of = {"line": found.line, "other": found.other, "chunk": chunk}
    order = np.lexsort((shifts, *(of[name] for name in reversed(names))))
    keys = np.stack([of[name] for name in names])[:, order]
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    begins = np.append(0, np.flatnonzero(changes) + 1)[: order.size]
    sizes = np.diff(np.append(begins, order.size))
    origins = np.array([chunk.origin for chunk in chunks] or [(0, 0, 0)])
    return keys[:, begins], sizes, found.block[order], shifts[order], origins


def _starts(sizes: Any) -> np.ndarray:
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def _int32(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array.astype(np.int32) for array in arrays)
