"""The blocks of w that a stage of a strip holds: how they come there, and on to an mma.

Those of 16 bits lie as they are stored, one after another, 16 bytes of each brought by a lane; the
two pieces of a row of 16 change places in every other four rows, so that none of eight rows shares
a bank. float32, which leaves one warp for all copies, is packed beforehand (`parts.packed`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import INSIDE_BITS, Strip
from numbsparse.kernels.parts.words import words_of_lane
from numbsparse.kernels.ptx import (
    bulk_load,
    cp_async_arrive,
    cp_async_zero_fill,
    elect,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shfl_idx,
)


@cuda.jit(device=True)
def exchanged(row, half):
    """Where a piece of a row of 16 values is."""
    return half ^ row // 4 % 2


@cache
def asking(strip: Strip) -> Any:
    """ask(w, codes, first, many, shared, to, bars, stage, fetcher): so many steps that are packed,
    from `first` on, to byte `to`."""
    BYTES = strip.STEP_BYTES

    @cuda.jit(device=True)
    def ask(w, codes, first, many, shared, to, bars, stage, fetcher):
        if many > 0 and elect() != 0:
            at, nbytes = int64(first) * (BYTES // 4), uint32(many * BYTES)
            bulk_load(shared, to, w, at, nbytes, bars, stage)

    return ask


@cache
def copying(strip: Strip, transposed: bool) -> Any:
    """The same of blocks as they are stored, by all lanes of all fetchers, a share each.

    What is beyond the last of the features that are summed over is 0.
    """
    B, FETCHERS, A_STEP, INSIDE = (
        strip.B,
        strip.FETCHERS,
        strip.BLOCKS_A_STEP,
        (1 << INSIDE_BITS) - 1,
    )
    PIECES, BYTES = B // 8, 2 * B * B  # of a row, of a block
    LANES = B * PIECES  # of a block: 8 or 32
    AT_ONCE = 32 // LANES

    @cuda.jit(device=True)
    def copy(values, codes, first, many, shared, to, bars, stage, fetcher):
        lane, first, many = uint32(cuda.threadIdx.x) % 32, first * A_STEP, int32(many * A_STEP)
        block, row, piece = lane // LANES, lane % LANES // PIECES, lane % PIECES
        within = int64(row * B + piece * 8)
        place = row * PIECES + (exchanged(row, piece) if B == 16 else piece)
        to = uint32(to + block * BYTES + place * 16)
        for group in range(32 * fetcher, many, 32 * FETCHERS):
            code = int32(0)
            if group + lane < many:
                code = codes[first + group + lane]
            for k in range(0, min(int32(32), many - group), AT_ONCE):
                own = shfl_idx(code, uint32(k + block))
                inside, at = own & INSIDE, int64(own >> INSIDE_BITS) * (B * B) + within
                nbytes = 16 if row < inside else 0
                if transposed:
                    nbytes = 2 * min(max(inside - 8 * piece, 0), 8)
                there = uint32(to + (group + k) * BYTES)
                cp_async_zero_fill(shared, there, values, at, int32(nbytes))
        cp_async_arrive(bars, stage)

    return copy


@cache
def loading(strip: Strip, transposed: bool) -> Any:
    """load(words, at): what a lane has of the step at a word, as `parts.packed` says."""
    B = strip.B
    if strip.ITEM == 4:
        return words_of_lane(strip.STEP_BYTES // 128).load
    two, four = (ldmatrix_x2, ldmatrix_x4)
    if not transposed:
        two, four = (ldmatrix_x2_trans, ldmatrix_x4_trans)

    @cuda.jit(device=True)
    def load_two(words, at):
        """Row 8 i + r of the lanes is that of block i."""
        return two(words, uint32(at + cuda.threadIdx.x % 16 * 4))

    @cuda.jit(device=True)
    def load_four(words, at):
        """Of 8 columns both 8 features, then of the next."""
        lane = uint32(cuda.threadIdx.x) % 32
        half, square = lane // 8 % 2, lane // 16
        above, piece = (square, half) if transposed else (half, square)
        row = lane % 8 + 8 * above
        return four(words, uint32(at + row * 8 + exchanged(row, piece) * 4))

    return load_two if B == 8 else load_four
