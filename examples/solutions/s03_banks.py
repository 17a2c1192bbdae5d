"""s03_shared: a tile that is read by columns, with and without a 17th column.

Thread tx reads ws[tx, i]: 16 rows at once. In rows of 16 words every second
row begins in the same bank, so 8 of the 16 words wait for one bank. In rows of 17 no two do.
The pad costs something too: a warp writes two rows at once, which in rows of 16 fill the 32 banks,
and in rows of 17 have one bank in common. So each write takes two wavefronts, and each read one.
"""

import os
from functools import partial

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch


def summed_rows(WIDTH):
    """A kernel that copies a 16 x 16 tile to shared memory, in rows of WIDTH, and sums its rows."""

    @cuda.jit
    def kernel(w, out):
        ws = cuda.shared.array((16, WIDTH), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        ws[ty, tx] = w[ty, tx]
        cuda.syncthreads()
        total = float32(0)
        for i in range(16):
            total += ws[tx, i]
        out[ty, tx] = total

    return kernel


w = np.arange(256, dtype=np.float32).reshape(16, 16)
wavefronts = {}
for width in (16, 17):
    out = ns.to_device(np.full((16, 16), np.nan, np.float32))
    kernel = summed_rows(width)
    (counted,) = ns.testing.count(partial(launch, kernel, 1, (16, 16), ns.to_device(w), out))
    np.testing.assert_array_equal(out.numpy(), np.tile(w.sum(1), (16, 1)))
    wavefronts[width] = counted.shared_reads.units
    print(f"rows of {width}", counted, sep="\n")

requests = 8 * 16  # 8 warps, 16 columns
assert wavefronts == {16: 8 * requests, 17: requests}
