"""The products of weight_grad out of tiles: x is taken to registers once for a line, dy each time.

The copy engine writes them: a warp leaves a square of dw in shared memory, its pieces of 16 bytes
exchanged as in `tiles`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k8_small_batch.block_ring import BlockRing
from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.outputs import packing
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.products import products
from numbsparse.kernels.matmul.k8_small_batch.repair import all_finite, mend_tile
from numbsparse.kernels.matmul.k8_small_batch.tiles import (
    factors,
    in_order,
    line_of,
    steps,
    take_across,
    take_along,
    take_halves,
    take_single,
)
from numbsparse.kernels.ptx import (
    as_uint32,
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    stmatrix_x4,
    store_4xu32,
    sync_warp,
    tma_store_2d,
)

LINES = 4, 2  # groups of eight lines, halves of what an mma takes


@cache
def take(form: Form, across: bool) -> Any:
    """raw[j, e] = half e of what an mma takes at once, of the lines of dy of group j, at step s."""
    if form.halves:
        return take_halves(across, 4, False)
    return take_across(4) if across else take_along(4, line_of(form, True))


@cache
def take_once(form: Form, across: bool) -> Any:
    """The same of x, whose lines stay in their order: so rows of dw meet every bank once."""
    if form.halves:
        return take_halves(across, 4, False)
    return take_single(4) if across else take_along(4, in_order)


@cache
def hold(form: Form, across: bool) -> Any:
    """hi[s], lo[s] = the factors of a tile at each step."""
    STEPS = steps(form)
    take_lines, make = take_once(form, across), factors(form, 4)

    @cuda.jit(device=True)
    def step(tile, start, s, hi, lo):
        raw = cuda.local.array(LINES, uint32)
        take_lines(tile, start, s, raw)
        make(raw, hi, lo)

    @cuda.jit(device=True)
    def hold_lines(tile, start, hi, lo):
        step(tile, start, uint32(0), hi[0], lo[0])
        step(tile, start, uint32(1), hi[1], lo[1])
        if STEPS == 4:
            step(tile, start, uint32(2), hi[2], lo[2])
            step(tile, start, uint32(3), hi[3], lo[3])

    return hold_lines


@cache
def multiply_held(form: Form, across: bool) -> Any:
    """acc += the products of a tile of dy and what is held of x.

    acc[m, t, 2 r + p] is that of the first's line number g of group 2 m + r and the second's line
    number 2 q + p of group t; dy comes first in float32, x in halves.
    """
    STEPS, HALVES = steps(form), form.halves
    take_lines, make, add = take(form, across), factors(form, 4), products(form, 4, 4)

    @cuda.jit(device=True)
    def step(tile, start, s, x_hi, x_lo, acc):
        raw = cuda.local.array(LINES, uint32)
        hi, lo = cuda.local.array(LINES, uint32), cuda.local.array(LINES, uint32)
        take_lines(tile, start, s, raw)
        make(raw, hi, lo)
        if HALVES:
            add(x_hi, x_lo, hi, lo, acc)
        else:
            add(hi, lo, x_hi, x_lo, acc)

    @cuda.jit(device=True)
    def multiply(tile, start, x_hi, x_lo, acc):
        step(tile, start, uint32(0), x_hi[0], x_lo[0], acc)
        step(tile, start, uint32(1), x_hi[1], x_lo[1], acc)
        if STEPS == 4:
            step(tile, start, uint32(2), x_hi[2], x_lo[2], acc)
            step(tile, start, uint32(3), x_hi[3], x_lo[3], acc)

    return multiply


@cache
def write_square(ring: BlockRing) -> Any:
    """Leave the products of a line of x and one of dy for the copy engine, which writes them."""
    CUT, SPLIT = ring.size // WIDTH, ring.form.split
    LINES_OF_BLOCK = ring.size // 2 if ring.paired else ring.size
    leave = leave_halves(ring) if ring.form.halves else leave_floats
    finite = all_finite(2, 4)

    @cuda.jit(device=True)
    def write(x, x_is, line, dy, dy_is, column, dw_map, square, shared, leaving, acc):
        if elect() != 0:
            bulk_wait_read()  # of what was left here before
        sync_warp()
        leave(shared, leaving, acc)
        if SPLIT and not finite(acc):
            mend_tile(x, x_is, line * WIDTH, dy, dy_is, column * WIDTH, shared, leaving)
        fence_proxy_async()
        sync_warp()
        if elect() != 0:
            block, part = square // (CUT * CUT), square % (CUT * CUT)
            first = int32(block * LINES_OF_BLOCK + part // CUT * WIDTH)
            tma_store_2d(shared, leaving, dw_map, int32(part % CUT * WIDTH), first)
            bulk_commit()

    return write


@cuda.jit(device=True)
def leave_floats(shared, leaving, acc):
    lane = uint32(cuda.threadIdx.x) % 32
    g, q = lane // 4, lane % 4
    for p in range(2):
        row = 2 * q + p
        place = leaving + 32 * row + 4 * (g ^ row)
        for t in range(4):
            v0, v1 = as_uint32(acc[0, t, p]), as_uint32(acc[0, t, 2 + p])
            v2, v3 = as_uint32(acc[1, t, p]), as_uint32(acc[1, t, 2 + p])
            store_4xu32(shared, place + 256 * t, v0, v1, v2, v3)


@cache
def leave_halves(ring: BlockRing) -> Any:
    PAIRED, pack = ring.paired, packing(ring.form)

    @cuda.jit(device=True)
    def leave(shared, leaving, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        for j in range(4):
            row, piece, m, i = 8 * j + lane % 8, lane // 8, j // 2, j % 2 * 2
            if PAIRED:
                place = row // 2 * 32 + 4 * ((row % 2 * 4 + piece) ^ (row // 2 % 8))
            else:
                place = 16 * row + 4 * (piece ^ (row // 2 % 4))
            v0, v1 = pack(acc[m, 0, i], acc[m, 0, i + 1]), pack(acc[m, 1, i], acc[m, 1, i + 1])
            v2, v3 = pack(acc[m, 2, i], acc[m, 2, i + 1]), pack(acc[m, 3, i], acc[m, 3, i + 1])
            stmatrix_x4(shared, leaving + place, v0, v1, v2, v3)

    return leave
