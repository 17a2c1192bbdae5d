"""Sums that operands split into two tf32 cannot give: those with an infinity or a NaN.

An infinity splits into hi = inf and lo = NaN, a value that rounds up to one into hi = inf and lo =
-inf: so with either a sum is NaN. An output that is NaN is computed once more, in float32 from
start to end: rare, so simple and slow.

Kernels look at their sums and repair themselves. With a launch behind that reads whether it has to,
replayed products of up to 6, 15 and 60 us and longer ones took 1.13, 1.03, 1.015 and 1.004 times as
long, and calls 8 to 14 us more of the host; with nothing looked at or repaired, 0.98, 0.985, 0.99
and 1.0 (80 drawn products, H200).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.words import conversions
from numbsparse.layout import Index


@cuda.jit(device=True)
def nan_in(values):
    """Whether accumulators of a thread hold a NaN: 0 or 1."""
    found = 0
    for i in range(values.shape[0]):
        if values[i] != values[i]:
            found = 1
    return found


@cuda.jit(device=True)
def nan_in_rows(sums, row, end):
    """The same of a warp's 16 rows from `row` on, as `wgmma` leaves them, of those before `end`."""
    found, own = 0, int32(row + cuda.threadIdx.x % 32 // 4)
    for i in range(sums.shape[0]):
        if sums[i] != sums[i] and own + i // 2 % 2 * 8 < end:
            found = 1
    return found


@cuda.jit(device=True)
def nan_in_sums(acc):
    """The same of (M, N, 4)."""
    found = 0
    for m in range(acc.shape[0]):
        own = 0
        for n in range(acc.shape[1]):
            own |= nan_in(acc[m, n])
        found |= own
    return found


@cuda.jit(device=True)
def plain_sum(value, a, a_at, a_step, b, b_at, b_step, count):
    """value + the sum of a[a_at + k * a_step] * b[b_at + k * b_step] over k < count, in order."""
    for k in range(count):
        value += a[a_at + k * a_step] * b[b_at + k * b_step]
    return value


class Dense(NamedTuple):
    """What is multiplied in y = x @ w, as one argument of a kernel."""

    x: Any  # along one axis
    x_strides: tuple[int, int]
    in_features: int
    w: Any  # along one axis
    w_strides: tuple[int, int]  # within a block, along the sum and across
    indptr: Any  # which blocks each line of w has
    indices: Any
    blocks: Any
    gates: Any  # what each block of w is multiplied by; one that is 0 counts for nothing


def dense_of(
    x: DeviceArray, values: DeviceArray, index: Index, transposed: bool, gates: Any = ()
) -> Dense:
    """Of x (batch, features) and w, or w.T."""
    walk, size = index.rows if transposed else index.columns, values.shape[1]
    x_strides = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    w_strides = (1, size) if transposed else (size, 1)
    return Dense(x.span, x_strides, x.shape[1], values.span, w_strides, *walk, gates)


@cache
def repairing_lines(gated: bool = False, kind: str = "") -> Any:
    """repair(y, n, feature, B, dense): y[n, feature] of y = x @ w, if that is NaN.

    y : `store.Output`
    dense : `Dense`, with gates if it is `gated`
    kind : of 16-bit values, see `store.KINDS`
    """
    widened, rounded = conversions(kind)

    @cuda.jit(device=True)
    def repair(y, n, feature, B, dense):
        values, row_stride, column_stride, _, _ = y
        x, x_strides, in_features, w, w_strides, indptr, indices, blocks, gates = dense
        at = n * row_stride + feature * column_stride
        if widened(values[at]) == widened(values[at]):
            return
        total = float32(0)
        for entry in range(indptr[feature // B], indptr[feature // B + 1]):
            first, block = indices[entry] * B, int64(blocks[entry]) * (B * B)
            block += feature % B * w_strides[1]
            gate = gates[blocks[entry]] if gated else float32(1)
            for i in range(min(B, in_features - first) if gate != 0 else 0):
                value = widened(x[n * x_strides[0] + (first + i) * x_strides[1]])
                weight = widened(w[block + i * w_strides[0]])
                total += value * (weight * gate if gated else weight)
        values[at] = rounded(total)

    return repair


class Factors(NamedTuple):
    """What is multiplied in dvalues = x.T @ dy, as one argument of a kernel."""

    x: Any  # along one axis
    dy: Any
    sizes: tuple[int, ...]  # stride of x, of dy, features of x, of dy, batch
    block_rows: Any
    block_columns: Any


def factors_of(x: DeviceArray, dy: DeviceArray, orders: tuple[bool, bool], index: Index) -> Factors:
    """Of x and dy (batch, features), each transposed where `orders` says so."""
    strides = (a.strides[0] // a.itemsize for a in (x, dy))
    features = (a.shape[0 if across else 1] for a, across in zip((x, dy), orders, strict=True))
    sizes = *strides, *features, x.shape[1 if orders[0] else 0]
    return Factors(x.span, dy.span, sizes, index.block_rows, index.block_columns)


@cuda.jit(device=True)
def repair_block(dvalues, at, B, dense, orders):
    """Number `at` of dvalues, (blocks, B, B), if that is NaN.

    Beyond the features it is 0. Elsewhere it is summed again.

    dense : `Factors`
    orders : whether x and dy are exchanged, x is feature-major, and dy is
    """
    swapped, x_transposed, dy_transposed = orders
    x, dy, (x_stride, dy_stride, in_features, out_features, batch), rows, columns = dense
    if dvalues[at] == dvalues[at]:
        return
    block = at // (B * B)
    i, j = rows[block] * int64(B) + at // B % B, columns[block] * int64(B) + at % B
    feature, column = (j, i) if swapped else (i, j)
    total = float32(0)
    if feature < in_features and column < out_features:
        for n in range(batch):
            left = x[feature * x_stride + n if x_transposed else n * x_stride + feature]
            right = dy[column * dy_stride + n if dy_transposed else n * dy_stride + column]
            total += left * right
    dvalues[at] = total
