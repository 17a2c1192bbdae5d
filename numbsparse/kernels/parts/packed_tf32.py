"""Products of a strip's stage in float32, a block of w a step (`packed`), as tf32 (`split`).

A warp has few others beside it, so what a step waits for is asked for a step before: w and where x
is at its begin, x as soon as the registers of the last one are split.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.parts import fragments
from numbsparse.kernels.parts.split import round_in_one, split_in_two
from numbsparse.kernels.parts.swizzle import PIECE, Rows
from numbsparse.kernels.ptx import as_float32


def held_tf32(strip: Any) -> tuple[int, ...]:
    """The shape of what a lane holds of x: of 32 rows, of each piece."""
    return -(-strip.ROWS // 32), strip.B // PIECE, 2, 4


@cache
def reading_tf32(strip: Any, rows: Rows) -> Any:
    """read(shared, lines, place, pair, x): x[piece, m] = what a lane has of 32 rows of x.

    Behind the last step of a stage a place may be anything: then it is some place of the stage.
    """
    TM, PIECES, find, load = strip.ROWS // 16, strip.B // PIECE, rows.find, rows.load
    MASK, BEHIND = 0xFFFF & -4 * PIECE, 4 * PIECE
    LAST = (strip.GROUPS - 1) * strip.GROUP_BYTES + 4 * (strip.WIDTH - strip.B)

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
def passing_tf32(strip: Any, rows: Rows) -> Any:
    """pass_over(shared, lines, place, x): a step that is left out; x becomes that of the next."""
    PAIRS, read = held_tf32(strip)[0], reading_tf32(strip, rows)

    @cuda.jit(device=True)
    def pass_over(shared, lines, place, x):
        for pair in range(PAIRS):
            read(shared, lines, place, pair, x[pair])

    return pass_over


@cache
def adding_tf32(strip: Any, precision: str, rows: Rows, j: int) -> Any:
    """add(shared, lines, place, b, x, acc): column j of acc += x times b, what a lane has of w.

    The sum of a step begins at zero (`split`). x becomes that of the step which is at `place`.
    """
    SQUARES, TM, exact = strip.B // 8, strip.ROWS // 16, precision == "highest"
    PAIRS, read_x = -(-TM // 2), reading_tf32(strip, rows)
    W, X, SUMS = (SQUARES, 2 * SQUARES), (2, SQUARES, 4), (2, SQUARES, 4)
    split, add = split_in_two if exact else round_in_one, fragments.adding("float32")

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
