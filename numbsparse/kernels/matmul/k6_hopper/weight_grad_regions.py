"""Which blocks of B = 32 an item has, of a layout made on a GPU: chosen there, a warp for a part.

A part is 32 block rows by a few times 32 block columns. As on the host (`parts.regions`), the best
line that fits is added to an item, again and again: it gains many blocks and leaves few; where none
fits, a row that meets none inside. Lane i has row i, and the masks of columns i, 32 + i and so on:
bit r where row r still has its block.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Cut, finishing
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import Tile
from numbsparse.kernels.matmul.k6_hopper.weight_grad_shares import FEW_ROUNDS, NOT_FULL
from numbsparse.kernels.parts.regions import KEPT_FOR_LEFT
from numbsparse.kernels.ptx import redux_or, shfl_idx, shfl_xor

ROWS = 32
BLOCKS = 128  # of a part, about: with fewer, many items would not be full
LINES = 512  # more than a part has
FITS = 1024  # what a line that fits scores at least, more than a row has blocks


def columns_of(density: float) -> int:
    """Columns of a part."""
    return next((n for n in (64, 128) if n * ROWS * density >= BLOCKS), 256)


def products_of(blocks: int, tile: Tile, places: int, is_cut: bool) -> int:
    """Products that an item may have: as many as fill all places once or a few times over.

    Where once is enough and items are cut over the batch, large ones share more.
    """
    most, products = tile.GROUPS * tile.UNITS, NOT_FULL * blocks / tile.PAIR
    rounds = max(ceil(products / (most * places)), 1)
    if rounds > FEW_ROUNDS or (rounds == 1 and is_cut):
        return most
    return max(min(ceil(products / (rounds * places)), most), 1)


def least_of(products: int) -> int:
    """Blocks of an item of a part that is not its last one.

    It ends where each line that meets it would open more products than are free, and these are no
    more than its rows that have blocks, each of which has a product: half of all are not free.
    """
    return max(products // 2, 1)


@cache
def regions_kernel(tile: Tile, columns: int) -> Any:
    """The items of a part; `starts` and `numbers` say where they are, and how many."""
    finish, least = finishing(tile), cuda.jit(device=True)(least_of)
    EACH, SLOTS, MOST = columns // 32, tile.SLOTS, Cut.of(tile).MOST

    @cuda.jit(device=True)
    def greatest(number):
        for k in range(5):
            number = max(number, int32(shfl_xor(int32(number), uint32(1 << k))))
        return number

    @cuda.jit(device=True)
    def sum_of(number):
        for k in range(5):
            number += int32(shfl_xor(int32(number), uint32(1 << k)))
        return number

    @cuda.jit(device=True)
    def bits_of(word):
        return int32(cuda.popc(uint32(word)))

    @cuda.jit(device=True)
    def key_of(line, gains, count):
        """Of lines that fit: greater where a line is better, and of equal ones the first."""
        score = int32(FITS + (1 + KEPT_FOR_LEFT) * gains - count)
        return int32(score * LINES + LINES - 1 - line)

    @cuda.jit(device=True)
    def key_of_row(lane, gains, count, free, more):
        if gains > 0:
            return key_of(lane, gains, count) if (gains + 1) // 2 <= free else int32(0)
        apart = count > 0 and free > 0 and more
        return int32(count * LINES + LINES - 1 - lane) if apart else int32(0)

    @cuda.jit(device=True)
    def key_of_column(line, mask, rows, even, free):
        """A block opens a product in a row that has an even number of them."""
        gains = bits_of(mask & rows)
        fits = gains > 0 and bits_of(mask & even) <= free
        return key_of(line, gains, bits_of(mask)) if fits else int32(0)

    @cuda.jit
    def kernel(
        words, before, column_words, indptr, blocks, products, edges, counts, loads, places, outs,
        starts, numbers,
    ):  # fmt: skip
        group, lane = cuda.blockIdx.x, int32(cuda.threadIdx.x)
        parts = (column_words.shape[0] + columns - 1) // columns
        line, at = group // parts * ROWS, group % parts * EACH
        masks = cuda.local.array(EACH, uint32)
        count = earlier = int32(0)  # blocks of this lane's row: here, and before
        if line + lane < words.shape[0]:
            earlier = int32(before[line + lane, at])
            for j in range(EACH):
                if at + j < words.shape[1]:
                    count += bits_of(words[line + lane, at + j])
        for j in range(EACH):
            column = (at + j) * 32 + lane
            masks[j] = uint32(0)
            if column < column_words.shape[0]:
                masks[j] = column_words[column, line // ROWS]
        left = sum_of(count)
        first = item = (indptr[line] + sum_of(earlier)) // least(products) + group
        bits, tables = (words, before, indptr, blocks), (counts, loads, places, outs)
        while left > 0:
            rows, even, taken = uint32(0), uint32(0), uint32(0)
            own, kept, gains = int32(0), uint32(0), int32(0)
            free, lines, wide = int32(products), int32(0), int32(0)
            while lines < SLOTS and wide < MOST:
                key = int32(0)
                if rows >> uint32(lane) & uint32(1) == 0:
                    key = key_of_row(lane, gains, count, free, lines <= SLOTS - 2)
                for j in range(EACH):
                    if taken >> uint32(j) & uint32(1) == 0:
                        other = key_of_column(32 + 32 * j + lane, masks[j], rows, even, free)
                        key = max(key, other)
                key = greatest(key)
                if key == 0:
                    break
                best = int32(LINES - 1 - key % LINES)
                source, which = uint32(best % 32), best // 32 - 1
                if which < 0:
                    rows = uint32(rows | uint32(1) << source)
                    free -= (int32(shfl_idx(int32(gains), source)) + 1) // 2
                else:
                    mask = uint32(0)
                    for j in range(EACH):
                        mask = masks[j] if j == which else mask
                    mask = shfl_idx(uint32(mask), source)
                    free -= bits_of(mask & even)
                    gains += int32(mask >> uint32(lane) & uint32(1))
                    if uint32(lane) == source:
                        taken = uint32(taken | uint32(1) << uint32(which))
                    if lane == wide:
                        own, kept = (at + which) * 32 + int32(source), mask
                    wide += 1
                mine = rows >> uint32(lane) & uint32(1) and gains % 2 == 0
                even = redux_or(uint32(uint32(1) << uint32(lane)) if mine else uint32(0))
                lines += 1
            finish(item, wide, line, 0, own, uint32(kept & rows), bits, edges, tables)
            item += 1
            for j in range(EACH):
                if taken >> uint32(j) & uint32(1):
                    masks[j] = uint32(masks[j] & ~rows)
            gains = gains if rows >> uint32(lane) & uint32(1) else int32(0)
            count -= gains
            left -= sum_of(gains)
        if lane == 0:
            starts[group], numbers[group + 1] = first, item - first

    return kernel
