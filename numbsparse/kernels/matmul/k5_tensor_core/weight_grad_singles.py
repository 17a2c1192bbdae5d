"""The weight-gradient of float32: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

A block of threads takes a region (see `regions`): its tiles of x and dy come once for all of its
cells, and each warp multiplies its own cells out of them. The last regions, those past a whole
number of waves, would leave most of the GPU idle: they are cut along the batch, and a second
kernel adds the pieces in their order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import SIMULATED, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.matmul.aligned import BYTES, aligned_lines
from numbsparse.kernels.matmul.k5_tensor_core import singles
from numbsparse.kernels.matmul.k5_tensor_core.cells import (
    PIECE,
    Cells,
    fetch_tile,
    finish_cells,
    sum_kernel,
)
from numbsparse.kernels.matmul.k5_tensor_core.regions import WIDTH, Region, cell_shape, regions
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.kernels.views import span

LEAST_STEPS = 4  # of a piece of a region
MOST_PIECES = 8


def region_of(size: int) -> Region:
    if size == 16:
        return Region(16, 16, 14, 8, 16, 3, 1)
    return Region(1, 4, 1, 4, 32, 3, 3) if size == 32 else Region(2, 2, 1, 4, 32, 3, 3)


def weight_grad(x, dy, index, dvalues, precision):
    size = dvalues.shape[1]
    region, shape = region_of(size), cell_shape(size)
    plan = planned(index, regions, size, region)
    if not dvalues.shape[0]:
        return
    (batch, in_features), out_features, count = x.shape, dy.shape[1], plan[0].shape[0]
    (x, x_stride, x_turned), (dy, dy_stride, dy_turned) = aligned_lines(x), aligned_lines(dy)
    wide = dvalues.address % BYTES == 0
    cells = Cells(dvalues.shape[1], *shape, region, precision, x_turned, dy_turned, wide)
    whole, pieces = cut(count, -(-batch // region.NT), region.PER_SM)
    size = region.capacity * shape[0] * shape[1]  # of a piece of a region
    parts = empty(((count - whole) * pieces * size if pieces > 1 else 1,), dvalues.dtype)
    dense = x, x_stride, in_features, dy, dy_stride, out_features, batch
    operands = *dense, *plan, span(dvalues), parts, whole, pieces
    stage = (region.XT + region.YT) * WIDTH * region.NT
    shared = region.STAGES * stage * dvalues.itemsize
    grid, threads = whole + (count - whole) * pieces, region.WARPS * 32
    launch(region_kernel(cells), grid, threads, *operands, shared_bytes=shared)
    if pieces > 1:
        launch(sum_kernel(cells), (count - whole) * region.CELLS, threads, *operands)


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


@cache
def products(cells: Cells) -> tuple[Any, Any, Any]:
    """(places of x, of dy, add_step): each warp by mma.sync, cell after cell; see `swizzle`."""
    _, height, width, region, precision, x_turned, dy_turned, _ = cells
    XT, NT, CELLS, TILE = region.XT, region.NT, region.CELLS, region.NT * WIDTH
    TA, TB = height // 16, width // 8
    X_PIECES, Y_PIECES = (NT if x_turned else WIDTH) // PIECE, (NT if dy_turned else WIDTH) // PIECE
    x_places = singles.places(X_PIECES, x_turned, 2 * TA, NT)
    dy_places = singles.places(Y_PIECES, dy_turned, TB, NT)
    (_, move_in_x), (_, move_in_dy) = x_places, dy_places
    begin_in_x, begin_in_dy, add_products = singles.products(
        precision, TA, TB, NT, X_PIECES, x_turned, Y_PIECES, dy_turned
    )

    def cells_from(q):
        """Each cell from q on: loops unrolled, so acc[q] stays in registers."""

        @cuda.jit(device=True)
        def none(ring, x_lane, dy_lane, codes, first, acc):
            pass

        if q == CELLS:
            return none
        rest = cells_from(q + 1)

        @cuda.jit(device=True)
        def add_cell(ring, x_lane, dy_lane, codes, first, acc):
            code = codes[first + q]
            if code >= 0:
                x_at, y_at = uint32(code & 0xFFFF), uint32(code >> 16)
                x_in, y_in = x_at % WIDTH, y_at % WIDTH
                x_line, x_piece = (x_in, 0) if x_turned else (0, x_in // PIECE)
                y_line, y_piece = (y_in, 0) if dy_turned else (0, y_in // PIECE)
                x_at = move_in_x(x_lane + x_at // WIDTH * TILE, x_line, x_piece)
                y_at = move_in_dy(dy_lane + y_at // WIDTH * TILE, y_line, y_piece)
                add_products(ring, x_at, y_at, acc[q])
                rest(ring, x_lane, dy_lane, codes, first, acc)

        return add_cell

    add_cells = cells_from(0)

    @cuda.jit(device=True)
    def add_step(ring, start, codes, acc):
        first = uint32(cuda.threadIdx.x) // 32 * CELLS
        x_lane, dy_lane = start + begin_in_x(0, 0), start + XT * TILE + begin_in_dy(0, 0)
        add_cells(ring, x_lane, dy_lane, codes, first, acc)

    return x_places, dy_places, add_step


@cache
def region_kernel(cells: Cells) -> Any:
    _, height, width, region, _, x_turned, dy_turned, _ = cells
    XT, YT, CELLS, WARPS, NT, STAGES, _ = region
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    THREADS, TILES, CAPACITY = WARPS * 32, XT + YT, region.capacity
    TILE, STAGE = NT * WIDTH, (XT + YT) * NT * WIDTH
    TA, TB = height // 16, width // 8
    ACC = (CELLS, TA, TB, 4)
    AT_ONCE = max(THREADS * PIECE // TILE, 1)  # tiles
    x_places, dy_places, add_step = products(cells)
    fetch_x = fetch_tile(NT, THREADS, x_turned, x_places)
    fetch_dy = fetch_tile(NT, THREADS, dy_turned, dy_places)
    finish = finish_cells(cells, CELLS)
    limit = {} if SIMULATED else {"max_registers": 65536 // (THREADS * region.PER_SM) // 8 * 8}
    limit = {name: min(registers, 248) for name, registers in limit.items()}

    @cuda.jit(**limit)
    def kernel(
        x,
        x_stride,
        in_features,
        dy,
        dy_stride,
        out_features,
        batch,
        tiles,
        codes,
        targets,
        dvalues,
        parts,
        whole,
        pieces,
    ):
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # stages, each of tiles of x and of dy
        features = cuda.shared.array(TILES, int32)
        own = cuda.shared.array(CAPACITY, int32)
        acc = cuda.local.array(ACC, float32)
        for q in range(CELLS):
            for m in range(TA):
                for n in range(TB):
                    for i in range(4):
                        acc[q, m, n, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp = t // 32
        item, piece, of = int64(cuda.blockIdx.x), int64(0), int64(1)
        if item >= whole:
            cut_items = tiles.shape[0] - whole
            piece, of = (item - whole) // cut_items, pieces
            item = whole + (item - whole) % cut_items
        for i in range(t, TILES, THREADS):
            features[i] = tiles[item, i]
        for i in range(t, CAPACITY, THREADS):
            own[i] = codes[item, i]
        cuda.syncthreads()

        now = then = int64(0)  # where the stages start that are multiplied and fetched
        full = in_features % WIDTH == 0 and out_features % WIDTH == 0
        all_steps = (batch + NT - 1) // NT
        begin, end = all_steps * piece // of, all_steps * (piece + 1) // of
        for step in range(begin - AHEAD, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < end:
                n = coming * NT
                inside = full and n + NT <= batch
                for r in range(0, XT, AT_ONCE):
                    fetch_x(
                        x, x_stride, batch, n, in_features, inside, features, r, XT, ring, then
                    )  # fmt: skip
                for r in range(XT, TILES, AT_ONCE):
                    fetch_dy(
                        dy, dy_stride, batch, n, out_features, inside, features, r, TILES, ring,
                        then,
                    )  # fmt: skip
                then = then + STAGE if then + STAGE < STAGES * STAGE else 0
            cp_async_commit()
            if step >= begin:
                add_step(ring, now, own, acc)
                now = now + STAGE if now + STAGE < STAGES * STAGE else 0

        if of > 1:
            for q in range(CELLS):
                at = (((item - whole) * pieces + piece) * CAPACITY + warp * CELLS + q) * (
                    height * width
                )
                for m in range(TA):
                    for n in range(TB):
                        for i in range(4):
                            parts[at + ((m * TB + n) * 4 + i) * 32 + t % 32] = acc[q, m, n, i]
        else:
            finish(
                x, x_stride, in_features, dy, dy_stride, out_features, batch, tiles, codes, targets,
                dvalues, item, warp * CELLS, acc,
            )  # fmt: skip

    return kernel
