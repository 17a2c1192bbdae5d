"""Products of several tiles: rows from two of them, or columns from several, wherever they are."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32
from ptx_helpers import laid, load_tiles, on_hopper, rows_of

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import Operand

pytestmark = on_hopper
N = ROWS = 32  # columns of a product, and rows of a tile
UNITS, TILES = 3, 4


def product_kernel(multiply, units, n):
    COUNT = units * n // 2
    start_from, read = ptx.zeros(COUNT), ptx.words(2 * units)

    @cuda.jit
    def kernel(tiles, places, number, out):
        shared = cuda.shared.array(0, uint8)
        local = cuda.local.array(COUNT, float32)
        start, t = load_tiles(tiles, shared), cuda.threadIdx.x
        acc = multiply(start_from(), shared, start, read(places, 0), uint32(number))
        ptx.to_local(acc, local)
        for i in range(COUNT):
            out[t, i] = local[i]

    return kernel


@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("depth", [32, 64])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_rows_come_from_two_tiles(rng, depth, b_turned, number):
    tiles = rng.integers(-8, 8, (TILES, ROWS, depth)).astype(np.float16)  # rows along the sum
    ys = rng.integers(-8, 8, (2, N, depth)).astype(np.float16)
    nbytes = 2 * ROWS * depth
    matrices = (*tiles, *(np.ascontiguousarray(y.T) if b_turned else y for y in ys))
    given = [laid(matrix, 2 * matrix.shape[1], nbytes) for matrix in matrices]
    pairs = [(0, 3, 0), (2, 3, 1), (1, 1, 0)]  # two tiles, and y
    step = nbytes >> 4
    places = [
        word for i, j, k in pairs for word in (i * step | (j - i) * step << 16, (TILES + k) * step)
    ]
    b = Operand(2 * (N if b_turned else depth), 0, b_turned)
    out = device.to_device(np.full((128, UNITS * N // 2), np.nan, np.float32))
    given = device.to_device(np.concatenate(given)), device.to_device(np.array(places, np.int32))
    multiply = ptx.wgmma_pairs("f16", UNITS, N, depth // 16, 2 * depth, b)
    kernel = product_kernel(multiply, UNITS, N)
    launch(kernel, 1, 128, *given, number, out, shared_bytes=(TILES + 2) * nbytes + 1024)
    result = rows_of(out, UNITS, N)
    for u, (i, j, k) in enumerate(pairs):
        x = np.vstack([tiles[i], tiles[j]]).astype(float)
        expected = x @ ys[k].T.astype(float) if u < number else np.zeros((64, N))
        np.testing.assert_array_equal(result[u], expected)


@pytest.mark.parametrize("depth", [32, 64])
@pytest.mark.parametrize(("units", "n"), [(3, 64), (2, 128)])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_products_side_by_side_are_one(rng, depth, units, n, number):
    """Where the first one is, of so many times the columns; the others' places are not read."""
    number = min(number, units)
    x = rng.integers(-8, 8, (depth, 64)).astype(np.float16)
    panels = rng.integers(-8, 8, (units * n // 64, depth, 64)).astype(np.float16)
    given = np.concatenate([laid(panel, 128, panel.nbytes) for panel in (x, *panels)])
    step = x.nbytes >> 4
    places = np.array([0, step | step << 16] + [0x3FFF] * (2 * units - 2), np.int32)
    operand = Operand(128, 0, True)
    multiply = ptx.wgmma_units("f16", units, n, depth // 16, operand, operand, True)
    out = device.to_device(np.full((128, units * n // 2), np.nan, np.float32))
    kernel, there = (
        product_kernel(multiply, units, n),
        (device.to_device(given), device.to_device(places)),
    )
    launch(kernel, 1, 128, *there, number, out, shared_bytes=given.size + 1024)
    got = rows_of(out, units, n)
    expected = np.einsum("ki,pkj->ipj", x.astype(float), panels).reshape(64, units, n)
    expected[:, number:] = 0
    np.testing.assert_array_equal(got, expected.swapaxes(0, 1))
