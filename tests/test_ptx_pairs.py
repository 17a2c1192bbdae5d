"""`wgmma_pairs`: 64 rows of a product from two tiles, wherever they are."""

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


def product_kernel(k_steps, width, b):
    COUNT, WHERE = UNITS * N // 2, 2 * UNITS
    multiply, read = ptx.wgmma_pairs("f16", UNITS, N, k_steps, width, b), ptx.words(WHERE)
    start_from = ptx.zeros(COUNT)

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
    kernel = product_kernel(depth // 16, 2 * depth, b)
    launch(kernel, 1, 128, *given, number, out, shared_bytes=(TILES + 2) * nbytes + 1024)
    result = rows_of(out, UNITS, N)
    for u, (i, j, k) in enumerate(pairs):
        x = np.vstack([tiles[i], tiles[j]]).astype(float)
        expected = x @ ys[k].T.astype(float) if u < number else np.zeros((64, N))
        np.testing.assert_array_equal(result[u], expected)
