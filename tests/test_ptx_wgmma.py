"""wgmma and the registers of warpgroups against plain NumPy; in the simulator their meanings."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32
from ptx_helpers import load_tiles, on_hopper, simulated_only

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import Operand
from numbsparse.kernels.ptx.tiles import swizzled

pytestmark = on_hopper


def product_kernel(kind, m_tiles, n, k_steps, a, b, columns, inputs, a_bytes):
    multiply = ptx.wgmma(kind, m_tiles, n, k_steps, a, b, columns, inputs, a_bytes)
    COUNT = max(columns, 1) * m_tiles * n // 2
    B_START, start_from, to_tuple = inputs * a_bytes, ptx.zeros(COUNT), ptx.from_local(COUNT)

    @cuda.jit
    def kernel(tiles, mask, out):
        """Tiles of a, then of b, as they are in shared memory; twice the product."""
        shared = cuda.shared.array(0, uint8)
        local = cuda.local.array(COUNT, float32)
        start, t = load_tiles(tiles, shared), cuda.threadIdx.x
        acc = start_from()
        for _ in range(2):
            acc = multiply_once(acc, shared, start, start + B_START, mask)
            ptx.to_local(acc, local)
            acc = to_tuple(local)
        for i in range(COUNT):
            out[t, i] = local[i]

    if columns:

        @cuda.jit(device=True)
        def multiply_once(acc, shared, i, j, mask):
            return multiply(acc, shared, i, shared, j, uint32(mask))
    else:

        @cuda.jit(device=True)
        def multiply_once(acc, shared, i, j, mask):
            return multiply(acc, shared, i, shared, j)

    return kernel


def laid(values, operand, panels_bytes):
    """The bits of an operand (rows, terms) as `operand` says, swaps included."""
    row, k = np.indices(values.shape)
    item = values.itemsize
    byte = swizzled(operand.place(row, k, item), operand.width)
    out = np.zeros(panels_bytes // item, f"u{item}")
    out[byte // item] = values.view(out.dtype)
    return out.view(np.uint8)


def bits_of(values, kind):
    if kind == "tf32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("m_tiles", "n", "depth", "a_width", "a_turned", "b_width", "b_turned", "columns"),
    [
        (1, 32, 32, 64, False, 64, False, 0),
        (2, 32, 32, 64, False, 64, True, 0),
        (1, 16, 16, 32, False, 32, True, 0),
        (1, 16, 16, 32, True, 32, False, 0),
        (2, 64, 64, 128, True, 128, True, 0),
        (1, 128, 128, 128, False, 128, True, 0),
        (1, 128, 128, 128, False, 128, False, 0),
        (2, 32, 64, 64, True, 64, True, 0),
        (1, 32, 32, 64, False, 64, True, 4),
        (2, 16, 32, 64, False, 32, True, 3),
        (1, 128, 128, 128, True, 128, False, 1),
    ],
)
def test_wgmma(kind, m_tiles, n, depth, a_width, a_turned, b_width, b_turned, columns, rng):
    rows = 64 * m_tiles
    # Panels hold `width` bytes of every line.
    a = Operand(a_width, (depth if a_turned else rows) * a_width, a_turned)
    b = Operand(b_width, (depth if b_turned else n) * b_width, b_turned)
    small = rng.integers(-8, 8, (rows, depth)), rng.integers(-8, 8, (max(columns, 1), n, depth))
    x, ws = (s.astype(np.float64) for s in small)
    tiles = [laid(bits_of(x, kind), a, rows * depth * 2)]
    tiles += [laid(bits_of(w, kind), b, n * depth * 2) for w in ws]
    kernel = product_kernel(kind, m_tiles, n, depth // 16, a, b, columns, 1, tiles[0].size)
    mask = 0b101 if columns > 2 else 1
    tiles = np.concatenate(tiles)
    count = max(columns, 1) * m_tiles * n // 2
    out = device.to_device(np.full((128, count), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), mask, out, shared_bytes=tiles.size + 1024)
    got = out.numpy().reshape(4, 32, max(columns, 1), m_tiles, n // 2)

    expected = np.zeros((max(columns, 1), rows, n))
    held = [g for g in range(max(columns, 1)) if mask >> g & 1]
    for g, w in zip(held, ws, strict=False):  # contiguous, those that the mask names
        expected[g] = 2 * x @ w.T
    warp, lane, g, m, i = np.indices(got.shape)
    row = 64 * m + 16 * warp + lane // 4 + i // 2 % 2 * 8
    column = i // 4 * 8 + lane % 4 * 2 + i % 2
    np.testing.assert_array_equal(got, expected[g, row, column])


@pytest.mark.parametrize(("n", "depth"), [(32, 64), (128, 32)])
def test_wgmma_of_float32(n, depth, rng):
    a, b = Operand(128, 64 * 128), Operand(128, n * 128)
    x, w = (rng.integers(-8, 8, (rows, depth)).astype(np.float64) for rows in (64, n))
    tiles = [laid(bits_of(f, "tf32"), of, f.size * 4) for f, of in ((x, a), (w, b))]
    kernel = product_kernel("tf32", 1, n, depth // 8, a, b, 0, 1, tiles[0].size)
    tiles = np.concatenate(tiles)
    out = device.to_device(np.full((128, n // 2), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), 1, out, shared_bytes=tiles.size + 1024)
    t, i = np.indices((128, n // 2))
    row, column = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2
    np.testing.assert_array_equal(out.numpy(), (2 * x @ w.T)[row, column])


def test_wgmma_of_several_inputs(rng):
    """acc[g] += x[e] @ w.T for the bits e * columns + g of the mask, w one after another."""
    rows = depth = n = 64
    a, b = Operand(128, rows * 128), Operand(128, n * 128)
    xs = rng.integers(-8, 8, (2, rows, depth)).astype(np.float64)
    ws = rng.integers(-8, 8, (3, n, depth)).astype(np.float64)
    tiles = [laid(bits_of(x, "f16"), a, rows * depth * 2) for x in xs]
    tiles += [laid(bits_of(w, "f16"), b, n * depth * 2) for w in ws]
    kernel = product_kernel("f16", 1, n, depth // 16, a, b, 2, 2, tiles[0].size)
    tiles = np.concatenate(tiles)
    out = device.to_device(np.full((128, n), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), 0b1110, out, shared_bytes=tiles.size + 1024)
    got = out.numpy().reshape(4, 32, 2, n // 2)
    expected = 2 * np.stack([xs[1] @ ws[1].T, xs[0] @ ws[0].T + xs[1] @ ws[2].T])
    warp, lane, g, i = np.indices(got.shape)
    row = 16 * warp + lane // 4 + i // 2 % 2 * 8
    column = i // 4 * 8 + lane % 4 * 2 + i % 2
    np.testing.assert_array_equal(got, expected[g, row, column])


def registers_kernel(given, taken):
    @cuda.jit(**({} if device.SIMULATED else {"launch_bounds": (512, 1)}))
    def kernel(x, out):
        t = uint32(cuda.threadIdx.x)
        if t < 128:
            ptx.fewer_registers(given)
            out[t] = x[t] + 1
        else:
            ptx.more_registers(taken)
            out[t] = x[t] * 2

    return kernel


def test_registers_handed_over_change_no_value(rng):
    x = rng.standard_normal(512).astype(np.float32)
    out = device.to_device(np.full(512, np.nan, np.float32))
    launch(registers_kernel(32, 160), 1, 512, device.to_device(x), out)
    np.testing.assert_array_equal(out.numpy(), np.r_[x[:128] + 1, x[128:] * 2])


@simulated_only
@pytest.mark.parametrize("count", [16, 100, 264])
def test_registers_are_multiples_of_8(count):
    x = device.to_device(np.zeros(512, np.float32))
    with pytest.raises(ValueError, match=f"24 to 256, a multiple of 8, got {count}"):
        launch(registers_kernel(count, 160), 1, 512, x, x)
