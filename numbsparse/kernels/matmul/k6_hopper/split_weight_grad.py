"""The weight-gradient of float32 by `wgmma` of tf32.

wgmma takes its second factor from shared memory with the terms of the sum side by side, and dy has
them below each other. So at each step the threads split the tiles of dy into hi and lo and turn
them over; that is why a region here is one or two tiles of dy and as many tiles of x as there are
warps, all of them kept blocks of one block column: each image of dy serves the whole region.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint32

from numbsparse.kernels.matmul.k5_tensor_core import singles
from numbsparse.kernels.matmul.k5_tensor_core.cells import PIECE, Cells
from numbsparse.kernels.matmul.k5_tensor_core.regions import WIDTH, Region
from numbsparse.kernels.matmul.k5_tensor_core.weight_grad_singles import Recipe, multiply_regions
from numbsparse.kernels.matmul.k6_hopper.split import products
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import as_float32, fence_proxy_async, load_4xf32
from numbsparse.layout import Index

NT = 32  # rows of the batch in a step


def region_of(size: int) -> Region:
    return Region(4, 1, 1, 4, NT, 3, 3) if size == 32 else Region(4, 2, 1, 4, NT, 3, 2)


def weight_grad(x, dy, index, dvalues, precision):
    size = dvalues.shape[1]
    region = region_of(size)
    shape = WIDTH, region.YT * WIDTH
    plan = planned(index, columns, size, region)
    multiply_regions(x, dy, dvalues, precision, shape, region, plan, recipe_of)


def columns(index: Index, B: int, region: Region) -> tuple[Any, ...]:
    """(tiles, cells, targets) as `regions` gives them; a region stays within a column of cells."""
    XT, width = region.XT, region.YT * WIDTH
    part_row, part = (a.reshape(-1) for a in np.indices((B // WIDTH, B // width)))
    block = np.arange(index.block_rows.size)[:, None]
    rows = (index.block_rows[:, None] * np.int64(B // WIDTH) + part_row).reshape(-1)
    across = (index.block_columns[:, None] * np.int64(B // width) + part).reshape(-1)
    target = ((block * B + part_row * WIDTH) * (B // width) + part).reshape(-1)
    order = np.lexsort((rows, across))
    rows, across, target = rows[order], across[order], target[order]

    cells_of_column = np.bincount(across)
    before = np.cumsum(cells_of_column) - cells_of_column
    number = np.arange(rows.size) - before[across]  # in its column
    regions_of_column = -(-cells_of_column // XT)
    region_of_cell = (np.cumsum(regions_of_column) - regions_of_column)[across] + number // XT
    sizes = np.bincount(region_of_cell)
    rank = np.empty(sizes.size, np.int64)  # the fullest first
    rank[np.argsort(-sizes, kind="stable")] = np.arange(sizes.size)

    at, slot = rank[region_of_cell], number % XT
    tiles = np.full((sizes.size, XT + region.YT), -1, np.int32)
    cells, targets = (np.full((sizes.size, XT), -1, np.int32) for _ in range(2))
    tiles[at, slot] = rows * WIDTH
    for k in range(region.YT):
        tiles[at, XT + k] = across * width + k * WIDTH
    cells[at, slot] = slot * WIDTH
    targets[at, slot] = target
    return tiles, cells, targets


@cache
def recipe_of(cells: Cells) -> Recipe:
    _, _, N, region, precision, x_turned, dy_turned, _ = cells
    TILE, STAGES = NT * WIDTH, region.STAGES * (region.XT + region.YT) * NT * WIDTH
    X_SIDE = (NT if x_turned else WIDTH) // PIECE, x_turned
    begin_in_x, add_products = products(precision, 2, N, NT, *X_SIDE)
    dy_places = singles.places(WIDTH // PIECE, dy_turned, 4, NT)
    turn_over = turn(region, precision, dy_turned, dy_places)
    XT = region.XT

    @cuda.jit(device=True)
    def add_step(ring, start, codes, acc):
        turn_over(ring, start + XT * TILE, STAGES)
        fence_proxy_async()
        cuda.syncthreads()
        warp = uint32(cuda.threadIdx.x) // 32
        add_products(ring, start + warp * TILE + begin_in_x(0, 0), STAGES, acc[0])

    return Recipe(singles.places(*X_SIDE, 4, NT), dy_places, 2 * NT * N, add_step)


@cache
def turn(region: Region, precision: str, dy_turned: bool, dy_places: Any) -> Any:
    """The image of the tiles of dy: see `split.split_kernel`. A lane turns four values at once."""
    N, WARPS = region.YT * WIDTH, region.WARPS
    HALF = NT * N
    exact = precision == "highest"
    split = singles.split_exact if exact else singles.round_to_tf32
    begin, _ = singles.fragment(WIDTH // PIECE, dy_turned, 4, NT)
    _, move = dy_places

    def units_from(unit):
        """Every WARPS-th unit from this on: 16 terms, a fourth of 32 columns or of these terms."""

        @cuda.jit(device=True)
        def none(ring, at, image):
            pass

        if unit >= 8 * region.YT:
            return none
        rest = units_from(unit + WARPS)

        @cuda.jit(device=True)
        def turn_unit(ring, at, image):
            own = unit + uint32(cuda.threadIdx.x) // 32
            chunk, j, group = own % 2, own // 2 % 4, own // 8
            tile = at + group * (NT * WIDTH)
            if dy_turned:
                values = load_4xf32(ring, move(tile, j, 4 * chunk))
            else:
                values = load_4xf32(ring, move(tile, 16 * chunk + j, 0))
            for e in range(4):
                term, column = (e, j) if dy_turned else (j, e)
                place = (chunk * 4 + term) * (N // 8) + 4 * group + column
                to = image + place * 32 + uint32(cuda.threadIdx.x) % 32
                hi, lo = split(values[e])
                ring[to] = as_float32(hi)
                if exact:
                    ring[to + HALF] = as_float32(lo)
            rest(ring, at, image)

        return turn_unit

    turn_units = units_from(0)

    @cuda.jit(device=True)
    def turn_over(ring, start, image):
        turn_units(ring, start + begin(0, 0), image)

    return turn_over
