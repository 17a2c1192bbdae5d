"""The steps of w for strips of float32: laid out as an mma wants them, and multiplied.

A step is a block of w: of 8 x 8 one mma of tf32 for every 16 rows, of 16 x 16 four, pieces of 8
features by squares of 8 columns. `ldmatrix` brings four neighbours of a row to the four lanes that
hold it: two of them make a piece.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k7_small_blocks.single_rows import rows_of
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import COUNT_BITS, PIECE, Strip
from numbsparse.kernels.parts.fragments_tf32 import round_to_tf32, split_exact
from numbsparse.kernels.ptx import as_float32, load_2xu32, load_4xu32, mma_m16n8k8_tf32

THREADS = 128


def packed(
    values: DeviceArray, halves: DeviceArray, lines: DeviceArray, features: int, turned: bool
) -> DeviceArray:
    """float32, a block after another: (B / 8 squares, 32 lanes, B / 8 pieces, 2 terms).

    What lies beyond the last of the features that are summed over becomes 0.
    """
    B, n_steps = values.shape[1], halves.size // 2
    out = empty((n_steps * B * B,), "float32")
    grid = -(-out.size // (2 * THREADS))
    launch(pack_kernel(B, turned), grid, THREADS, values, halves, lines, features, out)
    return out


@cache
def pack_kernel(B: int, turned: bool) -> Any:
    PIECES, LANES = B // PIECE, B * B // 2  # threads of a step, each with two values

    @cuda.jit
    def kernel(values, halves, lines, features, out):
        t = uint32(cuda.threadIdx.x)
        step = cuda.blockIdx.x * int64(THREADS // LANES) + t // LANES
        if step < halves.size // 2:
            half, lane = t % PIECES, t // PIECES % 32
            piece = halves[2 * step + half]
            block, n = piece // PIECES, t % LANES // (32 * PIECES) * 8 + lane // 4
            for term in range(2):
                k = piece % PIECES * PIECE + lane % 4 + 4 * term
                value = float32(0)
                if piece >= 0 and lines[max(block, 0)] * int64(B) + k < features:
                    value = values[block, n, k] if turned else values[block, k, n]
                out[step * (2 * LANES) + 2 * (t % LANES) + term] = value

    return kernel


@cache
def products(strip: Strip, exact: bool, x_turned: bool) -> Any:
    """acc += x @ w of the stage that begins at byte `stage`, by a warp of its block."""
    X_START, W_START, STEP = strip.X_START, strip.W_START, strip.STEP_BYTES // 4
    HEAD = strip.HEAD
    LAST_COLUMN, COUNT = strip.COLUMNS - 1, (1 << COUNT_BITS) - 1
    begin_x = rows_of(x_turned).begin

    @cuda.jit(device=True)
    def load(words, at):
        """The values of a step of w that a lane holds."""
        lane = uint32(cuda.threadIdx.x) % 32
        if STEP == 256:
            b0, b1, b2, b3 = load_4xu32(words, at + lane * 4)
            b4, b5, b6, b7 = load_4xu32(words, at + 128 + lane * 4)
            return b0, b1, b2, b3, b4, b5, b6, b7
        b0, b1 = load_2xu32(words, at + lane * 2)
        return b0, b1, b0, b1, b0, b1, b0, b1

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = step_products(strip, exact, x_turned, j)
        others = columns_from(j + 1) if j < LAST_COLUMN else None

        @cuda.jit(device=True)
        def add_columns(shared, words, lines, word, at, place, b, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                now, own = place, b
                word, at = uint32(word + 1), uint32(at + STEP)
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
        at = uint32((stage + W_START) // 4 + before * STEP)
        # A step is read ahead of the one that is multiplied.
        place, b = words[word], load(words, at)
        columns(shared, words, lines, word, at, place, b, counts, acc)

    return add_all


@cache
def step_products(strip: Strip, exact: bool, x_turned: bool, j: int) -> Any:
    """acc of column j += the features of x that a step needs times its block of w.

    acc holds, column by column and for each 16 rows, 16 x B values: B / 2 in a lane.
    """
    TM, SQUARES = strip.ROWS // 16, strip.B // 8
    W, X, SUMS = (SQUARES, 2 * SQUARES), (SQUARES, 4), (SQUARES, 4)
    RAW = (SQUARES, 2, 4)
    split = split_exact if exact else round_to_tf32
    _, find, load, _ = rows_of(x_turned)

    @cuda.jit(device=True)
    def multiply(a, b, n, piece, c):
        c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(
            a[0], a[1], a[2], a[3], b[n, 2 * piece], b[n, 2 * piece + 1], c[0], c[1], c[2], c[3]
        )

    @cuda.jit(device=True)
    def add_step(shared, lines, place, b, acc):
        wh, wl = cuda.local.array(W, uint32), cuda.local.array(W, uint32)
        for n in range(SQUARES):
            for i in range(2 * SQUARES):
                wh[n, i], wl[n, i] = split(as_float32(b[4 * n + i]))
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
                        multiply(xl[piece], wh, n, piece, c[n])
                    for n in range(SQUARES):
                        multiply(xh[piece], wl, n, piece, c[n])
            for piece in range(SQUARES):
                for n in range(SQUARES):
                    multiply(xh[piece], wh, n, piece, c[n])
            for n in range(SQUARES):
                for i in range(4):
                    acc[((j * TM + m) * SQUARES + n) * 4 + i] += c[n, i]

    return add_step
