"""Blocks of w in the order of the steps that multiply them, as the registers of an mma; products.

A step is what a lane holds of w at once: 16 x B values of 16 bits, for one mma for every 16 rows
and 8 columns; or a block of float32, 8 features by 8 columns to an mma of tf32 (`split`). A warp of
these has few others beside it, so what a step waits for is asked for a step before: w and where x
is at its begin, x as soon as the registers of the last one are split.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.fragments import MMA, adding, scaling
from numbsparse.kernels.parts.gates import adding_gated
from numbsparse.kernels.parts.split import round_in_one, split_in_two
from numbsparse.kernels.parts.stored_blocks import INSIDE_BITS, loading, loading_float32
from numbsparse.kernels.parts.strip import Strip, blocks_of_step
from numbsparse.kernels.parts.swizzle import PIECE, Rows, rows_of
from numbsparse.kernels.parts.words import words_of_lane
from numbsparse.kernels.ptx import (
    as_float32,
    let_next_kernel_start,
    movmatrix_trans,
    wait_for_earlier_kernels,
)

THREADS, RUN = 128, 4  # of a block, and the steps of a warp
COUNT_BITS = 6  # of the steps of a column, in the word of a warp


def packed(values: DeviceArray, codes: DeviceArray, transposed: bool) -> DeviceArray:
    """The blocks of w in the order of the steps, each value in the register where an mma needs it.

    codes (steps, blocks of a step) : the stored block; below it, in INSIDE_BITS, how many of its
        features there are, 0 where there is no block

    What is beyond the last of the features that are summed over becomes 0. The next kernel may
    start while this one runs, and then finds all that was there before this one.
    """
    B = values.shape[1]
    item, a_step = values.itemsize, blocks_of_step(B, values.itemsize)
    n_steps, across = codes.size // a_step, B * item // 4
    out = empty((n_steps * a_step * B * across,), "uint32")
    kernel, warps = pack_kernel(B, item, transposed), -(-n_steps // RUN)
    args = values.view("uint32"), codes, out
    launch(kernel, -(-warps * 32 // THREADS), THREADS, *args, overlap=True)
    return out


@cache
def pack_kernel(B: int, item: int, transposed: bool) -> Any:
    pack, BLOCKS = packing(B, item, transposed), blocks_of_step(B, item)

    @cuda.jit
    def kernel(values, codes, out):
        wait_for_earlier_kernels()
        let_next_kernel_start()
        pack(values, codes, codes.size // BLOCKS, cuda.grid(1) // 32 * RUN, (), out, int64(0))

    return kernel


@cache
def packing(B: int, item: int, transposed: bool, gated: str | None = None) -> Any:
    """pack(values, codes, n_steps, first, gates, out, to): RUN steps from `first` on, by a warp.

    They go to step `to` + first of `out`. `gated` is the dtype of values that are multiplied by
    gates.
    """
    INSIDE, PIECES = (1 << INSIDE_BITS) - 1, B // PIECE
    HALVES = 2 if item == 2 else PIECES  # of a step; for every one of them and every 8 columns
    TERMS = 1 if item == 2 else 2  # words of a lane
    WORDS, BLOCKS = TERMS * HALVES * PIECES, blocks_of_step(B, item)
    CODES, OWN = (RUN, BLOCKS), (RUN, WORDS)
    GATED, scaled = gated is not None, scaling(gated, skips=True) if gated else as_it_is
    read, finish = (reading_16_bit if item == 2 else reading_float32)(transposed, GATED, scaled)
    store = words_of_lane(WORDS).store

    @cuda.jit(device=True)
    def pack(values, codes, n_steps, first, gates, out, to):
        own, words = cuda.local.array(CODES, int32), cuda.local.array(OWN, uint32)
        factors = cuda.local.array(CODES, float32)
        # A warp's loads are in flight together: first what is where, then all values.
        for k in range(RUN):
            for i in range(BLOCKS):
                own[k, i] = codes[BLOCKS * (first + k) + i] if first + k < n_steps else int32(0)
        for k in range(RUN):
            for i in range(BLOCKS):
                factors[k, i] = gates[own[k, i] >> INSIDE_BITS] if GATED else float32(1)
        for k in range(RUN):
            for half in range(HALVES):
                code, at = own[k, half // PIECES], half % PIECES * PIECE
                block, inside = int64(code >> INSIDE_BITS), code & INSIDE
                for square in range(PIECES):
                    word = (square * HALVES + half) * TERMS
                    read(values, block, at, square * PIECE, inside, words[k], word)
        for k in range(RUN):
            for half in range(HALVES):
                code, at = own[k, half // PIECES], half % PIECES * PIECE
                for square in range(PIECES):
                    word = (square * HALVES + half) * TERMS
                    finish(at, code & INSIDE, factors[k, half // PIECES], words[k], word)
        for k in range(RUN):
            if first + k < n_steps:
                store(out, (to + first + k) * (32 * WORDS), words[k])

    return pack


@cuda.jit(device=True)
def as_it_is(word, gate):
    return word


@cache
def reading_16_bit(transposed: bool, GATED: bool, scaled: Any) -> Any:
    """read, finish: of column n + lane // 4 the values of features k + lane % 4 * 2 and the next,
    in a word. What is not there stays 0, whatever the gate."""

    @cuda.jit(device=True)
    def left_of(k, inside):
        lane = uint32(cuda.grid(1)) % 32
        return int32(inside - k - (lane % 4 * 2 if transposed else lane // 4))

    @cuda.jit(device=True)
    def read(values, block, k, n, inside, words, at):
        lane = uint32(cuda.grid(1)) % 32
        row, column = lane // 4, lane % 4
        words[at] = 0
        if left_of(k, inside) > 0:
            if transposed:
                words[at] = values[block, n + row, k // 2 + column]
            else:
                words[at] = values[block, k + row, n // 2 + column]

    @cuda.jit(device=True)
    def finish(k, inside, gate, words, at):
        left = left_of(k, inside)
        two = words[at]
        if GATED:
            two = scaled(two, gate) if left > 0 else uint32(0)
        if transposed:
            words[at] = two & uint32(0xFFFF) if left == 1 else two
        else:
            words[at] = movmatrix_trans(two)

    return read, finish


@cache
def reading_float32(transposed: bool, GATED: bool, scaled: Any) -> Any:
    """The same of features k + lane % 4 and that + 4, in two words."""

    @cuda.jit(device=True)
    def read(values, block, k, n, inside, words, at):
        lane = uint32(cuda.grid(1)) % 32
        for term in range(2):
            f, c = k + lane % 4 + 4 * term, n + lane // 4
            words[at + term] = 0
            if inside > f:
                words[at + term] = values[block, c, f] if transposed else values[block, f, c]

    @cuda.jit(device=True)
    def finish(k, inside, gate, words, at):
        if GATED:
            lane = uint32(cuda.grid(1)) % 32
            for term in range(2):
                there = inside > k + lane % 4 + 4 * term
                words[at + term] = scaled(words[at + term], gate) if there else uint32(0)

    return read, finish


@cache
def adding_16_bit(strip: Strip, arithmetic: str, rows: Rows, j: int) -> Any:
    """add(shared, lines, place, b, x, acc): column j of acc += x times a step, of 16 features from
    two pieces.

    b : what a lane has of the step
    lines, place : where x is, see `swizzle.Rows`; none of it is held a step ahead in `x`
    """
    SQUARES, TM, A, mma = strip.B // 8, strip.ROWS // 16, (2, 4), MMA[arithmetic]
    find, load = rows.find, rows.load

    @cuda.jit(device=True)
    def add_step(shared, lines, place, b, x, acc):
        at = find(lines, place)
        two = cuda.local.array(A, uint32)
        for m in range(TM):
            load(shared, at, m, two)
            a = two[m % 2]
            for n in range(SQUARES):
                i = ((j * TM + m) * SQUARES + n) * 4
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma(
                    *(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]),
                    *(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]),
                )

    return add_step


def held_tf32(strip: Strip) -> tuple[int, ...]:
    """The shape of what a lane holds of x: of 32 rows, of each piece."""
    return -(-strip.ROWS // 32), strip.B // PIECE, 2, 4


@cache
def reading_tf32(strip: Strip, rows: Rows) -> Any:
    """read(shared, lines, place, pair, x): x[piece, m] = what a lane has of 32 rows of x.

    Behind the last step of a stage a place may be anything: then it is some place of the stage.
    """
    TM, PIECES, find, load = strip.ROWS // 16, strip.B // PIECE, rows.find, rows.load
    MASK, BEHIND = 0xFFFF & -4 * PIECE, 4 * PIECE
    of_last = strip.GROUP_BYTES if strip.BOX else 4 * strip.WIDTH
    LAST = (strip.GROUPS - 1) * strip.GROUP_BYTES + of_last - 4 * strip.B

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
def passing_tf32(strip: Strip, rows: Rows) -> Any:
    """pass_over(shared, lines, place, x): a step that is left out; x becomes that of the next."""
    PAIRS, read = held_tf32(strip)[0], reading_tf32(strip, rows)

    @cuda.jit(device=True)
    def pass_over(shared, lines, place, x):
        for pair in range(PAIRS):
            read(shared, lines, place, pair, x[pair])

    return pass_over


@cache
def adding_tf32(strip: Strip, precision: str, rows: Rows, j: int) -> Any:
    """add(shared, lines, place, b, x, acc): column j of acc += x times b, what a lane has of w.

    The sum of a step begins at zero (`split`). x becomes that of the step which is at `place`.
    """
    SQUARES, TM, exact = strip.B // 8, strip.ROWS // 16, precision == "highest"
    PAIRS, read_x = -(-TM // 2), reading_tf32(strip, rows)
    W, X, SUMS = (SQUARES, 2 * SQUARES), (2, SQUARES, 4), (2, SQUARES, 4)
    split, add = split_in_two if exact else round_in_one, adding("float32")

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


@cuda.jit(device=True)
def nothing(shared, lines, place, x):
    pass


@cache
def products(strip: Strip, arithmetic: str, x_transposed: bool, transposed: bool) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane. A warp's word
    has the steps of each column, in COUNT_BITS bits each, and above them those of the warps before.
    Of float32 the lower half of a step's word has where x is, and that is read a step ahead too.
    """
    X_START, W_START, HEAD, NEXT = strip.X_START, strip.W_START, strip.HEAD, strip.STEP_BYTES // 4
    LAST_COLUMN, COUNT, FLOAT32 = strip.COLUMNS - 1, (1 << COUNT_BITS) - 1, strip.ITEM == 4
    AHEAD, HELD = (1, held_tf32(strip)) if FLOAT32 else (0, (1, 1))
    in_boxes = strip.GROUPS * strip.GROUP_BYTES if strip.BOX else 0
    rows = rows_of(strip.ITEM, strip.WIDTH, x_transposed, in_boxes)
    read_x, begin_x = reading_tf32(strip, rows), rows.begin  # read_x is for float32 alone
    load = (loading_float32 if FLOAT32 else loading)(strip.B, transposed)
    if strip.PACKED:
        load = words_of_lane(NEXT // 32).load
    adding_step = adding_tf32 if FLOAT32 else adding_16_bit
    pass_over = passing_tf32(strip, rows) if FLOAT32 else nothing
    GATED, OF_GATES = strip.GATES, strip.STEPS - AHEAD

    @cuda.jit(device=True)
    def gate_of(words, word):
        """Of the step whose word is AHEAD of this one."""
        return as_float32(words[word + OF_GATES]) if GATED else float32(1)

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = adding_gated(strip, adding_step(strip, arithmetic, rows, j), pass_over)
        others = columns_from(j + 1) if j < LAST_COLUMN else None

        @cuda.jit(device=True)
        def add_columns(shared, words, lines, word, at, place, b, gate, x, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                now, own, own_gate = place, b, gate
                word, at = uint32(word + 1), uint32(at + NEXT)
                place, b, gate = words[word], load(words, at), gate_of(words, word)
                add_step(shared, lines, now, own, own_gate, x, acc)
            if others is not None:
                others(shared, words, lines, word, at, place, b, gate, x, counts, acc)

        return add_columns

    columns = columns_from(0)

    @cuda.jit(device=True)
    def add_all(shared, words, stage, warp, within, acc):
        counts = words[stage // 4 + warp]
        lines = begin_x(uint32(stage + X_START), within)
        before = counts >> uint32(4 * COUNT_BITS)
        word = uint32(stage // 4 + HEAD + before)
        at = uint32((stage + W_START) // 4 + before * NEXT)
        # A step is read ahead of the one that is multiplied.
        first, place = words[word], words[word + AHEAD]
        b, x = load(words, at), cuda.local.array(HELD, uint32)
        if FLOAT32:
            for pair in range(x.shape[0]):
                read_x(shared, lines, first, pair, x[pair])
        word = uint32(word + AHEAD)
        gate = gate_of(words, word)
        columns(shared, words, lines, word, at, place, b, gate, x, counts, acc)

    return add_all
