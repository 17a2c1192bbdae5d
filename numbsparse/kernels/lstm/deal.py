"""Scheduling a recurrent product: its lines, cut where they are long, dealt evenly to places.

A line is a block of units: the four block columns of their gates, or where `transposed` their block
row. A read is four kept blocks contiguous in memory, or where `transposed` two at times, and what
they meet: of a line of gates one block of h, of a row as many blocks of the gates' gradient.
"""

from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED, DeviceArray, compute_capability, multiprocessors
from numbsparse.kernels.lstm import GATES, WARPS
from numbsparse.kernels.parts import store
from numbsparse.kernels.parts.deal import dealt, even_pieces, in_turn
from numbsparse.kernels.parts.plans import on_gpu_of, planned, scratch
from numbsparse.layout import Index

B, ROWS = 32, 64  # of a block; of a tile of the batch, or half as many
SIZES = 8, 16, B, 64  # of blocks that they take
SECTOR = 32  # bytes of memory that are read at once, at least
LINE = 128  # bytes of a line of the gates' gradient in shared memory
UNITS = 8  # of a state: its rows begin at multiples of 16 bytes
# Of the state, where there are more lines of its tiles than CROWDED times the places.
MOST_ROWS, CROWDED = 256, 1.5
BLOCKS = 2  # of threads, on a multiprocessor: one computes gates while the other multiplies
KINDS = store.KINDS | {"float32": "tf32"}  # of product, of a dtype
TO_BEGIN_AND_END = 2  # reads that take as long as a piece's own work
TO_JOIN = 12  # and as long as to hand over, or add, the parts of a line that is cut
A_READ = {1: 0.28, BLOCKS: 0.4}  # microseconds, where so many blocks of threads share it (H200)


def serves(values: DeviceArray, index: Index, batch: int, units: int) -> bool:
    """Whether the streaming kernels take this weight and such a state.

    Of units that are no multiple of UNITS they take a state with zeros for those that are missing,
    of other blocks than 32 x 32 those that `blocks` makes of them.
    """
    return (
        values.size > 0
        and values.shape[1] in SIZES
        and batch > 0
        and (batch <= MOST_ROWS or -(-units // B) * -(-batch // ROWS) <= CROWDED * places())
        and values.address % 16 == 0
        and (SIMULATED or compute_capability() == (9, 0))
        and planned(index, in_fours)[0]
    )


def rows_of_tile(batch: int, units: int, exact: bool) -> int:
    """Half as many, and of the gates, where most of such have a place of their own.

    Of what is `exact` half a tile is multiplied in the time of a whole one: where places are idle.
    """
    half = ROWS // 2
    most = 0.375 if exact and batch > half else 1.25
    return half if -(-units // B) * -(-batch // half) <= most * places() else ROWS


def all_at_once(batch: int, units: int, tile: int) -> bool:
    """Whether each line of each tile, or nearly, has a multiprocessor of its own.

    Then one block of threads there has twice as many reads on their way and all registers: of 25
    drawn LSTMs 12 took 0.74 to 0.97 of the time, 2 up to 1.02; where there are more lines, up to
    1.4 (H200).
    """
    return -(-units // B) * -(-batch // tile) <= 1.25 * places() / BLOCKS


def one_after_another(batch: int, units: int, tile: int) -> bool:
    """Whether places take several lines in a step."""
    return -(-units // B) * -(-batch // tile) > places()


def places() -> int:
    """Blocks of threads that run at once."""
    return 2 if SIMULATED else BLOCKS * multiprocessors()


def in_fours(index: Index) -> tuple[bool]:
    """Whether columns 0 to 3 keep the same block rows, 4 to 7 do, and so on, as an LSTM's gates."""
    indptr, rows, _ = index.columns
    lengths = np.diff(indptr)
    if lengths.size == 0 or lengths.size % GATES:
        return (False,)
    lengths = lengths.reshape(-1, GATES)
    if (lengths != lengths[:, :1]).any():
        return (False,)
    # Column by column, their rows are one list after another: those of a four are one list four
    # times over.
    place = np.arange(rows.size) - np.repeat(indptr[:-1], lengths.ravel())
    first = np.repeat(indptr[:-1:GATES], lengths.sum(1))
    return (bool((rows == rows[first + place]).all()),)


@on_gpu_of(in_fours)
def no_fours(index: Index) -> tuple[bool]:
    return (False,)


class Plan(NamedTuple):
    """What each place takes, and memory for the parts of lines that are cut: see `deal`."""

    starts: Any  # (places + 1,), of its pieces
    pieces: Any  # (n, 7)
    read_starts: Any  # (places + 1,)
    reads: Any  # (m, 4)
    awaited: Any  # (tiles,), places that have pieces of it
    partials: Any  # of each part `sums` float32
    tickets: Any  # and WARPS of these


def deal(
    index: Index,
    places: int,
    transposed: bool,
    itemsize: int,
    sums: int,
    tiles: int = 1,
    rows: int = ROWS,
    size: int = B,
) -> Plan:
    """The work of each place.

    Each line is there for each of the tiles of the batch. Of a piece: its line, how many reads it
    has, its part of all cut lines, the line's first part, how many there are (a line that is whole
    has one), the row that its tile begins with, and whether it is the place's last of that tile. Of
    a read: the first of its blocks, whether it waits for what they meet, the tile's row, and what
    they meet: the block row of h, or the first block column of the gates' gradient; of small blocks
    the names that `gathered` has. The largest pieces are dealt first, each to the place that has
    least; a place takes its tiles in their order, of each the largest pieces first: line by line a
    step of 18,432 units took 1.06 times as long (float32 as tf32, H200).

    Block rows beyond the lines are of inputs: their reads precede all others and do not wait, and
    block and row are counted down from -1: the first of them is -1. The last read of a piece always
    waits: so no piece ends before all have ended the step before.
    """
    blocks, names, indptr = _reads(index, transposed, size, itemsize)
    lines = indptr.size - 1
    below = (names[:, 0] // (GATES if transposed else 1) >= lines) & (size == B)
    _, (item, first, count, nth, many), owners = _cut(np.tile(np.diff(indptr), tiles), places)
    part = np.cumsum(many > 1) - 1  # of all lines that are cut
    tile, line = np.divmod(item, lines)
    by_tile = np.lexsort((-count - TO_JOIN * (many > 1), tile))
    order, starts = in_turn(owners[by_tile], places)
    order = by_tile[order]
    of_place = owners[order] * tiles + tile[order]
    ends = np.diff(of_place, append=-1) != 0
    start, parts = indptr[line] + first, max(int((many > 1).sum()), 1)
    at = _spans(start[order], count[order])
    of_piece = np.repeat(np.arange(order.size), count[order])
    of_tile = tile[order][of_piece]
    at = at[np.lexsort((~below[at], of_piece))]
    inputs = below[at]
    waits = ~inputs | (np.diff(of_piece, append=-1) != 0)
    block, n_blocks = blocks[at], np.count_nonzero(index.block_rows < lines)
    block = np.where(inputs, n_blocks - 1 - block, block)
    met = np.where(inputs[:, None], lines - 1 - names[at], names[at])
    reads = np.column_stack([block, waits, of_tile * rows, met])
    pieces = np.stack([line, count, part, part - nth, many, tile * rows], 1)[order]
    return Plan(
        starts,
        np.column_stack([pieces, ends]).astype(np.int32),
        np.append(0, np.cumsum(count[order]))[starts].astype(np.int32),
        np.pad(reads, ((0, 1), (0, 0))).astype(np.int32),  # one that is never taken
        np.bincount(tile[order][ends], minlength=tiles).astype(np.int32),
        scratch(parts * sums, np.float32),
        scratch(parts * WARPS, np.int32),
    )


def few_of(transposed: bool, itemsize: int) -> int:
    """Blocks of a read."""
    return GATES // 2 if transposed and itemsize == 4 else GATES


def ends(index: Index, places: int, size: int, itemsize: int, tiles: int) -> tuple[float]:
    """Reads after which the last place ends a step, forward and backward together."""
    reads = (_reads(index, transposed, size, itemsize) for transposed in (False, True))
    return (sum(_cut(np.tile(np.diff(indptr), tiles), places)[0] for _, _, indptr in reads),)


def _cut(lengths: np.ndarray, places: int) -> tuple[Any, Any, np.ndarray]:
    """(when the last place ends, the `even_pieces` by which it is soonest, the place of each)."""
    fair, longest = max(-(-int(lengths.sum()) // places), 1), max(int(lengths.max()), 1)
    found: Any = None
    for most in np.unique(np.geomspace(longest, min(fair, longest), 8).round().astype(int))[::-1]:
        pieces = even_pieces(lengths, most, 1)
        cost = pieces[2] + TO_BEGIN_AND_END + TO_JOIN * (pieces[4] > 1)
        owners, end = dealt(cost, places, longest_first=True)
        if found is None or end < found[0]:
            found = end, pieces, owners
    return found


def _reads(
    index: Index, transposed: bool, size: int, itemsize: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Line by line: the first block, what it meets (reads, of each), and where each line begins."""
    of_read = few_of(transposed, itemsize)
    if size != B:
        of = gathered(index, transposed, size, itemsize)
        return np.arange(len(of.names)) * of_read, of.names, of.indptr
    if transposed:
        walk = index.rows
        return walk.blocks[::of_read], walk.indices[::of_read, None], walk.indptr // of_read
    walk = index.columns
    lengths = np.diff(walk.indptr)[::GATES]
    kept = _spans(walk.indptr[:-1:GATES], lengths)
    return walk.blocks[kept], walk.indices[kept, None], np.append(0, np.cumsum(lengths))


class Gathered(NamedTuple):
    """Reads of a weight of other blocks, line by line.

    Of small blocks a read takes what a line keeps of anywhere: grains of units, of at least 32
    bytes of a line of h, and of the gates' gradient four times as many columns. Of larger ones it
    takes one grain, as large as a read.
    """

    units: int  # of a grain
    grains: Any  # (reads, of a read), repeated at a line's end
    there: Any  # and whether they are no such repetition
    lines: Any  # (reads,)
    names: Any  # (reads, copies): of 32 bytes of a line of h, or of so many columns; else as blocks
    indptr: Any  # (lines + 1,)


def gathered(index: Index, transposed: bool, size: int, itemsize: int) -> Gathered:
    whole = B * few_of(transposed, itemsize) // GATES if transposed else B
    units = max(size, SECTOR // itemsize) if size < B else whole
    kept = np.zeros((index.rows.indptr.size - 1, (index.columns.indptr.size - 1) // GATES), bool)
    kept[index.block_rows, index.block_columns // GATES] = True
    along = kept.T if transposed else kept
    of_lines = _coarser(_coarser(along, size, units).T, size, B)
    (_, grain), many, few = np.nonzero(of_lines), of_lines.sum(1), whole // units
    lengths, ends = -(-many // few), np.cumsum(many)
    lines = np.repeat(np.arange(many.size), lengths)
    at = (ends - many)[lines] + few * _spans(0 * lengths, lengths)
    at, last = at[:, None] + np.arange(few), ends[lines, None] - 1
    grains = grain[np.minimum(at, last)]
    copies, apart = 1, GATES * units // B if transposed else 1
    if size < B:
        copies = apart = units * itemsize // SECTOR
    names = (grains[:, :, None] * apart + np.arange(copies)).reshape(len(lines), few * copies)
    return Gathered(units, grains, at <= last, lines, names, np.append(0, np.cumsum(lengths)))


def _coarser(kept: np.ndarray, size: int, to: int) -> np.ndarray:
    """Rows of `size` units as such of `to`, which keep what any of theirs does."""
    if size >= to:
        return np.repeat(kept, size // to, axis=0)
    few = to // size
    padded = np.pad(kept, ((0, -len(kept) % few), (0, 0)))
    return np.asarray(padded.reshape(-1, few, kept.shape[1]).any(1))


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., as many as lengths[0] says; then those from starts[1] on."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
