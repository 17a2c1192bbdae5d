"""dvalues = x.T @ dy at the kept blocks: each region of w reads the features that it needs once.

Rows of x and dy pass through a ring in shared memory, side by side in one row. A slot multiplies
16 features of x, two pieces that may stand anywhere, by B of dy; its sums stay in registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.matmul.k7_small_blocks.card import (
    MMA,
    PAIR,
    multiprocessors,
    registers,
    shared_memory,
)
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE_BITS, Region, plan_regions
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import GROUP, PIECE, kept_in_strips
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    ldmatrix_x4_trans,
    ldmatrix_x4_trans_if,
)


def in_regions(x: Any, dy: Any, index: Any, dvalues: Any) -> None:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    name, B = dvalues.dtype.name, dvalues.shape[1]
    (batch, in_features), out_features = x.shape, dy.shape[1]
    sides = -(-in_features // B), -(-out_features // B)
    width = min(512, sides[1] * B)
    region = region_of(B, *planned(index, kept_in_strips, B, False, width))
    plan = planned(index, plan_regions, B, sides, region, multiprocessors())
    segments, groups, codes, used, blocks, cut, pieces = plan
    slots = region.WARPS * region.SLOTS * cut.size
    partials = empty((max(slots * pieces * 16 * B, 1),), "float32")
    places = index.block_rows, index.block_columns, in_features, out_features
    dvalues = dvalues.view("uint16")
    launch(
        region_kernel(B, name, region),
        segments.size // 4,
        32 * region.WARPS,
        batch,
        *aligned_rows(x.view("uint16")),
        *aligned_rows(dy.view("uint16")),
        segments,
        groups,
        codes,
        used,
        blocks,
        *places,
        partials,
        dvalues,
        shared_bytes=shared_bytes(region),
    )
    total = total_kernel(B, name, region)
    launch(total, slots, 32, partials, pieces, cut, blocks, *places, dvalues)


def region_of(B: int, kept: float) -> Region:
    """As many blocks as the registers of a multiprocessor hold, if shared memory holds their x and
    dy; where few are kept near each other, more features of fewer rows."""
    limit = shared_memory()
    if limit is None:
        return Region(2, 4, 4, 32, 2) if kept > 0.2 else Region(2, 4, 8, 16, 2)
    if kept > 0.05:
        return Region(16, 10 if B == 16 else 18, _groups(limit, 32, 48), 32, 2)
    return Region(12, 14 if B == 16 else 26, _groups(limit, 16, 96), 16, 2)


def _groups(limit: int, depth: int, most: int) -> int:
    """Groups of features of which two stages fit shared memory."""
    return min(most, (limit // (2 * depth * 2) - PIECE) // GROUP)


def shared_bytes(region: Region) -> int:
    return 2 * region.STAGES * region.DEPTH * (region.GROUPS * GROUP + PIECE)


@cache
def region_kernel(B: int, name: str, region: Region) -> Any:
    WARPS, SLOTS, GROUPS, DEPTH, STAGES = region
    AHEAD, PENDING, LINES = STAGES - 1, STAGES - 2, lines_of(region)
    PITCH = GROUPS * GROUP + PIECE  # of a row of x and dy
    STAGE, SUMS = DEPTH * PITCH, B // 2  # of a slot, in a lane
    ACC = (SLOTS, SUMS)
    MOVE = STAGE // PIECE * 0x10001  # of two places
    pair, place, store = PAIR[name], places_of_lane(B, region), store_pair(B)
    fetch, add_products = fetch_rows(region), products(B, name, region)

    @cuda.jit(**registers(WARPS))
    def kernel(
        batch,
        x,
        x_stride,
        dy,
        dy_stride,
        segments,
        groups,
        codes,
        useds,
        blocks,
        block_rows,
        block_columns,
        in_features,
        out_features,
        partials,
        dvalues,
    ):
        ring = cuda.shared.array(0, uint16, ALIGNMENT)
        acc = cuda.local.array(ACC, float32)
        code = cuda.local.array(SLOTS, uint32)
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        item, piece = segments[4 * cuda.blockIdx.x], segments[4 * cuda.blockIdx.x + 1]
        pieces, partial = segments[4 * cuda.blockIdx.x + 2], segments[4 * cuda.blockIdx.x + 3]
        for p in range(SLOTS):
            code[p] = place(codes[(item * WARPS + warp) * SLOTS + p], lane)
            for i in range(SUMS):
                acc[p, i] = 0
        chunks = (batch + DEPTH - 1) // DEPTH
        first = chunks * piece // pieces
        steps = chunks * (piece + 1) // pieces - first

        # The part of a row that this thread fetches: 8 of the features of one group.
        group, line = groups[item * GROUPS + t // 4 % GROUPS], t // 4 // GROUPS
        of_dy = group % 2 == 1
        c = int64(group // 2) * GROUP + t % 4 * PIECE
        n = uint32(2 * min(max((out_features if of_dy else in_features) - c, 0), PIECE))
        mine = group >= 0 and line < LINES
        source = (first * DEPTH + line) * (dy_stride if of_dy else x_stride) + c
        target = line * PITCH + t // 4 % GROUPS * GROUP + t % 4 * PIECE

        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                to = uint32(coming) % STAGES * STAGE + target
                left = batch - (first + coming) * DEPTH - line
                if mine:
                    if of_dy:
                        fetch(dy, source, dy_stride, n, left, ring, to)
                    else:
                        fetch(x, source, x_stride, n, left, ring, to)
                source += DEPTH * (dy_stride if of_dy else x_stride)
            cp_async_commit()
            if step >= 0:
                # Places move from stage to stage; sums of them would take a register each.
                move = MOVE if step % STAGES < STAGES - 1 else MOVE * (1 - STAGES)
                add_products(ring, code, move, acc)

        cp_async_wait(0)
        cuda.syncthreads()
        pairs = cuda.shared.array(0, uint32, ALIGNMENT)  # the memory of the ring
        for p in range(SLOTS):
            for i in range(SUMS // 2):
                at = (warp * SLOTS + p) * (SUMS // 2) + i
                if partial < 0:
                    pairs[at * 32 + lane] = pair(acc[p, 2 * i], acc[p, 2 * i + 1])
                else:
                    at = (int64(partial) * (WARPS * SLOTS * SUMS) + 2 * at) * 32 + lane
                    partials[at], partials[at + 32] = acc[p, 2 * i], acc[p, 2 * i + 1]
        if partial < 0:
            for p in range(useds[item * WARPS + warp]):
                for i in range(SUMS // 2):
                    store(
                        pairs[((warp * SLOTS + p) * (SUMS // 2) + i) * 32 + lane],
                        i,
                        blocks,
                        (item * WARPS + warp) * SLOTS + p,
                        lane,
                        block_rows,
                        block_columns,
                        in_features,
                        out_features,
                        dvalues,
                    )

    return kernel


@cache
def total_kernel(B: int, name: str, region: Region) -> Any:
    """The sums of the regions that were cut over the batch; a warp per slot."""
    SLOTS, SUMS = region.WARPS * region.SLOTS, B // 2
    pair, store = PAIR[name], store_pair(B)

    @cuda.jit
    def kernel(
        partials, pieces, cut, blocks, block_rows, block_columns, in_features, out_features, dvalues
    ):
        which, slot = cuda.blockIdx.x // SLOTS, cuda.blockIdx.x % SLOTS
        lane = uint32(cuda.threadIdx.x)
        for i in range(SUMS // 2):
            lo = hi = float32(0)
            for piece in range(pieces):
                at = (((which * pieces + piece) * SLOTS + slot) * SUMS + 2 * i) * 32 + lane
                lo += partials[at]
                hi += partials[at + 32]
            store(
                pair(lo, hi),
                i,
                blocks,
                cut[which] * SLOTS + slot,
                lane,
                block_rows,
                block_columns,
                in_features,
                out_features,
                dvalues,
            )

    return kernel


@cache
def places_of_lane(B: int, region: Region) -> Any:
    """Where a lane reads for a slot, in pieces: x below 15 bits, a new column, dy above 16 bits.

    It gives a row of an 8 x 8 matrix that is turned over: of x 8 rows of the batch for each of two
    pieces, then 8 rows more; of dy 16 rows for each of two pieces, or 32 rows for one.
    """
    DEPTH, PITCH = region.DEPTH, (region.GROUPS * GROUP + PIECE) // PIECE
    PLACE = (1 << PLACE_BITS) - 1

    @cuda.jit(device=True)
    def place(code, lane):
        x_row = lane % 8 + lane // 16 * 8
        x_piece = code >> (lane // 8 % 2 * PLACE_BITS) & uint32(PLACE)
        dy_row, across = (lane % 16, lane // 16) if B == 16 else (lane % DEPTH, uint32(0))
        dy_piece = (code >> uint32(2 * PLACE_BITS) & uint32(PLACE)) + across
        new = code >> uint32(3 * PLACE_BITS)
        x_at, dy_at = x_row * PITCH + x_piece, dy_row * PITCH + dy_piece
        return uint32(x_at | new << uint32(15) | dy_at << uint32(16))

    return place


@cache
def products(B: int, name: str, region: Region) -> Any:
    """acc[p] += a slot's 16 features of x times its B of dy, over DEPTH rows of the batch."""
    SLOTS, DEPTH = region.SLOTS, region.DEPTH
    BELOW = 16 * (region.GROUPS * GROUP + PIECE)  # 16 rows down
    X_PLACE, NEW = 0x7FFF, 0x8000
    mma = MMA[name]

    @cuda.jit(device=True)
    def add_products(ring, code, move, acc):
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = uint32(0)
        a0, a1, a2, a3 = ldmatrix_x4_trans(ring, (code[0] & uint32(X_PLACE)) * PIECE)
        for p in range(SLOTS):
            c, new = acc[p], uint32(code[p] & uint32(NEW))
            at = (code[p] >> uint32(16)) * PIECE
            b0, b1, b2, b3 = ldmatrix_x4_trans_if(ring, at, new, b0, b1, b2, b3)
            if B == 16 and DEPTH == 32:
                b4, b5, b6, b7 = ldmatrix_x4_trans_if(ring, at + BELOW, new, b4, b5, b6, b7)
            if DEPTH == 32:
                at = (code[p] & uint32(X_PLACE)) * PIECE + BELOW
                e0, e1, e2, e3 = ldmatrix_x4_trans(ring, at)
            c[0], c[1], c[2], c[3] = mma(a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3])
            if B == 16:
                c[4], c[5], c[6], c[7] = mma(a0, a1, a2, a3, b2, b3, c[4], c[5], c[6], c[7])
            if p + 1 < SLOTS:
                at = (code[p + 1] & uint32(X_PLACE)) * PIECE
                a0, a1, a2, a3 = ldmatrix_x4_trans(ring, at)
            if DEPTH == 32 and B == 16:
                c[0], c[1], c[2], c[3] = mma(e0, e1, e2, e3, b4, b5, c[0], c[1], c[2], c[3])
                c[4], c[5], c[6], c[7] = mma(e0, e1, e2, e3, b6, b7, c[4], c[5], c[6], c[7])
            elif DEPTH == 32:
                c[0], c[1], c[2], c[3] = mma(e0, e1, e2, e3, b2, b3, c[0], c[1], c[2], c[3])
            code[p] = uint32(int64(code[p]) + move)

    return add_products


def lines_of(region: Region) -> int:
    """Rows of x and dy that the threads fetch at once: a power of two."""
    lines = 1
    while 2 * lines * region.GROUPS <= 8 * region.WARPS:
        lines *= 2
    return lines


@cache
def fetch_rows(region: Region) -> Any:
    """A piece of every row of a stage that this thread fetches; 0 beyond the last of `left`."""
    PITCH, LINES = region.GROUPS * GROUP + PIECE, lines_of(region)
    DEPTH, COUNT = region.DEPTH, region.DEPTH // LINES

    @cuda.jit(device=True)
    def fetch(x, source, stride, n, left, ring, to):
        if left >= DEPTH:
            for i in range(COUNT):
                cp_async_zero_fill(ring, to + i * LINES * PITCH, x, source, n)
                source += LINES * stride
        else:
            for i in range(COUNT):
                at, m = (source, n) if i * LINES < left else (0, uint32(0))
                cp_async_zero_fill(ring, to + i * LINES * PITCH, x, at, m)
                source += LINES * stride

    return fetch


@cache
def store_pair(B: int) -> Any:
    """Pair i of a lane's sums of 16 x B to dvalues; 0 beyond the edges."""

    @cuda.jit(device=True)
    def store(
        both, i, blocks, slot, lane, block_rows, block_columns, in_features, out_features, dvalues
    ):
        half, column = i % 2, i // 2 * 8 + lane % 4 * 2
        block = blocks[2 * slot + (half if B == 8 else 0)]
        if block >= 0:
            row = lane // 4 + (half * 8 if B == 16 else 0)
            inside = block_rows[block] * B + row < in_features
            right = out_features - int64(block_columns[block]) * B - column
            lo, hi = uint16(both & uint32(0xFFFF)), uint16(both >> uint32(16))
            dvalues[block, row, column] = lo if inside and right > 0 else uint16(0)
            dvalues[block, row, column + 1] = hi if inside and right > 1 else uint16(0)

    return store
