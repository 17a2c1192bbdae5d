"""What a warp does with a stage: its 32 columns of a strip += the features that they keep."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k7_small_blocks.card import MMA
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import COUNT_BITS, Strip
from numbsparse.kernels.ptx import ldmatrix_x4, load_2xu32, load_4xu32


@cache
def products(name: str, strip: Strip) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block."""
    X_START, W_START, STEP_BYTES, LINE = (
        strip.X_START, strip.W_START, strip.STEP_BYTES, 2 * strip.WIDTH
    )  # fmt: skip
    HEAD, LAST_COLUMN, COUNT = strip.HEAD, strip.COLUMNS - 1, (1 << COUNT_BITS) - 1

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
        add_step = step_products(name, strip, j)
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
        # A lane reads a row of an 8 x 8 matrix: 16 rows, then the second piece of each.
        lines, piece = uint32(stage + X_START + lane % 16 * LINE), lane // 16 * 16
        before = counts >> uint32(4 * COUNT_BITS)
        word = uint32(stage // 4 + HEAD + before)
        at = uint32(stage // 4 + W_START // 4 + before * (STEP_BYTES // 4))
        # A step is read ahead of the one that is multiplied.
        place, b = words[word], load(words, at)
        columns(shared, words, lines, piece, word, at, place, b, counts, acc)

    return add_all


@cache
def step_products(name: str, strip: Strip, j: int) -> Any:
    """acc of column j += 16 features of x, from two pieces, times a step of w.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane.
    """
    TM, SQUARES, BELOW = strip.ROWS // 16, strip.B // 8, 16 * 2 * strip.WIDTH
    ALIKE = 64 // strip.WIDTH  # lines that are swizzled alike
    mma = MMA[name]

    @cuda.jit(device=True)
    def add_step(shared, lines, half, b, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        at = uint32(lines + (half ^ lane % 8 // ALIKE * 16))  # the pieces of a line are swizzled
        for m in range(TM):
            a0, a1, a2, a3 = ldmatrix_x4(shared, at + m * BELOW)
            for n in range(SQUARES):
                i = ((j * TM + m) * SQUARES + n) * 4
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma(
                    a0,
                    a1,
                    a2,
                    a3,
                    b[2 * n],
                    b[2 * n + 1],
                    acc[i],
                    acc[i + 1],
                    acc[i + 2],
                    acc[i + 3],
                )

    return add_step


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
