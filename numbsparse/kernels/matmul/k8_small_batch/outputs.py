"""From the sums of a warp to a line of y.

An mma leaves a lane two neighbours along its second operand. So where y is contiguous along the
batch x is the second, elsewhere w; what is stored at once is contiguous then: four float32, or two
16-bit values as a word of y. One by one products took 1.07 to 1.55 times as long in float32, in 16
bits 1.17 to 2.0 (H200).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint16, uint32, uint64

from numbsparse.kernels.parts.fragments import PACK
from numbsparse.kernels.parts.fragments_tf32 import number_of
from numbsparse.kernels.parts.repair import repairing_lines
from numbsparse.kernels.parts.store import ANY, FEATURES
from numbsparse.kernels.parts.tiles import Form, Operand
from numbsparse.kernels.ptx import store_4xf32

# Of a tile whose x is the second operand: an mma takes 16 lines of the first, and 8 of the second.
SECOND_ROWS = 24


class Sums(NamedTuple):
    """The sums of a line of y: which operand is first, and how they are stored.

    In an order of `parts.store` what is contiguous is stored at once, all or none of which is
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
    """put(y, first row, first feature of the line, y_view, acc)."""
    return store_each(sums) if sums.form.is_16_bit or sums.y == ANY else store_fours(sums)


@cache
def store_fours(sums: Sums) -> Any:
    """Four float32 at once: of four groups, or, where neighbours are in twos, of two."""
    (M, N), ROWS, X_FIRST = sums.shape, sums.rows, sums.x_first
    FOURS, place = sums.operands[1].together == 4, places(sums)

    @cuda.jit(device=True)
    def put(y, top, first, y_view, acc):
        batch, out_features, y_batch, y_feature = y_view
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(M):
            for r in range(ROWS):
                for h in range(N // 2):
                    b, i = place(lane, m, 0 if FOURS else 2 * h, r, h if FOURS else 0)
                    if FOURS:
                        v0, v1 = acc[m, 0, 2 * r + h], acc[m, 1, 2 * r + h]
                        v2, v3 = acc[m, 2, 2 * r + h], acc[m, 3, 2 * r + h]
                    else:
                        v0, v1 = acc[m, 2 * h, 2 * r], acc[m, 2 * h + 1, 2 * r]
                        v2, v3 = acc[m, 2 * h, 2 * r + 1], acc[m, 2 * h + 1, 2 * r + 1]
                    b, i = b + top, i + first
                    if b < batch and i < out_features:
                        at = b * y_batch + i if X_FIRST else i * y_feature + b
                        store_4xf32(y, at, v0, v1, v2, v3)

    return put


@cache
def store_each(sums: Sums) -> Any:
    """One by one; or two 16-bit values at once, where y and what is contiguous count words.

    Places are added up, as in `parts.store`, and worked out whether a value is there or not.
    """
    (M, N), ROWS, X_FIRST, place = sums.shape, sums.rows, sums.x_first, places(sums)
    IS_16_BIT, PAIRS = sums.form.is_16_bit, sums.form.is_16_bit and sums.y != ANY
    EACH, PER_B, PER_I = 2 - int(PAIRS), 1 + int(PAIRS and not X_FIRST), 1 + int(PAIRS and X_FIRST)
    pack: Any = PACK.get(sums.form.dtype)

    @cuda.jit(device=True)
    def put(y, top, first, y_view, acc):
        batch, width, y_batch, y_feature = y_view
        y_batch, y_feature = 1 if PER_B == 2 else y_batch, 1 if PER_I == 2 else y_feature
        b, i = place(uint32(cuda.threadIdx.x) % 32, 0, 0, 0, 0)
        b, i = b + top, i + first
        begin, rows, columns = b // PER_B * y_batch + i // PER_I * y_feature, batch - b, width - i
        for m in range(M):
            for r in range(ROWS):
                for n in range(N):
                    for p in range(EACH):
                        b, i = place(0, m, n, r, p)  # from this lane's first
                        # Numba checks whether a signed index counts from the end.
                        there = uint64(begin + b // PER_B * y_batch + i // PER_I * y_feature)
                        value = acc[m, n, 2 * r + p]
                        if b < rows and i < columns:
                            if PAIRS:
                                y[there] = pack(value, acc[m, n, 2 * r + 1])
                            elif IS_16_BIT:
                                y[there] = uint16(pack(value, value) & uint32(0xFFFF))
                            else:
                                y[there] = value

    return put


@cache
def repairing(sums: Sums) -> Any:
    """Compute again what is NaN of this lane's outputs in a line of y = x @ w.

    `walk` is that over the lines of w, and `first` the first feature of this one.
    """
    (M, N), ROWS, place = sums.shape, sums.rows, places(sums)
    TRANSPOSED, repair_one = not sums.w.across, repairing_lines(sums.w.gated > 0)

    @cuda.jit(device=True)
    def repair(operands, top, gates, walk, first, y, y_view):
        x, x_view, values, w_view, _ = operands
        size = w_view[0]
        w_strides, (indptr, indices, blocks) = (1, size) if TRANSPOSED else (size, 1), walk
        x_strides = x_view[2], x_view[3]
        dense = x, x_strides, x_view[1], values, w_strides, indptr, indices, blocks, gates
        out = y, y_view[2], y_view[3], y_view[0], y_view[1]
        for n in range(4 * M * N):
            r = n // 2 % 2
            b, i = place(uint32(cuda.threadIdx.x) % 32, n // (4 * N), n // 4 % N, r, n % 2)
            if r < ROWS and b + top < y_view[0] and first + i < y_view[1]:
                repair_one(out, b + top, first + i, size, dense)

    return repair
