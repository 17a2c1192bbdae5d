"""What a warp does with a stage: its 32 columns of a strip += the features that they keep."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k7_small_blocks.card import MMA
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import COUNT_BITS, PIECE, Strip
from numbsparse.kernels.ptx import ldmatrix_x4, ldmatrix_x4_trans, load_2xu32, load_4xu32


@cache
def products(name: str, strip: Strip, x_turned: bool) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block."""
    X_START, W_START, STEP_BYTES = strip.X_START, strip.W_START, strip.STEP_BYTES
    HEAD, LAST_COLUMN, COUNT = strip.HEAD, strip.COLUMNS - 1, (1 << COUNT_BITS) - 1
    # A lane reads a line of an 8 x 8 matrix: 16 rows of the batch, then the second piece of each;
    # or 8 features of the upper 8 rows of 16, of the lower, and then of the second piece.
    LINES, LINE = (PIECE, 128) if x_turned else (16, 2 * strip.WIDTH)
    make_step = turned_step if x_turned else step_of_rows

    @cuda.jit(device=True)
    def load(words, at):
        """The registers of a step of w."""
        lane = uint32(cuda.threadIdx.x) % 32
        if STEP_BYTES == 512:
            return load_4xu32(words, at + lane * 4)
        b0, b1 = load_2xu32(words, at + lane * 2)
        return b0, b1, b0, b1

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = make_step(name, strip, j)
        others = columns_from(j + 1) if j < LAST_COLUMN else None

        @cuda.jit(device=True)
        def add_columns(shared, words, lines, piece, word, at, place, b, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                half, now = place >> piece & uint32(0xFFFF), b
                word, at = uint32(word + 1), uint32(at + STEP_BYTES // 4)
                place, b = words[word], load(words, at)
                add_step(shared, lines, half, now, acc)
            if others is not None:
                others(shared, words, lines, piece, word, at, place, b, counts, acc)

        return add_columns

    columns = columns_from(0)

    @cuda.jit(device=True)
    def add_all(shared, words, stage, warp, acc):
        lane, counts = uint32(cuda.threadIdx.x) % 32, words[stage // 4 + warp]
        lines = uint32(uint32(stage + X_START) + cuda.threadIdx.x % LINES * LINE)
        piece = lane // 16 * 16
        before = counts >> uint32(4 * COUNT_BITS)
        word = uint32(stage // 4 + HEAD + before)
        at = uint32(stage // 4 + W_START // 4 + before * (STEP_BYTES // 4))
        # A step is read ahead of the one that is multiplied.
        place, b = words[word], load(words, at)
        columns(shared, words, lines, piece, word, at, place, b, counts, acc)

    return add_all


@cache
def step_of_rows(name: str, strip: Strip, j: int) -> Any:
    """acc of column j += 16 features of x, from two pieces, times a step of w.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane.
    """
    TM, BELOW = strip.ROWS // 16, 16 * 2 * strip.WIDTH
    ALIKE = 64 // strip.WIDTH  # lines that are swizzled alike
    add_rows = row_products(name, strip, j)

    @cuda.jit(device=True)
    def add_step(shared, lines, half, b, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        at = uint32(lines + (half ^ lane % 8 // ALIKE * 16))  # the pieces of a line are swizzled
        for m in range(TM):
            add_rows(m, ldmatrix_x4(shared, at + m * BELOW), b, acc)

    return add_step


@cache
def turned_step(name: str, strip: Strip, j: int) -> Any:
    """As `step_of_rows`: `ldmatrix` turns the matrices over. A plan counts 16 bytes for a piece,
    which here is 8 lines."""
    TM, WITHIN = strip.ROWS // 16, 16 * (strip.WIDTH // PIECE - 1)
    FURTHER = PIECE * 128 // 16 - 1
    add_rows = row_products(name, strip, j)

    @cuda.jit(device=True)
    def add_step(shared, lines, half, b, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        piece = uint32((lane // 8 % 2 ^ lane % 8) * 16)  # the pieces of a line are swizzled
        at = uint32(lines + half + (half & uint32(WITHIN)) * FURTHER)
        for m in range(TM):
            add_rows(m, ldmatrix_x4_trans(shared, at + (piece ^ uint32(32 * m))), b, acc)

    return add_step


@cache
def row_products(name: str, strip: Strip, j: int) -> Any:
    """acc of column j += the m-th 16 rows of x, in the registers a, times a step of w."""
    TM, SQUARES = strip.ROWS // 16, strip.B // 8
    mma = MMA[name]

    @cuda.jit(device=True)
    def add_rows(m, a, b, acc):
        for n in range(SQUARES):
            i = ((j * TM + m) * SQUARES + n) * 4
            acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma(
                a[0],
                a[1],
                a[2],
                a[3],
                b[2 * n],
                b[2 * n + 1],
                acc[i],
                acc[i + 1],
                acc[i + 2],
                acc[i + 3],
            )

    return add_rows


@cache
def clear_zeros(strip: Strip, warps: int) -> Any:
    """The zeros after the groups of every stage, for steps that are half empty."""
    STAGES, STAGE_BYTES = strip.STAGES, strip.STAGE_BYTES
    START = strip.X_START + strip.GROUPS * strip.GROUP_BYTES
    COUNT, THREADS = (STAGE_BYTES - START) // 4, 32 * warps

    @cuda.jit(device=True)
    def clear(words, base):
        for stage in range(STAGES):
            first = (base + stage * STAGE_BYTES + START) // 4
            for i in range(cuda.threadIdx.x, COUNT, THREADS):
                words[first + i] = 0

    return clear
