"""From tiles in shared memory to sums: the fragments of an mma, and the products of two tiles.

A tile is 32 terms of a sum by 8 to 64 lines: rows of 32 values, their pieces of 16 bytes exchanged
(swizzled), so that lanes that read down a column use every bank once. Its rows are lines (along) or
terms (across). Lines are in groups of eight; lane 4 g + q holds line g of each group at terms that
both operands agree on: of 16-bit values the pairs that `ldmatrix` loads, of float32 terms 2 q and 2
q + 1 of each eight.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, uint32, uint64

from numbsparse.kernels.parts import pieces, skewed
from numbsparse.kernels.parts.fragments import adding, scaling
from numbsparse.kernels.parts.fragments_tf32 import number_of
from numbsparse.kernels.parts.skewed import take_four, taking_16_bit, taking_along, taking_float32
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_2xu32,
    load_4xu32,
)

ONE = np.float32(1)
WIDTH = skewed.WIDTH  # terms of a tile, and lines of one of w


class Form(NamedTuple):
    """How values are multiplied: their dtype, and whether a float32 is split into two tf32."""

    dtype: str
    split: bool

    @property
    def is_16_bit(self) -> bool:
        return self.dtype != "float32"

    @property
    def run(self) -> int:
        """Values in a piece of 16 bytes."""
        return 8 if self.is_16_bit else 4

    @property
    def row(self) -> int:
        """Words of 32 bits in a row of a tile."""
        return WIDTH // 2 if self.is_16_bit else WIDTH

    @property
    def steps(self) -> int:
        """How many mma follow each other along the terms of a tile."""
        return 2 if self.is_16_bit else 4


class Operand(NamedTuple):
    """How the lines of a tile are taken."""

    across: bool  # whether rows of the tile are terms, not lines
    groups: int
    together: int = 1  # neighbouring lines that a lane holds
    gated: int = 0  # terms that are multiplied by a gate each, if any are
    slab: int = 0  # rows, in eights, that there is room for where features follow without gaps
    even: bool = False  # whether features of a slab begin at multiples of 16 bytes
    begins: int = 16  # bytes of which multiples its lines in memory begin at: 16, or 4
    skewed: str = ""  # how its lines are loaded, if they are from 16 bytes on: see `skewed`
    listed: bool = False  # whether terms whose gate is 0 are 0 there

    @property
    def has_pitch(self) -> bool:
        """Whether its lines are as far apart as they are in memory: slabs, and `skewed` ones."""
        return self.slab > 0 or self.skewed != ""


@cache
def take_16_bit(operand: Operand) -> Any:
    """raw[j, e] = half e of what an mma takes at once, of the lines of group j, at step s.

    `how` is the pitch of an even slab, along which further terms are 0; of further lines, across
    it, other values are read. Else it is 16 where two rows share a line of 128 bytes, whose swizzle
    has a bit more, or 0.
    """
    PAIRS, across, EVEN = -(-operand.groups // 2), operand.across, operand.even
    ALONG = EVEN and not across
    load = ldmatrix_x4_trans if across else ldmatrix_x4

    @cuda.jit(device=True)
    def read(tile, start, s, how, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        matrix, r = lane // 8, lane % 8
        for p in range(PAIRS):
            line, term = 16 * (p if EVEN else p % 2) + matrix // 2 * 8, 16 * s + matrix % 2 * 8
            row, piece = (term + r, line // 8) if across else (line + r, term // 8)
            if EVEN:
                v = load(tile, start + row * (how // 2) + 4 * piece)
            else:
                place = (16 * row + 4 * (piece ^ (row // 2 % 4))) ^ (2 * row & how)
                v = load(tile, start + p // 2 * (WIDTH * 16) + place)
            raw[2 * p, 0], raw[2 * p, 1] = v[0], v[1]
            raw[2 * p + 1, 0], raw[2 * p + 1, 1] = v[2], v[3]
            for j in range(4 if ALONG else 0):
                if 16 * s + j % 2 * 8 >= how:
                    raw[2 * p + j // 2, j % 2] = uint32(0)

    return read


@cache
def take_float32(operand: Operand) -> Any:
    """The same of float32."""
    GROUPS, TILES, EVEN = operand.groups, operand.groups // 4, operand.even
    line_of = number_of(operand.together)

    @cuda.jit(device=True)
    def four_at_once(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(TILES):
            for e in range(2):
                row = 2 * q + e
                v = load_4xu32(tile, start + 1024 * u + 256 * s + 32 * row + 4 * (g ^ row))
                for j in range(4):
                    raw[4 * u + j, e] = v[j]

    @cuda.jit(device=True)
    def two_at_once(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            v = load_2xu32(tile, start + (8 * s + 2 * q + e) * pitch + 2 * g)
            raw[0, e], raw[1, e] = v[0], v[1]

    @cuda.jit(device=True)
    def in_order(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            row = 2 * q + e
            for j in range(GROUPS):
                piece = (2 * j + g // 4) ^ row
                raw[j, e] = tile[start + 256 * s + 32 * row + 4 * piece + g % 4]

    @cuda.jit(device=True)
    def along(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        there = not EVEN or 8 * s + 2 * q < pitch
        for j in range(GROUPS):
            row = line_of(j, g)
            piece = (q // 2) ^ (row % 8) ^ (2 * s)
            at = row * pitch + 8 * s + 2 * q if EVEN else 32 * row + 4 * piece + q % 2 * 2
            v = load_2xu32(tile, start + at)
            raw[j, 0], raw[j, 1] = (v[0], v[1]) if there else (uint32(0), uint32(0))

    if not operand.across:
        return along
    if EVEN:
        return two_at_once
    return four_at_once if operand.together == 4 else in_order


@cache
def take_along_slab(form: Form, operand: Operand) -> Any:
    """The same along a slab, whose lines have `pitch` terms: further ones are 0."""
    GROUPS, line_of = operand.groups, number_of(operand.together)

    @cuda.jit(device=True)
    def of_16_bits(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for j in range(GROUPS):
            for e in range(2):
                term = 16 * s + 8 * e + 2 * q
                at = line_of(j, g) * pitch + term
                word, shift = start + at // 2, uint64(16 * (at % 2))
                two = uint64(tile[word + 1]) << uint64(32) | uint64(tile[word])
                pair = uint32(two >> shift)
                pair = pair if term + 1 < pitch else pair & uint32(0xFFFF)
                raw[j, e] = pair if term < pitch else uint32(0)

    @cuda.jit(device=True)
    def of_float32(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for j in range(GROUPS):
            for e in range(2):
                term = 8 * s + 2 * q + e
                value = tile[start + line_of(j, g) * pitch + term]
                raw[j, e] = value if term < pitch else uint32(0)

    return of_16_bits if form.is_16_bit else of_float32


@cache
def take_across_slab(form: Form, groups: int) -> Any:
    """The same across a slab, whose terms are `pitch` values apart; a lane holds four neighbours,
    or two where there are two groups.

    So few lanes read the same bank where the pitch is next to a multiple of 32.
    """
    UNITS, EACH = groups // 4, min(groups, 4)
    TWO = groups == 2

    @cuda.jit(device=True)
    def of_16_bits(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        shift = uint32(16 * (pitch % 2))  # the lines of an odd term begin inside a word
        for e in range(2):
            even = start + (8 * s + 4 * e + q) * pitch + EACH // 2 * g
            odd = even + pitch // 2
            if TWO:
                one = uint32(tile[even])
                two = uint64(tile[odd + 1]) << uint64(32) | uint64(tile[odd])
                other = uint32(two >> uint64(shift))
                raw[0, e] = one & uint32(0xFFFF) | other << uint32(16)
                raw[1, e] = one >> uint32(16) | other & uint32(0xFFFF0000)
            for u in range(UNITS):
                take_four(tile, even + 16 * u, odd + 16 * u, shift, raw, 4 * u, e)

    @cuda.jit(device=True)
    def of_float32(tile, start, s, pitch, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for e in range(2):
            at = start + (8 * s + 2 * q + e) * pitch + EACH * g
            for u in range(1 if TWO else UNITS):
                for k in range(EACH):
                    raw[4 * u + k, e] = tile[at + 32 * u + k]

    return of_16_bits if form.is_16_bit else of_float32


@cache
def gating(form: Form, operand: Operand) -> Any:
    """raw[j, e] times the gate of its terms at step s, rounded; 0 where that is 0.

    Of 16 bits not where it is one; of float32 a look at it takes longer than to multiply. A tile of
    a single block whose gate is 0 is not multiplied, and the sums of one of float32 are by who adds
    them.
    """
    GROUPS, TERMS, HALF = operand.groups, operand.gated, 8 if form.is_16_bit else 0
    ALWAYS = not form.is_16_bit
    scaled = scaling(form.dtype, skips=TERMS < WIDTH and not operand.listed)

    @cuda.jit(device=True)
    def leave(gates, s, raw):
        pass

    @cuda.jit(device=True)
    def apply(gates, s, raw):
        for e in range(2):
            gate = gates[(s * (8 + HALF) + e * HALF) // TERMS]
            if ALWAYS or gate != ONE:
                for j in range(GROUPS):
                    raw[j, e] = scaled(raw[j, e], gate)

    return leave if TERMS in ((0,) if form.is_16_bit else (0, WIDTH)) else apply


@cache
def fragment(form: Form, operand: Operand, apart: bool = True) -> Any:
    """hi, lo of step s: where a float32 is split, the nearest tf32 and what is left of it.

    If not `apart`, hi is the float32 itself. An mma takes two groups: where there is one, the other
    is 0. A float32 that is gated is first multiplied, of 16 bits who calls this does.
    """
    GROUPS, RAW = operand.groups, (operand.groups + operand.groups % 2, 2)
    LACKS, ROWS = operand.groups % 2 == 1, operand.groups + operand.groups % 2
    sixteen = form.is_16_bit
    take = take_16_bit(operand) if sixteen else take_float32(operand)
    if operand.slab and not operand.even:
        across = operand.across
        take = take_across_slab(form, operand.groups) if across else take_along_slab(form, operand)
    if operand.skewed:
        rows, by = 8 * operand.groups, operand.skewed
        take = taking_16_bit(rows, by) if sixteen else taking_float32(rows)
        if not operand.across:
            take = taking_along(operand.groups, number_of(operand.together))
    split, apply = splitting(form.split) if apart else whole, gating(form, operand)

    @cuda.jit(device=True)
    def fragment_of_step(tile, start, s, pitch, gates, hi, lo):
        raw = cuda.local.array(RAW, uint32)
        take(tile, start, s, pitch, raw)
        if not sixteen:
            apply(gates, s, raw)
        if LACKS:
            raw[GROUPS, 0] = raw[GROUPS, 1] = uint32(0)
        for j in range(ROWS):
            for e in range(2):
                if sixteen:
                    hi[j, e] = raw[j, e]
                else:
                    hi[j, e], lo[j, e] = split(as_float32(raw[j, e]))

    return fragment_of_step


@cuda.jit(device=True)
def whole(x):
    return as_uint32(x), uint32(0)


@cache
def products(form: Form, M: int, N: int) -> Any:
    """acc += A times B, over a step: A of M times 16 lines, B of N groups.

    acc[m, n, 2 r + p] is that of A's line number g of group 2 m + r and B's line number 2 q + p of
    group n.
    """
    add_product = adding(form.dtype)

    @cuda.jit(device=True)
    def add(a, b, acc):
        for m in range(M):
            four = a[2 * m, 0], a[2 * m + 1, 0], a[2 * m, 1], a[2 * m + 1, 1]
            for n in range(N):
                add_product(four, b[n, 0], b[n, 1], acc[m, n])

    return add


@cache
def multiply(form: Form, first: Operand, second: Operand) -> tuple[Any, Any]:
    """(take, rest): all that is read of a tile of each, and what is multiplied after.

    Together acc += first second.T; acc as in `products`, a and b as `operands_of` says.
    `gates` are those of what is gated, see `fragment`; `how` is a slab's pitch, of 16 bits else
    `paired`, as in `take_16_bit`. Where the second has eight groups, its upper four have sums of
    their own, after the others'.
    Steps are taken by twos. For split float32 acc is zero before; the small products are first, and
    the second two steps start from zero and are added in float32: a tensor core cuts off what it
    adds, always towards zero, and in the 12 products of a unit that would show.
    """
    SPLIT, SIXTEEN, LO = form.split, form.is_16_bit, 0 if form.is_16_bit else 1
    M, N, HALVES = -(-first.groups // 2), min(second.groups, 4), -(-second.groups // 4)
    take_a, take_b = fragment(form, first), fragment(form, second)
    apply_a, apply_b = gating(form, first), gating(form, second)
    add, SUMS = products(form, M, N), (M * HALVES, N, 4)

    @cuda.jit(device=True)
    def load(tile, a_start, a_how, b_start, b_how, s, gates, a, b):
        for k in range(2):
            take_a(tile, a_start, uint32(s + k), a_how, gates, a[0, k], a[LO, k])
            take_b(tile, b_start, uint32(s + k), b_how, gates, b[0, k], b[LO, k])

    @cuda.jit(device=True)
    def two_steps(a, b, acc):
        if SPLIT:  # lo times lo is less than what a float32 holds
            for k in range(2):
                for u in range(HALVES):
                    add(a[1, k], b[0, k, 4 * u :], acc[M * u :])
                    add(a[0, k], b[1, k, 4 * u :], acc[M * u :])
        for k in range(2):
            for u in range(HALVES):
                add(a[0, k], b[0, k, 4 * u :], acc[M * u :])

    @cuda.jit(device=True)
    def take(tile, a_start, a_how, b_start, b_how, gates, a, b, acc):
        # Their numbers are of one type; of each literal a step would be compiled again.
        load(tile, a_start, a_how, b_start, b_how, uint32(0), gates, a, b)
        if not SIXTEEN:
            two_steps(a, b, acc)
            load(tile, a_start, a_how, b_start, b_how, uint32(2), gates, a, b)

    @cuda.jit(device=True)
    def rest(gates, a, b, acc):
        for k in range(2 if SIXTEEN else 0):  # when all loads are under way
            apply_a(gates, uint32(k), a[0, k])
            apply_b(gates, uint32(k), b[0, k])
        if SPLIT:
            more = cuda.local.array(SUMS, float32)
            pieces.clear(more)
            two_steps(a, b, more)
            pieces.add(acc, more)
        else:
            two_steps(a, b, acc)

    return take, rest


def operands_of(form: Form, operand: Operand) -> tuple[int, int, int, int]:
    """The shape of what is taken of one: hi, and lo of float32, at two steps, of its groups by
    twos, as an mma takes them."""
    return (1 if form.is_16_bit else 2), 2, operand.groups + operand.groups % 2, 2
