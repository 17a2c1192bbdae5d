"""Blocks of float32 as `wgmma` takes them: each transposed, its values rounded to tf32."""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.lstm.deal import B
from numbsparse.kernels.ptx import as_float32, cvt_rna_tf32

ROWS = 1 if SIMULATED else 8  # of threads
PITCH = B + 1  # so that neither a line nor a column meets a bank twice
TILE = B * PITCH


def turned_blocks(values: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of float32, each transposed; a copy."""
    turned = empty(values.shape, values.dtype)
    launch(turn_kernel, values.shape[0], (B, ROWS), values.reshape(-1), turned.reshape(-1))
    return turned


@cuda.jit
def turn_kernel(values, turned):
    tile = cuda.shared.array(TILE, float32)
    x, y, first = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x * B * B
    for k in range(y, B, ROWS):
        tile[k * PITCH + x] = as_float32(cvt_rna_tf32(values[first + k * B + x]))
    cuda.syncthreads()
    for n in range(y, B, ROWS):
        turned[first + n * B + x] = tile[x * PITCH + n]
