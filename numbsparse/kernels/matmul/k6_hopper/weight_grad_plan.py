"""Which kept blocks are computed when, and by whom: worked out once for every layout.

The GPU runs items as places get free, in the order of the plan: largest first, and at the end those
that do not fill all places once more, cut over the batch. Only these leave sums to be added.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapreplace
from typing import Any

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Share, Tile, rows_of_blocks
from numbsparse.kernels.matmul.k6_hopper.weight_grad_pairs import pairs_of_rows
from numbsparse.kernels.matmul.k6_hopper.weight_grad_regions import regions
from numbsparse.layout import Index

HEAD = 5  # first step, steps, copies, panels that arrive, whether sums are left to add


def plan(
    index: Index,
    tile: Tile,
    steps: int,
    processors: int,
    apart: bool,
    edges: tuple[tuple[int, bool], ...],
) -> tuple[Any, ...]:
    """(heads, loads, places, outs, cut blocks, pieces): what the kernel reads, and the two sums.

    `steps` make the batch, and `processors` blocks of threads run at once. `apart` says whether the
    two tiles of dy that one product takes may lie anywhere; `edges` how many panels of x and of dy
    are whole, and whether a part of one follows.
    """
    items = sorted(items_of(index, tile, apart), key=cost_of, reverse=True)
    whole, pieces = cut([cost_of(i) for i in items], processors // tile.CLUSTER, steps, tile)
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


def items_of(index: Index, tile: Tile, apart: bool) -> Iterator[list[Share]]:
    """What the tile can share: rectangles, block rows in pairs, or one block row."""
    if tile.B == 32 and apart:
        return regions(index, tile)
    if tile.B == 64 and (tile.GROUPS, tile.CLUSTER) == (2, 1):
        return pairs_of_rows(index, tile)
    return rows_of_blocks(index, tile)


def cost_of(item: list[Share]) -> int:
    return max(share.blocks for share in item) + 1


def cut(costs: list[int], places: int, steps: int, tile: Tile) -> tuple[int, int]:
    """(items that stay whole, pieces of each other one): what ends first on so many places.

    Times are in microseconds as measured on an H200; only their ratios decide.
    """
    whole = len(costs) // places * places
    step = tile.B * tile.DEPTH / 3.2e4  # a tile: loading is what counts
    start = 4.0  # until a block of threads multiplies, and while it writes
    best = (float("inf"), 0, 1)
    for pieces in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32):
        if pieces > max(steps // 4, 1):
            break
        ends = [0.0] * places
        for cost in costs[:whole]:
            heapreplace(ends, ends[0] + cost * steps * step + start)
        for cost in costs[whole:] * pieces:
            heapreplace(ends, ends[0] + cost * steps * step / pieces + start)
        if pieces > 1:  # a launch, and 8 bytes for every sum, to memory and back
            ends[0] = max(ends) + 8 + sum(costs[whole:]) * tile.CLUSTER * pieces * tile.B**2 / 3e5
        best = min(best, (max(ends), whole, pieces))
    return best[1:]
