"""What a warp does with a stage: its 32 columns of a strip += the features that they keep.

A step is what a lane holds of w at once: 16 x B values of 16 bits, for one mma for every 16 rows
and 8 columns; or a block of float32, 8 features by 8 columns to an mma of tf32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k7_small_blocks.strip_blocks import loading
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import COUNT_BITS, Strip
from numbsparse.kernels.parts.fragments import MMA
from numbsparse.kernels.parts.split import add_product, splitting
from numbsparse.kernels.parts.swizzle import Rows, rows_of
from numbsparse.kernels.ptx import as_float32


@cache
def products(strip: Strip, arithmetic: str, x_transposed: bool, transposed: bool) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane.
    """
    X_START, W_START, HEAD = strip.X_START, strip.W_START, strip.HEAD
    WORDS, LAST_COLUMN, COUNT = strip.STEP_BYTES // 128, strip.COLUMNS - 1, (1 << COUNT_BITS) - 1
    rows = rows_of(strip.ITEM, strip.WIDTH, x_transposed)
    load, begin_x = loading(strip, transposed), rows.begin

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = adding(arithmetic, strip.B, strip.ROWS // 16, rows, j)
        others = columns_from(j + 1) if j < LAST_COLUMN else None

        @cuda.jit(device=True)
        def add_columns(shared, words, lines, word, at, place, b, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                now, own = place, b
                word, at = uint32(word + 1), uint32(at + 32 * WORDS)
                place, b = words[word], load(words, at)
                add_step(shared, lines, now, own, acc)
            if others is not None:
                others(shared, words, lines, word, at, place, b, counts, acc)

        return add_columns

    columns = columns_from(0)

    @cuda.jit(device=True)
    def add_all(shared, words, stage, warp, acc):
        counts = words[stage // 4 + warp]
        lines = begin_x(uint32(stage + X_START))
        before = counts >> uint32(4 * COUNT_BITS)
        word = uint32(stage // 4 + HEAD + before)
        at = uint32((stage + W_START) // 4 + before * (32 * WORDS))
        # A step is read ahead of the one that is multiplied.
        place, b = words[word], load(words, at)
        columns(shared, words, lines, word, at, place, b, counts, acc)

    return add_all


def adding(arithmetic: str, B: int, TM: int, rows: Rows, j: int) -> Any:
    """add(shared, lines, place, b, acc): the j-th part of acc += 16 TM rows of x times a step.

    b : what a lane has of the step
    lines, place : where x is, see `swizzle.Rows`: of 16 bits both pieces, of float32 each
    """
    make = add_16_bit if arithmetic in MMA else add_tf32
    return make(arithmetic, B, TM, rows, j)


@cache
def add_16_bit(dtype: str, B: int, TM: int, rows: Rows, j: int) -> Any:
    """acc of column j += 16 features of x, from two pieces, times a step of w."""
    SQUARES, A, mma, find, load = B // 8, (2, 4), MMA[dtype], rows.find, rows.load

    @cuda.jit(device=True)
    def add_step(shared, lines, place, b, acc):
        at = find(lines, place)
        x = cuda.local.array(A, uint32)
        for m in range(TM):
            load(shared, at, m, x)
            a = x[m % 2]
            for n in range(SQUARES):
                i = ((j * TM + m) * SQUARES + n) * 4
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma(
                    *(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]),
                    *(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]),
                )

    return add_step


@cache
def add_tf32(precision: str, B: int, TM: int, rows: Rows, j: int) -> Any:
    """acc of column j += the features of x that a step needs times its block of w: a sum of its
    own, which begins at zero (`split`)."""
    SQUARES, exact = B // 8, precision == "highest"
    W, X, SUMS, RAW = (SQUARES, 2 * SQUARES), (SQUARES, 4), (SQUARES, 4), (SQUARES, 2, 4)
    split, find, load = splitting(exact), rows.find, rows.load

    @cuda.jit(device=True)
    def multiply(a, b, piece, c):
        add_product(a[0], a[1], a[2], a[3], b[2 * piece], b[2 * piece + 1], c)

    @cuda.jit(device=True)
    def add_step(shared, lines, place, b, acc):
        wh, wl = cuda.local.array(W, uint32), cuda.local.array(W, uint32)
        for n in range(SQUARES):
            for i in range(2 * SQUARES):
                wh[n, i], wl[n, i] = split(as_float32(b[2 * SQUARES * n + i]))
        first, second = find(lines, place & uint32(0xFFFF)), find(lines, place >> uint32(16))
        raw = cuda.local.array(RAW, uint32)
        for m in range(TM):
            c = cuda.local.array(SUMS, float32)
            for n in range(SQUARES):
                for i in range(4):
                    c[n, i] = 0
            xh, xl = cuda.local.array(X, uint32), cuda.local.array(X, uint32)
            for piece in range(SQUARES):
                load(shared, second if piece else first, m, raw[piece])
                for i in range(4):
                    xh[piece, i], xl[piece, i] = split(as_float32(raw[piece, m % 2, i]))
                if exact:
                    for n in range(SQUARES):
                        multiply(xl[piece], wh[n], piece, c[n])
                    for n in range(SQUARES):
                        multiply(xh[piece], wl[n], piece, c[n])
            for piece in range(SQUARES):
                for n in range(SQUARES):
                    multiply(xh[piece], wh[n], piece, c[n])
            for n in range(SQUARES):
                for i in range(4):
                    acc[((j * TM + m) * SQUARES + n) * 4 + i] += c[n, i]

    return add_step
