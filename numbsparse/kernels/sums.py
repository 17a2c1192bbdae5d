"""Several sums of a block's threads at once, for all of them: by shuffles within warps, twice.

Where each warp added those of 32 others one by one, a layer norm of 1,024 threads took 10 us in
place of 5 (H200). All has a fixed order.
"""

from functools import cache
from typing import Any

from numba import cuda, float32

from numbsparse.kernels.blocks import ALL, WARP


@cache
def adding(COUNT: int, MOST_WARPS: int) -> Any:
    """add(values, scratch): values[k] = the sum of all threads' values[k], for k below COUNT.

    `scratch` is shared, COUNT * MOST_WARPS float32; the most is a power of two.
    """

    @cuda.jit(device=True)
    def of_lanes(values, apart):
        while apart:
            for k in range(COUNT):
                values[k] += cuda.shfl_xor_sync(ALL, values[k], apart)
            apart //= 2

    @cuda.jit(device=True)
    def of_warps(values, scratch, warps):
        for k in range(COUNT):
            values[k] = float32(0)
        for warp in range(warps):
            for k in range(COUNT):
                values[k] += scratch[k * MOST_WARPS + warp]

    @cuda.jit(device=True)
    def add(values, scratch):
        t, warps = cuda.threadIdx.x, cuda.blockDim.x // WARP
        of_lanes(values, WARP // 2)
        if t % WARP == 0:
            for k in range(COUNT):
                scratch[k * MOST_WARPS + t // WARP] = values[k]
        cuda.syncthreads()
        if WARP == 1:  # in the simulator
            of_warps(values, scratch, warps)
        else:
            own = t % MOST_WARPS
            for k in range(COUNT):
                there = scratch[k * MOST_WARPS + min(own, warps - 1)]
                values[k] = there if own < warps else float32(0)
            of_lanes(values, MOST_WARPS // 2)
        cuda.syncthreads()  # scratch may be written again

    return add
