"""float32 x of a tile whose features begin anywhere, which the copy engine cannot load.

A lane has a value of each of 32 features in registers, and puts it in the tile once the tile before
it is multiplied: so they are on their way meanwhile, while a unit of w comes by the copy engine.
"""

from numba import cuda, int32, uint32, uint64

from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.kernels.ptx import as_uint32


@cuda.jit(device=True)
def take(x, view, line, top, own):
    """own = the lane's row, from `top` on, of 32 features of x, whose places are below 2^31.

    What is behind the last row of the batch may be anything.
    """
    last, stride = int32(x.size - 1), int32(view[3])
    at = int32(int32(line * WIDTH) * stride + int32(top + cuda.threadIdx.x % 32))
    for k in range(WIDTH):
        own[k] = x[uint64(min(at, last))]
        at = int32(at + stride)


@cuda.jit(device=True)
def put(own, shared, start):
    """Store them as a tile."""
    lane = uint32(cuda.threadIdx.x) % 32
    for k in range(WIDTH):  # in 64 bits what is added to a place is a part of the instruction
        at = uint64(uint32(start + 4 * (lane // 4 ^ uint32(k % 8)) + lane % 4))
        shared[at + uint64(k * WIDTH)] = as_uint32(own[k])
