"""Products of the slots of a region of float32: 16 features of x by B of dy, over DEPTH rows.

tf32 has no `ldmatrix` that turns a tile over, so lanes read their values one by one: lane 4 g + q
two neighbours of x, features 2 g and 2 g + 1 of a slot, in rows 2 q and 2 q + 1 of every 8, and of
dy as many columns. An mma's rows and columns, and the terms that it adds, may be any as long as
both factors agree; these meet in no bank of swizzled lines. What is split into hi and lo, and why
the products of a step start from zero, says `k5_tensor_core.singles`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, uint32

from numbsparse.kernels.matmul.k5_tensor_core.singles import round_to_tf32, split_exact
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE_BITS
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE
from numbsparse.kernels.ptx import as_float32, load_2xu32, load_4xu32, mma_m16n8k8_tf32


class Sums(NamedTuple):
    """What a kernel is made for."""

    B: int
    region: Region
    wide: bool  # whole blocks, stored several values at once
    exact: bool

    @property
    def PER_LANE(self) -> int:
        """Sums of a slot in a lane."""
        return self.B // 2


@cache
def translated(region: Region) -> Any:
    """Where the pieces of a slot stand in a stage, in bytes: both of x, and that of dy, with the
    highest bit for a new column."""
    GROUP_BYTES, PIECES, PLACE = region.GROUP_BYTES, region.FEATURES // PIECE, (1 << PLACE_BITS) - 1

    @cuda.jit(device=True)
    def start_of(place):
        place = place & uint32(PLACE)
        return uint32(place // PIECES * GROUP_BYTES + place % PIECES * (4 * PIECE))

    @cuda.jit(device=True)
    def translate(code):
        code = uint32(code)
        new = code >> uint32(3 * PLACE_BITS) << uint32(31)
        dy = uint32(start_of(code >> uint32(2 * PLACE_BITS)) | new)
        return start_of(code), start_of(code >> uint32(PLACE_BITS)), dy

    return translate


@cache
def products(sums: Sums) -> Any:
    """acc[p] += the products of slot p, of which a warp has `used`."""
    B, SLOTS, exact = sums.B, sums.region.SLOTS, sums.exact
    STEPS, TILES = sums.region.DEPTH // 8, B // 8
    X, Y, STEP = (STEPS, 4), (STEPS, TILES, 2), (STEPS, TILES, 4)  # registers of a lane
    LINE = 4 * sums.region.FEATURES  # bytes
    NEXT = LINE ^ 16  # one line further, where neighbouring pieces of 16 bytes have changed places
    split = split_exact if exact else round_to_tf32

    @cuda.jit(device=True)
    def load_x(shared, start, at, x):
        for s in range(STEPS):
            for k in range(2):
                here = uint32(start + (at ^ uint32(NEXT * k)) + s * 8 * LINE)
                x[s, 2 * k], x[s, 2 * k + 1] = load_2xu32(shared, here)

    @cuda.jit(device=True)
    def load_dy(shared, ring, start, at, hi, lo):
        for s in range(STEPS):
            for k in range(2):
                here = uint32(start + (at ^ uint32(NEXT * k)) + s * 8 * LINE)
                if TILES == 2:
                    a, b = load_2xu32(shared, here)
                    hi[s, 0, k], lo[s, 0, k] = split(as_float32(a))
                    hi[s, 1, k], lo[s, 1, k] = split(as_float32(b))
                else:
                    hi[s, 0, k], lo[s, 0, k] = split(ring[here >> uint32(2)])

    @cuda.jit(device=True)
    def multiply(a, b, s, t, c):
        c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(
            a[s, 0], a[s, 1], a[s, 2], a[s, 3], b[s, t, 0], b[s, t, 1], c[0], c[1], c[2], c[3]
        )

    @cuda.jit(device=True)
    def multiply_slot(shared, ring, start, lanes, codes, slot, x, yh, yl, acc):
        x_lane, y_lane, lower = lanes
        _, _, dy_at, _ = load_4xu32(codes, 4 * slot)
        if dy_at >> uint32(31) != 0:
            load_dy(shared, ring, start, dy_at & uint32(0x7FFFFFFF) ^ y_lane, yh, yl)
        xh, xl = cuda.local.array(X, uint32), cuda.local.array(X, uint32)
        for s in range(STEPS):
            for i in range(4):
                xh[s, i], xl[s, i] = split(as_float32(x[s, i]))
        upper_at, lower_at, _, _ = load_4xu32(codes, 4 * (slot + 1))  # is read ahead
        load_x(shared, start, (lower_at if lower else upper_at) ^ x_lane, x)
        step = cuda.local.array(STEP, float32)
        for s in range(STEPS):
            for t in range(TILES):
                for i in range(4):
                    step[s, t, i] = 0
        for s in range(STEPS):
            if exact:
                for t in range(TILES):
                    multiply(xl, yh, s, t, step[s, t])
                for t in range(TILES):
                    multiply(xh, yl, s, t, step[s, t])
            for t in range(TILES):
                multiply(xh, yh, s, t, step[s, t])
        for t in range(TILES):
            for i in range(4):
                for s in range(1, STEPS):
                    step[0, t, i] += step[s, t, i]
                acc[4 * t + i] += step[0, t, i]

    def slots_from(p: int) -> Any:
        """Each slot from p on: loops unrolled, so that acc[p] stays in registers."""

        @cuda.jit(device=True)
        def none(shared, ring, start, lanes, codes, first, used, x, yh, yl, acc):
            pass

        if p == SLOTS:
            return none
        rest = slots_from(p + 1)

        @cuda.jit(device=True)
        def add_slot(shared, ring, start, lanes, codes, first, used, x, yh, yl, acc):
            if p < used:
                multiply_slot(shared, ring, start, lanes, codes, first + p, x, yh, yl, acc[p])
                rest(shared, ring, start, lanes, codes, first, used, x, yh, yl, acc)

        return add_slot

    add_slots = slots_from(0)

    @cuda.jit(device=True)
    def add_products(shared, ring, start, codes, first, used, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        lower = g >= 4
        # Line 2 q of 8, whose pieces of 16 bytes are swizzled: no sum here carries, all are xors.
        line = uint32(q * (2 * LINE) ^ q * 32)
        x_lane, y_lane = uint32(line ^ g % 4 * 8), uint32(line ^ g * (4 * TILES))
        x = cuda.local.array(X, uint32)
        yh, yl = cuda.local.array(Y, uint32), cuda.local.array(Y, uint32)
        upper_at, lower_at, _, _ = load_4xu32(codes, 4 * first)
        load_x(shared, start, (lower_at if lower else upper_at) ^ x_lane, x)
        add_slots(shared, ring, start, (x_lane, y_lane, lower), codes, first, used, x, yh, yl, acc)

    return add_products
