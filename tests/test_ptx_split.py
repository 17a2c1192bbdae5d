"""wgmma of split float32: the fragments in registers, and the matrices in shared memory."""

import numpy as np
import pytest
from numba import cuda, float32, uint32

from numbsparse import device, to_device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT


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
