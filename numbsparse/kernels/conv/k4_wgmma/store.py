"""From accumulators to y: rounded, as matrices into shared memory, and on by the copy engine.

A warp has 16 pixels at a time, two lines of 8, or 16 of one line where pictures have no more. It
goes on while the copy engine reads them. What reaches beyond the picture is left out there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.conv.k2_tensor_core.boxes import unpacked
from numbsparse.kernels.conv.k4_wgmma.tiles import SIDE
from numbsparse.kernels.conv.window import Pass, Three
from numbsparse.kernels.parts.fragments import PACK
from numbsparse.kernels.ptx import (
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    stmatrix_x4,
    sync_warp,
    tma_store_5d,
)

ROWS = 16  # of a warp


def room_bytes(B: int) -> int:
    return 2 * B * ROWS


def output_map(y: DeviceArray, sizes: Three, of: Pass, tile: Three, B: int) -> DeviceArray:
    """The map of the outputs of a pass, in y (batch, pixels, features), for what a warp stores."""
    batch, pixels, features = y.shape
    row = features * y.itemsize
    along = (sizes[1] * sizes[2] * row, sizes[2] * row, row)
    address = y.address + sum(f * s for f, s in zip(of.first, along, strict=True))
    strides = (pixels * row, *(n * s for n, s in zip(of.step, along, strict=True)), y.itemsize)
    view = DeviceArray(address, (batch, *of.counts, features), y.dtype, strides, y.owner)
    lines = (1, ROWS) if tile[2] > SIDE else (ROWS // SIDE, SIDE)
    return tensor_map(view, (1, 1, *lines, B), 2 * B)


@cache
def storer(dtype: str, B: int) -> Any:
    """store(sums, first, ring, room, y_map, packed, image, top, column).

    sums : from `first` on, those of a thread in 16 x B sums: in every strip of 8 columns, lane
        4 r + q has columns 2 q and 2 q + 1 of rows r and r + 8
    room : item of `ring`; of the warp alone
    packed : the place of the first output, as `spread` gives it, in the tile of `image` and `top`
    """
    STRIPS, LINE, pack = B // 8, 2 * B, PACK[dtype]
    SWAPS = LINE // 16 - 1

    @cuda.jit(device=True)
    def store(sums, first, ring, room, y_map, packed, image, top, column):
        lane = uint32(cuda.threadIdx.x) % 32
        # A lane has a line of one of four matrices: two strips, and in each two halves.
        strip, half, line = lane // 16, lane // 8 % 2, lane % 8
        byte = uint32((8 * half + line) * LINE + 16 * strip)
        byte = uint32(byte ^ (byte >> 7 & SWAPS) << 4)
        bulk_wait_read()
        sync_warp()
        for s in range(0, STRIPS, 2):
            i = first + 4 * s
            stmatrix_x4(
                ring, room + (byte ^ (16 * s)) // 2,
                pack(sums[i], sums[i + 1]), pack(sums[i + 2], sums[i + 3]),
                pack(sums[i + 4], sums[i + 5]), pack(sums[i + 6], sums[i + 7]),
            )  # fmt: skip
        fence_proxy_async()
        sync_warp()
        if elect() != 0 and packed >= 0:
            n, q = unpacked(packed)
            z, y, x = int32(top[0] + q[0]), int32(top[1] + q[1]), int32(top[2] + q[2])
            tma_store_5d(ring, room, y_map, column, x, y, z, int32(image + n))
            bulk_commit()

    return store
