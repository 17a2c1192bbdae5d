"""From a tile of 32 lines by 32 terms in shared memory to the registers of an mma.

The copy engine brought it, rows of 32 values with their pieces of 16 bytes exchanged (swizzled), so
that lanes that read down a column meet every bank once. A tile lies along, its rows lines, or
across, its rows terms. Lines come in four groups of eight; lane 4 g + q holds line g of each group
at terms that both operands agree on: of halves, the pairs that `ldmatrix` brings; of float32, terms
2 q and 2 q + 1 of each eight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form, in_two
from numbsparse.kernels.matmul.k8_small_batch.products import add_products
from numbsparse.kernels.matmul.k8_small_batch.sums import add as add_up
from numbsparse.kernels.matmul.k8_small_batch.sums import clear
from numbsparse.kernels.ptx import (
    as_float32,
    cvt_rna_tf32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_2xu32,
    load_4xu32,
)

SIDE = 32  # lines, and terms


def words_of(form: Form) -> int:
    """Words of 32 bits in a tile."""
    return SIDE * SIDE // (2 if form.halves else 1)


def steps(form: Form) -> int:
    """How many mma follow each other along the terms of a tile."""
    return 2 if form.halves else 4


@cuda.jit(device=True)
def in_order(j, i):
    return 8 * j + i


@cache
def line_of(form: Form, across: bool) -> Any:
    """The line that is number i of group j; each tile has four groups."""

    @cuda.jit(device=True)
    def neighbours(j, i):
        return 2 * i + j % 2 + 16 * (j // 2)

    @cuda.jit(device=True)
    def side_by_side(j, i):
        return 4 * i + j % 4 + 32 * (j // 4)

    return in_order if form.halves else side_by_side if across else neighbours


@cache
def take(form: Form, across: bool, groups: int, paired: bool) -> Any:
    """raw[j, e] = half e of what an mma takes at once, of the lines of group j, at step s.

    `paired` halves: two rows of a tile stand in one line of 128 bytes.
    """
    if form.halves:
        return take_halves(across, groups, paired)
    return take_across(groups) if across else take_along(groups, line_of(form, False))


@cache
def take_halves(across: bool, groups: int, paired: bool) -> Any:
    PAIRS, WORDS = groups // 2, SIDE * SIDE // 2
    load = ldmatrix_x4_trans if across else ldmatrix_x4

    @cuda.jit(device=True)
    def read(tile, start, s, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        matrix, r = lane // 8, lane % 8
        for p in range(PAIRS):
            line, term = 16 * (p % 2) + matrix // 2 * 8, 16 * s + matrix % 2 * 8
            if across:
                row, piece = term + r, line // 8
            else:
                row, piece = line + r, term // 8
            if paired:
                piece = (row % 2 * 4 + piece) ^ (row // 2 % 8)
                place = row // 2 * 32 + 4 * piece
            else:
                place = 16 * row + 4 * (piece ^ (row // 2 % 4))
            v = load(tile, start + p // 2 * WORDS + place)
            raw[2 * p, 0], raw[2 * p, 1] = v[0], v[1]
            raw[2 * p + 1, 0], raw[2 * p + 1, 1] = v[2], v[3]

    return read


@cache
def take_across(groups: int) -> Any:
    TILES = groups // 4

    @cuda.jit(device=True)
    def read(tile, start, s, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(TILES):
            for e in range(2):
                row = 2 * q + e
                v = load_4xu32(tile, start + 1024 * u + 256 * s + 32 * row + 4 * (g ^ row))
                for j in range(4):
                    raw[4 * u + j, e] = v[j]

    return read


@cache
def take_single(groups: int) -> Any:
    """As take_across, but of lines in their order."""

    @cuda.jit(device=True)
    def read(tile, start, s, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            row = 2 * q + e
            for j in range(groups):
                piece = (2 * j + g // 4) ^ row
                raw[j, e] = tile[start + 256 * s + 32 * row + 4 * piece + g % 4]

    return read


@cache
def take_along(groups: int, number_of: Any) -> Any:
    """number_of(j, g) is the line that is number g of group j."""

    @cuda.jit(device=True)
    def read(tile, start, s, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for j in range(groups):
            row = number_of(j, g)
            piece = (q // 2) ^ (row % 8) ^ (2 * s)
            v = load_2xu32(tile, start + 32 * row + 4 * piece + q % 2 * 2)
            raw[j, 0], raw[j, 1] = v[0], v[1]

    return read


@cache
def factors(form: Form, groups: int) -> Any:
    """hi, lo from raw: where a float32 is split, the nearest tf32 and what is left of it."""

    @cuda.jit(device=True)
    def as_they_are(raw, hi, lo):
        for j in range(groups):
            for e in range(2):
                hi[j, e] = raw[j, e]

    @cuda.jit(device=True)
    def rounded(raw, hi, lo):
        for j in range(groups):
            for e in range(2):
                hi[j, e] = cvt_rna_tf32(as_float32(raw[j, e]))

    @cuda.jit(device=True)
    def split(raw, hi, lo):
        for j in range(groups):
            for e in range(2):
                hi[j, e], lo[j, e] = in_two(raw[j, e])

    return as_they_are if form.halves else split if form.split else rounded


@cache
def multiply_tiles(form: Form, x_across: bool, w_across: bool, x_groups: int, paired: bool) -> Any:
    """acc += x w.T of a tile of x and one of w: acc[m, t, 2 r + p] is that of x's line number g of
    group 2 m + r and w's line number 2 q + p of group t.

    Steps are taken by twos. Of split float32 acc is zero before; the small products come first, and
    the second two start from zero and are added in float32: see `products`.
    """
    STEPS, SPLIT, X, W = steps(form), form.split, (2, x_groups, 2), (2, 4, 2)
    SUMS = (x_groups // 2, 4, 4)
    make = factors_of_step(form, x_across, w_across, x_groups, paired)
    add = add_products(form, x_groups, 4)
    clear_sums, add_sums = clear(x_groups // 2, 4), add_up(x_groups // 2, 4)

    @cuda.jit(device=True)
    def two_steps(tile, x_start, w_start, s, acc):
        x_hi, w_hi = cuda.local.array(X, uint32), cuda.local.array(W, uint32)
        x_lo, w_lo = cuda.local.array(X, uint32), cuda.local.array(W, uint32)
        for k in range(2):
            make(tile, x_start, w_start, uint32(s + k), x_hi[k], x_lo[k], w_hi[k], w_lo[k])
            if SPLIT:  # lo times lo is less than what a float32 holds
                add(x_lo[k], w_hi[k], acc)
                add(x_hi[k], w_lo[k], acc)
        for k in range(2):
            add(x_hi[k], w_hi[k], acc)

    @cuda.jit(device=True)
    def multiply(tile, x_start, w_start, acc):
        # Written out: the compiler leaves a loop, and then no load is ahead of the products. Their
        # numbers are of one type; of each literal a step would be compiled anew.
        two_steps(tile, x_start, w_start, uint32(0), acc)
        if STEPS == 4:
            if SPLIT:
                more = cuda.local.array(SUMS, float32)
                clear_sums(more)
                two_steps(tile, x_start, w_start, uint32(2), more)
                add_sums(acc, more)
            else:
                two_steps(tile, x_start, w_start, uint32(2), acc)

    return multiply


@cache
def factors_of_step(form: Form, x_across: bool, w_across: bool, x_groups: int, paired: bool) -> Any:
    """x_hi, x_lo, w_hi, w_lo of a step."""
    X, W = (x_groups, 2), (4, 2)
    take_x, take_w = take(form, x_across, x_groups, False), take(form, w_across, 4, paired)
    make_x, make_w = factors(form, x_groups), factors(form, 4)

    @cuda.jit(device=True)
    def make(tile, x_start, w_start, s, x_hi, x_lo, w_hi, w_lo):
        x_raw, w_raw = cuda.local.array(X, uint32), cuda.local.array(W, uint32)
        take_x(tile, x_start, s, x_raw)
        take_w(tile, w_start, s, w_raw)
        make_x(x_raw, x_hi, x_lo)
        make_w(w_raw, w_hi, w_lo)

    return make
