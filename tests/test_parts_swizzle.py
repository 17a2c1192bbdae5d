"""Lanes read tiles of swizzled lines as the registers of an mma, and words; float32 as tf32."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32
from ptx_helpers import laid, on_hopper, run

from numbsparse import device, to_device
from numbsparse.device.launch import launch
from numbsparse.kernels.parts import split, swizzle, words
from numbsparse.kernels.ptx import ALIGNMENT, as_float32, as_uint32, first_multiple

pytestmark = on_hopper
ROWS, GROUPS = 64, 2


def reading_kernel(item, width, transposed, nbytes):
    """Of two pieces the registers of each 16 rows, and the rows of a lane."""
    begin, find, load, row_of = swizzle.rows_of(item, width, transposed)
    X, SIZE = (2, 4), nbytes + swizzle.PERIOD

    @cuda.jit
    def kernel(tiles, place, out):
        shared = cuda.shared.array(SIZE, uint8, ALIGNMENT)
        base, t = first_multiple(shared, swizzle.PERIOD), cuda.threadIdx.x
        for i in range(t, nbytes, 32):
            shared[base + i] = tiles[i]
        cuda.syncthreads()
        x = cuda.local.array(X, uint32)
        for piece in range(1 if item == 2 else 2):
            both = uint32(place[0] if item == 2 else place[0] >> 16 * piece & 0xFFFF)
            at = find(begin(uint32(base), x), both)  # boxes alone look where rows begin
            for m in range(ROWS // 16):
                load(shared, at, m, x)
                for i in range(4):
                    out[t, piece, m, i] = x[m % 2, i]
                    out[t, 2, m, i] = row_of(m, i % 2)

    return kernel


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(("item", "width"), [(2, 32), (2, 64), (4, 32)])
@pytest.mark.parametrize("pieces", [(0, 3), (5, 2)])
def test_pieces_of_rows_are_the_first_operand_of_an_mma(item, width, transposed, pieces, rng):
    dtype = {2: np.uint16, 4: np.uint32}[item]
    x = rng.integers(0, 2 ** (8 * item), (GROUPS, ROWS, width), dtype=dtype)
    box = 128 // item if transposed else ROWS  # rows that come together
    boxes = x.reshape(GROUPS, ROWS // box, box, width)
    lines = boxes.swapaxes(2, 3) if transposed else boxes
    tiles = laid(np.ascontiguousarray(lines), item * lines.shape[-1], x.nbytes)
    group, within = np.divmod(np.array(pieces) * 8, width)
    places = group * width * ROWS * item + within * item
    place = np.array([places[0] | places[1] << 16], np.uint32)
    kernel = reading_kernel(item, width, transposed, x.nbytes)
    got = run(kernel, tiles, place, out=np.zeros((32, 3, ROWS // 16, 4), np.uint32))

    lane, m, i = np.ogrid[:32, : ROWS // 16, :4]
    rows = got[:, 2]
    if item == 2 or not transposed:
        np.testing.assert_array_equal(rows, lane // 4 + 16 * m + 8 * (i % 2))
    assert np.unique(rows[::4, :, :2]).size == ROWS  # each of them once
    for piece in range(2):
        features = x[group[piece], :, within[piece] : within[piece] + 8]
        if item == 2:  # two neighbours in a register
            expected = features.view(np.uint32)[rows, lane % 4 + 0 * i]
            both = slice(2 * piece, 2 * piece + 2)
            np.testing.assert_array_equal(got[:, 0, :, both], expected[..., both])
        else:
            expected = features[rows, lane % 4 + 4 * (i // 2)]
            np.testing.assert_array_equal(got[:, piece], expected)


@pytest.mark.skipif(not device.SIMULATED, reason="calls device functions from Python")
@pytest.mark.parametrize("width", [32, 64])
def test_lines_of_a_fragment_meet_in_no_bank(width):
    """Eight bytes a lane: half a warp is served at once, which is g = 0 to 3, or 4 to 7."""
    g, q = np.mgrid[:8, :4]
    for half in range(2):
        line = np.array([[swizzle.feature_of.py_func(i, half) for i in row] for row in g])
        byte = swizzle.swizzled(line * width + q * 8, width)
        for lanes in (slice(0, 4), slice(4, 8)):
            banks = byte[lanes, :, None] // 4 % 32 + np.arange(2)
            assert np.unique(banks).size == 32
    every = [swizzle.feature_of.py_func(i % 8, i // 8) for i in range(16)]
    assert sorted(every) == list(range(16))
    assert sorted(swizzle.feature_of_eight.py_func(i) for i in range(8)) == list(range(8))


def copying_kernel(count):
    own = words.words_of_lane(count)

    @cuda.jit
    def kernel(x, lanes, out):
        values = own.load(x, 32)
        for w in range(count):
            lanes[cuda.threadIdx.x, w] = values[w]
        own.store(out, 64, values)

    return kernel


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_warp_copies_words_side_by_side(count, rng):
    x = rng.integers(0, 2**32, 32 + 32 * count, dtype=np.uint32)
    lanes = to_device(np.zeros((32, count), np.uint32))
    out = to_device(np.zeros(64 + 32 * count, np.uint32))
    launch(copying_kernel(count), 1, 32, to_device(x), lanes, out)
    np.testing.assert_array_equal(out.numpy()[64:], x[32:])
    assert not out.numpy()[:64].any()
    run = min(count, 4)
    expected = x[32:].reshape(count // run, 32, run).swapaxes(0, 1).reshape(32, count)
    np.testing.assert_array_equal(lanes.numpy(), expected)


def splitting_kernel(exact):
    cut = split.splitting(exact)

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[0, t], out[1, t] = cut(x[t])

    return kernel


def test_hi_and_lo_are_the_value(rng):
    x = (rng.standard_normal(32) * 10.0 ** rng.integers(-20, 20, 32)).astype(np.float32)
    (hi, lo), (high, nothing) = (
        run(splitting_kernel(exact), x, out=np.zeros((2, 32), np.uint32)) for exact in (True, False)
    )
    tf32 = np.uint32(0xFFFFE000)
    hi, high = (hi & tf32).view(np.float32), (high & tf32).view(np.float32)
    np.testing.assert_array_equal(hi + lo.view(np.float32), x)  # lo is what hi leaves, exactly
    np.testing.assert_allclose(hi, x, rtol=2.0**-11)
    np.testing.assert_allclose((lo & tf32).view(np.float32), x - hi, rtol=2.0**-10)
    np.testing.assert_array_equal(hi, high)
    assert not nothing.any()


@cuda.jit
def product_kernel(a, b, out):
    lane = cuda.threadIdx.x
    g, q = lane // 4, lane % 4
    c = cuda.local.array(4, float32)
    for i in range(4):
        c[i] = 1
    split.add_product(
        as_uint32(a[g, q]), as_uint32(a[g + 8, q]), as_uint32(a[g, q + 4]),
        as_uint32(a[g + 8, q + 4]), as_uint32(b[q, g]), as_uint32(b[q + 4, g]), c,
    )  # fmt: skip
    for i in range(4):
        out[g + i // 2 * 8, 2 * q + i % 2] = as_float32(as_uint32(c[i]))


def test_a_product_is_added(rng):
    a, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    np.testing.assert_array_equal(
        run(product_kernel, a, b, out=np.zeros((16, 8), np.float32)), 1 + a @ b
    )
