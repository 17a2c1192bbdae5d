"""What a warp does with a stage: its 32 columns of a strip += the features that they keep.

`parts.packed` says what a step of w is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import COUNT_BITS, Strip
from numbsparse.kernels.parts.packed import adding
from numbsparse.kernels.parts.stored_blocks import loading
from numbsparse.kernels.parts.swizzle import rows_of
from numbsparse.kernels.parts.words import words_of_lane


@cache
def products(strip: Strip, arithmetic: str, x_transposed: bool, transposed: bool) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane.
    """
    X_START, W_START, HEAD = strip.X_START, strip.W_START, strip.HEAD
    WORDS, LAST_COLUMN, COUNT = strip.STEP_BYTES // 128, strip.COLUMNS - 1, (1 << COUNT_BITS) - 1
    rows = rows_of(strip.ITEM, strip.WIDTH, x_transposed)
    load, begin_x = loading(strip.B, transposed), rows.begin
    if strip.PACKED:
        load = words_of_lane(WORDS).load

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
