"""Products of a strip's stage in float32, a block of w a step (`packed`), as tf32 (`split`).

A warp has few others beside it, so what a step waits for is asked for a step before: w and where x
is at its begin, x as soon as the registers of the last one are split.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.parts import fragments
from numbsparse.kernels.parts.split import round_in_one, split_in_two
from numbsparse.kernels.parts.stored_blocks import loading_float32
from numbsparse.kernels.parts.swizzle import PIECE, Rows, rows_of
from numbsparse.kernels.parts.words import words_of_lane
from numbsparse.kernels.ptx import as_float32


@cache
def products_tf32(
    strip: Any, arithmetic: str, x_transposed: bool, transposed: bool, COUNT_BITS: int
) -> Any:
    """As `packed.products`; the lower half of a step's word has where x is."""
    X_START, W_START, HEAD = strip.X_START, strip.W_START, strip.HEAD
    LAST_COLUMN, COUNT, NEXT = strip.COLUMNS - 1, (1 << COUNT_BITS) - 1, strip.STEP_BYTES // 4
    PAIRS = -(-strip.ROWS // 32)
    RAW = PAIRS, strip.B // PIECE, 2, 4
    rows = rows_of(4, strip.WIDTH, x_transposed)
    load, begin_x, read_x = loading_float32(strip.B, transposed), rows.begin, reading(strip, rows)
    if strip.PACKED:
        load = words_of_lane(strip.STEP_BYTES // 128).load

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = adding(strip, arithmetic, rows, j)
        others = columns_from(j + 1) if j < LAST_COLUMN else None

        @cuda.jit(device=True)
        def add_columns(shared, words, lines, word, at, place, b, x, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                own, there = b, place
                word, at = uint32(word + 1), uint32(at + NEXT)
                place, b = words[word], load(words, at)
                add_step(shared, lines, there, own, x, acc)
            if others is not None:
                others(shared, words, lines, word, at, place, b, x, counts, acc)

        return add_columns

    columns = columns_from(0)

    @cuda.jit(device=True)
    def add_all(shared, words, stage, warp, acc):
        counts = words[stage // 4 + warp]
        lines = begin_x(uint32(stage + X_START))
        before = counts >> uint32(4 * COUNT_BITS)
        word = uint32(stage // 4 + HEAD + before)
        at = uint32((stage + W_START) // 4 + before * NEXT)
        first, place = words[word], words[word + 1]
        b, x = load(words, at), cuda.local.array(RAW, uint32)
        for pair in range(PAIRS):
            read_x(shared, lines, first, pair, x[pair])
        columns(shared, words, lines, uint32(word + 1), at, place, b, x, counts, acc)

    return add_all


@cache
def reading(strip: Any, rows: Rows) -> Any:
    """read(shared, lines, place, pair, x): x[piece, m] = what a lane has of 32 rows of x.

    Behind the last step of a stage a place may be anything: then it is some place of the stage.
    """
    TM, PIECES, find, load = strip.ROWS // 16, strip.B // PIECE, rows.find, rows.load
    MASK, BEHIND = 0xFFFF & -4 * PIECE, 4 * PIECE
    LAST = (strip.GROUPS - 1) * strip.GROUP_BYTES + 4 * (strip.WIDTH - strip.B)

    @cuda.jit(device=True)
    def read(shared, lines, place, pair, x):
        here = min(uint32(place & uint32(MASK)), uint32(LAST))
        for piece in range(PIECES):
            at = find(lines, uint32(here + BEHIND * piece))
            for m in range(2):
                if 2 * pair + m < TM:
                    load(shared, at, 2 * pair + m, x[piece])

    return read


@cache
def adding(strip: Any, precision: str, rows: Rows, j: int) -> Any:
    """add(shared, lines, place, b, x, acc): column j of acc += x times b, what a lane has of w.

    The sum of a step begins at zero (`split`). x becomes that of the step which is at `place`.
    """
    SQUARES, TM, exact = strip.B // 8, strip.ROWS // 16, precision == "highest"
    PAIRS, read_x = -(-TM // 2), reading(strip, rows)
    W, X, SUMS = (SQUARES, 2 * SQUARES), (2, SQUARES, 4), (2, SQUARES, 4)
    split, add = split_in_two if exact else round_in_one, fragments.adding("float32")

    @cuda.jit(device=True)
    def multiply(x, w, c):
        for piece in range(SQUARES):
            for n in range(SQUARES):
                add(x[piece], w[n, 2 * piece], w[n, 2 * piece + 1], c[n])

    @cuda.jit(device=True)
    def add_step(shared, lines, place, b, x, acc):
        wh, wl = cuda.local.array(W, uint32), cuda.local.array(W, uint32)
        for n in range(SQUARES):
            for i in range(2 * SQUARES):
                wh[n, i], wl[n, i] = split(as_float32(b[2 * SQUARES * n + i]))
        for pair in range(PAIRS):
            xh, xl = cuda.local.array(X, uint32), cuda.local.array(X, uint32)
            c = cuda.local.array(SUMS, float32)
            for m in range(2):
                if 2 * pair + m < TM:
                    for n in range(SQUARES):
                        for i in range(4):
                            xh[m, n, i], xl[m, n, i] = split(as_float32(x[pair, n, m, i]))
                            c[m, n, i] = 0
            read_x(shared, lines, place, pair, x[pair])
            if exact:
                for m in range(2):
                    if 2 * pair + m < TM:
                        multiply(xl[m], wh, c[m])
                for m in range(2):
                    if 2 * pair + m < TM:
                        multiply(xh[m], wl, c[m])
            for m in range(2):
                if 2 * pair + m < TM:
                    multiply(xh[m], wh, c[m])
            for m in range(2):
                if 2 * pair + m < TM:
                    for n in range(SQUARES):
                        for i in range(4):
                            acc[((j * TM + 2 * pair + m) * SQUARES + n) * 4 + i] += c[m, n, i]

    return add_step
