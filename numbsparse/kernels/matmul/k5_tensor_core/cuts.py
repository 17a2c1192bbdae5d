"""Long sums cut into pieces, where there are fewer of them than the card can run at a time.

Each piece has a block of threads, which leaves its part of the sum in memory; the last one adds the
parts up, in their order. That takes as long as some steps, and longer the more pieces there are.
"""

from functools import cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.parts.deal_on_gpu import ranking
from numbsparse.kernels.parts.plans import on_gpu_of, scratch
from numbsparse.layout import Index

PER_SM = 3  # blocks of threads that a multiprocessor holds
# Steps of a line, by bytes of a value, in which pieces are added up: not cut for less.
ADDED = {2: 8, 4: 4}
SHORT = 16  # steps of a block of w, which are shorter than those of a line: not cut
EACH = 3  # pieces that are added up in a step: so a sum of n steps has up to sqrt(EACH n)


class Strips(NamedTuple):
    """Of y: their width, rows in a tile, so many tiles below each other; a step's depth, and in how
    many steps pieces are added up."""

    width: int
    rows: int
    tiles: int
    depth: int
    added: int


class Cuts(NamedTuple):
    """As one argument of a kernel: the items, or into how many pieces every sum is cut; and where
    parts of sums are left, and counted."""

    items: Any
    partials: Any
    tickets: Any


class Item(NamedTuple):
    """A piece of a strip's sum: where its blocks begin and end, and, of a strip that is cut, whose
    name is -1 - strip, its number, that of the strip's first piece, and how many that has."""

    strip: Any
    first: Any
    last: Any
    own: Any
    origin: Any
    many: Any


def pieces_of(steps: np.ndarray, times: int, added: int) -> np.ndarray:
    """Into how many pieces each sum is cut, where there are `times` as many of these sums.

    A piece is about what each place of the card has, where all of them end together; `added` steps
    take as long as adding pieces up.
    """
    share = max(-(-int(steps.sum()) * times // (PER_SM * multiprocessors())), 1)
    many = np.minimum(-(-steps // share), np.sqrt(EACH * steps).astype(int))
    return np.where(steps > max(share, added) + added, many, 1)


def pieces_of_equal(steps: int, sums: int) -> int:
    """Into how many pieces each of so many sums of short steps is cut."""
    places = PER_SM * multiprocessors()
    return max(min(places // sums, isqrt(EACH * steps)), 1) if steps > SHORT else 1


def plan_strips(
    index: Index, product: str, B: int, features: int, strips: Strips
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(items (n, 6), partials, tickets): the longest pieces first. See `Item`."""
    width, rows, tiles, depth, added = strips
    walk = index.columns if product == "forward" else index.rows
    strip = np.arange(-(-features // width))
    first, end = (walk.indptr[strip * width // B + i] for i in (0, 1))
    together = max(depth // B, 1)
    runs = -(-(end - first) // together)  # of the blocks that a step takes together
    many = np.clip(pieces_of(runs * max(B // depth, 1), tiles, added), 1, np.maximum(runs, 1))
    of = np.repeat(strip, many)
    number = np.arange(of.size) - (np.cumsum(many) - many)[of]
    begins, ends = (first[of] + runs[of] * (number + i) // many[of] * together for i in (0, 1))
    is_cut = many[of] > 1
    own = np.cumsum(is_cut) - 1
    items = Item(
        np.where(is_cut, -1 - of, of),
        begins,
        np.minimum(ends, end[of]),
        own,
        own - number,
        many[of],
    )
    longest = np.argsort(items.first - items.last, kind="stable")
    parts = max(int(is_cut.sum()), 1) * tiles
    return (
        np.stack(items, 1)[longest].astype(np.int32),
        scratch(parts * rows * width, np.float32),
        scratch(parts, np.int32),
    )


@on_gpu_of(plan_strips)
def plan_strips_on_gpu(
    index: Index, product: str, B: int, features: int, strips: Strips
) -> tuple[DeviceArray, np.ndarray, np.ndarray]:
    """Whole strips. In the order of their numbers products took 4 to 10 % longer (H200)."""
    walk = index.columns if product == "forward" else index.rows
    items = empty((-(-features // strips.width), len(Item._fields)), np.int32)
    launch(items_kernel(), items.shape[0], 32, walk.indptr, B, strips.width, items)
    return items, scratch(1, np.float32), scratch(1, np.int32)


@cache
def items_kernel() -> Any:
    @cuda.jit(device=True)
    def length_of(strips, i):
        indptr, B, width = strips
        line = i * width // B
        return indptr[line + 1] - indptr[line]

    rank = ranking(length_of)

    @cuda.jit
    def kernel(indptr, B, width, items):
        strip = cuda.blockIdx.x
        line, i = strip * width // B, rank(strip, items.shape[0], (indptr, B, width))
        items[i, 0], items[i, 1], items[i, 2] = strip, indptr[line], indptr[line + 1]
        items[i, 3], items[i, 4], items[i, 5] = 0, 0, 1

    return kernel


@cuda.jit(device=True)
def own_piece(many, steps):
    """(sum, piece, its first step, how many it has) of a block of threads: equal sums are cut."""
    many, steps = uint32(many), uint32(steps)
    block = uint32(cuda.blockIdx.x)
    piece, each, more = block % many, steps // many, steps % many
    own = each + 1 if piece < more else each
    return int64(block // many), int64(piece), int64(piece * each + min(piece, more)), int64(own)


def room_of_sums(index: Index, parts: int, floats: int) -> tuple[np.ndarray, np.ndarray]:
    """(partials, tickets) of so many parts of sums."""
    return scratch(parts * floats, np.float32), scratch(parts, np.int32)


on_gpu_of(room_of_sums)(room_of_sums)
