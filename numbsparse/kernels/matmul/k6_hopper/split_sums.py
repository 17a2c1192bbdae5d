"""From the sums of a weight-gradient of float32 to dvalues, of whole items and of those cut."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.matmul.k6_hopper.split_factors import rows_of
from numbsparse.kernels.matmul.k6_hopper.split_items import HALVES, TILE, Work
from numbsparse.kernels.ptx import store_4xf32


@cache
def finisher(
    B: int, work: Work, exact: bool, wide: bool, swapped: bool, x_turned: bool, dy_turned: bool
) -> Any:
    """finish(sums, m, t, dense, plan, item, dvalues): product m of a lane, sums (N / 8, 4).

    A split makes NaN of infinities: where a sum is NaN, the lane that has it adds plain products.
    """
    ACROSS, STRIPS, row_of = work.N // TILE, work.N // 8, rows_of(x_turned)
    DOWN, ALONG = (1, B) if swapped else (B, 1)  # from a row to the next, and from a column
    FOURS = wide and not swapped

    @cuda.jit(device=True)
    def place_of(m, t, plan, item, c):
        """(where a lane's sums of the c-th 32 columns begin in dvalues or -1, row, first tile)."""
        tiles, images, _, targets = plan
        group, warp, g, q = t // 128, t // 32 % 4, t % 32 // 4, t % 4
        tile, row, step = row_of(images, item, group, warp, m)
        row = int64(row + step * g)
        target = int64(targets[item, group, tile, c])
        at = target * TILE + row * DOWN + 8 * q * ALONG if target >= 0 else int64(-1)
        return at, tiles[item, group, tile] + row

    @cuda.jit(device=True)
    def plain(dense, feature, column):
        x, dy, (x_stride, dy_stride, in_features, out_features, batch) = dense
        total = float32(0)
        if feature < in_features and column < out_features:
            for n in range(batch):
                left = x[feature * x_stride + n if x_turned else n * x_stride + feature]
                total += left * dy[column * dy_stride + n if dy_turned else n * dy_stride + column]
        return total

    @cuda.jit(device=True)
    def finish(sums, m, t, dense, plan, item, dvalues):
        found = 0
        for c in range(ACROSS):
            start, _ = place_of(m, t, plan, item, c)
            for u in range(2):
                for i in range(2):
                    at, k = start + u * DOWN + 4 * i * ALONG, 2 * u + i
                    if start >= 0:
                        if FOURS:
                            store_4xf32(
                                dvalues, at, sums[4 * c, k], sums[4 * c + 1, k],
                                sums[4 * c + 2, k], sums[4 * c + 3, k],
                            )  # fmt: skip
                        else:
                            for e in range(4):
                                dvalues[at + e * ALONG] = sums[4 * c + e, k]
        for i in range(STRIPS):
            for k in range(4):
                if exact and sums[i, k] != sums[i, k]:
                    found = 1
        if found:
            _, images, columns, _ = plan
            first = columns[item, images[item, t // 128, m]]
            for number in range(ACROSS * 16):
                c, u, across = number // 16, number // 8 % 2, number % 8
                start, feature = place_of(m, t, plan, item, c)
                at = start + u * DOWN + across * ALONG
                if start >= 0 and dvalues[at] != dvalues[at]:
                    column = first + c * TILE + 8 * (t % 4) + across
                    dvalues[at] = plain(dense, feature + u, column)

    return finish


@cache
def add_kernel(
    B: int, work: Work, exact: bool, wide: bool, swapped: bool, x_turned: bool, dy_turned: bool
) -> Any:
    """dvalues of the items that were cut: a block of threads adds the pieces of one product of each
    warpgroup, in the order of the batch."""
    COUNT, LANES, STRIPS = work.PER_LANE, 128 * work.GROUPS, work.N // 8
    SUMS = STRIPS, 4
    finish = finisher(B, work, exact, wide, swapped, x_turned, dy_turned)

    @cuda.jit
    def kernel(
        x, dy, sizes, tiles, images, columns, extents, targets, dvalues, parts, whole, pieces
    ):
        t = uint32(cuda.threadIdx.x)
        item, m = int64(cuda.blockIdx.x) // HALVES, cuda.blockIdx.x % HALVES
        sums = cuda.local.array(SUMS, float32)
        for i in range(STRIPS):
            for k in range(4):
                sums[i, k] = 0
        for piece in range(pieces):
            at = ((item * pieces + piece) * HALVES + m) * COUNT
            for i in range(STRIPS):
                for k in range(4):
                    sums[i, k] += parts[(at + 4 * i + k) * LANES + t]
        plan = tiles, images, columns, targets
        finish(sums, m, t, (x, dy, sizes), plan, whole + item, dvalues)

    return kernel
