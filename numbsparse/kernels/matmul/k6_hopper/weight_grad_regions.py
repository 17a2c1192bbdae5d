"""Which kept blocks share most tiles: block rows and columns that meet in many, their regions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numbsparse.device import CPU_THREADS
from numbsparse.device.waits import shown
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, Tile
from numbsparse.kernels.parts.deal import in_turn
from numbsparse.layout import Index

# Lines among which regions are looked for. More would not find better ones: a region has few
# lines, and what is left of many lines is as hard to fit together as what is left of few.
PART, MOST = 256, 384
SAID = "planning, parts of the grid"
LEAVES, KEPT_FOR_LEFT = 0.05, 20  # blocks that one left behind counts for, and the inverse
AT_A_TIME = 128  # lines among which the best one is looked for
INSIDE, NEVER = -(1 << 24), -(1 << 30)  # what a line inside gains; less than any line scores


def regions(index: Index, tile: Tile, products: int) -> np.ndarray:
    """Block rows and columns with many kept blocks where they cross: at most so many products.

    They are looked for in parts of the grid, all cores at a time.
    """
    rows, columns = index.block_rows, index.block_columns
    down, across = (parts_of(len(walk.indptr) - 1) for walk in (index.rows, index.columns))
    wide, part = across.size + 1, np.searchsorted(across, columns, "right")
    part += np.searchsorted(down, rows, "right") * wide
    order, starts = in_turn(part, (down.size + 1) * wide)
    found = np.empty(columns.size, np.int64)

    def look(blocks: np.ndarray) -> int:
        """Number the regions of a part from 0 on; how many there are."""
        own, row = np.unique(rows[blocks], return_inverse=True)
        used, place = np.unique(columns[blocks], return_inverse=True)
        left = np.zeros((own.size, used.size), np.uint8)  # 1 where a block is in no region
        left[row, place] = 1
        region = np.empty(left.shape, np.int64)
        n = _grow_regions(left, tile, products, region)
        found[blocks] = region[row, place]
        return n

    parts = [blocks for blocks in np.split(order, starts[1:-1]) if blocks.size]
    with ThreadPoolExecutor(CPU_THREADS) as pool:
        looking = [pool.submit(look, blocks) for blocks in parts]
        numbers = [part.result() for part in shown(looking, SAID)]
    for blocks, before in zip(parts, np.cumsum(numbers) - numbers, strict=True):
        found[blocks] += before
    return found


def parts_of(lines: int) -> np.ndarray:
    """Where parts of the lines end, but for the last: even ones of up to PART, or one of MOST."""
    parts = 1 if lines <= MOST else -(-lines // PART)
    return np.arange(1, parts) * lines // parts


def _grow_regions(left: np.ndarray, tile: Tile, products: int, region: np.ndarray) -> int:
    """Number regions from 0 on, until every block is in one; how many there are."""
    n, m = left.shape
    counts = np.concatenate([left.sum(1), left.sum(0)]).astype(np.int32)  # that are in no region
    gains, opens = np.empty((2, n + m), np.int32)
    scores = np.full((-(-(n + m) // AT_A_TIME), AT_A_TIME), NEVER, np.int32)
    lines, held = np.empty((2, tile.SLOTS), np.int64)
    arrays = counts, gains, opens, scores, lines, held, region
    return _grow(left, left.T.copy(), products, tile.PAIR, *arrays)


@compiled(error_model="numpy")
def _grow(left, across, most, pair, counts, gains, opens, scores, lines, held, region):
    """A line is a row, or after those a column. The best one that fits is added, again and again:
    it gains many blocks and leaves few. Where none fits, a row is added that meets none inside.

    counts, gains, opens : of each line the blocks that are in no region, those that it gains if
        it is added, and the products that it adds; of a row those that it has
    lines, held : those inside, and how many blocks each has there
    """
    (n, m), slots, blocks, number = left.shape, lines.size, 0, 0
    for i in range(n):
        blocks += counts[i]
    while blocks > 0:
        inside, free = 0, most
        for line in range(n + m):
            gains[line] = opens[line] = 0
        while inside < slots:
            line = _best(gains, opens, counts, np.int32(free), scores)
            if line < 0:  # the first row, or one more
                line = 0
                for i in range(n):
                    if gains[i] == 0 and (gains[line] != 0 or counts[i] > counts[line]):
                        line = i
                if gains[line] != 0 or counts[line] == 0 or free == 0 or inside > slots - 2:
                    break
            gained = gains[line]
            lines[inside], held[inside] = line, gained
            gains[line] = INSIDE
            inside += 1
            if line < n:
                free -= opens[line]
                opening = np.int32(0 if pair > 1 and gained % pair else 1)
                own, of_columns, of_opens = left[line], gains[n:], opens[n:]
                for j in range(m):
                    of_columns[j] += own[j]
                    of_opens[j] += own[j] * opening
                for k in range(inside - 1):
                    if lines[k] >= n:
                        held[k] += left[line, lines[k] - n]
            else:
                own = across[line - n]
                for i in range(n):
                    gains[i] += own[i]
                    opens[i] = (gains[i] + pair - 1) >> pair - 1  # pair is 1 or 2
                for k in range(inside - 1):
                    if lines[k] < n and across[line - n, lines[k]]:
                        odd = pair > 1 and held[k] % pair
                        free -= 0 if odd else 1
                        held[k] += 1
                        if pair > 1:  # its last product fits now, or never
                            turns = np.int32(1 if odd else -1)
                            own, of_opens = left[lines[k]], opens[n:]
                            for j in range(m):
                                of_opens[j] += own[j] * turns
        for k in range(inside):
            for other in range(inside):
                i, j = lines[k], lines[other] - n
                if i < n and j >= 0 and left[i, j]:
                    region[i, j] = number
                    left[i, j] = across[j, i] = 0
                    counts[i] -= 1
                    counts[n + j] -= 1
                    blocks -= 1
        number += 1
    return number


@compiled(error_model="numpy")
def _best(gains, opens, counts, free, scores):
    """The first line that scores most of those that gain blocks and fit; -1 for none.

    The score, gains + LEAVES * (gains - counts), is compared in whole numbers, some lines at a
    time. Of lines that score the same, rounding decides, as float32 of what they leave has it.
    """
    flat, most = scores.reshape(-1), np.int32(NEVER)
    for line in range(gains.size):
        score = np.int32((1 + KEPT_FOR_LEFT) * gains[line] - counts[line])
        fits = (gains[line] > 0) & (opens[line] <= free)
        flat[line] = score if fits else np.int32(NEVER)
    for line in range(flat.size):
        most = max(most, flat[line])
    if most == NEVER:
        return -1
    best, at = -np.inf, -1
    for first in range(len(scores)):
        top = np.int32(NEVER)
        for k in range(AT_A_TIME):
            top = max(top, scores[first, k])
        for k in range(AT_A_TIME if top == most else 0):
            if scores[first, k] == most:
                line = first * AT_A_TIME + k
                left = np.float32(LEAVES) * np.float32(counts[line])
                score = (1 + LEAVES) * gains[line] - left
                if score > best:
                    best, at = score, line
    return at


@compiled(error_model="numpy")
def share_regions(
    order, starts, rows, columns, step, pair, slot, loads, ends, arriving, places, outs
):
    """Slots of x, then of dy; and the products, dealt evenly to the warpgroups."""
    groups = outs.shape[1]
    for item in range(starts.size - 1):
        first, end = starts[item], starts[item + 1]
        n = products = 0  # of rows
        for k in range(first, end):
            begins = k == first or rows[k] != rows[k - 1]
            if begins:
                loads[item, n, 0], loads[item, n, 1] = rows[k], n | ALONE
                n, run = n + 1, 0
            products += run % pair == 0
            run += 1
        count = n
        for k in range(first, end):  # columns in order
            if slot[columns[k]] < 0:
                slot[columns[k]] = at = count
                while at > n and loads[item, at - 1, 0] > columns[k]:
                    loads[item, at, 0] = loads[item, at - 1, 0]
                    at -= 1
                loads[item, at, 0] = columns[k]
                count += 1
        for at in range(n, count):
            slot[loads[item, at, 0]] = at
            loads[item, at, 1] = at | ALONE
        ends[item, 0], ends[item, 1], arriving[item] = n, count, count
        each = -(-products // groups)
        product, row = -1, -1
        for k in range(first, end):
            if k == first or rows[k] != rows[k - 1]:
                row, run = row + 1, 0
            product += run % pair == 0
            group, unit = product // each, product % each
            outs[item, group, unit * pair + run % pair] = order[k]
            places[item, group, 0] = unit + 1
            x, dy = row * step, slot[columns[k]] * step
            if pair == 1:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = x, dy
            elif run % pair == 0:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = dy, x
            else:
                places[item, group, 1 + 2 * unit] |= dy - places[item, group, 1 + 2 * unit] << 16
            run += 1
        for k in range(first, end):
            slot[columns[k]] = -1
