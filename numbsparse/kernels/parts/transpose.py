"""A feature-major copy of batch-major values, through tiles in shared memory."""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.parts.aligned import aligned_either_way, aligned_like, is_aligned, of_bits
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels

SIDE = 64  # columns of a tile: 128 bytes; and its rows, at most
THREADS = 256


def readable(x: DeviceArray) -> tuple[DeviceArray, bool]:
    """x, or a copy, as the copy engine reads it: (..., whether it is feature-major).

    k7 took 0.82 and 0.84 of the time so (129 and 513 rows of 4,096 features, H200), in float32 0.76
    and 0.69; k9 1.16.
    """
    x = of_bits(x)
    if x.batch_is_contiguous and not is_aligned(x.T):
        x = transposed_copy(x.T, 32).T  # copied anyway, and so its tiles are even
    (lines,), (across,) = aligned_either_way(x)
    return lines, across


def transposed_copy(x: DeviceArray, high: int = SIDE) -> DeviceArray:
    """A copy of x (rows, columns); its columns are contiguous, each aligned.

    high : rows of a tile, 32 or 64. Of 32 there are more tiles, which write half as many
        neighbours: k7 took 0.86 of the time with 129 rows, 0.91 with 513, the same with 33 (H200).
    """
    rows, columns = x.shape
    out = aligned_like(x.T)
    overlap = copy_engine()
    grid = -(-columns // SIDE), -(-rows // high)
    strides, step = tuple(n // x.itemsize for n in x.strides), out.strides[0] // x.itemsize
    args = of_bits(x.span), strides, x.shape, of_bits(out.span), step
    launch(transposing_kernel(x.itemsize, overlap, high), grid, THREADS, *args, overlap=overlap)
    return out.T


@cache
def transposing_kernel(item: int, overlap: bool, HIGH: int) -> Any:
    ROWS, COLUMNS = THREADS // SIDE, THREADS // HIGH  # that are read, and written, at once
    STEPS, TILE = HIGH // ROWS, (HIGH, SIDE + 4 // item)  # columns start in all banks
    kind = uint16 if item == 2 else float32

    @cuda.jit
    def kernel(x, strides, shape, out, stride):
        tile, own = cuda.shared.array(TILE, kind), cuda.local.array(STEPS, kind)
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        slow, fast = uint32(cuda.threadIdx.x) // SIDE, uint32(cuda.threadIdx.x) % SIDE
        column, row = int64(cuda.blockIdx.x) * SIDE, int64(cuda.blockIdx.y) * HIGH
        here = (row + slow) * strides[0] + (column + fast) * strides[1]
        rows = shape[0] - row - slow if column + fast < shape[1] else int64(0)
        for k in range(STEPS):  # all of it is awaited at once
            if ROWS * k < rows:
                own[k] = x[uint64(here + k * (ROWS * strides[0]))]
        for k in range(STEPS):
            tile[slow + ROWS * k, fast] = own[k]
        cuda.syncthreads()
        slow, fast = uint32(cuda.threadIdx.x) // HIGH, uint32(cuda.threadIdx.x) % HIGH
        there = (column + slow) * stride + row + fast
        columns = shape[1] - column - slow if row + fast < shape[0] else int64(0)
        for k in range(STEPS):
            own[k] = tile[fast, slow + COLUMNS * k]
        for k in range(STEPS):
            if COLUMNS * k < columns:
                out[uint64(there + k * (COLUMNS * stride))] = own[k]

    return kernel
