"""Sums of a weight-gradient: what a team multiplies, and what a block of threads leaves of them.

In 16 bits a team is a warpgroup: `wgmma` reads both operands, transposed, from shared memory, 64
rows of features and 64 pixels at a time. Of float32 it transposes none: there a team is a warp, of
`mma`, whose lanes read neighbours of a line for several of their rows or columns at once, 8 pixels
at a time. Which pixel is which term of a sum is free, and chosen so that no two lanes share a bank.

An item is the sum of a few kept blocks. It is cut into pieces where items are too few for the GPU.
Each piece goes to memory of its own, float32, and none waits for another.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint16, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.conv.k4_wgmma.products import places_from
from numbsparse.kernels.conv.window import PIXELS
from numbsparse.kernels.parts.pieces import clear, writing
from numbsparse.kernels.parts.split import add_product, splitting
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.ptx import (
    Operand,
    as_float32,
    load_2xu32,
    load_4xf32,
    load_4xu32,
    store_4xf32,
    to_local,
    wgmma_units,
    zeros,
)

RUN = 4  # values that a thread takes at once
# In tiles: until a block of threads multiplies; the kernel behind; a value that is saved and read.
BEGIN, BEHIND, SAVED = 1.0, 1.5, 1.3e-6


class TeamProduct(NamedTuple):
    """Of teams of THREADS, which have units, the rows of PANELS taps.

    item, NBYTES : what shared memory holds
    STEP : pixels that are multiplied at once
    SCALE : of shifts in lines, for `words`
    SUMS : the shape of a thread's accumulators in memory
    start : start(sums), accumulators of zeros, or None where they are `sums`
    add : add(acc, sums, ring, words, x_line, dy_line, mine), the accumulators with the products of
        STEP pixels, from these lines of shared memory on, added; None where they are `sums`
    finish : finish(acc, sums), in memory
    place : place(n, i), the row in its unit and the column of a sum
    """

    THREADS: int
    PANELS: int
    item: Any
    NBYTES: int
    STEP: int
    SCALE: int
    SUMS: Any
    start: Any
    add: Any
    finish: Any
    place: Any


@cache
def product_of_16_bit(dtype: str, B: int, UNITS: int, GROUP: int) -> TeamProduct:
    """`words` have the shift of a unit in the low half, the distance of its taps above."""
    LINE, PIECES = 2 * B, B // 8
    x_operand, dy_operand = Operand(LINE, 0, True, GROUP * LINE), Operand(LINE, 0, True)
    multiply = wgmma_units(KINDS[dtype], UNITS, B, PIXELS // 16, x_operand, dy_operand)
    start_from, placed = zeros(UNITS * B // 2), places_from(0, UNITS)

    @cuda.jit(device=True)
    def start(sums):
        return start_from()

    @cuda.jit(device=True)
    def add(acc, sums, ring, words, x_line, dy_line, mine):
        where = placed(words, uint32(x_line * PIECES), uint32(dy_line * PIECES))
        return multiply(acc, ring, 0, where, mine)

    @cuda.jit(device=True)
    def place(n, i):
        t = uint32(cuda.threadIdx.x)
        return uint32(t // 32 % 4 * 16 + t % 32 // 4 + i // 2 * 8), uint32(
            8 * n + t % 4 * 2 + i % 2
        )

    sizes = 128, PIXELS // B, uint16, 2, PIXELS, PIECES, (UNITS, B // 8, 4)
    return TeamProduct(*sizes, start, add, to_local, place)


@cache
def product_of_float32(precision: str, B: int, UNITS: int) -> TeamProduct:
    """A lane has B / 8 neighbours of a line, for the rows or columns that are its own in all `mma`.

    Lane (g, q) has terms q and q + 4 of 8, and of x rows g and g + 8 of each 16, of dy column g of
    each 8: its neighbours from B / 8 g on, in this order.
    """
    EACH, SLABS, EXACT = B // 8, B // 16, precision == "highest"
    LINES = 32 // B  # of which the pieces are swapped alike
    split, SUMS, TERMS = splitting(EXACT, fast=True), (UNITS, SLABS * EACH, 4), (2, EACH)

    @cuda.jit(device=True)
    def load(ring, line, hi, lo):
        """Two terms of lane (g, q) of the 8 lines from `line` on."""
        g, q = uint32(cuda.threadIdx.x) % 32 // 4, uint32(cuda.threadIdx.x) % 4
        for k in range(2):
            if B == 32:
                at = uint32(line + 2 * q + k)
                word = uint32(at * B + 4 * (g ^ at % 8))
                four = load_4xu32(ring, word)
                for i in range(4):
                    hi[k, i], lo[k, i] = split(as_float32(four[i]))
            else:
                at = uint32(line + q % 2 + q // 2 * 4 + 2 * k)
                word = uint32(at * B + 4 * (g // 2 ^ at // LINES % 4) + g % 2 * 2)
                two = load_2xu32(ring, word)
                for i in range(2):
                    hi[k, i], lo[k, i] = split(as_float32(two[i]))

    @cuda.jit(device=True)
    def multiply(a, s, b, j, c):
        """c = c + the products of rows 2 s and 2 s + 1 of a by column j of b."""
        r = 2 * s
        add_product(a[0, r], a[0, r + 1], a[1, r], a[1, r + 1], b[0, j], b[1, j], c)

    @cuda.jit(device=True)
    def add(_, sums, ring, words, x_line, dy_line, mine):
        dy_hi, dy_lo = cuda.local.array(TERMS, uint32), cuda.local.array(TERMS, uint32)
        x_hi, x_lo = cuda.local.array(TERMS, uint32), cuda.local.array(TERMS, uint32)
        few = cuda.local.array(4, float32)
        load(ring, dy_line, dy_hi, dy_lo)
        for u in range(UNITS):
            if u < mine:
                load(ring, uint32(x_line + words[u]), x_hi, x_lo)
                for s in range(SLABS):
                    for j in range(EACH):
                        own = sums[u, s * EACH + j]
                        if EXACT:  # see `split`
                            for i in range(4):
                                few[i] = 0
                            multiply(x_lo, s, dy_hi, j, few)
                            multiply(x_hi, s, dy_lo, j, few)
                            multiply(x_hi, s, dy_hi, j, few)
                            for i in range(4):
                                own[i] += few[i]
                        else:
                            multiply(x_hi, s, dy_hi, j, own)

    @cuda.jit(device=True)
    def finish(_, sums):
        pass

    @cuda.jit(device=True)
    def place(n, i):
        g, q = uint32(cuda.threadIdx.x) % 32 // 4, uint32(cuda.threadIdx.x) % 4
        row = uint32(EACH * g + n // EACH * 2 + i // 2)
        return row, uint32(EACH * (2 * q + i % 2) + n % EACH)

    return TeamProduct(*(32, 1, float32, 4, 8, 1, SUMS, clear, add, finish, place))


class Sums(NamedTuple):
    """Where pieces go; one argument of a kernel."""

    pieces: int  # of each item
    saved: DeviceArray  # float32: all values of the first pieces, of the second ones, and so on
    result: DeviceArray  # along one axis, where there is one piece


def sums_into(result: DeviceArray, pieces: int) -> Sums:
    saved = empty((pieces * result.size if pieces > 1 else 1,), np.float32)
    return Sums(pieces, saved, result.span)


@lru_cache(maxsize=1024)
def pieces_of(items: int, tiles: int, places: int, values: int) -> int:
    """Into how many pieces to cut each item of `tiles` tiles, so that all end soonest.

    Blocks of threads run side by side, one in each of the places. All items have so many values.
    """

    def time(pieces: int) -> float:
        rounds = -(-items * pieces // places)
        adding = BEHIND + SAVED * pieces * values if pieces > 1 else 0
        return rounds * (BEGIN - (-tiles // pieces)) + adding

    return min(range(1, max(1, min(tiles, places)) + 1), key=time)


@cache
def place_in_block(B: int) -> Any:
    """place(line, column) in a block of shared memory: lanes that write lines of a column, one or
    four of them on, use other banks."""
    ALONG = B // RUN

    @cuda.jit(device=True)
    def place(line, column):
        run = column // RUN ^ (line + line // 8) % ALONG
        return uint32((line * ALONG + run) * RUN + column % RUN)

    return place


@cache
def leave_piece(dtype: str, B: int, THREADS: int, PARTS: int = 1) -> Any:
    """leave(own, slices, blocks, count, piece, sums), for a result of this dtype.

    own : in shared memory, by `place_in_block`, `count` blocks; so often, to be added up
    blocks : which of the blocks of the result they are, where those are of PARTS * B x PARTS * B
        values: (block * PARTS + row) * PARTS + column, negative where none
    """
    ALONG, write, in_block = B // RUN, writing(KINDS.get(dtype)), place_in_block(B)
    RUNS, LINE = B * ALONG, PARTS * ALONG  # runs of a block, and of a line of the result

    @cuda.jit(device=True)
    def leave(own, slices, blocks, count, piece, sums):
        run = uint32(cuda.threadIdx.x)
        end = uint32(count * RUNS) if run < THREADS else uint32(0)
        before = int64(piece) * sums.result.size
        while run < end:
            block, inside, place = blocks[run // RUNS], run % RUNS // ALONG, run % ALONG
            if block >= 0:
                line = block // PARTS * B + inside
                at = int64(line * LINE + block % PARTS * ALONG + place) * RUN
                start = uint32(run // RUNS * (B * B) + in_block(inside, place * RUN))
                a, b, c, d = load_4xf32(own, start)
                for s in range(1, slices):
                    e, f, g, h = load_4xf32(own, uint32(start + s * count * (B * B)))
                    a, b, c, d = a + e, b + f, c + g, d + h
                if sums.pieces == 1:
                    write(sums.result, at, a, b, c, d)
                else:
                    store_4xf32(sums.saved, before + at, a, b, c, d)
            run = uint32(run + THREADS)

    return leave
