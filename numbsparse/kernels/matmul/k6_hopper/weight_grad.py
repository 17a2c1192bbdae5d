"""The weight-gradient of rung 6: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

Both factors are summed down the batch, so batch-major they lie turned, and wgmma takes them so; of
feature-major ones the lines run along the sum. What limits it is reading them: a block of B x B
sums takes 2 B values of each row of the batch. So a block of threads, or a cluster of two, computes
many kept blocks together that share block rows and block columns, and the copy engine brings each
of their tiles from L2 once. At B = 32 the products then read shared memory as fast as it gives.

Reads per output, for a sum of K products: K / B times the tiles per kept block, 2 where nothing is
shared. On a random layout of density 0.1 these are 0.7 at B = 32 (`weight_grad_regions`), 1.0 at
B = 64 (`weight_grad_pairs`) and 1.3 at B = 128 (a block row for a cluster, `weight_grad_items`).

Where the rows of x and dy are long, one item of up to 52 kept blocks for each multiprocessor, whose
sums are up to 208 registers of each thread that multiplies, has all of them go down the batch side
by side: then each row comes from memory once. More stages would let some run ahead of others, which
then find what they share no longer in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.dtypes import is_bfloat16
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way
from numbsparse.kernels.matmul.k6_hopper.weight_grad_fours import in_fours
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import RUNS, Tile
from numbsparse.kernels.matmul.k6_hopper.weight_grad_kernel import (
    add_kernel,
    shared_bytes,
    threads,
    weight_grad_kernel,
)
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import plan
from numbsparse.kernels.matmul.plans import planned
from numbsparse.layout import Index

TILES = {
    32: Tile(32, 4, 4, (32,), 32, 3, 37, 1, REGISTERS=(24, 112)),
    64: Tile(64, 2, 1, (64, 128, 192, 256), 64, 3, 9, 1, 2),
    128: Tile(128, 2, 1, (128, 256), 64, 4, 6, 2),
}
# The most kept blocks of a multiprocessor that it takes at once, if there are so many features that
# a second item for some, which reads x and dy from memory once more, would take longer.
AT_ONCE = (
    (43, Tile(32, 3, 8, (32,), 32, 2, 56, 1, REGISTERS=(24, 160))),
    (50, Tile(32, 2, 13, (32,), 32, 2, 56, 1, REGISTERS=(24, 240))),
)
FEATURES_AT_ONCE = 24_576  # of x and dy
OF_FEW = Tile(64, 2, 6, (64,), 64, 3, 9, 1, REGISTERS=(40, 232))  # kept blocks at B = 64
FEW = 4  # of a multiprocessor
# Of a feature-major dy at B = 32. With a batch-major one, four stages would let some blocks of
# threads run ahead of others, which then find what they share no longer in the L2 cache.
OF_LINES = TILES[32]._replace(STAGES=4, SLOTS=27)
OF_FOURS = Tile(32, 2, 1, (64, 128, 192, 256), 128, 2, 12, 1, 1)
THREADS_TO_ADD = 256


def weight_grad(x, dy, index, dvalues):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    (n_blocks, B, _), batch = dvalues.shape, x.shape[0]
    if n_blocks == 0:
        return
    if batch == 0:
        fill(dvalues, 0.0)
        return
    (x, x_columns), (dy, dy_columns) = aligned_either_way(x), aligned_either_way(dy)
    x_turned, dy_turned = not x_columns, not dy_columns  # over, by wgmma, as the batch is summed
    tile = tile_of(B, x_turned, dy_turned, index)
    steps = -(-batch // tile.DEPTH)
    edges = edge_of(x, tile, x_turned), edge_of(dy, tile, dy_turned)
    *tables, cut, pieces = planned(
        index, plan, tile, steps, multiprocessors() * tile.RESIDENT, edges
    )
    kind = "bf16" if is_bfloat16(dvalues.dtype) else "f16"
    sums = empty((max(pieces * cut.size, 1), B, B), np.float32)
    launch(
        weight_grad_kernel(tile, kind, x_turned, dy_turned),
        tables[0].shape[0],
        threads(tile),
        tensor_maps(*boxes(x, tile, x_turned), *boxes(dy, tile, dy_turned)),
        *tables,
        as_stored(dvalues),
        sums,
        shared_bytes=shared_bytes(tile),
        cluster=(tile.CLUSTER,) if tile.CLUSTER > 1 else None,
    )
    if pieces:
        add = add_kernel(kind, B)
        grid = cut.size, B * B // THREADS_TO_ADD
        launch(add, grid, THREADS_TO_ADD, sums, cut, pieces, dvalues.view(np.uint16))


def tile_of(B: int, x_turned: bool, dy_turned: bool, index: Index) -> Tile:
    if B == 32 and dy_turned and planned(index, in_fours)[0]:
        return OF_FOURS._replace(DEPTH=64) if SIMULATED else OF_FOURS
    blocks = -(-index.block_rows.shape[0] // multiprocessors())
    features = B * (index.rows.indptr.shape[0] + index.columns.indptr.shape[0] - 2)
    tile = TILES[B]
    if B == 32 and not dy_turned:
        tile = OF_LINES
    elif B == 32 and x_turned and features >= FEATURES_AT_ONCE and blocks > tile.MOST:
        tile = next((each for most, each in AT_ONCE if blocks <= most), tile)
    elif B == 64 and blocks <= FEW:
        tile = OF_FEW
    if SIMULATED:
        return tile._replace(GROUPS=1 if B == 32 else 2, STAGES=2, LOADERS=1)
    return tile


def edge_of(x: DeviceArray, tile: Tile, turned: bool) -> tuple[int, bool]:
    """(whole panels, whether a part of one follows) of the features."""
    whole, rest = divmod(x.shape[1 if turned else 0], tile.PANEL)
    return whole, rest > 0


def boxes(x: DeviceArray, tile: Tile, turned: bool) -> list[tuple[DeviceArray, Any, int]]:
    """What the copies bring: runs of panels, a panel an axis of its own, and the one at the edge.

    As an axis of its own, panels beyond the last are zeros; the features of the last one end in it.
    """
    P, item = tile.PANEL, x.itemsize
    features = x.shape[1 if turned else 0]
    whole, rest = divmod(features, P)
    line = x.strides[0] if x.shape[0] > 1 else -(-x.shape[1] * item // 16) * 16
    step = P * (item if turned else line)

    def panels(first: int, count: int, width: int) -> DeviceArray:
        lines = (x.shape[0], width) if turned else (width, x.shape[1])
        address, strides = x.address + first * step, (step, line, item)
        return DeviceArray(address, (count, *lines), x.dtype, strides, x.owner)

    part = panels(whole, 1, rest) if rest else panels(0, whole, P)
    all_whole = panels(0, whole, P) if whole else part
    lines = (tile.DEPTH, P) if turned else (P, tile.DEPTH)
    swizzle = 2 * lines[1]
    found = [(all_whole, (run, *lines), swizzle) for run in RUNS]
    return [*found, (part, (1, *lines), swizzle)]


def as_stored(dvalues: DeviceArray) -> DeviceArray:
    """dvalues as what a thread writes at once: one number, or two neighbours of a line."""
    if dvalues.shape[1] == 32:
        return dvalues.view(np.uint16)
    n_blocks, B, _ = dvalues.shape
    return DeviceArray(dvalues.address, (n_blocks, B, B // 2), np.uint32, None, dvalues.owner)
