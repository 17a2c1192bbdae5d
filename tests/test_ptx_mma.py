"""Matrix instructions against plain matrix products.

The layout of a fragment is written down here once more, lane by lane, as the PTX ISA has it.
"""

import numpy as np
import pytest
from numba import cuda, float32, uint16
from ptx_helpers import needs_ampere, random_bits, run

from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT, meaning

pytestmark = needs_ampere
LANES = range(32)


def mma_kernel(mma):
    @cuda.jit
    def kernel(a, b, c, d):
        t = cuda.threadIdx.x
        at, bt, ct = a[t], b[t], c[t]
        d0, d1, d2, d3 = mma(at[0], at[1], at[2], at[3], bt[0], bt[1], ct[0], ct[1], ct[2], ct[3])
        d[t, 0], d[t, 1], d[t, 2], d[t, 3] = d0, d1, d2, d3

    return kernel


mma_f16_kernel = mma_kernel(ptx.mma_m16n8k16_f16)
mma_bf16_kernel = mma_kernel(ptx.mma_m16n8k16_bf16)
mma_tf32_kernel = mma_kernel(ptx.mma_m16n8k8_tf32)


def where_in_a16(group, member, i):
    row = group if i in (0, 1, 4, 5) else group + 8
    return row, member * 2 + (i & 1) + (8 if i >= 4 else 0)


def where_in_b16(group, member, i):
    return member * 2 + (i & 1) + (8 if i >= 2 else 0), group


def where_in_a8(group, member, i):
    return group if i in (0, 2) else group + 8, member if i < 2 else member + 4


def where_in_b8(group, member, i):
    return member if i == 0 else member + 4, group


def where_in_c(group, member, i):
    return group if i < 2 else group + 8, member * 2 + (i & 1)


def lanes_values(matrix, where, n):
    """What each lane holds of the matrix, (32, n)."""
    return np.array([[matrix[where(lane >> 2, lane & 3, i)] for i in range(n)] for lane in LANES])


def as_halves(values):
    return values.astype(np.float16).view(np.uint32)


def as_bfloats(values):
    upper = values.astype(np.float32).view(np.uint32) >> 16
    return (upper[:, ::2] | upper[:, 1::2] << 16).astype(np.uint32)


def as_floats(values):
    return values.astype(np.float32).view(np.uint32)


def with_mantissa(values, bits):
    """float32 cut off to so many bits of mantissa."""
    return (values.astype(np.float32).view(np.uint32) >> 23 - bits << 23 - bits).view(np.float32)


MMAS = {
    "f16": (mma_f16_kernel, meaning.mma_m16n8k16_f16, 16, 10, as_halves),
    "bf16": (mma_bf16_kernel, meaning.mma_m16n8k16_bf16, 16, 7, as_bfloats),
    "tf32": (mma_tf32_kernel, meaning.mma_m16n8k8_tf32, 8, 10, as_floats),
}


@pytest.mark.parametrize(("kernel", "means", "k", "bits", "pack"), MMAS.values(), ids=MMAS)
def test_mma_is_a_matrix_product(kernel, means, k, bits, pack, rng):
    a = with_mantissa(rng.standard_normal((16, k)), bits)
    b = with_mantissa(rng.standard_normal((k, 8)), bits)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    where_a, where_b = (where_in_a16, where_in_b16) if k == 16 else (where_in_a8, where_in_b8)
    registers = (
        pack(lanes_values(a, where_a, k // 2)),
        pack(lanes_values(b, where_b, k // 4)),
        lanes_values(c, where_in_c, 4),
    )
    if k == 8:  # the 13 bits below tf32 are ignored
        noise = random_bits(rng, 32, 6) & np.uint32(0x1FFF)
        registers = registers[0] | noise[:, :4], registers[1] | noise[:, 4:], registers[2]

    got = run(kernel, *registers, out=np.empty((32, 4), np.float32))

    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    exact = lanes_values(a @ b + c, where_in_c, 4)
    # k + 1 terms are added, and each addition may cut off one bit in 24 of the largest sum.
    bound = (k + 1) * 2**-23 * lanes_values(abs(a) @ abs(b) + abs(c), where_in_c, 4)
    assert (abs(got - exact) <= bound).all()
    assert (abs(means(*registers) - exact) <= bound).all()


@pytest.mark.parametrize(("kernel", "means", "k", "bits", "pack"), MMAS.values(), ids=MMAS)
def test_mma_carries_infinity_and_nan(kernel, means, k, bits, pack):
    a, b = np.ones((32, k // 2)), np.ones((32, k // 4))
    a[0], a[4] = np.inf, np.nan  # rows 0 and 8, 1 and 9
    c = np.zeros((32, 4), np.float32)
    got = run(kernel, pack(a), pack(b), c, out=np.empty((32, 4), np.float32))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, means(pack(a), pack(b), c))
    assert np.isposinf(got[:4]).all()
    assert np.isnan(got[4:8]).all()
    assert (got[8:] == k).all()


@cuda.jit
def ldmatrix_kernel(source, starts, out):
    shared = cuda.shared.array((33, 16), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    for i in range(t, 33 * 16, 32):
        shared[i // 16, i % 16] = source[i // 16, i % 16]
    cuda.syncthreads()
    out[0, t, 0], out[0, t, 1], out[0, t, 2], out[0, t, 3] = ptx.ldmatrix_x4(shared, starts[t])
    r0, r1, r2, r3 = ptx.ldmatrix_x4_trans(shared[1:], starts[t])
    out[1, t, 0], out[1, t, 1], out[1, t, 2], out[1, t, 3] = r0, r1, r2, r3


def test_ldmatrix_gives_fragments_of_rows_and_columns(rng):
    source = rng.integers(0, 2**16, (33, 16), dtype=np.uint16)
    starts = rng.permutation(64)[:32] * 8  # any rows of eight, in any order
    got = run(ldmatrix_kernel, source, starts, out=np.empty((2, 32, 4), np.uint32))
    for transposed in (0, 1):
        flat = source[transposed:].reshape(-1)
        for lane in LANES:
            for m in range(4):
                matrix = np.array([flat[s : s + 8] for s in starts[8 * m : 8 * m + 8]])
                matrix = matrix.T if transposed else matrix
                lo, hi = (int(matrix[lane // 4, lane % 4 * 2 + i]) for i in (0, 1))
                assert got[transposed, lane, m] == lo | hi << 16


@cuda.jit
def ldmatrix_of_two_kernel(source, starts, out):
    shared = cuda.shared.array((32, 8), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    for i in range(8):
        shared[t, i] = source[t, i]
    cuda.syncthreads()
    out[0, t, 0], out[0, t, 1] = ptx.ldmatrix_x2(shared, starts[t])
    out[1, t, 0], out[1, t, 1] = ptx.ldmatrix_x2_trans(shared, starts[t])


def test_ldmatrix_of_two_gives_the_first_of_four(rng):
    source, rows = rng.integers(0, 2**16, (32, 8), dtype=np.uint16), rng.permutation(32)
    got = run(ldmatrix_of_two_kernel, source, 8 * rows, out=np.empty((2, 32, 2), np.uint32))
    np.testing.assert_array_equal(got[0], meaning.ldmatrix_x4(source[rows])[:, :2])
    np.testing.assert_array_equal(got[1], meaning.ldmatrix_x4_trans(source[rows])[:, :2])


@cuda.jit
def ldmatrix_if_kernel(source, wanted, kept, out):
    shared = cuda.shared.array((32, 8), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    for i in range(8):
        shared[t, i] = source[t, i]
    cuda.syncthreads()
    for k in range(2):
        k0, k1, k2, k3 = kept[t, 0], kept[t, 1], kept[t, 2], kept[t, 3]
        r = ptx.ldmatrix_x4_if(shared, 8 * t, wanted[k], k0, k1, k2, k3)
        out[0, k, t, 0], out[0, k, t, 1], out[0, k, t, 2], out[0, k, t, 3] = r
        r = ptx.ldmatrix_x4_trans_if(shared, 8 * t, wanted[k], k0, k1, k2, k3)
        out[1, k, t, 0], out[1, k, t, 1], out[1, k, t, 2], out[1, k, t, 3] = r


def test_ldmatrix_if_loads_where_wanted_and_else_keeps(rng):
    source, kept = rng.integers(0, 2**16, (32, 8), dtype=np.uint16), random_bits(rng, 32, 4)
    wanted = np.array([0, 2**31], np.uint32)
    got = run(ldmatrix_if_kernel, source, wanted, kept, out=np.empty((2, 2, 32, 4), np.uint32))
    np.testing.assert_array_equal(got[:, 0], [kept, kept])
    np.testing.assert_array_equal(got[0, 1], meaning.ldmatrix_x4(source))
    np.testing.assert_array_equal(got[1, 1], meaning.ldmatrix_x4_trans(source))


def test_ldmatrix_if_takes_one_wish_per_warp():
    rows, kept = np.zeros((32, 8), np.uint16), np.zeros((32, 4), np.uint32)
    for load in (meaning.ldmatrix_x4_if, meaning.ldmatrix_x4_trans_if):
        with pytest.raises(ValueError, match="as one"):
            load(rows, np.arange(32), kept)


@cuda.jit
def tile_product_kernel(a, b, d):
    """d = a @ b, (16, 16) @ (16, 8), float16 as uint16, as a kernel does it."""
    a_tile = cuda.shared.array((16, 16), uint16, ALIGNMENT)
    b_tile = cuda.shared.array((16, 16), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    ptx.cp_async(a_tile, 8 * t, a, 8 * t)
    ptx.cp_async(b_tile, 8 * t, b, 8 * t)
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    cuda.syncthreads()
    # Lanes 0-15 give the rows of the left half, lanes 16-31 those of the right.
    a0, a1, a2, a3 = ptx.ldmatrix_x4(a_tile, t % 16 * 16 + t // 16 * 8)
    b0, b1, b2, b3 = ptx.ldmatrix_x4_trans(b_tile, t % 16 * 16 + t // 16 * 8)
    zero = float32(0)
    d0, d1, d2, d3 = ptx.mma_m16n8k16_f16(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
    row, column = t // 4, t % 4 * 2
    d[row, column], d[row, column + 1] = d0, d1
    d[row + 8, column], d[row + 8, column + 1] = d2, d3
    d0, d1, d2, d3 = ptx.mma_m16n8k16_f16(a0, a1, a2, a3, b2, b3, zero, zero, zero, zero)
    d[row, column + 8], d[row, column + 9] = d0, d1
    d[row + 8, column + 8], d[row + 8, column + 9] = d2, d3


def test_copy_load_and_multiply_a_tile(rng):
    a, b = rng.integers(-8, 9, (2, 16, 16)).astype(np.float16)
    out = np.empty((16, 16), np.float32)
    got = run(tile_product_kernel, a.view(np.uint16), b.view(np.uint16), out=out)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


@cuda.jit
def movmatrix_kernel(pairs, out):
    t = cuda.threadIdx.x
    out[t] = ptx.movmatrix_trans(pairs[t])


def test_movmatrix_transposes(rng):
    matrix = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    got = run(movmatrix_kernel, matrix.view(np.uint32).reshape(32), out=np.empty(32, np.uint32))
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)
