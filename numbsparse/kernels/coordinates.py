"""The index arrays of a layout, made on the GPU from the coordinates of its blocks.

The grid of blocks is two tables of bits, a line of 32-bit words for each block row and for each
block column. Coordinates set bits, in any order: what they leave is the same every time. Then the
bits are counted along lines, lines are summed up, and each word writes where its blocks are.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint32

from numbsparse.device import (
    SIMULATED,
    DeviceArray,
    current_stream,
    empty,
    is_capturing,
    outside_capture,
    replay,
    to_device,
)
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.elementwise import THREADS, blocks, fill
from numbsparse.kernels.ptx import let_next_kernel_start, shfl_idx, wait_for_earlier_kernels
from numbsparse.layout import Index, Walk

KEPT, TWICE, OUTSIDE, DISTINCT = range(4)  # of the numbers that are counted
WRONG: dict[int, DeviceArray] = {}  # of each GPU: see `wrong_here`
CLEARING = 512  # blocks of threads that write zeros
LINES = 32 if SIMULATED else 1024  # threads that sum up lines


class Bits(NamedTuple):
    """Which blocks each line keeps, and how many a line keeps before each of its words."""

    words: DeviceArray  # (lines, words) uint32: bit b of word i is block 32 i + b
    before: DeviceArray  # (lines, words) int32


class Made(NamedTuple):
    """What is known on the GPU of a layout that was made there."""

    rows: Bits
    columns: Bits
    found: DeviceArray  # (4,) int32: KEPT, TWICE, OUTSIDE, DISTINCT
    cleared: DeviceArray  # all that is zero at first
    is_captured: bool  # made within a capture, which makes it anew in each replay
    launches: list[Any]  # of its plans


def index_of(
    rows: DeviceArray, columns: DeviceArray, shape: tuple[int, int], capacity: int
) -> Index:
    """The index of the blocks (rows[i], columns[i]), with places for `capacity` blocks.

    Coordinates of -1 stand for no block. Of more blocks than there are places none is kept. Behind
    those that are kept, places say row 0 and column 0, and no line has them.
    """
    sides = [(n, -(-m // 32)) for n, m in (shape, shape[::-1])]
    sizes = [4, *(n * words for n, words in sides), *[capacity] * 5]
    whole = empty((sum(sizes),), np.int32)
    ends = np.cumsum(sizes).tolist()
    parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    found, of_rows, of_columns, indices, places, inputs, of_column, block_rows = parts
    row_bits, column_bits = (
        Bits(part.view(np.uint32).reshape(side), empty(side, np.int32))
        for part, side in zip((of_rows, of_columns), sides, strict=True)
    )
    starts = [empty((n + 1,), np.int32) for n in shape]
    captured = is_capturing() or current_stream().is_captured
    made = Made(row_bits, column_bits, found, whole, captured, [])
    walks = Walk(starts[0], indices, places), Walk(starts[1], inputs, of_column)
    index = Index(*walks, block_rows, indices, made=made)
    _write(index, rows, columns)
    return index


def _write(index: Index, rows: DeviceArray, columns: DeviceArray) -> None:
    made, walks = index.made, (index.rows, index.columns)
    starts, tables = [walk.indptr for walk in walks], (*made.rows, *made.columns)
    arrays = *walks[0][1:], *walks[1][1:], index.block_rows
    capacity, words = index.block_rows.size, made.rows.words.size + made.columns.words.size
    fill(made.cleared, 0)
    launch(mark, blocks(rows.size), THREADS, rows, columns, tables[0], tables[2], made.found)
    launch(count_lines, sum(a.size - 1 for a in starts), 32, *tables, *starts)
    launch(sum_lines, 2, LINES, *starts, capacity, made.found, wrong_here())
    grid = blocks(max(words, capacity))
    launch(write_blocks, grid, THREADS, *tables, *starts, made.found, *arrays)


def wrong_here() -> DeviceArray:
    """(4,) int32 of the GPU in use, that all its layouts write to, and captured graphs for ever.

    Of all of them how many had more blocks than places, the sums of TWICE and of OUTSIDE, and the
    most blocks that were too many.
    """
    device = current_stream().device
    if device not in WRONG:
        with outside_capture():
            WRONG[device] = to_device(np.zeros(4, np.int32))
    return WRONG[device]


def write_again(index: Index, rows: DeviceArray, columns: DeviceArray) -> None:
    """Let it be the index of these blocks, with its plans, on the stream that it was made on."""
    stream, work = current_stream(), partial(_write, index, rows, columns)
    what = _write, rows.identity, columns.identity
    replay.repeated(index.replays, what, (rows, columns), stream, work)
    for launches in index.made.launches:
        launches.start((), stream)


@cuda.jit(device=True)
def bits_below(word, bit):
    """How many bits of a word are set below this one."""
    return int32(cuda.popc(uint32(word & uint32((1 << int64(bit)) - 1))))


@cuda.jit(device=True)
def entry_of(words, before, starts, line, other):
    """Where in its walk a line meets the other, whose bit is set."""
    at = other // 32
    return starts[line] + before[line, at] + bits_below(words[line, at], other % 32)


@cuda.jit
def mark(rows, columns, row_words, column_words, found):
    """Set the bits of these blocks, and count those that are there twice, or nowhere."""
    i = cuda.grid(1)
    if i >= rows.size or rows[i] == -1 or columns[i] == -1:
        return
    row, column = int64(rows[i]), int64(columns[i])
    if row < 0 or row >= row_words.shape[0] or column < 0 or column >= column_words.shape[0]:
        cuda.atomic.add(found, OUTSIDE, 1)
        return
    bit = uint32(1 << column % 32)
    if cuda.atomic.or_(row_words, (row, column // 32), bit) & bit:
        cuda.atomic.add(found, TWICE, 1)
    else:
        cuda.atomic.or_(column_words, (column, row // 32), uint32(1 << row % 32))


@cuda.jit(device=True)
def along(words, before, line, starts):
    lane, total = cuda.threadIdx.x, int32(0)
    for first in range(0, words.shape[1], 32):
        own = int32(0)
        if first + lane < words.shape[1]:
            own = int32(cuda.popc(words[line, first + lane]))
        here = own
        for k in range(5):
            lower = shfl_idx(int32(here), uint32((lane - (1 << k)) % 32))
            if lane >= 1 << k:
                here += lower
        if first + lane < words.shape[1]:
            before[line, first + lane] = total + here - own
        total += shfl_idx(int32(here), uint32(31))
    if lane == 0:
        starts[line + 1] = total


@cuda.jit
def count_lines(row_words, row_before, column_words, column_before, row_starts, column_starts):
    """before[i] of each word of a line, and the line's own number; a warp for each line."""
    line, rows = cuda.blockIdx.x, row_words.shape[0]
    if line < rows:
        along(row_words, row_before, line, row_starts)
    else:
        along(column_words, column_before, line - rows, column_starts)


@cuda.jit(device=True)
def sum_up(starts, most):
    """starts[i + 1] = the sum of those up to i, or 0 if all are too many; that of all.

    By a block of LINES threads.
    """
    sums = cuda.shared.array(LINES, int32)
    t, lines = cuda.threadIdx.x, starts.size - 1
    each = (lines + LINES - 1) // LINES
    first, last = min(t * each, lines), min((t + 1) * each, lines)
    own = int32(0)
    for i in range(first, last):
        own += starts[i + 1]
    sums[t] = own
    step = 1
    while step < LINES:
        cuda.syncthreads()
        lower = sums[t - step] if t >= step else int32(0)
        cuda.syncthreads()
        sums[t] += lower
        step *= 2
    cuda.syncthreads()
    total, here = sums[LINES - 1], sums[t] - own
    for i in range(first, last):
        here += starts[i + 1]
        starts[i + 1] = here if total <= most else int32(0)
    if t == 0:
        starts[0] = 0
    return total


@cuda.jit
def sum_lines(row_starts, column_starts, capacity, found, wrong):
    """Each line's number in `starts` to where it begins; a block of threads for each direction."""
    total = sum_up(column_starts if cuda.blockIdx.x else row_starts, capacity)
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        found[DISTINCT] = total
        found[KEPT] = total if total <= capacity else 0
        if total > capacity:
            cuda.atomic.add(wrong, KEPT, 1)
            cuda.atomic.max(wrong, DISTINCT, total)
        for k in range(TWICE, DISTINCT):
            if found[k] != 0:
                cuda.atomic.add(wrong, k, found[k])


@cuda.jit
def write_blocks(
    row_words, row_before, column_words, column_before, row_starts, column_starts, found,
    indices, places, inputs, of_column, block_rows,
):  # fmt: skip
    """The blocks of each word to both walks; or no bits at all, where there are too many."""
    i = cuda.grid(1)
    if i < places.size:
        places[i] = i
    of_row = i < row_words.size
    words, before = (row_words, row_before) if of_row else (column_words, column_before)
    starts, i = (row_starts, i) if of_row else (column_starts, i - row_words.size)
    if i < words.size:
        line, at = i // words.shape[1], i % words.shape[1]
        if found[DISTINCT] > found[KEPT]:
            words[line, at] = 0
        to, word = starts[line] + before[line, at], words[line, at]
        for bit in range(32):
            if word >> bit & 1:
                other = 32 * at + bit
                if of_row:
                    indices[to], block_rows[to] = other, line
                else:
                    inputs[to] = other
                    of_column[to] = entry_of(row_words, row_before, row_starts, other, line)
                to += 1


def clear_rest(values: DeviceArray, found: DeviceArray) -> None:
    """values[b] = 0 of the places behind the blocks that are kept.

    It begins while the product before it ends: of 8,192 features, B = 32 and 64 rows both took 1.17
    times as long as the product of a layout of the host, and 1.32 where it began after (H200).
    """
    n, overlap = values.shape[0], copy_engine()
    kernel, grid = clear_rest_kernel(overlap), min(n, CLEARING)
    launch(kernel, grid, THREADS, values.reshape(n, -1), found, overlap=overlap)


@cache
def clear_rest_kernel(OVERLAP: bool) -> Any:
    @cuda.jit
    def kernel(values, found):
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        for block in range(found[KEPT] + cuda.blockIdx.x, values.shape[0], cuda.gridDim.x):
            for i in range(cuda.threadIdx.x, values.shape[1], cuda.blockDim.x):
                values[block, i] = 0

    return kernel
