"""Which kept blocks are computed when, and by whom: worked out once for every layout.

The GPU runs items as places get free, in the order of the plan: largest first, and at the end those
that do not fill all places once more, cut over the batch. Only these leave sums to be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.weight_grad_fours import fours
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import (
    OPERANDS,
    Share,
    Tile,
    copying,
    from_l2,
    last_end,
    rows_of_blocks,
)
from numbsparse.kernels.matmul.k6_hopper.weight_grad_pairs import pairs_of_rows
from numbsparse.kernels.matmul.k6_hopper.weight_grad_regions import regions
from numbsparse.layout import Index

HALF_EMPTY = 1.1  # products, where one of all blocks full would be enough
NOT_FULL = 1.03  # the same, where most regions have all the products they may
FEW_ROUNDS = 4  # so many that the last, half empty, takes much of the time
HEAD = 5  # first step, steps, copies, panels that arrive, whether sums are left to add


def plan(
    index: Index,
    tile: Tile,
    steps: int,
    processors: int,
    edges: tuple[tuple[int, bool], ...],
) -> tuple[Any, ...]:
    """(heads, loads, places, outs, cut blocks, pieces): what the kernel reads, and the two sums.

    `steps` make the batch, and `processors` blocks of threads run at once. `edges` says how many
    panels of x and of dy are whole, and whether a part of one follows.
    """
    at_once = processors // tile.CLUSTER
    ways = [
        sorted(items, key=lambda item: time_of(item, tile))[::-1]
        for items in ways_of(index, tile, at_once)
    ]
    _, whole, pieces, items = min(
        ((*cut(items, at_once, steps, tile), items) for items in ways), key=lambda way: way[0]
    )
    tail = items[whole:] if pieces > 1 else []
    kept = [share.outs[share.outs >= 0] for item in tail for share in item]
    cut_blocks = np.sort(np.concatenate([np.zeros(0, np.int32), *kept]))
    if tile.B == 128:  # of which both warpgroups have a part
        cut_blocks = np.unique(cut_blocks)

    works = [(share, 0, steps, -1) for item in items[: len(items) - len(tail)] for share in item]
    for piece in range(pieces if tail else 0):
        first, last = piece * steps // pieces, (piece + 1) * steps // pieces
        works += [(share, first, last - first, piece) for item in tail for share in item]

    copies = [share.copies(edges) for share, *_ in works]
    width = max(map(len, copies), default=0)
    heads = np.zeros((len(works), HEAD), np.int32)
    loads = np.zeros((len(works), width, 2), np.int32)
    places = np.zeros((len(works), tile.GROUPS, 1 + 2 * tile.UNITS), np.int32)
    outs = np.full((len(works), tile.GROUPS, tile.OUTS), -1, np.int32)
    for k, (share, first, count, piece) in enumerate(works):
        heads[k] = first, count, len(copies[k]), share.arriving, piece >= 0
        loads[k, : len(copies[k])] = np.reshape(copies[k], (-1, 2))
        places[k, :, 0], places[k, :, 1:] = share.counts, share.where
        outs[k] = share.outs
        if piece >= 0:
            there = share.outs >= 0
            place = np.searchsorted(cut_blocks, share.outs[there])
            outs[k][there] = piece * cut_blocks.size + place
    return heads, loads, places, outs, cut_blocks, pieces if tail else 0


def ways_of(index: Index, tile: Tile, places: int) -> Iterator[Iterable[list[Share]]]:
    """What the tile can share: fours of columns, pairs of block rows, one, or regions by size."""
    if tile.B == 32 and len(tile.SIZES) > 1:
        yield fours(index, tile)
    elif tile.B == 64 and tile.UNITS == 1:
        yield pairs_of_rows(index, tile)
    elif tile.B == 128:
        yield rows_of_blocks(index, tile)
    else:
        for products in sizes(index, tile, places):
            yield regions(index, tile, products)


def sizes(index: Index, tile: Tile, places: int) -> list[int]:
    """Products of a region: the most; so many that the regions fill all places once or a few times
    over; and where once is enough, more, which share more."""
    most = tile.GROUPS * tile.UNITS
    products = max(index.block_rows.size, 1) / tile.PAIR
    even = ceil(HALF_EMPTY * products / places)
    rounds = ceil(NOT_FULL * products / (most * places))
    found = {even, 2 * even, 4 * even, most}
    if 1 < rounds <= FEW_ROUNDS:
        found.add(ceil(NOT_FULL * products / (rounds * places)))
    return sorted({min(n, most) for n in found})


def time_of(item: list[Share], tile: Tile) -> float:
    """Of a step of an item: its copies or its products, whatever takes longer."""
    panels, blocks = (max(n) for n in zip(*((s.arriving, s.blocks) for s in item), strict=True))
    products = blocks * tile.B**2 * (2 if tile.B == 32 else 1)
    return max(copying(panels, tile), products * tile.DEPTH / 4e6)


def cut(items: list[list[Share]], places: int, steps: int, tile: Tile) -> tuple[float, int, int]:
    """(end, items that stay whole, pieces of each other one): what ends first on so many places.

    `items` come longest first. However they are cut, the copies take their time, from the L2 cache
    and, the first of each panel, from memory.
    """
    times = [time_of(item, tile) * steps for item in items]
    loads = [[share.x_loads, share.dy_loads] for item in items for share in item]
    panels = sum(len(panels) for operands in loads for panels in operands)
    first = sum(len({p for share in loads for p, _ in share[k]}) for k in range(OPERANDS))
    memory = 2.4  # times as long as from the L2 cache
    least = steps * max(from_l2(panels, tile), memory * from_l2(first, tile))
    start = 4.0  # until a block of threads multiplies, and while it writes
    whole = len(items) // places * places
    sums = sum(share.blocks for item in items[whole:] for share in item) * tile.B**2
    sums_in_us = 7e4 if tile.UNITS > 1 else 3e5  # pairs of blocks leave theirs number by number
    best = (float("inf"), 0, 1)
    for pieces in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32):
        if pieces > max(steps // 4, 1):
            break
        parts = times[:whole] + [time / pieces for time in times[whole:]] * pieces
        end = max(least, last_end([time + start for time in parts], places))
        if pieces > 1:  # a launch, and 8 bytes for every sum, to memory and back
            end += 16 + sums * pieces / sums_in_us
        best = min(best, (end, whole, pieces))
    return best
