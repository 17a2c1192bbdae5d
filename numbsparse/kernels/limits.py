"""Kernels that do one thing as fast as the card can: the limits that every other kernel meets."""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.ptx import (
    Operand,
    fence_proxy_async,
    first_multiple,
    load_4xf32,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    to_local,
    wgmma,
    zeros,
)

THREADS = 32 if SIMULATED else 256
AT_ONCE = 4  # loads of 16 bytes that a thread has under way
CHAINS = 32  # multiply-adds of a thread that do not wait for each other
FACTOR = 1e-6
SQUARES = 8  # the same for the products of a warp

# The instruction, its multiply-adds, the bits of its operands that are drawn, and those that make
# each operand 1 to 2: products of zeros take less power, and would show a higher clock.
TENSOR_CORES = {
    "float16": (mma_m16n8k16_f16, 16 * 8 * 16, 0x83FF83FF, 0x3C003C00),
    "bfloat16": (mma_m16n8k16_bf16, 16 * 8 * 16, 0x807F807F, 0x3F803F80),
    "tf32": (mma_m16n8k8_tf32, 16 * 8 * 8, 0x807FFFFF, 0x3F800000),
}

# Of a warpgroup, tiles in shared memory: 128 rows of x, 128 columns of w, and a sum over the same
# 64 terms four times, so that no step waits long for the one before.
WARPGROUPS, SIDE, DEPTH, TIMES = (1, 64, 64, 1) if SIMULATED else (2, 128, 64, 4)
ALONG = Operand(2 * DEPTH, 0)
KINDS = {"float16": "f16", "bfloat16": "bf16"}


def read(x, grid: int, passes: int, out) -> int:
    """Read the float32 array `x` `passes` times, 16 bytes a load; the bytes read.

    Each pass gives the blocks of threads other parts of it, so that no pass finds the last one's
    in the L1 cache. The length is a multiple of 4 * AT_ONCE * THREADS * grid.
    """
    launch(read_kernel, grid, THREADS, x, passes, out)
    return passes * x.nbytes


def multiply_add(grid: int, rounds: int, out) -> int:
    """float32 multiply-adds in registers; how many operations, two for each."""
    launch(multiply_add_kernel, grid, THREADS, rounds, FACTOR, out)
    return 2 * grid * THREADS * rounds * CHAINS


def tensor_core(dtype: str, grid: int, rounds: int, out) -> int:
    """Products on the tensor cores, operands in registers; how many operations."""
    launch(tensor_core_kernel(dtype), grid, THREADS, rounds, out)
    return 2 * grid * (THREADS // 32) * rounds * SQUARES * TENSOR_CORES[dtype][1]


def warpgroup(dtype: str, grid: int, rounds: int, out) -> int:
    """Products of warpgroups, tiles in shared memory; how many operations."""
    launch(warpgroup_kernel(dtype), grid, WARPGROUPS * 128, rounds, out)
    return 2 * grid * WARPGROUPS * rounds * SIDE * SIDE * DEPTH * TIMES


@cuda.jit
def read_kernel(x, passes, out):
    threads = cuda.gridDim.x * THREADS
    steps = x.size // 4 // threads // AT_ONCE
    total = float32(0)
    for p in range(passes):
        # 37 shares no factor with the usual sizes of a grid.
        block = (cuda.blockIdx.x + 37 * p) % cuda.gridDim.x
        piece = block * THREADS + cuda.threadIdx.x
        for _ in range(steps):
            for i in range(AT_ONCE):
                a, b, c, d = load_4xf32(x, 4 * (piece + i * threads))
                total += (a + b) + (c + d)
            piece += AT_ONCE * threads
    out[cuda.grid(1)] = total


@cuda.jit
def multiply_add_kernel(rounds, factor, out):
    acc = cuda.local.array(CHAINS, float32)
    for i in range(CHAINS):
        acc[i] = cuda.threadIdx.x + i
    for _ in range(rounds):
        for i in range(CHAINS):
            acc[i] = cuda.fma(acc[i], factor, acc[i])  # two registers: three may share a bank
    total = float32(0)
    for i in range(CHAINS):
        total += acc[i]
    out[cuda.grid(1)] = total


@cache
def tensor_core_kernel(dtype: str) -> Any:
    mma, _, DRAWN, ONE_TO_TWO = TENSOR_CORES[dtype]
    ACC = (SQUARES, 4)
    factor = drawn(DRAWN, ONE_TO_TWO)

    @cuda.jit
    def kernel(rounds, out):
        acc = cuda.local.array(ACC, float32)
        for i in range(SQUARES):
            for j in range(4):
                acc[i, j] = i
        t = cuda.threadIdx.x
        a0, a1, a2, a3 = factor(t), factor(t + 256), factor(t + 512), factor(t + 768)
        b0, b1 = factor(t + 1024), factor(t + 1280)
        for _ in range(rounds):
            for i in range(SQUARES):
                acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3] = mma(
                    a0, a1, a2, a3, b0, b1, acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3]
                )
        total = float32(0)
        for i in range(SQUARES):
            for j in range(4):
                total += acc[i, j]
        out[cuda.grid(1)] = total

    return kernel


@cache
def warpgroup_kernel(dtype: str) -> Any:
    multiply = wgmma(KINDS[dtype], SIDE // 64, SIDE, DEPTH // 16 * TIMES, ALONG, ALONG)
    SUMS, TILE, SPAN = SIDE * SIDE // 128, SIDE * DEPTH, 2 * SIDE * DEPTH + 512
    no_sums, factor = zeros(SUMS), drawn(*TENSOR_CORES[dtype][2:])

    @cuda.jit
    def kernel(rounds, out):
        tiles = cuda.shared.array(SPAN, uint16)
        sums = cuda.local.array(SUMS, float32)
        for i in range(cuda.threadIdx.x, SPAN, cuda.blockDim.x):
            tiles[i] = uint16(factor(i))
        fence_proxy_async()
        cuda.syncthreads()
        start = first_multiple(tiles, 1024)
        acc = no_sums()
        for _ in range(rounds):
            acc = multiply(acc, tiles, start, tiles, start + TILE)
        to_local(acc, sums)
        total = float32(0)
        for i in range(SUMS):
            total += sums[i]
        out[cuda.grid(1)] = total

    return kernel


@cache
def drawn(DRAWN: int, ONE_TO_TWO: int) -> Any:
    """Two 16-bit numbers, or one tf32, from 1 to 2, signs drawn too."""

    @cuda.jit(device=True)
    def factor(seed):
        bits = seed * int64(2654435761) + int64(12345)
        return uint32(bits & DRAWN | ONE_TO_TWO)

    return factor
