"""Products of the slots of a region of float32: 16 features of x by B of dy, over DEPTH rows.

tf32 has no `ldmatrix` that turns a tile over, so lanes read their values one by one: lane 4 g + q
two neighbours of x, features 2 g and 2 g + 1 of a slot, in rows 2 q and 2 q + 1 of every 8, and of
dy as many columns. An mma's rows and columns, and the terms that it adds, may be any as long as
both factors agree; these meet in no bank of swizzled lines. A factor that lies feature-major is
read by `single_turned`. What is split into hi and lo, and why the products of a step start from
zero, says `parts.fragments_tf32`.

The three products of a step wait for each other. So two slots are taken at once, each with its own
dy; or one alone, where most slots find the dy of the one before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE_BITS
from numbsparse.kernels.matmul.k7_small_blocks.single_turned import lanes_of, turned_loads
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE
from numbsparse.kernels.parts.fragments_tf32 import round_to_tf32, split_exact
from numbsparse.kernels.ptx import as_float32, load_1xu32, load_2xu32, mma_m16n8k8_tf32


class Sums(NamedTuple):
    """What a kernel is made for."""

    B: int
    region: Region
    at_once: int  # slots, of which the region has a multiple; one alone keeps dy
    wide: bool  # whole blocks, stored several values at once
    exact: bool
    x_turned: bool  # feature-major
    dy_turned: bool

    @property
    def PER_LANE(self) -> int:
        """Sums of a slot in a lane."""
        return self.B // 2

    @property
    def FOURS(self) -> bool:
        """Whether a lane has four neighbouring terms: of lines of 16, and all factors lie so."""
        return self.x_turned and self.dy_turned and self.region.DEPTH == 16


@cache
def translated(sums: Sums) -> Any:
    """Where the pieces of a slot stand in a stage, in bytes: of x the upper, with it that of dy, of
    x the lower, dy again. The highest bit of dy says that the column is new."""
    GROUP_BYTES, PIECES = sums.region.GROUP_BYTES, sums.region.FEATURES // PIECE
    PLACE, LINES = (1 << PLACE_BITS) - 1, GROUP_BYTES // PIECES

    @cuda.jit(device=True)
    def start_of(place):
        place = place & uint32(PLACE)
        return uint32(place // PIECES * GROUP_BYTES + place % PIECES * (4 * PIECE))

    @cuda.jit(device=True)
    def start_of_lines(place):
        return uint32((place & uint32(PLACE)) * LINES)

    start_of_x = start_of_lines if sums.x_turned else start_of
    start_of_dy = start_of_lines if sums.dy_turned else start_of

    @cuda.jit(device=True)
    def translate(code):
        code = uint32(code)
        new = code >> uint32(3 * PLACE_BITS) << uint32(31)
        dy = uint32(start_of_dy(code >> uint32(2 * PLACE_BITS)) | new)
        return start_of_x(code), dy, start_of_x(code >> uint32(PLACE_BITS)), dy

    return translate


@cache
def loads(sums: Sums) -> tuple[Any, Any]:
    """(load_x, load_dy): a lane's values of a slot, split, those of `at` in a stage."""
    STEPS, TILES = sums.region.DEPTH // 8, sums.B // 8
    LINE = 4 * sums.region.FEATURES  # bytes
    NEXT = LINE ^ 16  # one line further, where neighbouring pieces of 16 bytes have changed places
    split = split_exact if sums.exact else round_to_tf32

    @cuda.jit(device=True)
    def load_x(shared, start, at, hi, lo):
        for k in range(2):
            here = int64(uint32(start + (at ^ uint32(NEXT * k))))
            for s in range(STEPS):
                a, b = load_2xu32(shared, here + s * 8 * LINE)
                hi[s, 2 * k], lo[s, 2 * k] = split(as_float32(a))
                hi[s, 2 * k + 1], lo[s, 2 * k + 1] = split(as_float32(b))

    @cuda.jit(device=True)
    def load_dy(shared, start, at, hi, lo):
        for k in range(2):
            here = int64(uint32(start + (at ^ uint32(NEXT * k))))
            for s in range(STEPS):
                if TILES == 2:
                    a, b = load_2xu32(shared, here + s * 8 * LINE)
                    hi[s, 0, k], lo[s, 0, k] = split(as_float32(a))
                    hi[s, 1, k], lo[s, 1, k] = split(as_float32(b))
                else:
                    (a,) = load_1xu32(shared, here + s * 8 * LINE)
                    hi[s, 0, k], lo[s, 0, k] = split(as_float32(a))

    turned_x, turned_dy = turned_loads(sums.region, sums.exact, sums.B, sums.FOURS)
    return turned_x if sums.x_turned else load_x, turned_dy if sums.dy_turned else load_dy


@cache
def lanes(sums: Sums) -> Any:
    """(x_lane, y_lane): bytes from the start of a piece to where a lane begins."""
    TILES, LINE = sums.B // 8, 4 * sums.region.FEATURES
    x_turned, dy_turned = sums.x_turned, sums.dy_turned
    turned_x, turned_dy = lanes_of(sums.region, sums.B, sums.FOURS)

    @cuda.jit(device=True)
    def own(g, q):
        # Line 2 q of 8, whose pieces of 16 bytes are swizzled: no sum here carries, all are xors.
        line = uint32(q * (2 * LINE) ^ q * 32)
        x_lane = turned_x(g, q) if x_turned else uint32(line ^ g % 4 * 8)
        y_lane = turned_dy(g, q) if dy_turned else uint32(line ^ g * (4 * TILES))
        return x_lane, y_lane

    return own


@cache
def products_at_once(sums: Sums) -> Any:
    """step[w] = the products of slot first + w over the rows of a stage, 8 rows by 8."""
    STEPS, TILES, AT_ONCE, exact = sums.region.DEPTH // 8, sums.B // 8, sums.at_once, sums.exact
    X = AT_ONCE, STEPS, 4  # registers of a lane
    load_x, load_dy = loads(sums)

    @cuda.jit(device=True)
    def multiply(a, b, step):
        for s in range(STEPS):
            for w in range(AT_ONCE):
                for t in range(TILES):
                    x, y, c = a[w, s], b[w, s, t], step[w, s, t]
                    c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(
                        x[0], x[1], x[2], x[3], y[0], y[1], c[0], c[1], c[2], c[3]
                    )

    @cuda.jit(device=True)
    def multiply_slots(shared, start, lanes, codes, first, yh, yl, step):
        x_lane, y_lane, code_lane = lanes
        xh, xl = cuda.local.array(X, uint32), cuda.local.array(X, uint32)
        for w in range(AT_ONCE):
            x_at, y_at = load_2xu32(codes, 4 * (first + w) + code_lane)
            load_x(shared, start, x_at ^ x_lane, xh[w], xl[w])
            if AT_ONCE > 1 or y_at >> uint32(31) != 0:
                load_dy(shared, start, y_at & uint32(0x7FFFFFFF) ^ y_lane, yh[w], yl[w])
            for s in range(STEPS):
                for t in range(TILES):
                    for i in range(4):
                        step[w, s, t, i] = 0
        if exact:
            multiply(xl, yh, step)
            multiply(xh, yl, step)
        multiply(xh, yh, step)

    return multiply_slots


@cache
def products(sums: Sums) -> Any:
    """acc[p] += the products of slot p, of which a warp has `used`."""
    region, TILES, AT_ONCE = sums.region, sums.B // 8, sums.at_once
    SLOTS, STEPS = region.SLOTS, region.DEPTH // 8
    Y, STEP = (AT_ONCE, STEPS, TILES, 2), (AT_ONCE, STEPS, TILES, 4)
    multiply_slots, lanes_at = products_at_once(sums), lanes(sums)

    @cuda.jit(device=True)
    def add(step, acc):
        for t in range(TILES):
            for i in range(4):
                for s in range(1, STEPS):
                    step[0, t, i] += step[s, t, i]
                acc[4 * t + i] += step[0, t, i]

    def slots_from(p: int) -> Any:
        """The slots from p on: loops unrolled, so that acc[p] stays in registers."""

        @cuda.jit(device=True)
        def none(shared, start, lanes, codes, first, used, yh, yl, acc):
            pass

        if p == SLOTS:
            return none
        rest = slots_from(p + AT_ONCE)

        @cuda.jit(device=True)
        def add_slots(shared, start, lanes, codes, first, used, yh, yl, acc):
            if p < used:
                step = cuda.local.array(STEP, float32)
                multiply_slots(shared, start, lanes, codes, first + p, yh, yl, step)
                for w in range(AT_ONCE):  # the last may be of a slot that is not taken
                    add(step[w], acc[p + w])
                rest(shared, start, lanes, codes, first, used, yh, yl, acc)

        return add_slots

    add_slots = slots_from(0)

    @cuda.jit(device=True)
    def add_products(shared, start, codes, first, used, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        x_lane, y_lane = lanes_at(g, q)
        yh, yl = cuda.local.array(Y, uint32), cuda.local.array(Y, uint32)
        at = x_lane, y_lane, g // 4 * 2  # half of the lanes read the lower piece of x
        add_slots(shared, start, at, codes, first, used, yh, yl, acc)

    return add_products
