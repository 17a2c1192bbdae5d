"""What the tests of PTX instructions share: one block of one kernel, run."""

import numpy as np
import pytest
from numba import cuda

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx.tiles import swizzled


def capability() -> tuple[int, int]:
    if device.SIMULATED:
        return (99, 0)  # the simulator knows every instruction
    return device.compute_capability() if device.is_available() else (0, 0)


needs_ampere = pytest.mark.skipif(
    capability() < (8, 0), reason="takes a GPU of compute capability 8.0, or the simulator"
)
on_hopper = pytest.mark.skipif(
    not device.SIMULATED and capability() != (9, 0),
    reason="takes a GPU of compute capability 9.0, or the simulator",
)
simulated_only = pytest.mark.skipif(not device.SIMULATED, reason="a GPU does not notice")


def run(kernel, *operands, out, threads=32):
    """The kernel's output, of shape and dtype of `out`, after one block ran."""
    out = np.ascontiguousarray(out)
    out.view(np.uint8)[...] = 0xFF
    result = device.to_device(out)
    launch(kernel, 1, threads, *(device.to_device(operand) for operand in operands), result)
    return result.numpy()


@cuda.jit(device=True)
def load_tiles(tiles, shared):
    """A warpgroup's bytes in shared memory, ready for wgmma: where they begin."""
    start = ptx.first_multiple(shared, 1024)
    t = cuda.threadIdx.x
    for i in range(t, tiles.shape[0], 128):
        shared[start + i] = tiles[i]
    ptx.fence_proxy_async()
    cuda.syncthreads()
    return start


def laid(values, width, nbytes):
    """Lines of `width` bytes as the copy engine lays them down."""
    out = np.zeros(nbytes, np.uint8)
    out[swizzled(np.arange(values.nbytes), width)] = values.view(np.uint8).ravel()
    return out


def rows_of(out, units, n):
    """The accumulators of a warpgroup as (units, 64, n)."""
    got = out.numpy().reshape(4, 32, units, n // 2)
    warp, lane, u, i = np.indices(got.shape)
    result = np.full((units, 64, n), np.nan)
    row, column = 16 * warp + lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2
    result[u, row, column] = got
    return result


def random_bits(rng, *shape) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)
