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


@cache
def multiplying(form: Form, x: Operand, dy: Operand, TILES: int) -> Any:
    """acc += the products of what is held of x and tiles of dy; acc as in `tiles.products`.

    Those of split float32 start from zero at each step and are added in float32: sums are short
    here, and tensor cores cut off what they add.
    """
    STEPS, SPLIT, M, SLAB = form.steps, form.split, -(-x.groups // 2), dy.slab > 0
    FRAGMENT, SUMS, HELD, (TILE, NEXT) = (4, 2), (M, 4, 4), (2 * M, 2), apart_of(form, dy)
    take, add, split = fragment(form, dy), products(form, M, 4), splitting(True)

    @cuda.jit(device=True)
    def step(tile, start, s, pitch, x_hi, x_lo, acc):
        hi, lo = cuda.local.array(FRAGMENT, uint32), cuda.local.array(FRAGMENT, uint32)
        take(tile, start, s, pitch if SLAB else uint32(0), (), hi, lo)
        if SPLIT:
            sums = cuda.local.array(SUMS, float32)
            pieces.clear(sums)
            # The smallest first; lo times lo is less than what a float32 holds.
            add(x_lo, hi, sums)
            add(x_hi, lo, sums)
            add(x_hi, hi, sums)
            pieces.add(acc, sums)
        else:
            add(x_hi, hi, acc)

    @cuda.jit(device=True)
    def split_step(tile, start, s, pitch, x, acc):
        hi, lo = cuda.local.array(HELD, uint32), cuda.local.array(HELD, uint32)
        for j in range(2 * M):
            for e in range(2):
                hi[j, e], lo[j, e] = split(as_float32(x[j, e]))
        step(tile, start, s, pitch, hi, lo, acc)

    @cuda.jit(device=True)
    def multiply(tile, start, pitch, x_hi, x_lo, acc):
        for u in range(TILES):
            for s in range(STEPS):
                at, n = uint32(start + u * TILE), u * STEPS + s
                number = uint32(s + u * NEXT)
                if SPLIT and TILES > 1:
                    split_step(tile, at, number, pitch, x_hi[n], acc)
                else:
                    step(tile, at, number, pitch, x_hi[n], x_lo[n], acc)

    return multiply
