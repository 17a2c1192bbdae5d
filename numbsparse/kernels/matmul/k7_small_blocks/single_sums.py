"""Where the sums of a slot of float32 go, and what becomes of those that a split made NaN."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.single_slots import Sums
from numbsparse.kernels.matmul.k7_small_blocks.single_turned import (
    feature_of,
    feature_of_eight,
)
from numbsparse.kernels.ptx import as_uint32, redux_or, store_2xu32, store_4xf32, sync_warp


@cache
def place_of(sums: Sums) -> Any:
    """(half, row, column) of sum i of a lane: which of the slot's blocks, and where in it."""
    B, x_turned, dy_turned = sums.B, sums.x_turned, sums.dy_turned

    @cuda.jit(device=True)
    def row_of(g, half):
        return feature_of(g, half) if x_turned else 2 * g + half

    @cuda.jit(device=True)
    def column_of(g, half):
        return feature_of(g, half) if dy_turned else 2 * g + half

    @cuda.jit(device=True)
    def place(i):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        if B == 16:
            return 0, row_of(g, i // 2 % 2), column_of(2 * q + i % 2, i // 4)
        column = 2 * q + i % 2
        return g // 4, row_of(g % 4, i // 2), feature_of_eight(column) if dy_turned else column

    return place


@cache
def store_slot(sums: Sums) -> Any:
    """dvalues of a slot's blocks = acc; 0 beyond the edges."""
    B, COUNT, wide, place = sums.B, sums.PER_LANE, sums.wide, place_of(sums)
    FOURS = B == 16 and not sums.dy_turned  # neighbours in a row; else two

    @cuda.jit(device=True)
    def store(acc, blocks, slot, block_rows, block_columns, in_features, out_features, dvalues):
        half, _, _ = place(0)
        block = int64(blocks[2 * slot + half])
        if block >= 0:
            for i in range(COUNT):
                _, row, column = place(i)
                at = (block * B + row) * B + column
                if not wide:
                    inside = block_rows[block] * int64(B) + row < in_features
                    inside = inside and block_columns[block] * int64(B) + column < out_features
                    dvalues[at] = acc[i] if inside else float32(0)
                elif FOURS and i in (0, 2):
                    store_4xf32(dvalues, at, acc[i], acc[i + 4], acc[i + 1], acc[i + 5])
                elif not FOURS and i % 2 == 0:
                    store_2xu32(dvalues, at, as_uint32(acc[i]), as_uint32(acc[i + 1]))

    return store


@cache
def store_slots(sums: Sums, SLOTS: int) -> Any:
    """The first `used` of SLOTS slots."""
    store = store_slot(sums)

    def slots_from(p: int) -> Any:
        @cuda.jit(device=True)
        def none(acc, used, blocks, slot, rows, columns, in_features, out_features, dvalues):
            pass

        if p == SLOTS:
            return none
        rest = slots_from(p + 1)

        @cuda.jit(device=True)
        def store_from(acc, used, blocks, slot, rows, columns, in_features, out_features, dvalues):
            if p < used:
                store(acc[p], blocks, slot + p, rows, columns, in_features, out_features, dvalues)
                rest(acc, used, blocks, slot, rows, columns, in_features, out_features, dvalues)

        return store_from

    return slots_from(0)


@cache
def any_nan(SLOTS: int, COUNT: int) -> Any:
    """Whether sums of a warp are NaN: 0 or 1. What its lanes have stored, all see afterwards."""

    @cuda.jit(device=True)
    def nan_in(acc):
        found = uint32(0)
        for p in range(SLOTS):
            for i in range(COUNT):
                if acc[p, i] != acc[p, i]:
                    found = uint32(1)
        found = redux_or(found)
        sync_warp()
        return found

    return nan_in


@cache
def mend_slots(sums: Sums) -> Any:
    """Plain sums where a slot's are NaN: a split makes NaN of infinities. Rare, so simple.

    A stride is that of the lines: of the rows of the batch, or of the features.
    """
    B, x_turned, dy_turned = sums.B, sums.x_turned, sums.dy_turned

    @cuda.jit(device=True)
    def mend(batch, x, x_stride, dy, dy_stride, blocks, rows, columns, dvalues, slot, used):
        lane = cuda.threadIdx.x % 32
        for k in range(2 * slot, 2 * (slot + used)):
            block = int64(blocks[k])
            for number in range(lane, B * B if block >= 0 else 0, 32):
                at = block * (B * B) + number
                if dvalues[at] != dvalues[at]:
                    i = rows[block] * int64(B) + number // B
                    j = columns[block] * int64(B) + number % B
                    total = float32(0)
                    for n in range(batch):
                        total += (
                            x[i * x_stride + n if x_turned else n * x_stride + i]
                            * dy[j * dy_stride + n if dy_turned else n * dy_stride + j]
                        )
                    dvalues[at] = total

    return mend


@cache
def total_kernel(sums: Sums) -> Any:
    """The sums of the regions that were cut over the batch; a warp per slot."""
    SLOTS, COUNT = sums.region.WARPS * sums.region.SLOTS, sums.PER_LANE
    ACC = (1, COUNT)
    store, exact, nan_in, mend = store_slots(sums, 1), sums.exact, any_nan(*ACC), mend_slots(sums)

    @cuda.jit
    def kernel(
        batch,
        x,
        x_stride,
        dy,
        dy_stride,
        blocks,
        block_rows,
        block_columns,
        in_features,
        out_features,
        partials,
        dvalues,
        cut,
        pieces,
    ):
        which, slot = cuda.blockIdx.x // SLOTS, cuda.blockIdx.x % SLOTS
        lane = uint32(cuda.threadIdx.x)
        acc = cuda.local.array(ACC, float32)
        for i in range(COUNT):
            acc[0, i] = 0
            for piece in range(pieces):
                at = ((which * pieces + piece) * SLOTS + slot) * COUNT + i
                acc[0, i] += partials[at * 32 + lane]
        slot = cut[which] * int64(SLOTS) + slot
        store(acc, 1, blocks, slot, block_rows, block_columns, in_features, out_features,
              dvalues)  # fmt: skip
        if exact and nan_in(acc) != 0:
            mend(batch, x, x_stride, dy, dy_stride, blocks, block_rows, block_columns, dvalues,
                 slot, 1)  # fmt: skip

    return kernel
