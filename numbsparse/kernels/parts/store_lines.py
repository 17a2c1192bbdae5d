"""From the sums of a warp, as `tiles.multiply` leaves them, to a line of y.

An mma leaves a lane two neighbours along its second operand. So where y is contiguous along the
batch x is the second, elsewhere w; what is stored at once is contiguous then: four float32, or two
16-bit values as a word of y. One by one products took 1.07 to 1.55 times as long in float32, in 16
bits 1.17 to 2.0 (H200).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import is_gapless, of_bits
from numbsparse.kernels.parts.fragments_tf32 import number_of
from numbsparse.kernels.parts.repair import nan_in_sums, repairing_lines
from numbsparse.kernels.parts.store import (
    ANY,
    AT_ONCE,
    BYTES,
    FEATURES,
    LINES,
    ROWS,
    SLABS,
    by_boxes,
    order_of,
)
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.parts.words import PACK, conversions
from numbsparse.kernels.ptx import load_4xu32, store_4xf32, store_4xu32, sync_warp
from numbsparse.kernels.views import view_of

PITCH = 36  # words from a line of what waits to be written to the next one
# Of a tile whose x is the second operand: an mma takes 16 lines of the first, and 8 of the second.
SECOND_ROWS = 24


class Sums(NamedTuple):
    """The sums of a line of y: which operand is first, and how they are stored.

    In an order of `store` what is contiguous is stored at once, all or none of which is
    there: 16-bit y is an array of words then.
    """

    form: Form
    x: Operand
    w: Operand
    y: str

    @property
    def x_first(self) -> bool:
        return self.y != FEATURES and 8 * self.x.groups != SECOND_ROWS

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return (self.x, self.w) if self.x_first else (self.w, self.x)

    @property
    def rows(self) -> int:
        """Lines of the first operand that a lane has in an mma: one where it has eight in all."""
        return min(self.operands[0].groups, 2)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N), as in `tiles.multiply`."""
        first, second = self.operands
        return -(-first.groups // 2) * -(-second.groups // 4), min(second.groups, 4)

    def room_words(self, depth: int) -> int:
        """Of a warp, for a line of so many features that waits to be written."""
        if self.y == SLABS:
            return 8 * self.x.groups * depth * self.form.row // WIDTH
        return PITCH * depth if self.y == LINES else 0


def order_of_lines(y: DeviceArray, form: Form, depth: int) -> str:
    """Along what y takes four float32 or two 16-bit values at once, in lines of `depth`."""
    order = order_of(y, 4 if form.is_16_bit else BYTES)
    return ANY if order == ROWS and depth < WIDTH and not form.is_16_bit else order


def order_of_sums(y: DeviceArray, form: Form, x: Operand, depth: int, engine: bool) -> str:
    """The same of sums of such an x, or how its values are stored where they are apart.

    Few rows of a gapless y are SLABS: stored value by value, 2 to 31 rows of 16 bits took an H200
    1.0 to 1.4 times as long; by lanes more than 16 up to 0.9 times, and float32 as long.
    """
    order, second = order_of_lines(y, form, depth), 8 * x.groups == SECOND_ROWS
    if second or (order == FEATURES and x.slab and not x.even):
        order = ANY  # nothing of a lane is stored together
    if second or not y.batch_is_contiguous or (order != ANY and not x.skewed):
        return order
    most = 8 * x.groups if form.is_16_bit and engine else 16 if form.is_16_bit or engine else 0
    if 1 < y.shape[0] <= min(most, WIDTH) and is_gapless(y) and y.shape[1] % form.run == 0:
        return SLABS
    return LINES if engine or x.skewed else order


def output_of(y: DeviceArray, sums: Sums) -> tuple[DeviceArray, tuple[int, ...]]:
    """The memory of y, 16-bit values as bits, or as words where those are stored; and its view."""
    flat, (batch, features, *strides) = of_bits(y.span), view_of(y)
    if sums.form.is_16_bit and by_boxes(sums.y):
        flat = DeviceArray(flat.address, (flat.size // 2,), "uint32", None, flat.owner)
        strides = [-(-stride // 2) for stride in strides]  # 1 where they are contiguous
    return flat, (batch, features, *strides)


@cache
def places(sums: Sums) -> Any:
    """place(lane, m, n, r, p) = (row of the batch, feature of the line) of acc[m, n, 2 r + p]."""
    first, second = sums.operands
    FIRST, X_FIRST = -(-first.groups // 2), sums.x_first
    line_of, other_of = number_of(first.together), number_of(second.together)

    @cuda.jit(device=True)
    def place(lane, m, n, r, p):
        line = line_of(2 * (m % FIRST) + r, lane // 4)
        other = other_of(m // FIRST * 4 + n, lane % 4 * 2 + p)
        return (line, other) if X_FIRST else (other, line)

    return place


@cache
def storing(sums: Sums) -> Any:
    """put(y, first row, first feature of the line, y_view, acc), as many at once as `storing_some`
    does.

    Places are added up, as in `store`, and worked out whether a value is there or not: 3 to
    63 feature-major rows, of which y takes values one by one, took an H200 0.71 to 1.00 of the
    time, 0.90 at the median.
    """
    if sums.y == LINES:
        return storing_lines(sums)
    if sums.y == SLABS:
        return storing_slabs(sums)
    (M, N), ROWS, X_FIRST, place = sums.shape, sums.rows, sums.x_first, places(sums)
    store, ALONG, ACROSS, MANY = storing_some(sums)
    RUNS, PAIRS = 2 * N // MANY, MANY == 2  # of 16 bits, of which y counts words
    OF_B, OF_I = int(PAIRS and not X_FIRST), int(PAIRS and X_FIRST)

    @cuda.jit(device=True)
    def put(y, top, first, y_view, acc, room):
        batch, out_features, y_batch, y_feature = y_view
        if MANY > 1:  # what is contiguous
            y_batch, y_feature = (y_batch, 1) if X_FIRST else (1, y_feature)
        b, i = place(uint32(cuda.threadIdx.x) % 32, 0, 0, 0, 0)
        b, i = b + top, i + first
        begin = (b >> OF_B) * y_batch + (i >> OF_I) * y_feature
        rows, features = batch - b, out_features - i
        for m in range(M):
            for r in range(ROWS):
                for run in range(RUNS):
                    n, p = run // ACROSS * ALONG, run % ACROSS
                    b, i = place(0, m, n, r, p)  # from this lane's first
                    at = begin + (b >> OF_B) * y_batch + (i >> OF_I) * y_feature
                    if b < rows and i < features:
                        store(y, at, acc[m], n, 2 * r + p)

    return put


def in_words(sums: Sums) -> tuple[int, Any]:
    """Values of y in a word, and what one is."""
    return (2, uint16) if sums.form.dtype in PACK else (1, float32)


@cache
def laying(sums: Sums) -> Any:
    """lay(shared, acc, begin, apart, left): this lane's values to shared memory, from `begin` on,
    features `apart`; of a slab the `left` rows that there are."""
    (M, N), RUNS, place, SLAB = sums.shape, sums.rows, places(sums), sums.y == SLABS
    pack: Any = PACK.get(sums.form.dtype)
    IN_WORD, _ = in_words(sums)

    @cuda.jit(device=True)
    def lay(shared, acc, begin, apart, left):
        for m in range(M):
            for r in range(RUNS):
                for n in range(N):
                    for p in range(2):
                        b, i = place(uint32(0), m, n, r, p)
                        value = acc[m, n, 2 * r + p]
                        if not SLAB or b < left:
                            if SLAB:
                                at = uint64(uint32(begin + i * apart + b))
                            else:
                                at = begin + uint64(i * apart + b)
                            if IN_WORD == 2:
                                shared[at] = uint16(pack(value, value) & uint32(0xFFFF))
                            else:
                                shared[at] = value

    return lay


@cache
def storing_lines(sums: Sums) -> Any:
    """put(...) as `storing` has it, and (..., shared, room): by way of shared memory.

    A warp writes what follows in memory together, and in a loop: one by one straight from the sums,
    that is 1,900 instructions, which the multiprocessor has to fetch for each line anew.
    """
    place, lay, IN_WORD, VALUE = places(sums), laying(sums), *in_words(sums)
    TILES = -(-8 * sums.x.groups // 32)
    APART, FEATURES_OF, OWN = IN_WORD * PITCH, 8 * sums.w.groups, (AT_ONCE, TILES)

    @cuda.jit(device=True)
    def put(y, top, first, y_view, acc, room):
        shared, own = cuda.shared.array(0, VALUE), cuda.local.array(OWN, VALUE)
        batch, out_features, _, y_feature = y_view
        lane = uint32(cuda.threadIdx.x) % 32
        b, i = place(lane, 0, 0, 0, 0)
        begin = uint64(uint32(room * IN_WORD + i * APART + b))
        lay(shared, acc, begin, APART, 0)
        sync_warp()
        at, here = first * y_feature + top + lane, uint64(uint32(room * IN_WORD + lane))
        rows, left = batch - top - lane, min(out_features - first, int64(FEATURES_OF))
        while left > 0:
            for k in range(AT_ONCE):
                for u in range(TILES):
                    own[k, u] = shared[here + uint64(k * APART + 32 * u)]
            for k in range(AT_ONCE):
                for u in range(TILES):
                    if 32 * u < rows and k < left:
                        y[uint64(at + 32 * u)] = own[k, u]
                at += y_feature
            left, here = left - AT_ONCE, here + uint64(AT_ONCE * APART)
        sync_warp()

    return put


@cache
def storing_slabs(sums: Sums) -> Any:
    """put(...) as `storing` has it, of a tile that has all rows: what a line of y has follows in
    memory, and is written 16 bytes at once by way of shared memory."""
    place, lay, IN_WORD, VALUE = places(sums), laying(sums), *in_words(sums)
    FEATURES_OF, RUN = 8 * sums.w.groups, sums.form.run

    @cuda.jit(device=True)
    def put(y, top, first, y_view, acc, room):
        shared, words = cuda.shared.array(0, VALUE), cuda.shared.array(0, uint32)
        batch, out_features, _, _ = y_view
        rows, lane = uint32(batch), uint32(cuda.threadIdx.x) % 32
        b, i = place(lane, 0, 0, 0, 0)
        begin = uint32(room * IN_WORD + i * rows + b)
        left = uint32(rows - min(b, rows))
        lay(shared, acc, begin, rows, left)
        sync_warp()
        pieces = uint32(min(out_features - first, int64(FEATURES_OF)) * batch) // uint32(RUN)
        at = first * batch
        while lane < pieces:
            v = load_4xu32(words, room + 4 * lane)
            store_4xu32(y, at + int64(lane * RUN), v[0], v[1], v[2], v[3])
            lane += uint32(32)
        sync_warp()

    return put


@cache
def storing_some(sums: Sums) -> tuple[Any, int, int, int]:
    """(store, groups from a run to the next, runs in a group, values of a run): four float32, of
    four groups, or of two, where neighbours are in twos; two 16-bit values; or one.

    store(y, at, c, n, i) : the run that begins with c[n, i]
    """
    pack: Any = PACK.get(sums.form.dtype)
    _, rounded = conversions(sums.form.dtype if sums.form.is_16_bit else "")

    @cuda.jit(device=True)
    def of_four(y, at, c, n, i):
        store_4xf32(y, at, c[n, i], c[n + 1, i], c[n + 2, i], c[n + 3, i])

    @cuda.jit(device=True)
    def of_two(y, at, c, n, i):
        store_4xf32(y, at, c[n, i], c[n + 1, i], c[n, i + 1], c[n + 1, i + 1])

    @cuda.jit(device=True)
    def pair(y, at, c, n, i):
        y[uint64(at)] = pack(c[n, i], c[n, i + 1])  # Numba checks signed indices

    @cuda.jit(device=True)
    def one(y, at, c, n, i):
        y[uint64(at)] = rounded(c[n, i])

    if sums.y == ANY:
        return one, 1, 2, 1
    if sums.form.is_16_bit:
        return pair, 1, 1, 2
    return (of_four, 4, 2, 4) if sums.operands[1].together == 4 else (of_two, 2, 1, 4)


@cache
def looking(sums: Sums) -> Any:
    """nan_in(acc, rows): whether a sum of this lane is NaN, of the `rows` that there are: what is
    behind those of a slab may be anything."""
    (M, N), ROWS, place = sums.shape, sums.rows, places(sums)

    @cuda.jit(device=True)
    def nan_in_rows(acc, rows):
        b, _ = place(uint32(cuda.threadIdx.x) % 32, 0, 0, 0, 0)
        found, left = False, rows - b
        for m in range(M):
            for r in range(ROWS):
                for n in range(N):
                    for p in range(2):
                        b, _ = place(uint32(0), m, n, r, p)
                        value = acc[m, n, 2 * r + p]
                        found |= b < left and value != value
        return found

    @cuda.jit(device=True)
    def nan_in_all(acc, rows):
        return nan_in_sums(acc)

    return nan_in_rows if sums.x.slab else nan_in_all


@cache
def repairing(sums: Sums) -> Any:
    """Compute again what is NaN of this lane's outputs in a line of y = x @ w, from its first
    feature on, of blocks of this size."""
    (M, N), ROWS, place = sums.shape, sums.rows, places(sums)
    repair_one = repairing_lines(sums.w.gated > 0)

    @cuda.jit(device=True)
    def repair(dense, size, top, first, y, y_view):
        out = y, y_view[2], y_view[3], y_view[0], y_view[1]
        for n in range(4 * M * N):
            r = n // 2 % 2
            b, i = place(uint32(cuda.threadIdx.x) % 32, n // (4 * N), n // 4 % N, r, n % 2)
            if r < ROWS and b + top < y_view[0] and first + i < y_view[1]:
                repair_one(out, b + top, first + i, size, dense)

    return repair
