"""PTX instructions against plain NumPy: on a GPU the instruction, in the simulator its meaning.

The matrix instructions are in test_ptx_mma.py.
"""

import numpy as np
from numba import cuda, float32, uint16, uint32
from ptx_helpers import needs_ampere, on_hopper, random_bits, run

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = needs_ampere
LANES = range(32)


@cuda.jit
def copy_kernel(source, out):
    """Two groups in flight, the first one used before the second one is there."""
    stages = cuda.shared.array((2, 32 * 4), float32, ALIGNMENT)
    t = cuda.threadIdx.x
    for stage in range(2):
        ptx.cp_async(stages[stage], 4 * t, source, 4 * (32 * stage + t))
        ptx.cp_async_commit()
    ptx.cp_async_wait(1)
    cuda.syncthreads()
    for i in range(t, 128, 32):
        out[0, i] = stages[0, i]
    ptx.cp_async_wait(0)
    cuda.syncthreads()
    for i in range(t, 128, 32):
        out[1, i] = stages[1, i]


def test_cp_async_copies_group_after_group(rng):
    source = rng.standard_normal((16, 16)).astype(np.float32)
    got = run(copy_kernel, source, out=np.empty((2, 128), np.float32))
    np.testing.assert_array_equal(got, source.reshape(2, 128))


@cuda.jit
def zero_fill_kernel(source, out):
    shared = cuda.shared.array(32 * 8, uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    for i in range(8):
        shared[8 * t + i] = uint16(7)
    ptx.cp_async_zero_fill(shared, 8 * t, source, 8 * t, t % 17)
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    for i in range(8):
        out[t, i] = shared[8 * t + i]


@cuda.jit
def word_kernel(source, out):
    shared = cuda.shared.array(32, uint32, ALIGNMENT)
    t = cuda.threadIdx.x
    ptx.cp_async_word(shared, t, source, 31 - t, t % 3 * 2)
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    out[t] = shared[t]


def test_cp_async_word_copies_a_word_or_its_first_half_or_writes_zeros(rng):
    source = rng.integers(1, 2**32, 32, dtype=np.uint32)
    got = run(word_kernel, source, out=np.empty(32, np.uint32))
    kept = np.array([0, 0xFFFF, 0xFFFFFFFF], np.uint32)[np.arange(32) % 3]
    np.testing.assert_array_equal(got, source[::-1] & kept)


def test_cp_async_zero_fill_copies_the_first_bytes(rng):
    # Lanes 17 and on begin anew with 0 bytes.
    source = rng.integers(1, 256, (32, 16), dtype=np.uint8)
    got = run(zero_fill_kernel, source.view(np.uint16), out=np.empty((32, 8), np.uint16))
    count = np.arange(32)[:, None] % 17
    np.testing.assert_array_equal(got.view(np.uint8), np.where(np.arange(16) < count, source, 0))


@cuda.jit
def wide_kernel(x, h, y, out):
    """(out[0], out[1]) = (x reversed in fours, h), by way of shared memory."""
    shared = cuda.shared.array(128, float32, ALIGNMENT)
    t = cuda.threadIdx.x
    a, b, c, d = ptx.load_4xf32(x, 4 * t)
    ptx.store_4xf32(shared, 4 * t, a, b, c, d)
    cuda.syncthreads()
    other = 31 - t
    a, b, c, d = ptx.load_4xf32(shared, 4 * other)
    ptx.store_4xf32(y, 4 * t, a, b, c, d)
    i, j, k, m = ptx.load_4xu32(h, 8 * t)
    ptx.store_4xu32(out, 8 * t, m, k, j, i)


def test_wide_loads_and_stores(rng):
    x = rng.standard_normal((8, 16)).astype(np.float32)
    h = random_bits(rng, 32, 4)
    y = device.to_device(np.full((4, 32), np.nan, np.float32))
    out = device.to_device(np.full((32, 8), 0xFFFF, np.uint16))
    launch(wide_kernel, 1, 32, device.to_device(x), device.to_device(h.view(np.uint16)), y, out)
    np.testing.assert_array_equal(y.numpy().reshape(32, 4), x.reshape(32, 4)[::-1])
    np.testing.assert_array_equal(out.numpy().view(np.uint32), h[:, ::-1])


@cuda.jit
def narrow_kernel(source, out):
    """Pairs by way of shared memory, from each lane to the one before it."""
    shared = cuda.shared.array(64, uint32, ALIGNMENT)
    t = cuda.threadIdx.x
    a, b = ptx.load_2xu32(source, 2 * t)
    ptx.store_2xu32(shared, 2 * t, b, a)
    ptx.sync_warp()
    a, b = ptx.load_2xu32(shared, (2 * t + 2) % 64)
    ptx.store_2xu32(out, 2 * t, a, b)


def test_loads_and_stores_of_8_bytes(rng):
    source = random_bits(rng, 32, 2)
    got = run(narrow_kernel, source, out=np.zeros((32, 2), np.uint32))
    np.testing.assert_array_equal(got, np.roll(source, -1, 0)[:, ::-1])


@cuda.jit
def single_kernel(source, out):
    """Words of an array of bytes, from each lane to its neighbour by way of shared memory."""
    shared = cuda.shared.array(32, uint32, ALIGNMENT)
    t = cuda.threadIdx.x
    (shared[t],) = ptx.load_1xu32(source, 4 * t)
    ptx.sync_warp()
    (out[t],) = ptx.load_1xu32(shared, t ^ 1)


def test_loads_of_4_bytes(rng):
    source = random_bits(rng, 32, 1)
    got = run(single_kernel, source.view(np.uint8).reshape(-1), out=np.zeros(32, np.uint32))
    np.testing.assert_array_equal(got, source.reshape(16, 2)[:, ::-1].reshape(-1))


@cuda.jit
def halves_kernel(source, out):
    """Two warps pass words to each other, and two others, by a barrier of 64 threads each."""
    shared = cuda.shared.array(128, uint32, ALIGNMENT)
    t = cuda.threadIdx.x
    shared[t] = source[t]
    ptx.sync_some(t // 64 + 1, 64)
    out[t] = shared[t ^ 32]


def test_some_warps_wait_for_each_other(rng):
    source = random_bits(rng, 128, 1).reshape(-1)
    got = run(halves_kernel, source, out=np.zeros(128, np.uint32), threads=128)
    np.testing.assert_array_equal(got, source[np.arange(128) ^ 32])


@cuda.jit
def convert_kernel(x, out):
    t = cuda.threadIdx.x
    for row in range(x.shape[0]):
        out[row, 0, t] = ptx.cvt_rna_tf32(x[row, t])
        out[row, 1, t] = ptx.pack_half2(x[row, t], x[row, 31 - t])
        out[row, 2, t] = ptx.pack_bfloat2(x[row, t], x[row, 31 - t])
        out[row, 3, t] = ptx.as_uint32(x[row, t])
        out[row, 4, t] = ptx.as_uint32(ptx.as_float32(out[row, 3, t]))


@cuda.jit
def convert_to_even_kernel(x, out):
    t = cuda.threadIdx.x
    for row in range(x.shape[0]):
        out[row, t] = ptx.cvt_rn_tf32(x[row, t])


def nearest(x: float, bits: int, away: bool) -> float:
    """x rounded to so many bits of mantissa; ties away from zero or to even."""
    if not np.isfinite(x) or x == 0:
        return x
    unit = 2.0 ** (max(int(np.floor(np.log2(abs(x)))), -126) - bits)
    scaled = abs(x) / unit
    return float(np.copysign((np.floor(scaled + 0.5) if away else np.round(scaled)) * unit, x))


def awkward_floats(rng) -> np.ndarray:
    """(4, 32) float32: ordinary, halfway between two neighbours, tiny and huge, special."""
    x = rng.standard_normal((4, 32)).astype(np.float32)
    bits = x.view(np.uint32)
    bits[1, :11] = bits[1, :11] >> 13 << 13 | 0x1000  # halfway in float16 and tf32
    bits[1, 11:] = bits[1, 11:] >> 16 << 16 | 0x8000  # halfway in bfloat16
    x[2] *= np.float32(10.0) ** rng.integers(-12, 30, 32).astype(np.float32)
    largest = np.finfo(np.float32).max
    x[3, :8] = 0.0, -0.0, np.inf, -np.inf, largest, 65504, 65520, 65519
    x[3, 8:12] = 2.0**-24, 2.0**-25, 3 * 2.0**-25, -(2.0**-15)
    return x


def test_conversions_round_to_the_nearest(rng):
    x = awkward_floats(rng)
    got = run(convert_kernel, x, out=np.empty((4, 5, 32), np.uint32))
    tf32, half, bfloat, bits, again = got.transpose(1, 0, 2)
    with np.errstate(over="ignore"):
        expected = np.vectorize(lambda v: nearest(v, 10, away=True))(x).astype(np.float32)
        values = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        bfloats = np.vectorize(lambda v: nearest(v, 7, away=False))(x).astype(np.float32)
    bfloats = bfloats.view(np.uint32) >> 16
    np.testing.assert_array_equal(tf32, expected.view(np.uint32))
    np.testing.assert_array_equal(half, values | values[:, ::-1] << 16)
    np.testing.assert_array_equal(bfloat, bfloats | bfloats[:, ::-1] << 16)
    np.testing.assert_array_equal(bits, x.view(np.uint32))
    np.testing.assert_array_equal(again, x.view(np.uint32))


def test_conversions_keep_nan():
    got = run(convert_kernel, np.full((1, 32), np.nan, np.float32), out=np.empty((1, 5, 32), "u4"))
    assert np.isnan(got[0, 0].view(np.float32)).all()
    assert (got[0, 1] == 0x7FFF7FFF).all()
    assert (got[0, 2] == 0x7FFF7FFF).all()


@on_hopper
def test_tf32_of_ties_is_even(rng):
    x = awkward_floats(rng)
    x[0, :4] = np.nan, -np.nan, 0, 0
    x.view(np.uint32)[0, 2:4] = 0x7FFFFFFF, 0x7F800001
    got = run(convert_to_even_kernel, x, out=np.empty((4, 32), np.uint32))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.vectorize(lambda v: nearest(v, 10, away=False))(x).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.float32), expected)
    assert not (got & 0x1FFF).any()


@cuda.jit
def unpack_kernel(words, out):
    t = cuda.threadIdx.x
    out[0, t, 0], out[0, t, 1] = ptx.unpack_half2(words[t])
    out[1, t, 0], out[1, t, 1] = ptx.unpack_bfloat2(words[t])


def test_pairs_are_unpacked(rng):
    words = random_bits(rng, 32) & np.uint32(0xBFFFBFFF)  # neither infinities nor NaNs
    got = run(unpack_kernel, words, out=np.empty((2, 32, 2), np.float32))
    values = words.view(np.float16).reshape(32, 2)
    bfloats = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(32, 2)
    np.testing.assert_array_equal(got[0], values.astype(np.float32))
    np.testing.assert_array_equal(got[1], bfloats)


@cuda.jit
def approximate_kernel(x, out):
    t = cuda.threadIdx.x
    out[0, t], out[1, t] = ptx.ex2(x[t]), ptx.rcp(x[t])


def test_powers_and_reciprocals_are_near(rng):
    x = (rng.standard_normal(32) * 30).astype(np.float32)
    x[:3] = np.inf, -np.inf, 200
    got = run(approximate_kernel, x, out=np.empty((2, 32), np.float32))
    with np.errstate(over="ignore"):
        expected = np.exp2(x.astype(np.float64)), 1 / x.astype(np.float64)
        np.testing.assert_allclose(got, np.float32(expected), rtol=5e-7)


@cuda.jit
def shuffle_kernel(x, source, out):
    t = cuda.threadIdx.x
    out[0, t] = ptx.shfl_xor(x[t], 5)
    out[1, t] = ptx.shfl_idx(x[t], source[t])
    out[2, t] = ptx.as_uint32(ptx.shfl_xor(ptx.as_float32(x[t]), uint32(16)))
    out[3, t] = ptx.redux_or(uint32(x[t] & 1 << t))


def test_shuffles_take_other_lanes_registers(rng):
    x = random_bits(rng, 32) & np.uint32(0x7F7FFFFF)  # no NaN among the floats
    source = rng.integers(0, 32, 32)
    got = run(shuffle_kernel, x, source, out=np.empty((4, 32), np.uint32))
    np.testing.assert_array_equal(got[0], [x[lane ^ 5] for lane in LANES])
    np.testing.assert_array_equal(got[1], [x[source[lane]] for lane in LANES])
    np.testing.assert_array_equal(got[2], [x[lane ^ 16] for lane in LANES])
    np.testing.assert_array_equal(got[3], sum(int(x[lane]) & 1 << lane for lane in LANES))


@cuda.jit
def two_warps_kernel(x, out):
    t = cuda.threadIdx.x
    value = x[t]
    if t >= 32:
        value = ptx.shfl_xor(value, 1)
    out[0, t] = ptx.shfl_xor(value, 1)


def test_warps_go_their_own_ways(rng):
    x = random_bits(rng, 64)
    got = run(two_warps_kernel, x, out=np.empty((1, 64), np.uint32), threads=64)[0]
    np.testing.assert_array_equal(got[:32], x[np.arange(32) ^ 1])
    np.testing.assert_array_equal(got[32:], x[32:])
