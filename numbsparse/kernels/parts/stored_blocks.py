"""Small 16-bit blocks of w in a stage of a ring: how lanes copy them, and how an mma gets them.

They are as in global memory, one after another, a lane copying 16 bytes at a time; pieces of a row
change places, so that those read together share no bank. For a long batch they are packed once
beforehand (`packed`), and the copy engine copies them, so that no lane has to.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.parts.swizzle import PIECE
from numbsparse.kernels.ptx import (
    cp_async_arrive,
    cp_async_zero_fill,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shfl_idx,
)

TOGETHER = 1 if SIMULATED else 4  # copies that a lane requests one after another


class Copying(NamedTuple):
    """How the fetchers copy the blocks of a stage, a share each.

    codes : those that a lane knows of a stage
    look_up(codes, known, k, fetcher, own) : of the k-th stage that the lanes know
    copy(values, own, many, shared, to, bars, stage, fetcher) : `many` steps, to byte `to`
    """

    codes: int
    look_up: Any
    copy: Any


def copying(B: int, STEPS: int, FETCHERS: int, INSIDE_BITS: int, transposed: bool) -> Copying:
    """For up to STEPS steps of 16 products in a stage, by FETCHERS warps; codes as in `packed`.

    What is beyond the last of the features that are summed over becomes 0.
    """
    A_STEP = 16 // B
    INSIDE, BYTES, PIECES = (1 << INSIDE_BITS) - 1, 2 * B * B, B // PIECE  # of a block, of a row
    LANES, AT_ONCE = B * PIECES, 32 // (B * PIECES)
    CODES = -(-STEPS * A_STEP // (32 * FETCHERS))
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
        exchange, begin = row // 4 % PIECES, int32(fetcher * AT_ONCE)
        rounds = (many - begin + EACH - 1) // EACH
        for c in range(CODES):
            mine = min(ROUNDS, rounds - c * ROUNDS)
            for first in range(0, mine, TOGETHER):
                for u in range(TOGETHER):  # the last one is copied again
                    k = min(first + u, mine - 1)
                    here = shfl_idx(own[c], uint32(k * AT_ONCE + block))
                    inside, at = here & INSIDE, int64(here >> INSIDE_BITS) * (B * B)
                    start = uint32(to + (begin + (c * ROUNDS + k) * EACH + block) * BYTES)
                    nbytes = 16 if row < inside else 0
                    if transposed:
                        nbytes = 2 * min(max(inside - PIECE * piece, 0), PIECE)
                    there = uint32(start + (row * PIECES + (piece ^ exchange)) * 16)
                    of_line = at + int64(row * B + piece * PIECE)
                    cp_async_zero_fill(shared, there, values, of_line, int32(nbytes))
        cp_async_arrive(bars, stage)

    return Copying(CODES, look_up, copy)


@cache
def loading(B: int, transposed: bool) -> Any:
    """load(words, at): what a lane has of the step at a word, as `packed` says."""
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
        return four(words, uint32(at + row * 8 + (piece ^ row // 4 % 2) * 4))

    return load_two if B == 8 else load_four
