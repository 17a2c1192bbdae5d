"""Small 16-bit blocks of w in a stage of a ring: how lanes copy them, and how an mma gets them.

They are as in global memory, one after another, a lane copying 16 bytes at a time; pieces of a row
change places, so that those read together share no bank. For a long batch they are packed once
beforehand (`packed`), and the copy engine copies them, so that no lane has to.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    cp_async_arrive,
    cp_async_word,
    cp_async_zero_fill,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_4xu32,
    redux_or,
    shfl_idx,
    store_4xu32,
)

INSIDE_BITS = 5  # of the code of a block, below its number: how many of its features there are
TOGETHER = 1 if SIMULATED else 4  # copies that a lane requests one after another


class Copying(NamedTuple):
    """How the fetchers copy the blocks of a stage, a share each.

    codes : numbers that a lane knows of a stage
    look_up(codes, known, k, fetcher, own) : of the k-th stage that the lanes know
    weigh(gates, own) : the gates of these, once they are there
    copy(values, gates, own, many, shared, to, bars, stage, fetcher) : `many` steps, to byte `to`
    """

    codes: int
    look_up: Any
    weigh: Any
    copy: Any


def copying(
    B: int,
    item: int,
    STEPS: int,
    FETCHERS: int,
    transposed: bool,
    gated: str = "",
    beside: bool = False,
) -> Copying:
    """For up to STEPS steps in a stage, by FETCHERS warps; codes as in `packed`.

    What is beyond the last of the features that are summed over becomes 0. `gated` is the dtype of
    values that are multiplied by gates, of blocks of 8; one whose gate is 0 is not read, and a
    stage whose gates are all 0 and 1 is copied as without. Or gates of blocks, one to a step, are
    copied to right before them, `beside`: who multiplies reads them there.
    """
    A_STEP, RUN = 16 // B if item == 2 else 1, 16 // item  # values in 16 bytes
    INSIDE, BYTES, PIECES = (1 << INSIDE_BITS) - 1, item * B * B, B // RUN  # of a block, of a row
    LANES, TIMES = min(B * PIECES, 32), -(-B * PIECES // 32)
    AT_ONCE, FURTHER = 32 // LANES, LANES // PIECES
    CODES = -(-STEPS * A_STEP // (32 * FETCHERS))
    ROUNDS, EACH = 32 // AT_ONCE, AT_ONCE * FETCHERS
    SCALES, scaled, FOUR = gated != "", scaling(gated or "float16"), (TOGETHER, 4)

    @cuda.jit(device=True)
    def weigh(gates, own):
        if SCALES:
            for c in range(CODES):
                own[CODES + c] = int32(as_uint32(gates[own[c] >> INSIDE_BITS]))

    @cuda.jit(device=True)
    def put_scaled(words, gate, nbytes, shared, at):
        """16 bytes times a gate, of which so many are there."""
        for i in range(4):
            left, word = nbytes - 4 * i, scaled(words[i], gate)
            word = uint32(word & uint32(0xFFFF)) if left == 2 else word
            words[i] = word if left > 0 else uint32(0)
        store_4xu32(shared, at, words[0], words[1], words[2], words[3])

    @cuda.jit(device=True)
    def copy_gates(gates, own, many, shared, begin, fetcher):
        lane = uint32(cuda.threadIdx.x) % 32
        at = int32((lane // AT_ONCE * FETCHERS + fetcher) * AT_ONCE + lane % AT_ONCE)
        for c in range(CODES):
            if at < many:
                cp_async_word(shared, uint32(begin + 4 * at), gates, own[c] >> INSIDE_BITS, 4)
            at = int32(at + 32 * FETCHERS)

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
    def leave_out(own):
        """Of blocks whose gate is 0 nothing is there; whether any lane has a gate of others."""
        scaled = uint32(0)
        for c in range(CODES):
            gate = as_float32(uint32(own[CODES + c]))
            if gate == 0:
                own[c] = int32(0)
            elif gate != 1 and own[c] & INSIDE != 0:
                scaled = uint32(1)
        return redux_or(scaled) != 0

    def copier(SCALES: bool) -> Any:
        @cuda.jit(device=True)
        def copy_blocks(values, own, many, shared, to, fetcher):
            lane = uint32(cuda.threadIdx.x) % 32
            block, row, piece = lane // LANES, lane % LANES // PIECES, lane % PIECES
            swap, begin = exchange(row, PIECES), int32(fetcher * AT_ONCE)
            rounds = (many - begin + EACH - 1) // EACH
            words, gates = cuda.local.array(FOUR, uint32), cuda.local.array(TOGETHER, float32)
            places, sizes = cuda.local.array(TOGETHER, uint32), cuda.local.array(TOGETHER, int32)
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
                            nbytes = item * min(max(inside - RUN * piece, 0), RUN)
                        there = uint32(start + (row * PIECES + (piece ^ swap)) * 16)
                        of_line = at + int64(row * B + piece * RUN)
                        if SCALES:
                            gate = shfl_idx(own[CODES + c], uint32(k * AT_ONCE + block))
                            gates[u], places[u], sizes[u] = as_float32(uint32(gate)), there, nbytes
                            if nbytes > 0 and gates[u] != 1:
                                four = load_4xu32(values, of_line)
                                for i in range(4):
                                    words[u, i] = four[i]
                                continue
                        cp_async_zero_fill(shared, there, values, of_line, int32(nbytes))
                        if TIMES == 2:  # the other half of a block, whose pieces are alike
                            if not transposed:
                                nbytes = 16 if row + FURTHER < inside else 0
                            there, of_line = uint32(there + 512), of_line + FURTHER * B
                            cp_async_zero_fill(shared, there, values, of_line, int32(nbytes))
                    if SCALES:
                        for u in range(TOGETHER):
                            if sizes[u] > 0 and gates[u] != 1:
                                put_scaled(words[u], gates[u], sizes[u], shared, places[u])

        return copy_blocks

    copy_as_stored, copy_scaled = copier(False), copier(SCALES)

    @cuda.jit(device=True)
    def copy(values, all_gates, own, many, shared, to, bars, stage, fetcher):
        many = int32(many * A_STEP)
        if beside:
            copy_gates(all_gates, own, many, shared, uint32(to - 4 * STEPS), fetcher)
        if SCALES and leave_out(own):
            copy_scaled(values, own, many, shared, to, fetcher)
            cuda.threadfence_block()
        else:
            copy_as_stored(values, own, many, shared, to, fetcher)
        cp_async_arrive(bars, stage)

    return Copying(2 * CODES if SCALES else CODES, look_up, weigh, copy)


@cuda.jit(device=True)
def exchange(row, pieces):
    """What the numbers of the pieces in a row of a block are changed by."""
    return row // 4 % 2 + row // 2 % 2 * 2 if pieces == 4 else row // 4 % pieces


@cache
def loading_float32(B: int, transposed: bool) -> Any:
    """load(words, at): what a lane has of the block of float32 at a word, as `packed` says."""
    PIECES = B // 4

    @cuda.jit(device=True)
    def value(words, at, square, feature):
        lane = uint32(cuda.threadIdx.x) % 32
        k, n = feature + lane % 4, square * 8 + lane // 4
        row, column = (n, k) if transposed else (k, n)
        return words[uint32(at + row * B + (column // 4 ^ exchange(row, PIECES)) * 4 + column % 4)]

    @cuda.jit(device=True)
    def load_square(words, at):
        return value(words, at, 0, 0), value(words, at, 0, 4)

    @cuda.jit(device=True)
    def load_squares(words, at):
        """Of 8 columns 16 features, then of the next."""
        a, b = value(words, at, 0, 0), value(words, at, 0, 4)
        c, d = value(words, at, 0, 8), value(words, at, 0, 12)
        e, f = value(words, at, 1, 0), value(words, at, 1, 4)
        g, h = value(words, at, 1, 8), value(words, at, 1, 12)
        return a, b, c, d, e, f, g, h

    return load_square if B == 8 else load_squares


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
