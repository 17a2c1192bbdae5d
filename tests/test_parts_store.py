"""Accumulators to y in each order: every sum in its place, nothing beyond the edges."""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32
from ptx_helpers import on_hopper

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.store import (
    ANY,
    FEATURES,
    LINES,
    ROWS,
    Sums,
    order_of,
    storer,
)
from numbsparse.kernels.parts.store_boxes import line_storer
from numbsparse.kernels.parts.store_float32 import storer_of_lines, storer_of_pairs
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = on_hopper


def filled(order, batch, features, dtype):
    """y of NaN in that order."""
    y = device.to_device(np.full((features, batch), np.nan, dtype)).T
    if order != FEATURES:
        y = device.to_device(np.full((batch, features), np.nan, dtype))
    assert order_of(y) == order
    return y


def of_y(y):
    return tuple(stride // y.itemsize for stride in y.strides) + y.shape


def storing_kernel(of, order):
    store, COUNT = storer(of, order), of.TILES * of.STRIPS * 4

    @cuda.jit
    def kernel(sums, columns, row, values, sizes):
        own = cuda.local.array(COUNT, float32)
        where = cuda.local.array(2, int32)
        for i in range(COUNT):
            own[i] = sums[cuda.threadIdx.x, i]
        for c in range(2):
            where[c] = columns[c]
        row_stride, column_stride, batch, features = sizes
        store(own, where, row, (values, row_stride, column_stride, batch, features))

    return kernel


@pytest.mark.parametrize("order", [ROWS, FEATURES, ANY])
@pytest.mark.parametrize(("B", "apart"), [(16, 16), (32, 64)])
@pytest.mark.parametrize("columns", [(3, 0), (1, -1)], ids=str)
def test_16_bit_sums(order, B, apart, columns, rng):
    of = Sums("f16", B, 2, 2, apart)
    batch, features = (apart + 24, 4 * B - 8) if order != ANY else (apart + 21, 4 * B - 7)
    sums = rng.standard_normal((32, of.TILES * of.STRIPS * 4), np.float32)
    y = filled(order, batch, features, np.float16)
    args = device.to_device(sums), device.to_device(np.array(columns, np.int32)), 8
    launch(storing_kernel(of, order), 1, 32, *args, y.span.view("uint16"), of_y(y))

    expected = np.full((batch, features), np.nan, np.float16)
    each = sums.reshape(8, 4, 2, 2, B // 8, 2, 2)  # g, q, column, tile, strip, half, one of two
    for g, q, c, tile, strip, half, e in np.ndindex(each.shape):
        n, k = 8 + apart * tile + 8 * half + g, columns[c] * B + 8 * strip + 2 * q + e
        if columns[c] >= 0 and n < batch and k < features:
            expected[n, k] = each[g, q, c, tile, strip, half, e]
    np.testing.assert_array_equal(y.numpy(), expected)


def lines_kernel(of, threads):
    """The four warps of a warpgroup by way of shared memory, or one straight from its sums."""
    COUNT, warps = of.TILES * of.STRIPS * 4, threads // 32
    store_one, store_four = storer(of, LINES), line_storer(of, of.PANEL_BYTES)

    @cuda.jit
    def kernel(sums, columns, row, values, sizes):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        own, t = cuda.local.array(COUNT, float32), cuda.threadIdx.x
        where = cuda.local.array(2, int32)
        for i in range(COUNT):
            own[i] = sums[t, i]
        for c in range(2):
            where[c] = columns[c]
        row_stride, column_stride, batch, features = sizes
        y = values, row_stride, column_stride, batch, features
        if warps == 1:
            store_one(own, where, row, y)
        else:
            warp = uint32(t // 32)
            store_four(own, where, row + 16 * warp, shared, warp * of.PANEL_BYTES, y)

    return kernel


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("batch", [67, 70, 77, 140])
@pytest.mark.parametrize("columns", [(3, 0), (1, -1)], ids=str)
def test_16_bit_sums_to_lines_that_begin_anywhere(threads, batch, columns, rng):
    B, row, tiles, apart = 16, 8, *((4, 16) if threads == 32 else (2, 64))
    of, features = Sums("f16", B, 2, tiles, apart), 4 * B - 7
    sums = rng.standard_normal((threads, of.TILES * of.STRIPS * 4), np.float32)
    y = device.to_device(np.full((features, batch), np.nan, np.float16)).T
    assert order_of(y, lines=True) == LINES
    args = device.to_device(sums), device.to_device(np.array(columns, np.int32)), row
    more = y.span.view("uint16"), of_y(y)
    launch(lines_kernel(of, threads), 1, threads, *args, *more, shared_bytes=4 * of.PANEL_BYTES)

    expected = np.full((batch, features), np.nan, np.float16)
    each = sums.reshape(-1, 8, 4, 2, tiles, B // 8, 2, 2)  # warp, g, q, column, tile, strip, ...
    for warp, g, q, c, tile, strip, half, e in np.ndindex(each.shape):
        n = row + 16 * warp + apart * tile + 8 * half + g
        k = columns[c] * B + 8 * strip + 2 * q + e
        if columns[c] >= 0 and n < batch and k < features:
            expected[n, k] = each[warp, g, q, c, tile, strip, half, e]
    np.testing.assert_array_equal(y.numpy(), expected)


@cuda.jit(device=True)
def next_to(tile, half):
    return 2 * (cuda.threadIdx.x // 4) + half


@cuda.jit(device=True)
def four_next_to(tile, half):
    return 4 * (cuda.threadIdx.x // 4) + 2 * tile + half


@cuda.jit(device=True)
def below(tile, half):
    return 8 * half + cuda.threadIdx.x // 4


def storing_float32(order, neighbours):
    of = Sums("highest", 32, 1, 1, 64)
    store = storer_of_pairs(of, order, next_to if neighbours else below, neighbours)

    @cuda.jit
    def kernel(sums, row, column, values, sizes):
        own, columns = cuda.local.array(16, float32), cuda.local.array(1, int32)
        columns[0] = column
        for k in range(16):
            own[k] = sums[cuda.threadIdx.x, k]
        row_stride, column_stride, batch, features = sizes
        store(own, columns, row, (values, row_stride, column_stride, batch, features))

    return kernel


@pytest.mark.parametrize("neighbours", [False, True], ids=["", "neighbours"])
@pytest.mark.parametrize("order", [ROWS, FEATURES, ANY])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
def test_float32_sums(order, neighbours, cut, rng):
    batch, features = (20 if cut else 40) + (order == ANY), (56 if cut else 80) + (order == ANY)
    sums = rng.standard_normal((8, 4, 4, 2, 2), np.float32)  # g, q, n, half, e
    y = filled(order, batch, features, np.float32)
    args = device.to_device(sums.reshape(32, 16)), 8, 1
    launch(storing_float32(order, neighbours), 1, 32, *args, y.span, of_y(y))

    expected = np.full((batch, features), np.nan, np.float32)
    for g, q, n, u, e in np.ndindex(sums.shape):
        row, column = 8 + (2 * g + u if neighbours else 8 * u + g), 32 + 8 * n + 2 * q + e
        if row < batch and column < features:
            expected[row, column] = sums[g, q, n, u, e]
    np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
def test_float32_sums_to_lines_that_begin_anywhere(tiles, cut, rng):
    of, batch, features = Sums("high", 32, 2, tiles, 64), (21 if cut else 41), 57 if cut else 97
    store, COUNT = storer_of_lines(of, next_to if tiles == 1 else four_next_to), 32 * tiles

    @cuda.jit
    def kernel(sums, row, values, sizes):
        own, columns = cuda.local.array(COUNT, float32), cuda.local.array(2, int32)
        columns[0], columns[1] = 1, 0
        for k in range(COUNT):
            own[k] = sums[cuda.threadIdx.x, k]
        row_stride, column_stride, batch, features = sizes
        store(own, columns, row, (values, row_stride, column_stride, batch, features))

    sums = rng.standard_normal((8, 4, 2, tiles, 4, 2, 2), np.float32)  # g, q, c, m, n, half, e
    y = device.to_device(np.full((features, batch), np.nan, np.float32)).T
    launch(kernel, 1, 32, device.to_device(sums.reshape(32, COUNT)), 8, y.span, of_y(y))
    expected = np.full((batch, features), np.nan, np.float32)
    for g, q, c, m, n, u, e in np.ndindex(sums.shape):
        row, column = 8 + 2 * tiles * g + 2 * m + u, 32 * (1 - c) + 8 * n + 2 * q + e
        if row < batch and column < features:
            expected[row, column] = sums[g, q, c, m, n, u, e]
    np.testing.assert_array_equal(y.numpy(), expected)
