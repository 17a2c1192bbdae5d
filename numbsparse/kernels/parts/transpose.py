"""A feature-major copy of batch-major 16-bit values, through tiles in shared memory."""

from functools import cache
from typing import Any

from numba import cuda, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.parts.aligned import of_bits
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels

SIDE = 64  # rows and columns of a tile: 128 bytes
THREADS = 256
RUN = 8  # values in 16 bytes


def transposed_copy(x: DeviceArray) -> DeviceArray:
    """A copy of x (rows, columns), 16-bit; its columns are contiguous, each 16 bytes aligned."""
    rows, columns = x.shape
    out = empty((columns, -(-rows // RUN) * RUN), x.dtype)[:, :rows]
    overlap = copy_engine()
    grid = -(-columns // SIDE), -(-rows // SIDE)
    strides, step = (x.strides[0] // 2, x.strides[1] // 2), out.strides[0] // 2
    args = of_bits(x.span), strides, x.shape, of_bits(out.span), step
    launch(transposing_kernel(overlap), grid, THREADS, *args, overlap=overlap)
    return out.T


@cache
def transposing_kernel(overlap: bool) -> Any:
    ROWS = THREADS // SIDE  # of a tile that are read at once
    STEPS, TILE = SIDE // ROWS, (SIDE, SIDE + 2)  # columns start in all banks

    @cuda.jit
    def kernel(x, strides, shape, out, stride):
        tile = cuda.shared.array(TILE, uint16)
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        slow, fast = uint32(cuda.threadIdx.x) // SIDE, uint32(cuda.threadIdx.x) % SIDE
        column, row = int64(cuda.blockIdx.x) * SIDE, int64(cuda.blockIdx.y) * SIDE
        # Of this thread: what it reads and what it writes, in steps of ROWS.
        here = (row + slow) * strides[0] + (column + fast) * strides[1]
        rows = shape[0] - row - slow if column + fast < shape[1] else int64(0)
        for k in range(STEPS):
            if ROWS * k < rows:
                tile[slow + ROWS * k, fast] = x[uint64(here + k * (ROWS * strides[0]))]
        cuda.syncthreads()
        there = (column + slow) * stride + row + fast
        columns = shape[1] - column - slow if row + fast < shape[0] else int64(0)
        for k in range(STEPS):
            if ROWS * k < columns:
                out[uint64(there + k * (ROWS * stride))] = tile[fast, slow + ROWS * k]

    return kernel
