"""Parts of kernels that multiply and add tiles, one by one: what they compute, in NumPy's words."""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32
from ptx_helpers import on_hopper

from numbsparse.device import to_device
from numbsparse.device.launch import launch
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.fragments_tf32 import number_of
from numbsparse.kernels.parts.repair import nan_in_rows, nan_in_sums, plain_sum
from numbsparse.kernels.parts.requests import Reach, copying
from numbsparse.kernels.parts.tiles import Form, Operand, multiply, operands_of
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait

pytestmark = on_hopper
SPLIT, TF32, HALF = Form("float32", True), Form("float32", False), Form("float16", False)


def tile_of(lines, form, across, paired=False):
    """The words of a tile (lines, 32 terms) as they stand in shared memory, two rows in 128 bytes
    where they are paired."""
    tiles = np.split(lines, len(lines) // 32) if across and len(lines) > 32 else [lines]
    rows = np.concatenate([tile.T if across else tile for tile in tiles])
    wide = np.zeros((len(rows), 32), form.dtype)
    wide[:, : rows.shape[1]] = rows
    n = np.arange(len(rows) // (2 if paired else 1))
    pieces_of = wide.view(np.uint32).reshape(n.size, -1, 4)
    key = n % 8 if form.dtype == "float32" or paired else n // 2 % 4
    swapped = np.empty_like(pieces_of)
    for i, k in zip(n, key, strict=True):
        swapped[i, np.arange(pieces_of.shape[1]) ^ k] = pieces_of[i]
    return swapped.ravel()


def product_kernel(form, first, second, shape):
    M, N = shape
    SUMS, FIRST = (M, N, 4), -(-first.groups // 2)
    (A, B), (take, rest) = (
        (operands_of(form, o) for o in (first, second)),
        multiply(form, first, second),
    )
    line_of, other_of = number_of(first.together), number_of(second.together)

    @cuda.jit
    def kernel(a, b, paired, out):
        shared = cuda.shared.array(8192, uint32, ALIGNMENT)
        acc = cuda.local.array(SUMS, float32)
        lane = cuda.threadIdx.x
        for i in range(lane, a.size, 32):
            shared[i] = a[i]
        for i in range(lane, b.size, 32):
            shared[4096 + i] = b[i]
        cuda.syncthreads()
        pieces.clear(acc)
        of_a, of_b = cuda.local.array(A, uint32), cuda.local.array(B, uint32)
        take(shared, uint32(0), uint32(0), uint32(4096), uint32(paired), (), of_a, of_b, acc)
        rest((), of_a, of_b, acc)
        for m in range(M):
            for n in range(N):
                for i in range(4):
                    row = line_of(2 * (m % FIRST) + i // 2, lane // 4)
                    column = other_of(m // FIRST * 4 + n, lane % 4 * 2 + i % 2)
                    out[row, column] = acc[m, n, i]

    return kernel


PRODUCTS = (
    (SPLIT, Operand(False, 2, 2), Operand(True, 4, 4)),
    (SPLIT, Operand(True, 4, 4), Operand(False, 4, 2)),
    (SPLIT, Operand(False, 1), Operand(True, 4, 4)),
    (SPLIT, Operand(True, 1), Operand(False, 2, 2)),
    (TF32, Operand(True, 2), Operand(False, 4, 4)),
    (HALF, Operand(False, 4), Operand(True, 8)),
    (HALF, Operand(True, 1), Operand(False, 4)),
    (HALF, Operand(False, 2), Operand(True, 4)),
    (HALF, Operand(False, 8), Operand(True, 2)),
)
PAIRED = [case for case in PRODUCTS if case[0] == HALF and case[2].groups == 4]


@pytest.mark.parametrize(
    ("paired", "form", "first", "second"),
    [*((False, *case) for case in PRODUCTS), *((True, *case) for case in PAIRED)],
    ids=str,
)
def test_a_tile_times_another(paired, form, first, second, rng):
    a, b = (rng.standard_normal((8 * o.groups, 32)).astype(form.dtype) for o in (first, second))
    if form == TF32:  # whose operands have ten bits of mantissa
        a, b = (np.ldexp(np.round(np.ldexp(v, 8)), -8) for v in (a, b))
    shape = -(-first.groups // 2) * -(-second.groups // 4), min(second.groups, 4)
    out = to_device(np.full((64, 64), np.nan, np.float32))
    kernel = product_kernel(form, first, second, shape)
    a_words, b_words = tile_of(a, form, first.across), tile_of(b, form, second.across, paired)
    launch(kernel, 1, 32, *map(to_device, (a_words, b_words)), 16 * paired, out)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    bound = 40 * np.finfo(np.float32).eps * (abs(a.astype(np.float64)) @ abs(b.T))
    got = out.numpy()[: len(a), : len(b)]
    assert (abs(got - exact) <= bound).all()  # NaN is not
    if first.groups == 1:  # the lines that an mma takes beside them are zeros
        assert not out.numpy()[8:16, : len(b)].any()


def copy_kernel(form, shape, depth, by_feature, reach):
    copy = copying(form, shape, depth, by_feature, reach)

    @cuda.jit
    def kernel(memory, record, features, stride, first, many, out):
        shared = cuda.shared.array(1024, uint32, ALIGNMENT)
        own = cuda.local.array(8, int32)
        for e in range(8):
            own[e] = record[e]
        copy(memory, own, features, stride, first, many, shared, uint32(0))
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, out.size, 32):
            out[i] = shared[i]

    return kernel


@pytest.mark.parametrize("form", [TF32, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("by_feature", [False, True], ids=["across", "along"])
@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("reach", [Reach(True, False), Reach(False, False), Reach(True, True)])
def test_lanes_copy_what_a_record_names(reach, first, by_feature, form, rng):
    """Four lines of eight features, one of which is not there and one that may end early."""
    depth, features, many = 8, 40 if reach.whole else 37, 24 if reach.whole else 27
    x = rng.standard_normal((many, 40)).astype(form.dtype)
    memory = x if by_feature else np.zeros((40, 32), form.dtype)
    if not by_feature:
        memory[:, :many] = x.T
    record = np.array([0, 2, 0, 4, -1, 0, 0, 1], np.int32)  # (place, line) of each
    out = to_device(np.full(32 * form.row, 99, np.uint32))
    kernel = copy_kernel(form, (32, 32), depth, by_feature, reach)
    flat = to_device(memory.ravel())
    args = features, memory.shape[1], first, many
    launch(kernel, 1, 32, flat, to_device(record), *args, out)
    expected, rows = np.zeros((32, 32), form.dtype), many - first
    expected[:rows, :8], expected[:rows, 8 : features - 24] = (
        x[first:, 16:24],
        x[first:, 32:features],
    )
    expected[:rows, 24:] = x[first:, 8:16]
    np.testing.assert_array_equal(out.numpy(), tile_of(expected, form, not by_feature))


def test_the_last_to_come_adds_all_pieces_in_their_order(rng):
    M, N, MANY = 2, 1, 3
    SUMS = (M, N, 4)

    @cuda.jit
    def kernel(values, partials, tickets, out):
        acc = cuda.local.array(SUMS, float32)
        k, lane = cuda.blockIdx.x, cuda.threadIdx.x
        for m in range(M):
            for i in range(4):
                acc[m, 0, i] = values[k, lane, m, i]
        if pieces.join(partials, tickets, 1 + k, 1, MANY, 1, acc):
            for m in range(M):
                for i in range(4):
                    out[lane, m, i] = acc[m, 0, i]

    values = rng.standard_normal((MANY, 32, M, 4)).astype(np.float32)
    partials = to_device(np.full((1 + MANY) * pieces.floats_of(M, N), np.nan, np.float32))
    tickets, out = to_device(np.zeros(4, np.int32)), to_device(np.zeros((32, M, 4), np.float32))
    launch(kernel, MANY, 32, to_device(values), partials, tickets, out)
    np.testing.assert_array_equal(out.numpy(), (values[0] + values[1]) + values[2])
    assert not tickets.numpy().any()


@pytest.mark.parametrize("end", [3, 12, 40])
def test_nan_is_found_in_rows_before_the_last(end, rng):
    """Of a warp's 16 rows; what lies behind is of no result."""
    COUNT, first = 16, 24

    @cuda.jit
    def kernel(values, end, found):
        sums = cuda.local.array(COUNT, float32)
        for i in range(COUNT):
            sums[i] = values[cuda.threadIdx.x, i]
        found[cuda.threadIdx.x] = nan_in_rows(sums, first, first + end)

    values = rng.standard_normal((32, COUNT)).astype(np.float32)
    spoilt = rng.random(values.shape) < 0.1
    values[spoilt] = np.nan
    found = to_device(np.full(32, -1, np.int32))
    launch(kernel, 1, 32, to_device(values), end, found)
    lane, i = np.ogrid[:32, :COUNT]
    rows = lane // 4 + i // 2 % 2 * 8
    np.testing.assert_array_equal(found.numpy(), (spoilt & (rows < end)).any(1))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of simulated registers
@pytest.mark.parametrize("spoilt", [None, np.inf, np.nan])
def test_sums_that_are_nan_are_found_and_computed_in_order(spoilt, rng):
    SUMS = (2, 3, 4)

    @cuda.jit
    def kernel(values, a, b, out):
        acc = cuda.local.array(SUMS, float32)
        for m in range(2):
            for n in range(3):
                for i in range(4):
                    acc[m, n, i] = values[m, n, i]
        out[0] = float32(nan_in_sums(acc))
        out[1] = plain_sum(float32(1), a, 1, 2, b, 0, 3, 4)

    values, (a, b) = rng.standard_normal(SUMS), rng.standard_normal((2, 12)).astype(np.float32)
    values[1, 2, 3] = values[1, 2, 3] if spoilt is None else spoilt
    out = to_device(np.full(2, np.nan, np.float32))
    launch(kernel, 1, 1, *map(to_device, (values.astype(np.float32), a, b)), out)
    found, total = out.numpy()
    assert found == (spoilt is np.nan)
    expected = np.float32(1)
    for x, y in zip(a[1:8:2], b[0:12:3], strict=True):
        expected += x * y
    assert total == pytest.approx(expected, rel=1e-6)
