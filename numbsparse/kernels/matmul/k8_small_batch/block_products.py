"""The products of a unit of dw: fragments of x that a warp holds, times tiles of dy."""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand, fragment, products
from numbsparse.kernels.ptx import as_float32


def apart_of(form: Form, operand: Operand) -> tuple[int, int]:
    """(words, steps) from a tile of 32 rows of the batch to the next one; a slab is one tile."""
    return (0, form.steps) if operand.slab else (WIDTH * form.row, 0)


@cache
def holding(form: Form, x: Operand, TILES: int) -> Any:
    """hi[s], lo[s] = the fragments of tiles of x at each step; of two tiles not split yet."""
    STEPS, (TILE, NEXT) = form.steps, apart_of(form, x)
    take, SLAB = fragment(form, x, TILES == 1 or not form.split), x.slab > 0

    @cuda.jit(device=True)
    def hold(tile, start, pitch, hi, lo):
        for u in range(TILES):
            for s in range(STEPS):
                at, n = uint32(start + u * TILE), u * STEPS + s
                how = pitch if SLAB else uint32(0)
                take(tile, at, uint32(s + u * NEXT), how, (), hi[n], lo[n])

    return hold


def sums_of(form: Form, x: Operand) -> tuple[int, int, int]:
    """The shape of acc: of float32 dy is the first operand, of 16 bits x, as they are stored."""
    return (-(-x.groups // 2), 4, 4) if form.is_16_bit else (2, x.groups, 4)


@cache
def consuming(form: Form, x: Operand, dy: Operand, TILES: int, LONG: bool) -> Any:
    """acc += the products of what is held of x and tiles of dy, each multiplied when it is read: to
    hold float32 of dy for longer, so that the next tile is requested before, took 1.01 to 1.07
    times as long (H200)."""
    STEPS, FRAGMENT, (TILE, NEXT) = form.steps, (4, 2), apart_of(form, dy)
    take, SLAB, step = fragment(form, dy), dy.slab > 0, multiplying(form, x, TILES, LONG)

    @cuda.jit(device=True)
    def multiply(tile, start, pitch, x_hi, x_lo, acc):
        for u in range(TILES):
            for s in range(STEPS):
                at, n = uint32(start + u * TILE), u * STEPS + s
                number, how = uint32(s + u * NEXT), pitch if SLAB else uint32(0)
                hi, lo = cuda.local.array(FRAGMENT, uint32), cuda.local.array(FRAGMENT, uint32)
                take(tile, at, number, how, (), hi, lo)
                step(n, x_hi[n], x_lo[n], hi, lo, acc)

    return multiply


@cache
def multiplying(form: Form, x: Operand, TILES: int, LONG: bool) -> Any:
    """acc += the products of a step, of fragments of x and dy.

    Those of split float32 start from zero at each step and are added in float32: sums are short
    here, and tensor cores cut off what they add. Unless the batch is `LONG`, acc is zero before the
    first.
    """
    SPLIT, ROWS, SUMS = form.split, x.groups + x.groups % 2, sums_of(form, x)
    HELD, X_FIRST, LATE = (ROWS, 2), form.is_16_bit, form.split and TILES > 1
    add, split = products(form, *SUMS[:2]), splitting(True)

    @cuda.jit(device=True)
    def three(x_hi, x_lo, hi, lo, acc):
        # The smallest first; lo times lo is less than what a float32 holds.
        add(hi, x_lo, acc)
        add(lo, x_hi, acc)
        add(hi, x_hi, acc)

    @cuda.jit(device=True)
    def multiply(n, x_hi, x_lo, hi, lo, acc):
        if X_FIRST:
            add(x_hi, hi, acc)
        elif not SPLIT:
            add(hi, x_hi, acc)
        elif n == 0 and not LONG:
            three(x_hi, x_lo, hi, lo, acc)
        else:
            sums = cuda.local.array(SUMS, float32)
            pieces.clear(sums)
            three(x_hi, x_lo, hi, lo, sums)
            pieces.add(acc, sums)

    @cuda.jit(device=True)
    def split_x(n, x, unused, hi, lo, acc):
        x_hi, x_lo = cuda.local.array(HELD, uint32), cuda.local.array(HELD, uint32)
        for j in range(ROWS):
            for e in range(2):
                x_hi[j, e], x_lo[j, e] = split(as_float32(x[j, e]))
        multiply(n, x_hi, x_lo, hi, lo, acc)

    return split_x if LATE else multiply
