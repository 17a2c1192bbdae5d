"""wgmma of split float32: the fragments in registers, and the matrices in shared memory."""

import numpy as np
import pytest
from numba import cuda, float32, uint32

from numbsparse import device, to_device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT


def product_kernel(n, k_steps, exact):
    COUNT, REGISTERS, SIZE = n // 2, 4 * k_steps, (1 + exact) * 8 * k_steps * n
    multiply = ptx.wgmma_split(n, k_steps, exact)

    @cuda.jit
    def kernel(a, image, out):
        shared = cuda.shared.array(SIZE, float32, ALIGNMENT)
        hi, lo = cuda.local.array(REGISTERS, uint32), cuda.local.array(REGISTERS, uint32)
        acc = cuda.local.array(COUNT, float32)
        t = cuda.threadIdx.x
        for i in range(t, SIZE, 128):
            shared[i] = image[i]
        for i in range(REGISTERS):
            hi[i], lo[i] = ptx.as_uint32(a[0, t, i]), ptx.as_uint32(a[1, t, i])
        for i in range(COUNT):
            acc[i] = 1
        ptx.fence_proxy_async()
        cuda.syncthreads()
        multiply(acc, hi, lo, shared, 0)
        for i in range(COUNT):
            out[t, i] = acc[i]

    return kernel


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("n", "k_steps"), [(8, 1), (32, 4), (64, 2)])
def test_wgmma_split(n, k_steps, exact, rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    if not device.SIMULATED and device.compute_capability() != (9, 0):
        pytest.skip("takes a GPU of compute capability 9.0")
    k = 8 * k_steps
    a = rng.integers(-8, 9, (2, 64, k)).astype(np.float32)  # hi and lo, exact in tf32
    b = rng.integers(-8, 9, (2, k, n)).astype(np.float32)
    t, i = np.arange(128)[:, None], np.arange(4 * k_steps)
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
    registers = a[:, row, i // 4 * 8 + i // 2 % 2 * 4 + t % 4]
    # (hi or lo, 4 terms, 8 columns, column, term)
    image = b.reshape(2, k // 4, 4, n // 8, 8).transpose(0, 1, 3, 4, 2)[: 1 + exact]
    out = to_device(np.full((128, n // 2), np.nan, np.float32))
    kernel = product_kernel(n, k_steps, exact)
    launch(kernel, 1, 128, to_device(registers), to_device(image.reshape(-1).copy()), out)
    expected = 1 + a[0] @ b[0] + (a[1] @ b[0] + a[0] @ b[1] if exact else 0)
    i = np.arange(n // 2)
    row = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    np.testing.assert_array_equal(out.numpy(), expected[row, t % 4 * 2 + i % 2 + i // 4 * 8])
