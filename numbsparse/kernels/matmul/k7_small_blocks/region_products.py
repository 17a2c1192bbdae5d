"""What a warp does with a stage: the sums of its slots += a few rows of x and dy.

A slot is 16 features of x, two pieces of 8 that may be anywhere, by B of dy. 16-bit values are
loaded by `ldmatrix`, which transposes what is stored in rows of the batch; a lane keeps the address
that it reads in a register for each slot.

tf32 has no `ldmatrix` that transposes, so lanes read their values one by one, at places that the
threads of a block have worked out in shared memory; see `loads_tf32`.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region_plan import Sums
from numbsparse.kernels.matmul.k7_small_blocks.region_slots import PLACE, PLACE_BITS
from numbsparse.kernels.parts.fragments import adding
from numbsparse.kernels.parts.split import add_product, splitting
from numbsparse.kernels.parts.swizzle import (
    IN_BOXES,
    PIECE,
    feature_of,
    feature_of_eight,
    loads_in_boxes,
    place_in_boxes,
    place_of_byte,
)
from numbsparse.kernels.ptx import (
    as_float32,
    ldmatrix_x4,
    ldmatrix_x4_if,
    ldmatrix_x4_trans,
    ldmatrix_x4_trans_if,
    load_1xu32,
    load_2xu32,
    load_4xu32,
)
from numbsparse.kernels.ptx.tiles import swizzled

X_PLACE = 0x7FFF
PIECES = 8  # of 16 bytes in 128
PARTS = (0.3, 0.55, 0.75, 1)  # of the slots, that gates may leave


@cache
def products(sums: Sums) -> tuple[Any, Any]:
    """place(code, lane) : what a lane keeps in a register of a slot's code in the plan
    add(shared, start, code, places, first, used, acc) : acc[p] += the products of slot p, with
        the rows of the stage that begins at byte `start`. The warp has `used` slots; `places` are
        those of `places_tf32` of all warps, its own from slot `first` on.
    """
    if sums.region.BOX:
        return place_in_boxes(sums), products_16_bit(sums)
    if sums.region.ITEM == 2:
        return places_16_bit(sums), products_16_bit(sums)
    return as_it_is, products_tf32(sums)


@cuda.jit(device=True)
def as_it_is(code, lane):
    return code


@cache
def places_16_bit(sums: Sums) -> Any:
    """Where a lane reads for a slot, in 16 bytes: x below 15 bits, a new column, dy above 16 bits.

    It gives a row of an 8 x 8 matrix: of x 8 rows of the batch for each of two pieces of 8
    features, then 8 rows more; of dy 16 rows for each of two pieces, or 32 rows for one.
    """
    B, DEPTH = sums.B, sums.region.DEPTH
    x_transposed, dy_transposed = sums.x_transposed, sums.dy_transposed

    @cuda.jit(device=True)
    def place(code, lane):
        x_rows = lane // 16
        x_piece = code >> (lane // 8 % 2 * PLACE_BITS) & uint32(PLACE)
        dy_rows, across = lane // 8 % 2, lane // 16
        if B == 8:
            dy_rows, across = lane // 8 % uint32(DEPTH // 8), uint32(0)
        dy_piece = (code >> uint32(2 * PLACE_BITS) & uint32(PLACE)) + across
        new = code >> uint32(3 * PLACE_BITS)
        x_at = place_within(x_piece, x_rows, lane % 8, DEPTH, x_transposed)
        dy_at = place_within(dy_piece, dy_rows, lane % 8, DEPTH, dy_transposed)
        return uint32(x_at | new << uint32(15) | dy_at << uint32(16))

    return place


@cuda.jit(device=True)
def place_within(piece, rows, r, depth, transposed):
    """Where line r of 8 x 8 values is: 8 features and the `rows`-th 8 rows of the batch.

    Transposed, lines have 32 rows of the batch, and their pieces change places by twos.
    """
    if transposed:
        return (piece * PIECES + r) * (depth // 8) + (rows ^ r // 2 % (depth // 8))
    return (piece // PIECES * depth + 8 * rows + r) * PIECES + (piece ^ r) % PIECES


@cache
def loads_16_bit(transposed: bool) -> tuple[Any, Any, Any]:
    """(load, load_if, below): the four matrices of a lane's place; the place 16 rows down."""
    BELOW = 16 * 16 * PIECES

    @cuda.jit(device=True)
    def below_rows(at):
        return at + BELOW

    @cuda.jit(device=True)
    def below_columns(at):
        """Two pieces on, in a line whose pieces are swizzled."""
        return at + 32 - cuda.threadIdx.x % 8 // 4 * 64

    if transposed:
        return ldmatrix_x4, ldmatrix_x4_if, below_columns
    return ldmatrix_x4_trans, ldmatrix_x4_trans_if, below_rows


@cache
def loads_of_x(transposed: bool) -> tuple[Any, Any]:
    """(load, load_below)(shared, stage, code, places): x of a slot, and of 16 rows down."""
    load_at, _, below = loads_16_bit(transposed)

    @cuda.jit(device=True)
    def x_at(stage, code):
        return uint32(stage + (code & uint32(X_PLACE)) * 16)

    @cuda.jit(device=True)
    def load(shared, stage, code, places):
        return load_at(shared, x_at(stage, code))

    @cuda.jit(device=True)
    def load_below(shared, stage, code, places):
        return load_at(shared, below(x_at(stage, code)))

    return load, load_below


def products_16_bit(sums: Sums) -> Any:
    """For all slots, also those that are not used; of gates, for a part of them that is enough.

    With a branch for each slot all of them took 1.4 times as long at B = 16 (H200).
    """
    SLOTS = sums.region.SLOTS
    parts = {round(part * SLOTS) for part in PARTS} - {0} if sums.gated else {SLOTS}
    return products_of_enough(sums, tuple(sorted(parts)))


@cache
def products_of_enough(sums: Sums, sizes: tuple[int, ...]) -> Any:
    """For as many slots as are enough."""
    *fewer, most = sizes
    if not fewer:
        return products_of_slots(sums, most)
    add_most, FEWER = products_of_slots(sums, most), fewer[-1]
    add_fewer = products_of_enough(sums, tuple(fewer))

    @cuda.jit(device=True)
    def add_products(shared, stage, code, places, first, used, acc):
        if used > FEWER:
            add_most(shared, stage, code, places, first, used, acc)
        else:
            add_fewer(shared, stage, code, places, first, used, acc)

    return add_products


@cache
def products_of_slots(sums: Sums, SLOTS: int) -> Any:
    """Of the first slots. code says where a lane reads."""
    B, DEPTH, add = sums.B, sums.region.DEPTH, adding(sums.arithmetic)
    NEW, DY_PLACE, DY_SHIFT = 0x8000, 0xFFFF0, 12
    load_x, load_x_below = loads_of_x(sums.x_transposed)
    if sums.region.BOX:
        load_x, load_x_below = loads_in_boxes
        NEW, DY_PLACE, DY_SHIFT = IN_BOXES
    _, load_dy_if, below_dy = loads_16_bit(sums.dy_transposed)

    @cuda.jit(device=True)
    def add_products(shared, stage, code, places, first, used, acc):
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = uint32(0)
        a = load_x(shared, stage, code[0], places)
        for p in range(SLOTS):
            new = uint32(code[p] & uint32(NEW))
            at = uint32(stage + (code[p] >> uint32(DY_SHIFT) & uint32(DY_PLACE)))
            b0, b1, b2, b3 = load_dy_if(shared, at, new, b0, b1, b2, b3)
            if B == 16 and DEPTH == 32:
                b4, b5, b6, b7 = load_dy_if(shared, below_dy(at), new, b4, b5, b6, b7)
            if DEPTH == 32:
                e = load_x_below(shared, stage, code[p], places)
            add(a, b0, b1, acc[p, 0])
            if B == 16:
                add(a, b2, b3, acc[p, 1])
            if p + 1 < SLOTS:
                a = load_x(shared, stage, code[p + 1], places)
            if DEPTH == 32 and B == 16:
                add(e, b4, b5, acc[p, 0])
                add(e, b6, b7, acc[p, 1])
            elif DEPTH == 32:
                add(e, b2, b3, acc[p, 0])

    return add_products


@cache
def places_tf32(sums: Sums) -> Any:
    """Where the pieces of a slot are in a stage, in bytes: of x the upper, with it that of dy, of x
    the lower, dy again. The highest bit of dy says that the column is new."""
    GROUP_BYTES, OF_GROUP = sums.region.GROUP_BYTES, sums.region.FEATURES // PIECE

    @cuda.jit(device=True)
    def start_in_rows(place):
        place = place & uint32(PLACE)
        return uint32(place // OF_GROUP * GROUP_BYTES + place % OF_GROUP * (4 * PIECE))

    @cuda.jit(device=True)
    def start_of_lines(place):
        return uint32((place & uint32(PLACE)) * (GROUP_BYTES // OF_GROUP))

    start_of_x = start_of_lines if sums.x_transposed else start_in_rows
    start_of_dy = start_of_lines if sums.dy_transposed else start_in_rows

    @cuda.jit(device=True)
    def places(code):
        code = uint32(code)
        new = code >> uint32(3 * PLACE_BITS) << uint32(31)
        dy = uint32(start_of_dy(code >> uint32(2 * PLACE_BITS)) | new)
        return start_of_x(code), dy, start_of_x(code >> uint32(PLACE_BITS)), dy

    return places


class Loads(NamedTuple):
    """begin(g, q): where lane 4 g + q begins, in bytes from the start of a piece.
    load(shared, start, at, hi, lo): its values in all steps of 8 rows, split: [step, term, unit].
    """

    begin: Any
    load: Any


@cache
def loads_tf32(sums: Sums, UNITS: int, of_x: bool) -> Loads:
    """Of an operand: 8 UNITS features, of x two pieces; of dy B, one run.

    An mma's rows and columns, and the terms that it adds, may be any as long as both operands
    agree. Of every 8 rows of the batch a lane has 2 q and 2 q + 1. In rows of the batch its
    features are neighbours, and the places share no bank. Of a transposed operand the terms are
    neighbours, and `feature_of` chooses the features; where both are transposed and have 16 rows, a
    lane has rows 4 q to 4 q + 3, read at once: 9 % less time at B = 8, 4 % at B = 16 (H200).
    """
    DEPTH = sums.region.DEPTH
    STEPS, split = DEPTH // 8, splitting(sums.arithmetic == "highest")
    transposed = sums.x_transposed if of_x else sums.dy_transposed
    fours = sums.x_transposed and sums.dy_transposed and DEPTH == 16
    LINE = 4 * (DEPTH if transposed else sums.region.FEATURES)  # bytes
    NEXT = LINE ^ 16  # one line further, where neighbouring pieces of 16 bytes have changed places
    OTHER = swizzled(2 * LINE, LINE)  # from the feature of one unit to that of the other
    RUN, EIGHT = 16 if fours else 8, 32  # bytes that a lane reads at once, and of 8 terms

    @cuda.jit(device=True)
    def begin_in_rows(g, q):
        # Line 2 q of 8, whose pieces of 16 bytes are swizzled: no sum here carries, all are xors.
        line = uint32(q * (2 * LINE) ^ q * 32)
        return uint32(line ^ (g % 4 * 8 if of_x else g * (4 * UNITS)))

    @cuda.jit(device=True)
    def begin_of_lines(g, q):
        feature = feature_of_eight(g) if UNITS == 1 else feature_of(g % 4 if of_x else g, 0)
        return uint32(place_of_byte(feature * LINE + q * RUN, LINE))

    @cuda.jit(device=True)
    def load_rows(shared, start, at, hi, lo):
        for k in range(2):
            here = int64(uint32(start + (at ^ uint32(NEXT * k))))
            for s in range(STEPS):
                if UNITS == 2:
                    a, b = load_2xu32(shared, here + s * 8 * LINE)
                    hi[s, k, 0], lo[s, k, 0] = split(as_float32(a))
                    hi[s, k, 1], lo[s, k, 1] = split(as_float32(b))
                else:
                    (a,) = load_1xu32(shared, here + s * 8 * LINE)
                    hi[s, k, 0], lo[s, k, 0] = split(as_float32(a))

    @cuda.jit(device=True)
    def load_lines(shared, start, at, hi, lo):
        for u in range(UNITS):
            if fours:
                run = load_4xu32(shared, int64(uint32(start + (at ^ uint32(OTHER * u)))))
                for i in range(4):
                    hi[i // 2, i % 2, u], lo[i // 2, i % 2, u] = split(as_float32(run[i]))
            else:
                for s in range(STEPS):
                    place = uint32(start + (at ^ uint32(OTHER * u ^ EIGHT * s)))
                    run = load_2xu32(shared, int64(place))
                    for k in range(2):
                        hi[s, k, u], lo[s, k, u] = split(as_float32(run[k]))

    return Loads(begin_of_lines, load_lines) if transposed else Loads(begin_in_rows, load_rows)


@cache
def slots_tf32(sums: Sums) -> Any:
    """step[w] = the products of slot first + w over the rows of a stage, 8 rows by 8: each begins
    at zero (`parts.split`).

    The three products of a step wait for each other. So two slots are taken at once, each with its
    own dy; or one at a time, where most slots find the dy of the one before.
    """
    STEPS, TILES, AT_ONCE = sums.region.DEPTH // 8, sums.B // 8, sums.region.AT_ONCE
    exact, X = sums.arithmetic == "highest", (AT_ONCE, STEPS, 2, 2)
    load_x, load_dy = loads_tf32(sums, 2, True).load, loads_tf32(sums, TILES, False).load

    @cuda.jit(device=True)
    def multiply(a, b, step):
        for s in range(STEPS):
            for w in range(AT_ONCE):
                for t in range(TILES):
                    x, y = a[w, s], b[w, s]
                    add_product(x[0, 0], x[0, 1], x[1, 0], x[1, 1], y[0, t], y[1, t], step[w, s, t])

    @cuda.jit(device=True)
    def multiply_slots(shared, start, lanes, places, first, yh, yl, step):
        x_lane, y_lane, piece = lanes
        xh, xl = cuda.local.array(X, uint32), cuda.local.array(X, uint32)
        for w in range(AT_ONCE):
            x_at, y_at = load_2xu32(places, 4 * (first + w) + piece)
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
def products_tf32(sums: Sums) -> Any:
    """A few slots at a time, those that are used."""
    SLOTS, STEPS, AT_ONCE = sums.region.SLOTS, sums.region.DEPTH // 8, sums.region.AT_ONCE
    TILES = sums.B // 8
    Y, STEP = (AT_ONCE, STEPS, 2, TILES), (AT_ONCE, STEPS, TILES, 4)
    multiply_slots = slots_tf32(sums)
    begin_x, begin_dy = loads_tf32(sums, 2, True).begin, loads_tf32(sums, TILES, False).begin

    @cuda.jit(device=True)
    def add(step, acc):
        for t in range(TILES):
            for i in range(4):
                for s in range(1, STEPS):
                    step[0, t, i] += step[s, t, i]
                acc[t, i] += step[0, t, i]

    def slots_from(p: int) -> Any:
        """The slots from p on: loops unrolled, so that acc[p] stays in registers."""

        @cuda.jit(device=True)
        def none(shared, start, lanes, places, first, used, yh, yl, acc):
            pass

        if p == SLOTS:
            return none
        rest = slots_from(p + AT_ONCE)

        @cuda.jit(device=True)
        def add_slots(shared, start, lanes, places, first, used, yh, yl, acc):
            if p < used:
                step = cuda.local.array(STEP, float32)
                multiply_slots(shared, start, lanes, places, first + p, yh, yl, step)
                for w in range(AT_ONCE):  # the last may be of a slot that is not taken
                    add(step[w], acc[p + w])
                rest(shared, start, lanes, places, first, used, yh, yl, acc)

        return add_slots

    add_slots = slots_from(0)

    @cuda.jit(device=True)
    def add_products(shared, start, code, places, first, used, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        yh, yl = cuda.local.array(Y, uint32), cuda.local.array(Y, uint32)
        lanes = begin_x(g, q), begin_dy(g, q), g // 4 * 2  # half of the lanes read the lower piece
        add_slots(shared, start, lanes, places, first, used, yh, yl, acc)

    return add_products
