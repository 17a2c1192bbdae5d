"""float32 by `wgmma` of tf32: hi and lo of x in registers, of w in shared memory.

What hi and lo are, and why each block's products start from zero, says `parts.fragments_tf32`. A
block of w is small against the pixels that it meets: all are split once, before, and laid out as
wgmma reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.conv.k2_tensor_core.boxes import unpacked
from numbsparse.kernels.conv.places import moved, plus, row_of
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.ptx import as_float32, load_4xf32, store_4xf32, wgmma_split
from numbsparse.kernels.views import span

CHUNK, RUN = 16, 4  # terms of a sum that four lanes hold, each four neighbours
SPLIT_THREADS = 128


def split_blocks(values: DeviceArray, B: int, turned: bool) -> DeviceArray:
    """(blocks of B x B, hi or lo, 4 terms, 8 columns, column, term), gapless."""
    images = empty((2 * values.size,), values.dtype)
    grid = -(-values.size // (RUN * SPLIT_THREADS))
    kernel = split_kernel(B, values.shape[1] // B, turned)
    launch(kernel, grid, SPLIT_THREADS, span(values), images)
    return images


@cache
def split_kernel(B: int, PARTS: int, turned: bool) -> Any:
    column_of, SIZE = singles.coordinates(B // 8), B * PARTS

    @cuda.jit
    def kernel(values, images):
        at = RUN * int64(cuda.grid(1))  # of four terms of a column
        if at >= values.size:
            return
        block, rest = at // (B * B), int32(at % (B * B))
        terms, column = rest // (RUN * B), rest // RUN % B
        n = column_of(column // 8, column % 8)
        his, los = cuda.local.array(RUN, float32), cuda.local.array(RUN, float32)
        for q in range(RUN):
            k = terms // RUN * CHUNK + RUN * q + terms % RUN
            down, across = (n, k) if turned else (k, n)
            row = block // PARTS * B + down
            value = values[row * SIZE + block % PARTS * B + across]
            hi, lo = singles.split_exact(value)
            his[q], los[q] = as_float32(hi), as_float32(lo)
        to = block * (2 * B * B) + rest
        store_4xf32(images, to, his[0], his[1], his[2], his[3])
        store_4xf32(images, to + B * B, los[0], los[1], los[2], los[3])

    return kernel


def pixel_of(B: int) -> Any:
    """Which pixel of 8 neighbours is line g of a product: such that lanes meet no bank twice."""

    @cuda.jit(device=True)
    def own(g):
        return g // 2 + g % 2 * 4 if B == 32 else g

    return own


@cache
def add_tap(precision: str, B: int) -> Any:
    """add(_, ring, start, shift, w_at, (acc, rows)): acc += 64 lines of a box times a block of w.

    `rows` are the lines of the box, from `start` on and before the tap's shift, that are the lane's
    rows g and g + 8 of its warp's 16.
    """
    LINE, REGISTERS, CHUNKS = 4 * B, B // 2, B // CHUNK
    SWAPS, exact = LINE // 16 - 1, precision == "highest"
    split = singles.split_exact if exact else singles.round_to_tf32
    multiply = wgmma_split(B, B // 8, exact)

    @cuda.jit(device=True)
    def add(_, ring, start, shift, w_at, own):
        acc, rows = own
        hi, lo = cuda.local.array(REGISTERS, uint32), cuda.local.array(REGISTERS, uint32)
        q = uint32(cuda.threadIdx.x) % 4
        for h in range(2):
            line = uint32((rows[h] + shift) * LINE)
            for c in range(CHUNKS):
                byte = uint32(line + 16 * (4 * c + q))
                byte = uint32(byte ^ (byte >> 7 & SWAPS) << 4)
                run = load_4xf32(ring, uint32(start + byte // 4))
                for j in range(RUN):
                    i = (c * 2 + j // 2) * 4 + j % 2 * 2 + h
                    hi[i], lo[i] = split(run[j])
        multiply(acc, hi, lo, ring, w_at)

    return add


@cache
def storer(B: int) -> Any:
    """store(acc, y, packed, h, image, batch, top, pass, column): half h of a lane's sums to y."""
    TB, column_in = B // 8, singles.coordinates(B // 8)

    @cuda.jit(device=True)
    def store(acc, y, packed, h, image, batch, top, of, column):
        counts, step, first, sizes, features = of
        n, place = unpacked(packed)
        o = plus(top, place)
        if packed < 0 or o[0] >= counts[0] or o[1] >= counts[1] or o[2] >= counts[2]:
            return
        row = row_of(image + n, batch, moved(o, step, first), sizes)
        if row < 0:
            return
        q = uint32(cuda.threadIdx.x) % 4
        for e in range(2):
            i = 2 * h + e
            for u in range(TB):
                at = int64(row) * features + column + column_in(u, 2 * q + e)
                if TB % 4:
                    y[at] = acc[4 * u + i]
                elif u % 4 == 0:
                    four = (
                        acc[4 * u + i],
                        acc[4 * u + 4 + i],
                        acc[4 * u + 8 + i],
                        acc[4 * u + 12 + i],
                    )
                    store_4xf32(y, at, four[0], four[1], four[2], four[3])

    return store
