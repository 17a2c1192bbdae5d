"""forward and input-gradient: y = x @ w down the block columns of w, x @ w.T along its block rows.

A block of threads owns BM x BN of y, where BN features are a block column or a part of one. It goes
through the blocks that are kept there, BK features a step: a block, a part of one, or two blocks.
The longest columns are first: in the order of their numbers products took 4 to 10 % longer (H200).
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.aligned import aligned_either_way
from numbsparse.kernels.parts.copies import copying, copying_matrix
from numbsparse.kernels.parts.fragments import MMA, Products, Side, piece_of, products
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.plans import on_gpu_of, planned
from numbsparse.kernels.parts.plans_on_gpu import longest_first
from numbsparse.kernels.parts.repair import dense_of, nan_in_sums, repairing_lines
from numbsparse.kernels.parts.store import Output
from numbsparse.kernels.parts.store_tile import rows_from, store_tile, stored
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.layout import Index


class Tile(NamedTuple):
    """What a block of threads owns (BM, BN), BK, the length of a step, and stages in the ring."""

    BM: int
    BN: int
    BK: int
    STAGES: int

    @property
    def threads(self) -> int:
        return max(self.BM, 128)

    @property
    def warps(self) -> int:
        return self.threads // 32


class Shape(NamedTuple):
    """What a kernel is made for."""

    B: int
    tile: Tile
    arithmetic: str  # "float16", "bfloat16", or the precision of float32
    transposed: bool  # w, for the input-gradient
    x_transposed: bool  # x is feature-major
    y_transposed: bool  # then the sums of a warp are of y.T: a lane has neighbours along columns
    wide: bool  # y can be stored several values at once
    edge: bool  # features of x end inside their last block

    @property
    def depth(self) -> int:
        """Features of a block in a step."""
        return min(self.B, self.tile.BK)


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
    batch, size = y.shape[0], values.shape[1]
    transposed, edge = product == "input_grad", x.shape[1] % size > 0
    (x,), (x_transposed,) = aligned_either_way(x)
    dense = dense_of(x.T if x_transposed else x, values, index, transposed)
    flat, y_transposed, wide = stored(y)
    into = Output(flat, *(stride // y.itemsize for stride in y.strides), *y.shape)
    shape = Shape(size, tile, arithmetic, transposed, x_transposed, y_transposed, wide, edge)
    (order,) = planned(index, in_order, transposed, size // tile.BN)
    stage = (tile.BM + tile.BN) * tile.BK * values.itemsize
    launch(
        *(line_kernel(shape), -(-batch // tile.BM) * order.size, tile.threads),
        *(dense, order, into),
        shared_bytes=tile.STAGES * stage,
    )


def in_order(index: Index, transposed: bool, parts: int) -> tuple[np.ndarray]:
    """(strips of y, of which each line has so many, the longest first,)."""
    lengths = np.diff((index.rows if transposed else index.columns).indptr).repeat(parts)
    return (np.argsort(-lengths, kind="stable").astype(np.int32),)


@on_gpu_of(in_order)
def in_order_on_gpu(index: Index, transposed: bool, parts: int) -> tuple[DeviceArray]:
    return (longest_first((index.rows if transposed else index.columns).indptr, parts),)


def products_of(shape: Shape) -> tuple[Products, Any, Any, Any, Any]:
    """Of a tile of x and of a part of a block of w: how a warp multiplies them, and their places.

    (products, places of x, of w, lane_of(own), add(ring, x_at, w_at, acc)): lane_of says where a
    lane begins to read in both, when the warp has the rows of x from `own` on.
    """
    tile, PIECE, x_transposed = shape.tile, piece_of(shape.arithmetic), shape.x_transposed
    rows, across, depth = tile.BM // tile.warps, tile.BN, shape.depth
    x = Side((tile.BM if x_transposed else depth) // PIECE, not x_transposed)
    w = Side((depth if shape.transposed else across) // PIECE, shape.transposed)
    first, second, height, width = (
        (w, x, across, rows) if shape.y_transposed else (x, w, rows, across)
    )
    made = products(shape.arithmetic, height // 16, width // 8, depth, first, second)
    add_products, begin_x, begin_w = made.add, made.begin_a, made.begin_b
    places = made.a_places, made.b_places
    if shape.y_transposed:
        begin_x, begin_w, places = begin_w, begin_x, places[::-1]

    @cuda.jit(device=True)
    def lane_of(own):
        return begin_x(0, own // PIECE) if x_transposed else begin_x(own, 0), begin_w(0, 0)

    @cuda.jit(device=True)
    def add_swapped(ring, x_at, w_at, acc):
        add_products(ring, w_at, x_at, acc)

    return made, *places, lane_of, add_swapped if shape.y_transposed else add_products


@cache
def fetching(shape: Shape, x_places: Any, w_places: Any) -> tuple[int, Any, Any]:
    """(ROUNDS, find, fetch): what a step takes of x and w, looked up a step ahead, and its copies.

    `features` has the first feature of each block in a step, or -1; `found` the blocks of w that
    this thread copies, of ROUNDS, or -1, and `of_found` their first features.
    """
    B, (BM, BN, BK, _), edge, transposed = shape.B, shape.tile, shape.edge, shape.transposed
    DEPTH, PIECE = shape.depth, piece_of(shape.arithmetic)
    BLOCKS, PARTS = BK // DEPTH, B // DEPTH
    X_SIZE, W_SIZE, ALL_OF_X = BM * DEPTH, DEPTH * BN, BM * BK
    LINES, WIDTH = (BN, DEPTH) if transposed else (DEPTH, BN)
    threads = shape.tile.threads
    _, _, copy_x = copying_matrix(BM, DEPTH, PIECE, threads, shape.x_transposed, x_places)
    AT_ONCE, own, copy_w = copying(LINES, WIDTH, PIECE, threads, w_places)
    AT_ONCE = min(AT_ONCE, BLOCKS)
    ROUNDS = BLOCKS // AT_ONCE

    @cuda.jit(device=True)
    def find(indices, blocks, first, last, step, features, found, of_found):
        offset = uint32(step) % PARTS * DEPTH
        for p in range(BLOCKS):
            entry, features[p] = uint32(first + uint32(step) // PARTS * BLOCKS + p), -1
            if entry < last:
                features[p] = indices[entry] * B + offset
        for r in range(ROUNDS):
            p = own() + r * AT_ONCE
            entry, found[r] = uint32(first + uint32(step) // PARTS * BLOCKS + p), -1
            if p < BLOCKS and entry < last:
                found[r] = blocks[entry]
                if edge:
                    of_found[r] = indices[entry] * B + offset

    @cuda.jit(device=True)
    def fetch(x_side, top, values, left, step, features, found, of_found, ring, start):
        x, stride, batch, in_features = x_side
        for p in range(BLOCKS):
            if BLOCKS == 1 or features[p] >= 0:
                to = start + p * X_SIZE
                copy_x(x, stride, int64(top), batch, int64(features[p]), in_features, ring, to)
        offset = uint32(step) % PARTS * DEPTH
        row, column = (left, offset) if transposed else (offset, left)
        for r in range(ROUNDS):
            if BLOCKS == 1 or found[r] >= 0:
                inside = in_features - int64(of_found[r]) if edge else int64(DEPTH)
                lines, items = (int64(BN), inside) if transposed else (inside, int64(BN))
                to = start + ALL_OF_X + (own() + r * AT_ONCE) * W_SIZE
                copy_w(values, B, int64(found[r]) * B + row, column, lines, items, ring, to)

    return ROUNDS, find, fetch


@cache
def line_kernel(shape: Shape) -> Any:
    B, (BM, BN, BK, STAGES), arithmetic, _, x_transposed, y_transposed, wide, _ = shape
    AHEAD, PENDING, DEPTH = STAGES - 1, STAGES - 2, shape.depth
    BLOCKS, PARTS = BK // DEPTH, B // DEPTH  # blocks in a step, or steps in a block
    X_SIZE, W_SIZE = BM * DEPTH, DEPTH * BN  # of a block
    STAGE = BLOCKS * (X_SIZE + W_SIZE)
    RING, WM = STAGES * STAGE, BM // shape.tile.warps
    ITEM = uint16 if arithmetic in MMA else float32
    made, x_places, w_places, lane_of, add_products = products_of(shape)
    TA, TB, ACC = made.TA, made.TB, (made.TA, made.TB, 4)
    ROUNDS, find, fetch = fetching(shape, x_places, w_places)
    store = store_tile(arithmetic, TA, TB, wide, rows_from(arithmetic, TA))
    repair, repairs = repairing(shape), arithmetic == "highest"
    # Three blocks of threads to a multiprocessor, at the price of a few registers kept in memory.
    three = arithmetic == "highest" and B <= 32 and not SIMULATED
    options = {"launch_bounds": (shape.tile.threads, 3)} if three else {}

    @cuda.jit(**options)
    def kernel(dense, order, y):
        x, x_strides, in_features, values, _, indptr, indices, blocks, _ = dense
        out, _, _, batch, out_features = y
        ring = cuda.shared.array(0, ITEM, ALIGNMENT)  # stages, each of x and of w
        acc = cuda.local.array(ACC, float32)
        clear(acc)
        block, strips = uint32(cuda.blockIdx.x), uint32(order.size)
        top, left = uint32(block // strips * BM), uint32(order[block % strips] * BN)
        first, last = indptr[left // B], indptr[left // B + 1]
        steps = int32(uint32(last - first + BLOCKS - 1) // BLOCKS * PARTS)

        features = cuda.local.array(BLOCKS, int32)
        found, of_found = cuda.local.array(ROUNDS, int32), cuda.local.array(ROUNDS, int32)
        find(indices, blocks, first, last, 0, features, found, of_found)
        x_side = x, x_strides[1 if x_transposed else 0], batch, in_features
        own = uint32(cuda.threadIdx.x) // 32 * WM
        x_lane, w_lane = lane_of(own)
        now = then = uint32(0)  # where the stages start that are multiplied and fetched
        for step in range(int32(-AHEAD), steps):  # the first ones only fetch
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = int32(step + AHEAD)
            if coming < steps:
                fetch(x_side, top, values, left % B, coming, features, found, of_found, ring, then)
                then = uint32(then + STAGE) if then + STAGE < RING else uint32(0)
                find(indices, blocks, first, last, coming + 1, features, found, of_found)
            cp_async_commit()
            if step >= 0:
                for p in range(BLOCKS):
                    if BLOCKS == 1 or first + step * BLOCKS + p < last:
                        x_at = now + p * X_SIZE + x_lane
                        w_at = now + BLOCKS * X_SIZE + p * W_SIZE + w_lane
                        add_products(ring, x_at, w_at, acc)
                now = uint32(now + STAGE) if now + STAGE < RING else uint32(0)

        row, column = top + int64(own), int64(left)
        if y_transposed:
            store(acc, out, (column, out_features), row, batch)
        else:
            store(acc, out, (row, batch), column, out_features)
        if repairs and cuda.syncthreads_or(nan_in_sums(acc)):
            repair(y, top, left, dense)

    return kernel


@cache
def repairing(shape: Shape) -> Any:
    """Of the tile that a block of threads wrote, where y is NaN: y = x @ w by plain sums."""
    (BM, BN, *_), y_transposed = shape.tile, shape.y_transposed
    THREADS, B, repair_one = shape.tile.threads, shape.B, repairing_lines()

    @cuda.jit(device=True)
    def repair(y, top, left, dense):
        for item in range(cuda.threadIdx.x, BM * BN, THREADS):
            in_row, in_column = (item % BM, item // BM) if y_transposed else (item // BN, item % BN)
            row, feature = top + in_row, int64(left + in_column)
            if row < y[3] and feature < y[4]:
                repair_one(y, row, feature, B, dense)

    return repair
