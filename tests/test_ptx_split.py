"""wgmma with fragments in registers: split float32, and 16 bits; matrices in shared memory."""

import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32
from ptx_helpers import on_hopper

from numbsparse import device, to_device
from numbsparse.device.launch import launch
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT, Operand
from numbsparse.kernels.ptx.tiles import swizzled


def product_kernel(n, k_steps, exact, units, apart, alone):
    COUNT, REGISTERS = (units, n // 2), (units, 4 * k_steps)
    SIZE = units * (2 if apart and not alone else 1 + exact) * 8 * k_steps * n
    multiply = ptx.wgmma_split(n, k_steps, exact, units, apart, alone)

    @cuda.jit
    def kernel(a, image, out):
        shared = cuda.shared.array(SIZE, float32, ALIGNMENT)
        hi, lo = cuda.local.array(REGISTERS, uint32), cuda.local.array(REGISTERS, uint32)
        acc = cuda.local.array(COUNT, float32)
        t = cuda.threadIdx.x
        for i in range(t, SIZE, 128):
            shared[i] = image[i]
        for u in range(REGISTERS[0]):
            for i in range(REGISTERS[1]):
                hi[u, i], lo[u, i] = ptx.as_uint32(a[u, 0, t, i]), ptx.as_uint32(a[u, 1, t, i])
            for i in range(COUNT[1]):
                acc[u, i] = 1
        ptx.fence_proxy_async()
        cuda.syncthreads()
        if units == 1:
            multiply(acc, hi, lo, shared, 0)
        else:
            multiply(acc, hi, lo, shared, 0, SIZE // 2)
        for u in range(COUNT[0]):
            for i in range(COUNT[1]):
                out[u, t, i] = acc[u, i]

    return kernel


@pytest.mark.parametrize(("exact", "alone"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("n", "k_steps", "units"), [(8, 1, 1), (32, 4, 1), (64, 2, 1), (32, 2, 2)])
def test_wgmma_split(n, k_steps, exact, alone, units, apart, rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    if not device.SIMULATED and device.compute_capability() != (9, 0):
        pytest.skip("takes a GPU of compute capability 9.0")
    k = 8 * k_steps
    a = rng.integers(-8, 9, (units, 2, 64, k)).astype(np.float32)  # hi and lo, exact in tf32
    b = rng.integers(-8, 9, (units, 2, k, n)).astype(np.float32)
    t, i = np.arange(128)[:, None], np.arange(4 * k_steps)
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
    registers = a[:, :, row, i // 4 * 8 + i // 2 % 2 * 4 + t % 4]
    # (unit, hi or lo, 4 terms, 8 columns, column, term)
    image = b.reshape(units, 2, k // 4, 4, n // 8, 8).transpose(0, 1, 2, 4, 5, 3)
    image = image[:, : 1 if alone else 2 if apart else 1 + exact]
    image = image.transpose(0, 3, 1, 2, 4, 5) if apart else image
    out = to_device(np.full((units, 128, n // 2), np.nan, np.float32))
    kernel = product_kernel(n, k_steps, exact, units, apart, alone)
    launch(kernel, 1, 128, to_device(registers), to_device(image.reshape(-1).copy()), out)
    expected = 1 + a[:, 0] @ b[:, 0]
    if exact:
        expected += a[:, 1] @ b[:, 0] + a[:, 0] @ b[:, 1]
    i = np.arange(n // 2)
    row = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    column = t % 4 * 2 + i % 2 + i // 4 * 8
    np.testing.assert_array_equal(out.numpy(), expected[:, row, column])


def rows_kernel(kind, n, k_steps, units, b):
    REGISTERS, COUNT, SIZE = (units, k_steps, 4), units * n // 2, 16 * k_steps * n
    multiply = ptx.wgmma_rows(kind, n, k_steps, units, b)

    @cuda.jit
    def kernel(a, image, out):
        shared = cuda.shared.array(2 * SIZE, uint16, 1024)
        registers = cuda.local.array(REGISTERS, uint32)
        acc = cuda.local.array(COUNT, float32)
        t = cuda.threadIdx.x
        for i in range(t, SIZE, 128):
            shared[SIZE + i] = image[i]
        for u in range(units):
            for k in range(k_steps):
                for i in range(4):
                    registers[u, k, i] = a[t, u, k, i]
        for i in range(COUNT):
            acc[i] = 1 + i
        ptx.fence_proxy_async()
        cuda.syncthreads()
        multiply(acc, registers, shared, SIZE)
        for i in range(COUNT):
            out[t, i] = acc[i]

    return kernel


@on_hopper
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k_steps", "units"), [(32, 2, 2), (64, 4, 1), (64, 4, 2)])
def test_wgmma_rows(n, k_steps, units, dtype, transposed, rng):
    k, kind = 16 * k_steps, "f16" if dtype == "float16" else "bf16"
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((units, 64, k), (n, k)))
    t, i = np.arange(128), np.arange(8)
    row = (t // 32 * 16 + t % 32 // 4)[:, None] + i // 2 % 2 * 8
    column = (t % 4 * 2)[:, None] + i % 2 + i // 4 * 8
    bits = [
        a[:, row, 16 * s + column].astype(as_dtype(dtype)).view(np.uint16) for s in range(k_steps)
    ]
    registers = np.stack(bits, 2).swapaxes(0, 1).copy().view(np.uint32)  # (128, units, k_steps, 4)
    lines = (b.T if transposed else b).astype(as_dtype(dtype)).view(np.uint16)
    line, item = np.indices(lines.shape)
    operand = Operand(2 * lines.shape[1], 0, transposed)
    image = np.empty(lines.size, np.uint16)
    image[swizzled(line * operand.width + 2 * item, operand.width) // 2] = lines
    out = to_device(np.full((128, units * n // 2), np.nan, np.float32))
    kernel = rows_kernel(kind, n, k_steps, units, operand)
    launch(kernel, 1, 128, to_device(registers), to_device(image), out)
    i = np.arange(n // 2)
    row, column = t[:, None] // 32 * 16 + t[:, None] % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + i % 2
    expected = (a @ b.T)[:, row, column + t[:, None] % 4 * 2].swapaxes(0, 1).reshape(128, -1)
    np.testing.assert_array_equal(out.numpy(), expected + 1 + np.arange(units * n // 2))
