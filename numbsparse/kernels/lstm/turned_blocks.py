"""Blocks of float32 as `wgmma` takes them: each transposed, its values rounded to tf32.

A thread has four neighbours of each of FEW blocks on their way at once: so memory is kept busy.
"""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.lstm.deal import B
from numbsparse.kernels.ptx import as_float32, cvt_rna_tf32, load_4xf32, store_4xf32

FOURS, FEW = B // 4, 2
THREADS = B * FOURS
PITCH = B + 1  # so that neither a line nor a column meets a bank twice
TILES, LOADED = (FEW, B * PITCH), (FEW, 4)


def turned_blocks(values: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of float32 at a multiple of 16 bytes, each transposed; a copy."""
    turned = empty(values.shape, values.dtype)
    flat = values.reshape(-1), turned.reshape(-1)
    launch(turn_kernel, -(-values.shape[0] // FEW), THREADS, *flat, values.shape[0])
    return turned


@cuda.jit
def turn_kernel(values, turned, n_blocks):
    tiles = cuda.shared.array(TILES, float32)
    line, four = cuda.threadIdx.x // FOURS, cuda.threadIdx.x % FOURS * 4
    first, loaded = cuda.blockIdx.x * FEW, cuda.local.array(LOADED, float32)
    for k in range(FEW):
        if first + k < n_blocks:
            run = load_4xf32(values, ((first + k) * B + line) * B + four)
            for e in range(4):
                loaded[k, e] = run[e]
    for k in range(FEW):
        for e in range(4):
            tiles[k, line * PITCH + four + e] = as_float32(cvt_rna_tf32(loaded[k, e]))
    cuda.syncthreads()
    for k in range(FEW):
        if first + k < n_blocks:
            to, tile = ((first + k) * B + line) * B + four, tiles[k]
            store_4xf32(
                turned, to, tile[four * PITCH + line], tile[(four + 1) * PITCH + line],
                tile[(four + 2) * PITCH + line], tile[(four + 3) * PITCH + line],
            )  # fmt: skip
