"""What a team multiplies in a weight-gradient, of 16 bits and of float32.

In 16 bits a team is a warpgroup: `ldmatrix` transposes pixels, 64 rows of features by 64 of these,
and `wgmma` multiplies them by those of dy, which are in shared memory. It transposes no float32:
there a team is a warp, of `mma`, whose lanes read neighbours of a line for several of their rows or
columns at once, 8 pixels at a time. Which pixel is which term of a sum is free, and chosen so that
no two lanes share a bank.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, uint16, uint32

from numbsparse.kernels.conv.window import PIXELS
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.ptx import (
    Operand,
    as_float32,
    ldmatrix_x4_trans,
    load_2xu32,
    load_4xu32,
    mma_m16n8k8_tf32,
    wgmma_rows,
)

ROWS = 16  # of a warp


class TeamProduct(NamedTuple):
    """Of teams of THREADS, which have units, the rows of PANELS taps.

    item, NBYTES : what shared memory holds
    STEP : pixels that are multiplied at once
    SUMS : the shape of a thread's accumulators in memory
    add : add(sums, ring, words, x_line, dy_line, group, mine), the products of STEP pixels, from
        these lines of shared memory on, of x with `group` lines from 8 pixels to the next; `words`
        has the shifts of the first `mine` units, of the tap whose rows a warp has
    first, further : first(), where in a unit, line by line, the first sum of a thread is, and
        further(n, i), how much further others are
    """

    THREADS: int
    PANELS: int
    item: Any
    NBYTES: int
    STEP: int
    SUMS: Any
    add: Any
    first: Any
    further: Any


@cache
def product_of_16_bit(dtype: str, B: int, UNITS: int) -> TeamProduct:
    PIECES, K = B // 8, 2  # of 16 pixels at once: more would take too many registers
    ALIKE = 8 // PIECES  # lines of which the pieces are swapped alike
    multiply = wgmma_rows(KINDS[dtype], B, K, 1, Operand(2 * B, 0, True))
    SUMS = UNITS, B // 8, 4

    @cuda.jit(device=True)
    def add(sums, ring, words, x_line, dy_line, group, mine):
        a, lane = cuda.local.array((1, K, 4), uint32), uint32(cuda.threadIdx.x) % 32
        piece = uint32((uint32(cuda.threadIdx.x) // 32 * ROWS % B + lane % ROWS) // 8)
        first = uint32(x_line + lane // ROWS * group + lane % 8)
        for u in range(UNITS):
            if u < mine:
                line = uint32(first + words[u])
                for pixel in range(0, PIXELS, 16 * K):
                    for k in range(K):
                        own, at = a[0, k], uint32(line * PIECES + (line // ALIKE % PIECES ^ piece))
                        own[0], own[1], own[2], own[3] = ldmatrix_x4_trans(ring, 8 * at)
                        line = uint32(line + 2 * group)
                    multiply(sums[u], a, ring, B * (dy_line + pixel))

    @cuda.jit(device=True)
    def first():
        t = uint32(cuda.threadIdx.x)
        return uint32((t // 32 % 4 * ROWS + t % 32 // 4) * B + t % 4 * 2)

    @cuda.jit(device=True)
    def further(n, i):
        return i // 2 * 8 * B + 8 * n + i % 2

    return TeamProduct(*(128, PIXELS // B, uint16, 2, PIXELS, SUMS, add, first, further))


@cache
def product_of_float32(precision: str, B: int, UNITS: int) -> TeamProduct:
    """A lane has B / 8 neighbours of a line, for the rows or columns that are its own in all `mma`.

    Lane (g, q) has terms q and q + 4 of 8, and of x rows g and g + 8 of each 16, of dy column g of
    each 8: its neighbours from B / 8 g on, in this order.
    """
    EACH, SLABS, EXACT = B // 8, B // 16, precision == "highest"
    LINES = 32 // B  # of which the pieces are swapped alike
    split, SUMS, TERMS = splitting(EXACT, fast=True), (UNITS, SLABS * EACH, 4), (2, EACH)

    @cuda.jit(device=True)
    def load(ring, line, hi, lo):
        """Two terms of lane (g, q) of the 8 lines from `line` on."""
        g, q = uint32(cuda.threadIdx.x) % 32 // 4, uint32(cuda.threadIdx.x) % 4
        for k in range(2):
            if B == 32:
                at = uint32(line + 2 * q + k)
                word = uint32(at * B + 4 * (g ^ at % 8))
                four = load_4xu32(ring, word)
                for i in range(4):
                    hi[k, i], lo[k, i] = split(as_float32(four[i]))
            else:
                at = uint32(line + q % 2 + q // 2 * 4 + 2 * k)
                word = uint32(at * B + 4 * (g // 2 ^ at // LINES % 4) + g % 2 * 2)
                two = load_2xu32(ring, word)
                for i in range(2):
                    hi[k, i], lo[k, i] = split(as_float32(two[i]))

    @cuda.jit(device=True)
    def multiply(a, s, b, j, c):
        """c = c + the products of rows 2 s and 2 s + 1 of a by column j of b."""
        c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(
            a[0, 2 * s], a[0, 2 * s + 1], a[1, 2 * s], a[1, 2 * s + 1], b[0, j], b[1, j],
            c[0], c[1], c[2], c[3],
        )  # fmt: skip

    @cuda.jit(device=True)
    def add(sums, ring, words, x_line, dy_line, group, mine):
        dy_hi, dy_lo = cuda.local.array(TERMS, uint32), cuda.local.array(TERMS, uint32)
        x_hi, x_lo = cuda.local.array(TERMS, uint32), cuda.local.array(TERMS, uint32)
        few = cuda.local.array(4, float32)
        load(ring, dy_line, dy_hi, dy_lo)
        for u in range(UNITS):
            if u < mine:
                load(ring, uint32(x_line + words[u]), x_hi, x_lo)
                for s in range(SLABS):
                    for j in range(EACH):
                        own = sums[u, s * EACH + j]
                        if EXACT:  # see `split`
                            for i in range(4):
                                few[i] = 0
                            multiply(x_lo, s, dy_hi, j, few)
                            multiply(x_hi, s, dy_lo, j, few)
                            multiply(x_hi, s, dy_hi, j, few)
                            for i in range(4):
                                own[i] += few[i]
                        else:
                            multiply(x_hi, s, dy_hi, j, own)

    @cuda.jit(device=True)
    def first():
        g, q = uint32(cuda.threadIdx.x) % 32 // 4, uint32(cuda.threadIdx.x) % 4
        return uint32(EACH * (g * B + 2 * q))

    @cuda.jit(device=True)
    def further(n, i):
        return (n // EACH * 2 + i // 2) * B + i % 2 * EACH + n % EACH

    return TeamProduct(*(32, 1, float32, 4, 8, SUMS, add, first, further))
