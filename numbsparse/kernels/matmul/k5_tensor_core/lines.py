"""forward and input-gradient: y = x @ w down the block columns of w, or along its rows turned."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import BYTES, aligned_lines
from numbsparse.kernels.matmul.k5_tensor_core.fetches import (
    Tile,
    fetch_columns,
    fetch_rows,
    slots_of,
)
from numbsparse.kernels.matmul.k5_tensor_core.recipes import Shape, recipe_of
from numbsparse.kernels.matmul.k5_tensor_core.repair import any_nan, repair_line
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.kernels.views import span
from numbsparse.layout import Index


def multiply_lines(
    product: str,
    x: DeviceArray,
    values: DeviceArray,
    index: Index,
    y: DeviceArray,
    arithmetic: str,
    tile: Tile,
) -> None:
    """y[:] = x @ w or x @ w.T, from `values`, the rows of blocks."""
    (batch, out_features), size, in_features = y.shape, values.shape[1], x.shape[1]
    flat, stride, x_turned = aligned_lines(x)
    y, y_turned, wide = stored(y)
    turned, edge = product == "input_grad", in_features % size > 0
    shape = Shape(size, tile, arithmetic, turned, x_turned, y_turned, wide, edge)
    recipe, slots = recipe_of(shape), slots_of(size, tile, turned)
    plan = planned(index, strips, product, size, tile.BN, out_features)
    grid = -(-batch // tile.BM) * plan[0].size
    stage = tile.BM * tile.BK + slots.BLOCKS * slots.COLUMNS * recipe.slot
    launch(
        line_kernel(shape), grid, tile.threads,
        flat, stride, batch, in_features, span(values), *plan, y, out_features,
        shared_bytes=tile.STAGES * stage * values.itemsize,
    )  # fmt: skip


def stored(y: DeviceArray) -> tuple[DeviceArray, bool, bool]:
    """y as one axis, whether that is of y.T, and whether several values may be stored at once.

    16-bit values go by pairs, float32 by fours.
    """
    turned = not y.is_contiguous
    y = y.T if turned else y
    together = BYTES if y.itemsize == 4 else 4
    wide = y.shape[1] * y.itemsize % together == 0 and y.address % together == 0
    y = span(y)
    if wide and y.itemsize == 2:
        y = DeviceArray(y.address, (y.size // 2,), np.uint32, None, y.owner)
    return y, turned, wide


def strips(index: Index, product: str, B: int, width: int, features: int) -> tuple[Any, ...]:
    """The output in strips of `width` features: how each walks its blocks, longest first.

    (order, indptr, indices, blocks, masks): position k of a strip meets the block row indices[k] in
    the blocks[k] of its columns, -1 where there is none; bit c of masks[k] says that c has one.
    """
    walk = index.columns if product == "forward" else index.rows
    count, columns = -(-features // width), max(width // B, 1)
    lengths = np.diff(walk.indptr)
    if columns == 1:
        of_strip = lengths[np.arange(count) * width // B]
        order = np.argsort(-of_strip, kind="stable").astype(np.int32)
        return order, walk.indptr, walk.indices, walk.blocks, np.ones_like(walk.blocks)
    column = np.repeat(np.arange(lengths.size), lengths)
    rows = int(walk.indices.max(initial=0)) + 1
    places, at = np.unique(column // columns * rows + walk.indices, return_inverse=True)
    blocks = np.full((places.size, columns), -1, np.int32)
    blocks[at, column % columns] = walk.blocks
    masks = ((blocks >= 0) << np.arange(columns)).sum(1)
    indptr = np.searchsorted(places // rows, np.arange(count + 1))
    # As many blocks as there are take as long as they are, positions a little.
    work = np.bincount(column // columns, minlength=count) + np.diff(indptr)
    arrays = (np.argsort(-work, kind="stable"), indptr, places % rows, blocks.reshape(-1), masks)
    return tuple(array.astype(np.int32) for array in arrays)


@cache
def line_kernel(shape: Shape) -> Any:
    B, tile, arithmetic, turned, x_turned, y_turned = shape[:6]
    recipe = recipe_of(shape)
    BM, BN, BK, STAGES = tile
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    slots = slots_of(B, tile, turned)
    DEPTH, COLUMNS, BLOCKS, PARTS = slots.DEPTH, slots.COLUMNS, slots.BLOCKS, slots.PARTS
    WM, ACROSS, SLOT, PIECE, ITEM = (
        BM // tile.warps,
        BN // COLUMNS,
        recipe.slot,
        recipe.piece,
        recipe.item,
    )
    TA, TB, ACC = recipe.TA, recipe.TB, (COLUMNS, recipe.TA, recipe.TB, 4)
    X_SIZE = BM * BK
    STAGE = X_SIZE + BLOCKS * COLUMNS * SLOT
    RING = STAGES * STAGE
    begin_in_x, begin_in_w, add_products = recipe.begin_x, recipe.begin_w, recipe.add_products
    store, swapped = recipe.store, recipe.swapped
    _, move_in_x = recipe.x_places
    fetch_from = fetch_columns if x_turned else fetch_rows
    begin_x, find_x, fetch_x, X_FOUND = fetch_from(tile, slots, B, PIECE, recipe.x_places)
    find_w, fetch_w, W_FOUND = recipe.fetch_w
    repair = repair_line(B, tile, turned, x_turned, y_turned)
    repairs, nan_in = arithmetic == "highest", any_nan(*ACC)

    @cuda.jit(device=True)
    def find_kept(masks, first, last, step):
        """COLUMNS bits for each of the step's blocks of features: which blocks of w there are."""
        kept = int64(0)
        for p in range(BLOCKS):
            entry = first + uint32(step) // PARTS * BLOCKS + p
            if entry < last:
                kept |= int64(masks[entry] if COLUMNS > 1 else 1) << (p * COLUMNS)
        return kept

    def columns_from(c):
        """The products of each kept column from c on: unrolled, so acc[c] stays in registers."""

        @cuda.jit(device=True)
        def none(kept, ring, x_at, w_at, acc):
            pass

        if c == COLUMNS:
            return none
        rest = columns_from(c + 1)

        @cuda.jit(device=True)
        def add_column(kept, ring, x_at, w_at, acc):
            if kept >> c & 1:
                add_products(ring, x_at, w_at + c * SLOT, acc[c])
            rest(kept, ring, x_at, w_at, acc)

        return add_column

    add_columns = columns_from(0)
    # Three blocks of threads to a multiprocessor, at the price of a few registers kept in memory.
    three = arithmetic == "highest" and B <= 32 and not SIMULATED
    options = {"launch_bounds": (tile.threads, 3)} if three else {}

    @cuda.jit(**options)
    def kernel(
        x,
        stride,
        batch,
        in_features,
        values,
        order,
        indptr,
        indices,
        blocks,
        masks,
        y,
        out_features,
    ):
        ring = cuda.shared.array(0, ITEM, ALIGNMENT)  # stages, each of x and of w
        acc = cuda.local.array(ACC, float32)
        for c in range(COLUMNS):
            for m in range(TA):
                for n in range(TB):
                    for i in range(4):
                        acc[c, m, n, i] = 0
        warp = uint32(cuda.threadIdx.x) // 32
        strip = order[cuda.blockIdx.x % order.size]
        top, left = cuda.blockIdx.x // order.size * BM, strip * BN
        line = left // B if COLUMNS == 1 else strip
        first, last = indptr[line], indptr[line + 1]
        steps = (last - first + BLOCKS - 1) // BLOCKS * PARTS

        x_found = cuda.local.array(X_FOUND, int64)
        w_found = cuda.local.array(W_FOUND, int32)
        insides = cuda.local.array(W_FOUND, int64)
        x_begin = begin_x(stride, top)
        find_x(indices, first, last, 0, in_features, x_found)
        find_w(blocks, indices, first, last, 0, in_features, w_found, insides)
        kept = find_kept(masks, first, last, 0)
        own = warp * WM
        x_lane = begin_in_x(0, own // PIECE) if x_turned else begin_in_x(own, 0)
        w_lane = X_SIZE + begin_in_w()
        now = then = int64(0)  # where the stages start that are multiplied and fetched
        for step in range(-AHEAD, steps):  # the first ones only fetch
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                fetch_x(x, x_begin, stride, top, batch, x_found, in_features, ring, then)
                fetch_w(values, w_found, insides, left % B, coming, ring, then + X_SIZE)
                then = then + STAGE if then + STAGE < RING else 0
                find_x(indices, first, last, coming + 1, in_features, x_found)
                find_w(blocks, indices, first, last, coming + 1, in_features, w_found, insides)
            cp_async_commit()
            if step >= 0:
                for p in range(BLOCKS):
                    down, piece = (p * DEPTH, 0) if x_turned else (0, p * DEPTH // PIECE)
                    x_at = move_in_x(now + x_lane, down, piece)
                    w_at = now + w_lane + p * (COLUMNS * SLOT)
                    add_columns(kept >> (p * COLUMNS), ring, x_at, w_at, acc)
                now = now + STAGE if now + STAGE < RING else 0
                kept = find_kept(masks, first, last, step + 1)

        for c in range(COLUMNS):
            row, column = top + int64(warp * WM), left + c * ACROSS
            if swapped:
                store(acc[c], y, column, row, out_features, batch)
            else:
                store(acc[c], y, row, column, batch, out_features)
        if repairs and cuda.syncthreads_or(nan_in(acc)):
            repair(
                x, stride, batch, in_features, values, indices, blocks, first, last, y, top, left,
                out_features,
            )  # fmt: skip

    return kernel
