"""Products of parts of a box of pixels, wherever in it they begin, as convolutions take them."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32
from ptx_helpers import laid, load_tiles, on_hopper, rows_of

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import Operand

pytestmark = on_hopper
UNITS, HEIGHT, WIDTH = 2, 19, 10  # pixels of the box


def product_kernel(n, k_steps, a, b, w_start):
    multiply = ptx.wgmma_units("f16", UNITS, n, k_steps, a, b)
    COUNT = UNITS * n // 2
    start_from = ptx.zeros(COUNT)

    @cuda.jit
    def kernel(tiles, first, second, apart, out):
        """Two products of a's from different places and the same b."""
        shared = cuda.shared.array(0, uint8)
        local = cuda.local.array(COUNT, float32)
        start, t = load_tiles(tiles, shared), cuda.threadIdx.x
        at, w = uint32(apart << 16), uint32(w_start >> 4)
        where = uint32(first >> 4 | at), w, uint32(second >> 4 | at), w
        acc = multiply(start_from(), shared, start, where, uint32(UNITS))
        ptx.to_local(acc, local)
        for i in range(COUNT):
            out[t, i] = local[i]

    return kernel


def multiplied(a, b, tiles, w_start, n, k_steps, first, second, apart=0):
    """(units, 64, n)"""
    out = device.to_device(np.full((128, UNITS * n // 2), np.nan, np.float32))
    kernel, shared_bytes = product_kernel(n, k_steps, a, b, w_start), tiles.size + 1024
    launch(
        kernel, 1, 128, device.to_device(tiles), first, second, apart, out,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    return rows_of(out, UNITS, n)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize(("top", "left"), [(0, 0), (1, 2), (2, 1)])
def test_rows_of_a_product_are_pixels(size, top, left, rng):
    box = rng.integers(-8, 8, (HEIGHT, WIDTH, size)).astype(np.float16)
    w = rng.integers(-8, 8, (size, size)).astype(np.float16)
    line = 2 * size
    w_start = -(-box.nbytes // 1024) * 1024
    tiles = np.concatenate([laid(box, line, w_start), laid(w, line, w.nbytes)])
    a, b = Operand(line, 0, group=WIDTH * line), Operand(line, 0, True)
    first = (top * WIDTH + left) * line
    second = first + 8 * WIDTH * line
    got = multiplied(a, b, tiles, w_start, size, size // 16, first, second)
    for u in range(UNITS):
        seen = box[top + 8 * u :, left:][:8, :8].reshape(64, size).astype(float)
        np.testing.assert_array_equal(got[u], seen @ w)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_terms_of_a_sum_are_pixels(size, rng):
    """Rows are features of neighbouring taps: panels of a few features, a pixel or more apart."""
    box = rng.integers(-8, 8, (HEIGHT, WIDTH, size)).astype(np.float16)
    dy = rng.integers(-8, 8, (8, 8, size)).astype(np.float16)
    line = 2 * size
    dy_start = -(-box.nbytes // 1024) * 1024
    tiles = np.concatenate([laid(box, line, dy_start), laid(dy, line, dy.nbytes)])
    a, b = Operand(line, 0, True, WIDTH * line), Operand(line, 0, True)
    taps = [(1, 0), (0, 2)]
    places = [(y * WIDTH + x) * line for y, x in taps]
    apart = 2 if size == 16 else WIDTH  # pixels from tap to tap of a product
    got = multiplied(a, b, tiles, dy_start, size, 4, *places, apart=apart * line >> 4)
    for u, (y, x) in enumerate(taps):
        for k in range(64 // size):
            down, along = divmod(y * WIDTH + x + k * apart, WIDTH)
            if along + 8 > WIDTH:
                continue  # not a box of pixels
            seen = box[down : down + 8, along : along + 8].reshape(64, size).astype(float)
            part = got[u, k * size : (k + 1) * size]
            np.testing.assert_array_equal(part, seen.T @ dy.reshape(64, size))


@cuda.jit
def storing_kernel(given, y_map, x, y, image):
    shared = cuda.shared.array(0, uint8)
    start = ptx.first_multiple(shared, 1024)
    for i in range(cuda.threadIdx.x, given.size, 32):
        shared[start + i] = given[i]
    ptx.fence_tensor_map(y_map)
    ptx.fence_proxy_async()
    ptx.sync_warp()
    if ptx.elect() != 0:
        ptx.tma_store_5d(shared, start, y_map, 16, x, y, 0, image)
        ptx.bulk_commit()
    ptx.bulk_wait_read()


@pytest.mark.parametrize(("x", "y", "image"), [(0, 0, 1), (2, 4, 0), (6, 1, 1), (0, 0, 2)])
def test_a_box_is_stored_where_the_picture_goes_on(x, y, image, rng):
    before = rng.standard_normal((2, 1, 5, 7, 24)).astype(np.float16)
    box = rng.standard_normal((2, 8, 16)).astype(np.float16)
    kept = device.to_device(before)  # the map names its address
    y_map = tensor_map(kept, (1, 1, 2, 8, 16))
    given = device.to_device(laid(box, 32, box.nbytes))
    launch(storing_kernel, 1, 32, given, y_map, x, y, image, shared_bytes=box.nbytes + 1024)
    expected = before.copy()
    if image < 2:
        inside = expected[image, 0, y : y + 2, x : x + 8, 16:]
        inside[...] = box[: inside.shape[0], : inside.shape[1], :8]
    np.testing.assert_array_equal(kept.numpy(), expected)
