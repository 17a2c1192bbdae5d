"""The weight-gradient of float32: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

A block of threads takes a region: up to XT tiles of x that are neighbours, up to YT tiles of dy,
each 32 features wide, and every kept cell where one of these meets one of those; a cell is a block
of w, or a part of one. The tiles are loaded once for all cells, and each warp multiplies its own
cells from them. The last regions, those past a whole number of waves, would leave most of the GPU
idle: they are cut along the batch, and a second kernel adds the pieces in their order.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers, shared_memory
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k5_tensor_core.store import store_float32, stored
from numbsparse.kernels.parts.aligned import aligned_either_way
from numbsparse.kernels.parts.copies import copying_matrix
from numbsparse.kernels.parts.deal import begins, in_order
from numbsparse.kernels.parts.fragments import Products, Side, products
from numbsparse.kernels.parts.fragments_tf32 import PIECE
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.parts.pieces import add_saved, clear, save
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.repair import any_nan, factors_of, repairing_blocks
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.layout import Index

WIDTH = 32  # of a tile
BYTES = 4  # of a value
LEAST_STEPS = 4  # of a piece of a region
MOST_PIECES = 8


class Region(NamedTuple):
    """What a block of threads takes: all cells of one tile of dy have to fit in."""

    XT: int  # tiles of x
    YT: int  # tiles of dy
    CELLS: int  # a warp
    WARPS: int
    NT: int  # rows of the batch in a step
    STAGES: int
    PER_SM: int  # blocks of threads that a multiprocessor holds

    @property
    def threads(self) -> int:
        return self.WARPS * 32

    @property
    def tiles(self) -> int:
        return self.XT + self.YT

    @property
    def stage(self) -> int:
        """Items of a stage."""
        return self.tiles * self.NT * WIDTH

    @property
    def capacity(self) -> int:
        return self.CELLS * self.WARPS


class Cells(NamedTuple):
    """What a kernel is made for."""

    B: int
    region: Region
    precision: str
    x_transposed: bool  # x is feature-major
    dy_transposed: bool
    wide: bool  # dvalues can be stored several values at once

    @property
    def side(self) -> int:
        return cell_side(self.B)

    @property
    def sums(self) -> tuple[int, int, int]:
        """Of a cell, as a lane has them."""
        return self.side // 16, self.side // 8, 4


def multiply_regions(x, dy, index, dvalues, precision):
    (n_blocks, size, _), batch = dvalues.shape, x.shape[0]
    if not n_blocks:
        return
    region = region_of(size)
    plan = planned(index, regions, size, region)
    (x, x_transposed), (dy, dy_transposed) = map(aligned_either_way, (x, dy))
    out, _, wide = stored(dvalues.reshape(-1, size))
    cells = Cells(size, region, precision, x_transposed, dy_transposed, wide)
    count = plan[0].shape[0]
    whole, pieces = cut(count, -(-batch // region.NT), region.PER_SM)
    sums = region.capacity * cells.side**2  # of a piece of a region
    parts = empty(((count - whole) * pieces * sums if pieces > 1 else 1,), np.float32)
    dense = factors_of(x, dy, (x_transposed, dy_transposed), index)
    operands = dense, *plan, out, parts, whole, pieces
    shared = region.STAGES * region.stage * BYTES
    grid, threads = whole + (count - whole) * pieces, region.threads
    launch(region_kernel(cells), grid, threads, *operands, shared_bytes=shared)
    if pieces > 1:
        launch(sum_kernel(cells), (count - whole) * region.CELLS, threads, *operands)


def region_of(size: int) -> Region:
    """The region for blocks of this size."""
    if size == 16:
        region = Region(16, 16, 14, 8, 16, 3, 1)
        least = region.stage * region.STAGES * BYTES
        few = (shared_memory() or least) < least
        return Region(6, 10, 7, 4, 16, 3, 1) if few else region
    return Region(1, 4, 1, 4, 32, 3, 3) if size == 32 else Region(2, 2, 1, 4, 32, 3, 3)


def cut(count: int, steps: int, per_sm: int) -> tuple[int, int]:
    """(whole, pieces): how many regions stay whole, and into how many pieces each other is cut."""
    places = per_sm * multiprocessors()
    rest = count % places
    most = min(MOST_PIECES, steps // LEAST_STEPS)
    if rest == 0 or most < 2:
        return count, 1

    def time(pieces: int) -> float:
        return -(-rest * pieces // places) / pieces + 0.01 * pieces

    pieces = min(range(1, most + 1), key=time)
    return (count, 1) if pieces == 1 else (count - rest, pieces)


def cell_side(B: int) -> int:
    return min(B, WIDTH)


def regions(index: Index, B: int, region: Region) -> tuple[Any, ...]:
    """(tiles, cells, targets), int32, a row for each region; the fullest regions first.

    tiles (XT + YT) : the first feature of each tile, -1 where there is none
    cells (CELLS * WARPS) : a cell's first column among the tiles of x and, times 2^16, of dy; or -1
    targets (CELLS * WARPS) : where a cell begins in dvalues seen as rows of a cell's width, or -1
    """
    side = cell_side(B)
    rows, columns, target = _cells(index, B, side)
    panel, tile = rows * side // (region.XT * WIDTH), columns * side // WIDTH
    order = in_order(rows, columns, panel)
    rows, columns, target, panel, tile = (a[order] for a in (rows, columns, target, panel, tile))
    of_region = np.empty(rows.size, np.int64)
    count = _fill(panel, tile, region.YT, region.capacity, of_region)
    starts = np.searchsorted(of_region, np.arange(count))
    sizes = np.diff(np.append(starts, rows.size))
    rank = np.empty(count, np.int64)  # the fullest first
    rank[np.argsort(-sizes, kind="stable")] = np.arange(count)

    group_of_cell = np.cumsum(begins(panel, tile)) - 1
    y_tile = group_of_cell - group_of_cell[starts][of_region]
    x_tile = rows * side // WIDTH - panel * region.XT
    at = rank[of_region]
    tiles = np.full((count, region.XT + region.YT), -1, np.int32)
    tiles[at, x_tile] = rows * side // WIDTH * WIDTH
    tiles[at, region.XT + y_tile] = tile * WIDTH

    number = np.arange(rows.size) - starts[of_region]
    slot = number % region.WARPS * region.CELLS + number // region.WARPS
    cells = np.full((count, region.capacity), -1, np.int32)
    x_at = x_tile * WIDTH + rows * side % WIDTH
    y_at = y_tile * WIDTH + columns * side % WIDTH
    cells[at, slot] = x_at | y_at << 16
    targets = np.full((count, region.capacity), -1, np.int32)
    targets[at, slot] = target
    return tiles, cells, targets


def _cells(index: Index, B: int, side: int) -> tuple[np.ndarray, ...]:
    """The row and column of each cell, counted in cells, and where it begins."""
    parts = B // side
    row, column = (a.reshape(-1) for a in np.indices((parts, parts)))
    block = np.arange(index.block_rows.size)[:, None]
    rows = (index.block_rows[:, None] * np.int64(parts) + row).reshape(-1)
    columns = (index.block_columns[:, None] * np.int64(parts) + column).reshape(-1)
    return rows, columns, ((block * B + row * side) * parts + column).reshape(-1)


@compiled(error_model="numpy")
def _fill(panel, tile, most, capacity, of_region):
    """Runs of groups, the cells of one tile of dy each, that fit into a region; how many."""
    region, tiles, free, cell = -1, 0, 0, 0
    while cell < tile.size:
        end = cell + 1
        while end < tile.size and panel[end] == panel[cell] and tile[end] == tile[cell]:
            end += 1
        tiles, free = tiles + 1, free - (end - cell)
        if cell == 0 or panel[cell] != panel[cell - 1] or tiles > most or free < 0:
            region, tiles, free = region + 1, 1, capacity - (end - cell)
        for k in range(cell, end):
            of_region[k] = region
        cell = end
    return region + 1


def products_of(cells: Cells) -> Products:
    """Of a cell's parts of the tiles of x and of dy."""
    NT, (TA, TB, _) = cells.region.NT, cells.sums
    orders = cells.x_transposed, cells.dy_transposed
    sides = (Side((NT if along else WIDTH) // PIECE, along) for along in orders)
    return products(cells.precision, TA, TB, NT, *sides)


@cache
def adding_cells(cells: Cells) -> Any:
    """add_step(ring, start, codes, acc): each warp by mma.sync, cell after cell."""
    region, x_transposed, dy_transposed = cells.region, cells.x_transposed, cells.dy_transposed
    XT, CELLS, TILE = region.XT, region.CELLS, region.NT * WIDTH
    made = products_of(cells)
    (_, move_in_x), (_, move_in_dy) = made.a_places, made.b_places
    begin_in_x, begin_in_dy, add_products = made.begin_a, made.begin_b, made.add

    def adding(q):
        @cuda.jit(device=True)
        def add_cell(ring, x_lane, dy_lane, codes, first, acc):
            code = codes[uint32(first + q)]
            if code >= 0:
                x_at, y_at = uint32(code & 0xFFFF), uint32(code >> 16)
                x_in, y_in = x_at % WIDTH, y_at % WIDTH
                x_line, x_piece = (x_in, 0) if x_transposed else (0, x_in // PIECE)
                y_line, y_piece = (y_in, 0) if dy_transposed else (0, y_in // PIECE)
                x_at = move_in_x(x_lane + x_at // WIDTH * TILE, x_line, x_piece)
                y_at = move_in_dy(dy_lane + y_at // WIDTH * TILE, y_line, y_piece)
                add_products(ring, x_at, y_at, acc[q])

        return add_cell

    add_cells = one_by_one(adding, CELLS)

    @cuda.jit(device=True)
    def add_step(ring, start, codes, acc):
        first = uint32(cuda.threadIdx.x) // 32 * CELLS
        x_lane, dy_lane = start + begin_in_x(0, 0), start + XT * TILE + begin_in_dy(0, 0)
        add_cells(ring, x_lane, dy_lane, codes, first, acc)

    return add_step


@cache
def fetching(cells: Cells) -> Any:
    """fetch(x_side, dy_side, batch, row, features, ring, start): a step's tiles, as they are."""
    made, region = products_of(cells), cells.region
    XT, NT, TILES, THREADS = region.XT, region.NT, region.tiles, region.threads
    tile, TILE = (NT, WIDTH, PIECE, THREADS), NT * WIDTH
    AT_ONCE, own, copy_x = copying_matrix(*tile, cells.x_transposed, made.a_places)
    _, _, copy_dy = copying_matrix(*tile, cells.dy_transposed, made.b_places)

    @cuda.jit(device=True)
    def fetch(x_side, dy_side, batch, row, features, ring, start):
        (x, x_stride, in_features), (dy, dy_stride, out_features) = x_side, dy_side
        for r in range(0, XT, AT_ONCE):
            i = uint32(r + own())
            feature = features[i] if i < XT else -1
            if feature >= 0:
                to = start + i * TILE
                copy_x(x, x_stride, row, batch, int64(feature), in_features, ring, to)
        for r in range(XT, TILES, AT_ONCE):
            i = uint32(r + own())
            feature = features[i] if i < TILES else -1
            if feature >= 0:
                to = start + i * TILE
                copy_dy(dy, dy_stride, row, batch, int64(feature), out_features, ring, to)

    return fetch


@cache
def region_kernel(cells: Cells) -> Any:
    region = cells.region
    CELLS, NT, STAGES, TILES = region.CELLS, region.NT, region.STAGES, region.tiles
    CAPACITY, THREADS = region.capacity, region.threads
    AHEAD, PENDING, STAGE, RING = STAGES - 1, STAGES - 2, region.stage, STAGES * region.stage
    (TA, TB, _), ACC = cells.sums, (CELLS, *cells.sums)
    clear_sums, save_sums = clear(TA, TB), save(TA, TB)
    fetch, add_step, finish = fetching(cells), adding_cells(cells), finishing(cells, CELLS)

    @cuda.jit(**registers(THREADS * region.PER_SM))
    def kernel(dense, tiles, codes, targets, dvalues, parts, whole, pieces):
        x, dy, (x_stride, dy_stride, in_features, out_features, batch), _, _ = dense
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # stages, each of tiles of x and of dy
        features = cuda.shared.array(TILES, int32)
        own = cuda.shared.array(CAPACITY, int32)
        acc = cuda.local.array(ACC, float32)
        for q in range(CELLS):
            clear_sums(acc[q])
        t = uint32(cuda.threadIdx.x)
        warp = t // 32
        item, piece, of = uint32(cuda.blockIdx.x), uint32(0), uint32(1)
        if item >= whole:
            number, cut_items = uint32(item - whole), uint32(tiles.shape[0] - whole)
            piece, of = uint32(number // cut_items), uint32(pieces)
            item = uint32(whole + number % cut_items)
        for i in range(t, TILES, THREADS):
            features[i] = tiles[item, i]
        for i in range(t, CAPACITY, THREADS):
            own[i] = codes[item, i]
        cuda.syncthreads()

        x_side, dy_side = (x, x_stride, in_features), (dy, dy_stride, out_features)
        now = then = int64(0)  # where the stages start that are multiplied and fetched
        steps = uint32((batch + NT - 1) // NT)
        begin, end = int64(uint32(steps * piece) // of), int64(uint32(steps * (piece + 1)) // of)
        for step in range(begin - AHEAD, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < end:
                fetch(x_side, dy_side, batch, coming * NT, features, ring, then)
                then = then + STAGE if then + STAGE < RING else 0
            cp_async_commit()
            if step >= begin:
                add_step(ring, now, own, acc)
                now = now + STAGE if now + STAGE < RING else 0

        if of > 1:
            for q in range(CELLS):
                cell = ((item - whole) * pieces + piece) * CAPACITY + warp * CELLS + q
                save_sums(parts, cell, acc[q])
        else:
            finish(dense, targets, dvalues, item, warp * CELLS, acc)

    return kernel


@cache
def sum_kernel(cells: Cells) -> Any:
    """dvalues of the regions that were cut: a warp adds the pieces of a cell in their order."""
    region, (TA, TB, _) = cells.region, cells.sums
    clear_sums, add_piece = clear(TA, TB), add_saved(TA, TB)
    PER_WARP, WARPS, CAPACITY = region.CELLS, region.WARPS, region.capacity
    ACC, finish = (1, *cells.sums), finishing(cells, 1)

    @cuda.jit
    def kernel(dense, tiles, codes, targets, dvalues, parts, whole, pieces):
        t = uint32(cuda.threadIdx.x)
        number = int64(cuda.blockIdx.x)
        cell = number % PER_WARP * WARPS + t // 32
        cut_item = number // PER_WARP
        acc = cuda.local.array(ACC, float32)
        clear_sums(acc[0])
        for p in range(pieces):
            add_piece(parts, (cut_item * pieces + p) * CAPACITY + cell, acc[0])
        finish(dense, targets, dvalues, whole + cut_item, cell, acc)

    return kernel


@cache
def finishing(cells: Cells, CELLS: int) -> Any:
    """dvalues of CELLS cells of a warp, from `first` on, = acc, and repaired where that is NaN."""
    SIDE, (TA, TB, _) = cells.side, cells.sums
    B, PARTS = int64(cells.B), cells.B // SIDE
    store_cell = store_float32(TA, TB, False, cells.wide, whole=True)
    nan_in, repair = any_nan(CELLS, *cells.sums), repairing(cells)

    def storing(c):
        @cuda.jit(device=True)
        def store_one(targets, dvalues, item, first, acc):
            target = int64(targets[item, first + c])
            if target >= 0:
                top, left = target // PARTS, target % PARTS * SIDE
                store_cell(acc[c], dvalues, top, left, top, B)

        return store_one

    store_all = one_by_one(storing, CELLS)

    @cuda.jit(device=True)
    def finish(dense, targets, dvalues, item, first, acc):
        store_all(targets, dvalues, item, first, acc)
        if cuda.syncthreads_or(nan_in(acc)):
            for c in range(CELLS):
                repair(dense, targets, dvalues, item, first + c)

    return finish


@cache
def repairing(cells: Cells) -> Any:
    """dvalues of a cell, where some are NaN, as an infinity times a 0 beyond the features is."""
    SIDE, PARTS, exact = cells.side, cells.B // cells.side, cells.precision == "highest"
    repair_one = repairing_blocks(cells.B, inside=exact)
    orders = False, cells.x_transposed, cells.dy_transposed

    @cuda.jit(device=True)
    def repair(dense, targets, dvalues, item, cell):
        target = int64(targets[item, cell])
        for number in range(cuda.threadIdx.x % 32, SIDE * SIDE if target >= 0 else 0, 32):
            at = (target + number // SIDE * PARTS) * SIDE + number % SIDE
            repair_one(dvalues, at, dense, orders)

    return repair
