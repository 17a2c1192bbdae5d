"""What the copy engine brings, and the barriers of the ring that it fills."""

from __future__ import annotations

from numba import cuda, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.conv.k2_tensor_core.tiles import Cut
from numbsparse.kernels.conv.window import Three
from numbsparse.kernels.ptx import fence_mbarrier_init, mbarrier_init


def pixel_map(x: DeviceArray, sizes: Three, images: int, box: Three, B: int) -> DeviceArray:
    """The map of images (batch, pixels, features) for boxes of B features of some images."""
    whole = x.reshape(x.shape[0], *sizes, x.shape[2])
    return tensor_map(whole, (images, *box, B), 2 * B)


def block_map(values: DeviceArray) -> DeviceArray:
    """The map of blocks (n_blocks, B, B), one at a time."""
    size = values.shape[1]
    return tensor_map(values.reshape(-1, size), (size, size), 2 * size)


def box_rows(cut: Cut, B: int) -> int:
    """Rows of a stage that holds a box, up to where swizzled lines repeat."""
    together = max(512 // B, 8)
    return -(-cut.rows // together) * together


@cuda.jit(device=True)
def start_ring(bars, stages, consumers):
    """Barrier s: stage s is full; stages + s: it is empty, as each consumer says."""
    if cuda.threadIdx.x == 0:
        for s in range(stages):
            mbarrier_init(bars, s, uint32(1))
            mbarrier_init(bars, stages + s, uint32(consumers))
        fence_mbarrier_init()
    cuda.syncthreads()
