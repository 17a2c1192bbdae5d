"""The weight-gradient: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

A block of threads takes a block of w, or 64 x 64 of it, which its warps share by quarters. Smaller
blocks they share by the batch: each warp takes its own rows of each step, and the sums of all meet
in shared memory.

Where there are fewer blocks than the card can run at a time, each is cut along the batch: a block
of threads leaves its part of the sum in memory, and the last one adds the parts up, in their order.
That takes as long as some steps, and longer the more parts there are.

What is left: blocks beyond a whole number of waves run alone. In float32, 410 of 64 x 64 for 396
places, cutting the last ones along the batch would save 8 % (H200). A step has 64 rows at B = 32,
so a batch of 96 takes as long as one of 128.
"""

from functools import cache
from math import isqrt
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint16, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers, resident
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.aligned import aligned_either_way, of_bits
from numbsparse.kernels.parts.copies import copying_matrix
from numbsparse.kernels.parts.fragments import MMA, Side, coordinates, piece_of, products
from numbsparse.kernels.parts.plans import planned, room_of_pieces
from numbsparse.kernels.parts.repair import factors_of, nan_in_sums, repair_block
from numbsparse.kernels.parts.store_tile import rows_from, store_tile, stored, storing_two
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait

WARPS = 4
THREADS = 32 * WARPS
STAGES = 4
SIZE = 2048  # values of x, and of dy, in a step
STAGE = 2 * SIZE
PER_SM = 3  # blocks of threads that the registers of a multiprocessor hold
SHORT = 16  # steps: not cut
EACH = 3  # pieces that are added up in a step: so a sum of n steps has up to sqrt(EACH n)


class Shape(NamedTuple):
    """What a kernel is made for."""

    arithmetic: str  # "float16", "bfloat16", or the precision of float32
    B: int
    x_transposed: bool  # x is feature-major
    dy_transposed: bool
    wide: bool  # several neighbours of dvalues can be stored at once
    # Whether blocks of threads have pieces of the batch. Where each asked, and none had, products
    # took 1.1 to 1.28 times as long (H200).
    cut: bool
    gated: bool


class Cuts(NamedTuple):
    """Into how many pieces every sum is cut, and where parts are left, and counted."""

    many: int
    partials: Any
    tickets: Any


def multiply_blocks(x, dy, index, dvalues, arithmetic, gates=None):
    n_blocks, size, _ = dvalues.shape
    side = min(size, 64)
    sums, steps = n_blocks * (size // side) ** 2, -(-x.shape[0] * side // SIZE)
    x, dy, dvalues = map(of_bits, (x, dy, dvalues))
    (x, dy), (x_transposed, dy_transposed) = aligned_either_way(x, dy)
    out, _, wide = stored(dvalues.reshape(-1, size))
    beside = min(PER_SM, resident(STAGES * STAGE * x.itemsize - 1024))  # it has no barriers
    many = pieces_of_equal(steps, max(sums, 1), multiprocessors(), beside)
    floats = WARPS * min(side, 32) ** 2
    room = planned(index, room_of_pieces, sums * many if many > 1 else 1, floats)
    shape = arithmetic, size, x_transposed, dy_transposed, wide, many > 1, gates is not None
    launch(
        *(block_kernel(Shape(*shape)), sums * many, THREADS),
        factors_of(x, dy, (x_transposed, dy_transposed), index),
        Cuts(many, *room),
        out,
        () if gates is None else gates,
        shared_bytes=STAGES * STAGE * dvalues.itemsize,
    )


def pieces_of_equal(steps: int, sums: int, processors: int, beside: int = PER_SM) -> int:
    """Into how many pieces each of so many sums is cut, for so many multiprocessors, each with so
    many blocks of threads beside each other: of float32 fewer where shared memory is small. With
    three places each, as before, 26 drawn products took 1.10 times as long at the mean where two
    blocks or one find room, up to 1.63 (an H200 whose blocks took as much of it).
    """
    places = beside * processors
    return max(min(places // sums, isqrt(EACH * steps)), 1) if steps > SHORT else 1


@cuda.jit(device=True)
def own_piece(many, steps):
    """(sum, piece, its first step, how many it has) of a block of threads: equal sums are cut."""
    many, steps = uint32(many), uint32(steps)
    block = uint32(cuda.blockIdx.x)
    piece, each, more = block % many, steps // many, steps % many
    own = each + 1 if piece < more else each
    return int64(block // many), int64(piece), int64(piece * each + min(piece, more)), int64(own)


@cache
def block_kernel(shape: Shape) -> Any:
    arithmetic, B, x_transposed, dy_transposed, wide, CUT, GATED = shape
    BM = min(B, 64)  # of x's and of dy's features
    BK = SIZE // BM  # rows of a step
    SIDE = min(BM, 32)  # of a warp's tile
    ACROSS, PARTS, PIECE = BM // SIDE, B // BM, piece_of(arithmetic)
    TILES = ACROSS * ACROSS
    DEPTH = BK * TILES // WARPS  # rows of a step for a warp
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    sides = (Side((BK if along else BM) // PIECE, along) for along in (x_transposed, dy_transposed))
    made = products(arithmetic, SIDE // 16, SIDE // 8, DEPTH, *sides)
    TA, TB, ACC = made.TA, made.TB, (made.TA, made.TB, 4)
    begin_x, begin_dy, add_products = made.begin_a, made.begin_b, made.add
    _, _, copy_x = copying_matrix(BK, BM, PIECE, THREADS, x_transposed, made.a_places)
    _, _, copy_dy = copying_matrix(BK, BM, PIECE, THREADS, dy_transposed, made.b_places)
    clear_beyond = clearing_beyond(arithmetic, TA, TB)
    store = store_tile(arithmetic, TA, TB, wide, rows_from(arithmetic, TA))
    store_sum, repairs = storing_sum(arithmetic, TA, TB, wide), arithmetic == "highest"
    repair = repairing(B, BM, (False, x_transposed, dy_transposed))
    ITEM, options = (uint16, {}) if arithmetic in MMA else (float32, registers(THREADS * PER_SM))

    @cuda.jit(**options)
    def kernel(dense, cuts, dvalues, gates):
        x, dy, sizes, block_rows, block_columns = dense
        x_stride, dy_stride, in_features, out_features, batch = sizes
        many, partials, tickets = cuts
        ring = cuda.shared.array(0, ITEM, ALIGNMENT)  # stages, each of x and of dy
        sums = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        acc = cuda.local.array(ACC, float32)
        pieces.clear(acc)
        warp = uint32(cuda.threadIdx.x) // 32
        mine = warp // TILES * DEPTH
        ty, tx = warp // ACROSS % ACROSS * SIDE, warp % ACROSS * SIDE
        which, start, steps = cuda.blockIdx.x, 0, (batch + BK - 1) // BK
        if CUT:
            which, piece, start, steps = own_piece(many, steps)
        part, block = which % (PARTS * PARTS), which // (PARTS * PARTS)
        if GATED and gates[block] == 0:
            return
        top, left = part // PARTS * BM, part % PARTS * BM
        row, column = block_rows[block] * int64(B) + top, block_columns[block] * int64(B) + left

        x_lane = begin_x(ty, mine // PIECE) if x_transposed else begin_x(mine, ty // PIECE)
        dy_lane = begin_dy(tx, mine // PIECE) if dy_transposed else begin_dy(mine, tx // PIECE)
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                then, at = uint32(coming) % STAGES * STAGE, (start + coming) * BK
                copy_x(x, x_stride, at, batch, row, in_features, ring, then)
                copy_dy(dy, dy_stride, at, batch, column, out_features, ring, then + SIZE)
            cp_async_commit()
            if step >= 0:
                now = uint32(step) % STAGES * STAGE
                add_products(ring, now + x_lane, now + SIZE + dy_lane, acc)

        if CUT:
            first = which * many
            if not pieces.join_all(partials, tickets, first + piece, first, many, 1, acc):
                return
        clear_beyond(acc, in_features - row - ty, out_features - column - tx)
        first = block * int64(B) + top
        if TILES == WARPS:
            store(acc, dvalues, (first + ty, first + B), left + tx, B)
        else:
            store_sum(acc, sums, dvalues, first, left, B)
        if repairs and cuda.syncthreads_or(nan_in_sums(acc)):
            repair(dvalues, first, left, dense)

    return kernel


@cache
def clearing_beyond(arithmetic: str, TA: int, TB: int) -> Any:
    """acc = 0 beyond so many rows and columns. What was read there is 0: times infinity, NaN."""
    row_in, column_in = coordinates(arithmetic, 2 * TA), coordinates(arithmetic, TB)

    @cuda.jit(device=True)
    def clear_beyond(acc, rows, columns):
        if rows >= 16 * TA and columns >= 8 * TB:
            return
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    row, column = row_in(2 * m + i // 2, g), column_in(n, 2 * q + i % 2)
                    if row >= rows or column >= columns:
                        acc[m, n, i] = 0

    return clear_beyond


@cache
def storing_sum(arithmetic: str, TA: int, TB: int, wide: bool) -> Any:
    """dvalues = the sum of all warps' acc, in their order: each takes 16 x 8 of it at a time."""
    COUNT, ACC = TA * TB, (1, 1, 4)
    row_in, store = coordinates(arithmetic, 2 * TA), storing_two(arithmetic, TB, wide)

    @cuda.jit(device=True)
    def store_sum(acc, sums, dvalues, top, left, columns):
        warp = uint32(cuda.threadIdx.x) // 32
        total = cuda.local.array(ACC, float32)
        cuda.syncthreads()
        pieces.save(sums, warp, acc)
        cuda.syncthreads()
        for part in range(warp, COUNT, WARPS):
            pieces.clear(total)
            for k in range(WARPS):
                pieces.add_saved(sums, k * COUNT + part, total)
            c, m, n = total[0, 0], part // TB, part % TB
            for h in range(2):
                row = top + row_in(2 * m + h, uint32(cuda.threadIdx.x) % 32 // 4)
                store(c[2 * h], c[2 * h + 1], n, dvalues, row, left, columns)

    return store_sum


@cache
def repairing(B: int, BM: int, orders: tuple[bool, bool, bool]) -> Any:
    """Of BM x BM values of dvalues, from a row and a column on, those that are NaN."""

    @cuda.jit(device=True)
    def repair(dvalues, top, left, dense):
        for item in range(cuda.threadIdx.x, BM * BM, THREADS):
            at = (top + item // BM) * int64(B) + left + item % BM
            repair_block(dvalues, at, B, dense, orders)

    return repair
