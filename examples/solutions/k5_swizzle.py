"""k5_tensor_core: what ldmatrix costs with pieces where they fall, and with pieces swapped.

ldmatrix reads the same piece of 16 bytes of eight neighbouring lines. In lines of 64 bytes every
second of them is in the same banks, in lines of 128 bytes all do. With the bits of the line added
to the place, without carry, the eight are in eight different places of 128 bytes.
"""

import os
from functools import partial

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np
from numba import cuda, uint16

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.banks import place, swap_for_rows
from numbsparse.kernels.ptx import ALIGNMENT, cp_async, cp_async_commit, cp_async_wait, ldmatrix_x4

PIECE, LINES = 8, 32  # 16-bit values in a piece; lines that a warp reads a piece of


@cuda.jit(device=True)
def no_swap(line):
    return 0


def reader(PIECES, swap):
    """out[lane] = what ldmatrix gives each lane of the first piece of 32 lines."""
    SIZE = LINES * PIECES * PIECE
    place_in, _ = place(PIECES, PIECE, swap)

    @cuda.jit
    def kernel(x, out):
        tile = cuda.shared.array(SIZE, uint16, ALIGNMENT)
        lane = cuda.threadIdx.x
        for piece in range(PIECES):
            cp_async(tile, place_in(lane, piece), x, (lane * PIECES + piece) * PIECE)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        for i, register in enumerate(ldmatrix_x4(tile, place_in(lane, 0))):
            out[lane, i] = register

    return kernel


for pieces in (2, 4, 8):
    x = ns.to_device(np.arange(LINES * pieces * PIECE, dtype=np.uint16))
    wavefronts, results = [], []
    for swap in (no_swap, swap_for_rows(pieces)):
        out = ns.to_device(np.zeros((32, 4), np.uint32))
        (counted,) = ns.testing.count(partial(launch, reader(pieces, swap), 1, 32, x, out))
        wavefronts.append(counted.shared_reads.units)
        results.append(out.numpy())
    print(f"lines of {16 * pieces:3} bytes: {wavefronts[0]:2} wavefronts, swapped {wavefronts[1]}")
    np.testing.assert_array_equal(*results)
    assert wavefronts == [4 * pieces, 4]
