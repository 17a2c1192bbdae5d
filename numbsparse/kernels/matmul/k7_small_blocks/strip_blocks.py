"""The blocks of w that a stage of a strip holds: how lanes bring them, and how they come to an mma.

They lie as they are stored, one after another, 16 bytes of each brought by a lane; pieces of a row
change places, so that those which are read together share no bank. For a long batch they are packed
once beforehand (`parts.packed`), and the copy engine brings them: then nobody copies them through
lanes, stage after stage.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import INSIDE_BITS, Strip
from numbsparse.kernels.parts.words import words_of_lane
from numbsparse.kernels.ptx import (
    cp_async_arrive,
    cp_async_zero_fill,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shfl_idx,
)

TOGETHER = 1 if SIMULATED else 4  # copies that a lane asks for one after another


@cache
def exchanging(strip: Strip) -> Any:
    """exchanged(row, piece): where 16 bytes of a row of a block are."""
    PIECES = strip.B * strip.ITEM // 16

    @cuda.jit(device=True)
    def exchanged(row, piece):
        if PIECES == 1:
            return piece
        key = row // 4 % 2
        return piece ^ (key if PIECES == 2 else key + row // 2 % 2 * 2)

    return exchanged


class Copying(NamedTuple):
    """How the fetchers copy the blocks of a stage, a share each.

    codes : those that a lane knows of a stage
    look_up(codes, known, k, fetcher, own) : of the k-th stage that the lanes know
    copy(values, own, many, shared, to, bars, stage, fetcher) : so many steps, to byte `to`
    """

    codes: int
    look_up: Any
    copy: Any


def copying(strip: Strip, transposed: bool) -> Copying:
    """What is beyond the last of the features that are summed over becomes 0."""
    B, ITEM, FETCHERS, A_STEP = strip.B, strip.ITEM, strip.FETCHERS, strip.BLOCKS_A_STEP
    RUN, INSIDE, BYTES = 16 // ITEM, (1 << INSIDE_BITS) - 1, ITEM * B * B  # of a block
    PIECES = B // RUN  # of a row
    LANES = min(B * PIECES, 32)  # of a block
    AT_ONCE, TIMES, exchanged = 32 // LANES, B * PIECES // LANES, exchanging(strip)
    CODES = -(-strip.STEPS * A_STEP // (32 * FETCHERS))
    ROUNDS, EACH = 32 // AT_ONCE, AT_ONCE * FETCHERS

    @cuda.jit(device=True)
    def look_up(codes, known, k, fetcher, own):
        """A lane knows one of those that are copied at once, which all fetchers do in turn."""
        lane = uint32(cuda.threadIdx.x) % 32
        first, end = shfl_idx(known[1], k) * A_STEP, shfl_idx(known[2], k) * A_STEP
        at = int32(first + (lane // AT_ONCE * FETCHERS + fetcher) * AT_ONCE + lane % AT_ONCE)
        for c in range(CODES):
            own[c] = codes[at] if at < end else int32(0)
            at = int32(at + 32 * FETCHERS)

    @cuda.jit(device=True)
    def copy(values, own, many, shared, to, bars, stage, fetcher):
        lane, many = uint32(cuda.threadIdx.x) % 32, int32(many * A_STEP)
        block, row, piece = lane // LANES, lane % LANES // PIECES, lane % PIECES
        begin = int32(fetcher * AT_ONCE)
        rounds = (many - begin + EACH - 1) // EACH
        for c in range(CODES):
            mine = min(ROUNDS, rounds - c * ROUNDS)
            for first in range(0, mine, TOGETHER):
                for u in range(TOGETHER):  # the last one is copied again
                    k = min(first + u, mine - 1)
                    here = shfl_idx(own[c], uint32(k * AT_ONCE + block))
                    inside, at = here & INSIDE, int64(here >> INSIDE_BITS) * (B * B)
                    start = uint32(to + (begin + (c * ROUNDS + k) * EACH + block) * BYTES)
                    for t in range(TIMES):
                        line = row + t * (LANES // PIECES)
                        nbytes = 16 if line < inside else 0
                        if transposed:
                            nbytes = ITEM * min(max(inside - RUN * piece, 0), RUN)
                        there = uint32(start + (line * PIECES + exchanged(line, piece)) * 16)
                        of_line = at + int64(line * B + piece * RUN)
                        cp_async_zero_fill(shared, there, values, of_line, int32(nbytes))
        cp_async_arrive(bars, stage)

    return Copying(CODES, look_up, copy)


@cache
def loading(strip: Strip, transposed: bool) -> Any:
    """load(words, at): what a lane has of the step at a word, as `parts.packed` says."""
    B, exchanged = strip.B, exchanging(strip)
    if strip.PACKED:
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

    @cuda.jit(device=True)
    def word(words, at, square, feature):
        lane = uint32(cuda.threadIdx.x) % 32
        k, n = feature + lane % 4, square * 8 + lane // 4
        row, column = (n, k) if transposed else (k, n)
        return words[uint32(at + row * B + exchanged(row, column // 4) * 4 + column % 4)]

    @cuda.jit(device=True)
    def load_square(words, at):
        return word(words, at, 0, 0), word(words, at, 0, 4)

    @cuda.jit(device=True)
    def load_squares(words, at):
        """Of 8 columns 16 features, then of the next."""
        a, b = word(words, at, 0, 0), word(words, at, 0, 4)
        c, d = word(words, at, 0, 8), word(words, at, 0, 12)
        e, f = word(words, at, 1, 0), word(words, at, 1, 4)
        g, h = word(words, at, 1, 8), word(words, at, 1, 12)
        return a, b, c, d, e, f, g, h

    if strip.ITEM == 4:
        return load_square if B == 8 else load_squares
    return load_two if B == 8 else load_four
