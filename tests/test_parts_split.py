"""What float32 on tensor cores takes beside the products: images of w, and what NaN is made of."""

import numpy as np
import pytest
from numba import cuda
from ptx_helpers import on_hopper

from numbsparse import Layout, to_device
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.images import images_of
from numbsparse.kernels.parts.repair import repair_block, repairing_lines

pytestmark = on_hopper
B = 32


def terms_of(depth, by_eights):
    """(terms / 4, 4): the terms of the sum in the order of an image."""
    group, q = np.indices((depth // 4, 4))
    first = group // 4 * 16
    if by_eights:
        return first + group % 4 // 2 * 8 + 2 * q + group % 2
    return first + 4 * q + group % 4


@pytest.mark.parametrize("by_eights", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("size", "N", "depth"), [(32, 32, 32), (64, 64, 32), (128, 64, 32)])
def test_images_hold_each_value_as_hi_and_lo(size, N, depth, transposed, by_eights, rng):
    values = rng.standard_normal((2, size, size), np.float32)
    rows, features = np.array([1, 0], np.int32), 2 * size - 5  # the first block is over the edge
    strides = (1, size) if transposed else (size, 1)
    images = images_of(to_device(values), strides, to_device(rows), features, N, depth, by_eights)
    images = images.numpy().reshape(2, size // N, size // depth, N // 8, 2, depth // 4, 8, 4)

    w = values.swapaxes(1, 2) if transposed else values
    w = np.where(rows[:, None, None] * size + np.arange(size)[:, None] < features, w, 0)
    parts = w.reshape(2, size // depth, depth, size // N, N).transpose(0, 3, 1, 4, 2)
    columns = np.arange(N).reshape(N // 8, 8)
    expected = parts[:, :, :, columns][..., terms_of(depth, by_eights)]  # (..., 8, 8, depth/4, 4)
    hi, lo = images[..., 0, :, :, :], images[..., 1, :, :, :]
    expected = np.moveaxis(expected, -2, -3)
    hi_of_tensor_cores = (hi.view(np.uint32) & 0xFFFFE000).view(np.float32)
    np.testing.assert_array_equal(hi_of_tensor_cores + lo, expected)
    assert (abs(lo) <= 2.0**-11 * abs(expected)).all()


def test_images_of_hi_alone_hold_the_nearest_tf32(rng):
    values = rng.standard_normal((2, B, B), np.float32)
    values.view(np.uint32)[1, 3, 4] = 0x7FFFFFFF  # a NaN, as GPUs make it: rounded up it were -0
    how = (B, 1), to_device(np.zeros(2, np.int32)), B, B, B, False
    both, alone = (images_of(to_device(values), *how, alone=alone) for alone in (False, True))
    hi = both.numpy().reshape(2, B // 8, 2, -1)[:, :, 0].reshape(-1)
    found, kept = alone.numpy(), (hi.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert np.isnan(found).sum() == 1
    np.testing.assert_array_equal(found, kept)


def repairing_kernel(repair, is_line):
    @cuda.jit
    def of_lines(y, sizes, x, x_strides, features, w, w_strides, indptr, indices, blocks):
        row_stride, column_stride, batch, columns = sizes
        dense = x, x_strides, features, w, w_strides, indptr, indices, blocks, ()
        for i in range(cuda.threadIdx.x, batch * columns, 32):
            out = y, row_stride, column_stride, batch, columns
            repair(out, i // columns, i % columns, B, dense)

    @cuda.jit
    def of_blocks(dvalues, x, dy, sizes, rows, columns, orders):
        for i in range(cuda.threadIdx.x, dvalues.size, 32):
            repair(dvalues, i, B, (x, dy, sizes, rows, columns), orders)

    return of_lines if is_line else of_blocks


def test_outputs_that_are_nan_are_plain_sums_and_others_stay(rng):
    layout, batch = Layout([[1, 0], [1, 1]]), 5
    values = rng.standard_normal((3, B, B), np.float32)
    x = rng.standard_normal((batch, 2 * B - 3), np.float32)
    x[2, 40] = np.inf
    y = np.full((batch, 2 * B), 7, np.float32)
    y[:, 1::3] = np.nan
    out, walk = to_device(y), layout.index.columns
    dense = to_device(x.reshape(-1)), (x.shape[1], 1), x.shape[1], to_device(values.reshape(-1))
    kernel, sizes = repairing_kernel(repairing_lines(), True), (2 * B, 1, batch, 2 * B)
    arrays = [to_device(np.asarray(a, np.int32)) for a in walk]
    launch(kernel, 1, 32, out.reshape(-1), sizes, *dense, (B, 1), *arrays)

    w = np.zeros((2 * B, 2 * B))
    for block, i, j in zip(
        values, layout.index.block_rows, layout.index.block_columns, strict=True
    ):
        w[B * i :, B * j :][:B, :B] = block
    exact = x.astype(float) @ w[: x.shape[1]]
    np.testing.assert_allclose(out.numpy(), np.where(np.isnan(y), exact, 7), 1e-5, 1e-5)


@pytest.mark.parametrize("x_transposed", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_weights_that_are_nan_are_plain_sums(swapped, x_transposed, rng):
    layout, batch = Layout([[1, 0], [1, 1]]), 9
    index, features = layout.index, 2 * B - 3
    x, dy = (rng.standard_normal((batch, features), np.float32) for _ in range(2))
    dvalues = np.full((3, B, B), 7, np.float32)
    dvalues[:, ::2] = np.nan
    out, lines = to_device(dvalues), np.ascontiguousarray(x.T) if x_transposed else x
    sizes = [lines.shape[1], features, features, features, batch]
    first, second = lines, dy
    if swapped:
        first, second, sizes[:2] = dy, lines, [features, lines.shape[1]]
    transposed = (False, x_transposed) if swapped else (x_transposed, False)
    orders, kernel = (swapped, *transposed), repairing_kernel(repair_block, False)
    arrays = [to_device(a.reshape(-1)) for a in (first, second)]
    places = [to_device(np.asarray(a, np.int32)) for a in (index.block_rows, index.block_columns)]
    args = *arrays, tuple(sizes), *places, tuple(map(int, orders))
    launch(kernel, 1, 32, out.reshape(-1), *args)

    exact = np.zeros((2 * B, 2 * B))
    exact[:features, :features] = x.T.astype(float) @ dy
    blocks = exact.reshape(2, B, 2, B).swapaxes(1, 2)[index.block_rows, index.block_columns]
    expected = np.where(np.isnan(dvalues), blocks, 7)
    np.testing.assert_allclose(out.numpy(), expected, 1e-5, 1e-5)
