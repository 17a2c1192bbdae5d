"""From the registers of a warp to the output."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint16, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.products import tiles
from numbsparse.kernels.ptx import (
    pack_bfloat2,
    pack_half2,
    store_2xu32,
    store_4xf32,
    store_4xu32,
)


@cache
def store(form: Form, J: int, JB: int, way: str) -> Any:
    """y[at + a_line * i + b_line * k] = line i of A times line k of B, for k < b_lines.

    `at` is where this lane's first line of A meets the first line of B; `a_lines` of A are left.
    "across" stores four lines of A at once (a_line = 1), "along" eight lines of B (b_line = 1), all
    or none of which are there; "each" stores them one by one.
    """
    if way == "across" and J == 4:
        return store_across(form, JB)
    if way == "along" and JB == 4:
        return store_along(form, J)
    return store_each(form, J, JB)


@cache
def store_across(form: Form, JB: int) -> Any:
    pack = packing(form)

    @cuda.jit(device=True)
    def floats(y, at, a_line, b_line, a_lines, b_lines, acc):
        q = uint32(cuda.threadIdx.x) % 4
        for p in range(2):
            for n in range(JB):
                k = JB * (2 * q + p) + n
                if k < b_lines and a_lines > 0:
                    v0, v1, v2, v3 = acc[0, n, p], acc[0, n, 2 + p], acc[1, n, p], acc[1, n, 2 + p]
                    store_4xf32(y, at + k * b_line, v0, v1, v2, v3)

    @cuda.jit(device=True)
    def halves(y, at, a_line, b_line, a_lines, b_lines, acc):
        q = uint32(cuda.threadIdx.x) % 4
        for p in range(2):
            for n in range(JB):
                k = JB * (2 * q + p) + n
                if k < b_lines and a_lines > 0:
                    lo = pack(acc[0, n, p], acc[0, n, 2 + p])
                    store_2xu32(y, at + k * b_line, lo, pack(acc[1, n, p], acc[1, n, 2 + p]))

    return halves if form.halves else floats


@cache
def store_along(form: Form, J: int) -> Any:
    M, R = tiles(J), min(J, 2)
    pack = packing(form)

    @cuda.jit(device=True)
    def floats(y, at, a_line, b_line, a_lines, b_lines, acc):
        q = uint32(cuda.threadIdx.x) % 4
        for m in range(M):
            for r in range(R):
                if 2 * m + r < a_lines:
                    for p in range(2):
                        i = 2 * r + p
                        start = at + (2 * m + r) * a_line + 4 * (2 * q + p)
                        v0, v1, v2, v3 = acc[m, 0, i], acc[m, 1, i], acc[m, 2, i], acc[m, 3, i]
                        store_4xf32(y, start, v0, v1, v2, v3)

    @cuda.jit(device=True)
    def halves(y, at, a_line, b_line, a_lines, b_lines, acc):
        q = uint32(cuda.threadIdx.x) % 4
        for m in range(M):
            for r in range(R):
                if 2 * m + r < a_lines:
                    i = 2 * r
                    v0, v1 = pack(acc[m, 0, i], acc[m, 1, i]), pack(acc[m, 2, i], acc[m, 3, i])
                    i += 1
                    v2, v3 = pack(acc[m, 0, i], acc[m, 1, i]), pack(acc[m, 2, i], acc[m, 3, i])
                    store_4xu32(y, at + (2 * m + r) * a_line + 8 * q, v0, v1, v2, v3)

    return halves if form.halves else floats


@cache
def store_each(form: Form, J: int, JB: int) -> Any:
    M, R = tiles(J), min(J, 2)
    item = item_of(form)

    @cuda.jit(device=True)
    def put(y, at, a_line, b_line, a_lines, b_lines, acc):
        q = uint32(cuda.threadIdx.x) % 4
        for m in range(M):
            for r in range(R):
                for p in range(2):
                    for n in range(JB):
                        i, k = 2 * m + r, JB * (2 * q + p) + n
                        if i < a_lines and k < b_lines:
                            y[at + i * a_line + k * b_line] = item(acc[m, n, 2 * r + p])

    return put


@cache
def packing(form: Form) -> Any:
    return pack_bfloat2 if form.dtype == "bfloat16" else pack_half2


@cache
def item_of(form: Form) -> Any:
    pack = packing(form)

    @cuda.jit(device=True)
    def as_half(value):
        return uint16(pack(value, value) & uint32(0xFFFF))

    @cuda.jit(device=True)
    def as_it_is(value):
        return value

    return as_half if form.halves else as_it_is
