"""From memory to the registers of an mma, by way of nothing: terms of a sum come in any order.

An mma wants of lane 4 g + q the values of line g at terms q and q + 4, or at pairs of terms. Both
operands may renumber lines and terms, as long as they agree on the terms. So lane (g, q) takes the
lines J g to J g + J - 1 and, of 32 terms, the runs of 16 bytes number q, q + 4, ...: it loads 16
bytes at once where the terms of a line lie side by side ("along"), and J values at once where the
lines do ("across"). There is no shared memory and no shuffle in between.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    cvt_rna_tf32,
    load_2xu32,
    load_4xu32,
)


class Form(NamedTuple):
    """How values are multiplied: their dtype, and whether a float32 is split into two tf32."""

    dtype: str
    split: bool

    @property
    def halves(self) -> bool:
        return self.dtype != "float32"

    @property
    def run(self) -> int:
        """Values in 16 bytes."""
        return 8 if self.halves else 4

    @property
    def rounds(self) -> int:
        """Runs of 32 terms that a lane takes of each line."""
        return 8 // self.run


class Side(NamedTuple):
    """How an operand lies: J lines a lane, across or along, and what must be checked.

    "whole": nothing; "runs": whether a run, or across a term, is there at all; "each": every value.
    """

    J: int
    across: bool
    check: str

    @property
    def along(self) -> bool:
        """Whether the terms of a line are known to lie side by side."""
        return not self.across and self.check != "each"

    @property
    def beside(self) -> bool:
        """Whether the lines are known to."""
        return self.across and self.check != "each"


def words(form: Form, side: Side) -> int:
    """Registers that a run of all lines of a lane is loaded to."""
    loose = form.halves and side.beside and side.J < 4
    return 8 * side.J if loose else 4 * side.J


@cache
def fetch(form: Form, side: Side) -> Any:
    """raw[h] = run h of this lane's lines, from item `at` on; 0 for what is not there.

    Terms are `term` items apart, lines `line`; `terms` and `lines` are left from there on.
    """
    if side.check == "each":
        return fetch_each(form, side.J)
    return fetch_across(form, side) if side.across else fetch_along(side)


@cache
def fetch_along(side: Side) -> Any:
    J, WHOLE = side.J, side.check == "whole"

    @cuda.jit(device=True)
    def fetch(a, at, term, line, terms, lines, raw, h):
        for j in range(J):
            raw[h, 4 * j] = raw[h, 4 * j + 1] = raw[h, 4 * j + 2] = raw[h, 4 * j + 3] = uint32(0)
            if WHOLE or terms > 0:
                # Beyond the last line it is read again, for outputs that are not written.
                other = j if WHOLE else min(j, lines - 1)
                v = load_4xu32(a, at + other * line)
                raw[h, 4 * j], raw[h, 4 * j + 1] = v[0], v[1]
                raw[h, 4 * j + 2], raw[h, 4 * j + 3] = v[2], v[3]

    return fetch


@cache
def fetch_across(form: Form, side: Side) -> Any:
    J, WHOLE, RUN = side.J, side.check == "whole", form.run
    WORDS = words(form, side) // RUN
    load = wide_load(form, J)

    @cuda.jit(device=True)
    def fetch(a, at, term, line, terms, lines, raw, h):
        for e in range(RUN):
            for i in range(WORDS):
                raw[h, WORDS * e + i] = uint32(0)
            if WHOLE or e < terms:
                v = load(a, at + e * term)
                for i in range(WORDS):
                    raw[h, WORDS * e + i] = v[i]

    return fetch


@cache
def wide_load(form: Form, J: int) -> Any:
    """J values side by side, as registers that the load gives."""
    if J == 4:
        return load_2xu32 if form.halves else load_4xu32
    if J == 2 and not form.halves:
        return load_2xu32
    bits = bits_of(form)

    @cuda.jit(device=True)
    def one(a, at):
        return (bits(a[at]),)

    @cuda.jit(device=True)
    def two(a, at):
        return bits(a[at]), bits(a[at + 1])

    return one if J == 1 else two


@cache
def fetch_each(form: Form, J: int) -> Any:
    """Value by value, from any strides and up to any edge, to where fetch_along brings them."""
    PACKED = 2 if form.halves else 1  # values in a register
    bits = bits_of(form)

    @cuda.jit(device=True)
    def fetch(a, at, term, line, terms, lines, raw, h):
        for j in range(J):
            for i in range(4):
                word = uint32(0)
                for p in range(PACKED):
                    e = PACKED * i + p
                    if e < terms and j < lines:
                        value = bits(a[at + e * term + j * line])
                        word = uint32(word | value << uint32(16 * p))
                raw[h, 4 * j + i] = word

    return fetch


@cache
def bits_of(form: Form) -> Any:
    @cuda.jit(device=True)
    def of_half(value):
        return uint32(value)

    @cuda.jit(device=True)
    def of_float(value):
        return as_uint32(value)

    return of_half if form.halves else of_float


@cache
def operand(form: Form, side: Side) -> Any:
    """hi[j, i] = the two registers of half s of run h of line j, as an mma takes them.

    Where a float32 is split, hi is the nearest tf32 and lo what is left of it.
    """
    across = side.beside
    packed = across and form.halves
    word = packed_word(side.J) if packed else plain_word(side.J, across)
    J = side.J

    @cuda.jit(device=True)
    def take(raw, h, s, hi, lo):
        for j in range(J):
            for i in range(2):
                hi[j, i] = word(raw, h, j, 2 * s + i)

    @cuda.jit(device=True)
    def round_off(raw, h, s, hi, lo):
        for j in range(J):
            for i in range(2):
                hi[j, i] = cvt_rna_tf32(as_float32(word(raw, h, j, 2 * s + i)))

    @cuda.jit(device=True)
    def split(raw, h, s, hi, lo):
        for j in range(J):
            for i in range(2):
                hi[j, i], lo[j, i] = in_two(word(raw, h, j, 2 * s + i))

    return take if form.halves else split if form.split else round_off


@cuda.jit(device=True)
def in_two(bits):
    """The nearest tf32 of a float32, and what is left of it."""
    # An mma reads the upper 19 bits alone, so the others need not be cut off for it.
    # What this does to infinities and NaNs is mended with the sums.
    hi = uint32(bits + uint32(0x1000))
    nearest = as_float32(uint32(hi & uint32(0xFFFFE000)))
    return hi, as_uint32(as_float32(bits) - nearest)


@cache
def plain_word(J: int, across: bool) -> Any:
    @cuda.jit(device=True)
    def word(raw, h, j, i):
        return raw[h, J * i + j] if across else raw[h, 4 * j + i]

    return word


@cache
def packed_word(J: int) -> Any:
    """Halves 2 i and 2 i + 1 of line j, of which each was loaded beside those of other lines."""

    @cuda.jit(device=True)
    def of_four(raw, h, j, i):
        a, b = raw[h, 4 * i + j // 2], raw[h, 4 * i + 2 + j // 2]
        if j % 2 == 0:
            return uint32(uint32(a & uint32(0xFFFF)) | uint32(b << uint32(16)))
        return uint32(uint32(a >> uint32(16)) | uint32(b & uint32(0xFFFF0000)))

    @cuda.jit(device=True)
    def of_few(raw, h, j, i):
        return uint32(raw[h, 2 * J * i + j] | uint32(raw[h, 2 * J * i + J + j] << uint32(16)))

    return of_four if J == 4 else of_few
