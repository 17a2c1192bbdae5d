"""Rung 5: `ldmatrix` and `mma.sync`, the tensor cores.

One mma.sync multiplies 16 x 16 by 16 x 8 values of a whole warp, two float16 in a register and
sums in float32; `ldmatrix` reads four 8 x 8 matrices from shared memory into the registers where an
mma wants them, turned over on the way where the sum runs down the rows of a tile. So input_grad
reads the same blocks as forward, and weight_grad x as it lies. The tiles come by `cp.async` through
a ring of stages, as in the rung before, and stay float16.

Reads per output, for a sum of K products: from global memory K / BM + K / BN, as in the two rungs
before, at half the bytes; from shared memory K / WN + K / WM with the tile WM x WN of a warp, 32 x
min(B, 64), where a thread alone had K / TM + K / TN. A line of a tile is cut into pieces of 16
bytes, and `place` swaps these so that eight pieces of one matrix, like eight neighbours along a
line, lie in eight different sets of four banks.

cp.async reads pieces that start at multiples of 16 bytes. An operand whose rows do not (other
strides, an odd address) is copied first. A small B still reads a whole tile of x for few columns
of y, and the registers of each warp still pass every operand: the next rung removes both.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32
from numba.types import float16

from numbsparse.device import SIMULATED, compute_capability
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_f16,
)

BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float16",)
THREADS = 128
WARPS = THREADS // 32
FEW = 64  # rows: batches up to here get smaller tiles
PIECE = 8  # float16 values in 16 bytes


class Tile(NamedTuple):
    """What a block of threads owns (BM, BN), BK, the length of a step, and stages in the ring."""

    BM: int
    BN: int
    BK: int
    STAGES: int


def unsupported(
    product: str,
    block_size: int,
    dtype: Any,
    place: str,
    batch: int = 1,
    precision: str = "highest",
) -> str | None:
    if place != "cuda":
        return "k5_tensor_core runs on a GPU"
    if block_size not in BLOCK_SIZES:
        few = "; an mma takes 16 products of a sum at once" if block_size < 16 else ""
        return f"k5_tensor_core takes block sizes {BLOCK_SIZES}, got {block_size}{few}"
    if str(dtype) not in DTYPES:
        return f"k5_tensor_core takes float16, got {dtype}"
    if not SIMULATED and compute_capability() < (8, 0):
        major, minor = compute_capability()
        return f"k5_tensor_core needs compute capability 8.0, this GPU is {major}.{minor}"
    return None


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    _along_lines(forward_kernel, x, values, index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    _along_lines(input_grad_kernel, dy, values, index.rows, dx)


def _along_lines(kernel_for, x, values, lines, y):
    (batch, out_features), size = y.shape, values.shape[1]
    tile = tile_of(size, batch)
    grid = -(-batch // tile.BM) * -(-out_features // tile.BN)
    kernel, in_features = kernel_for(size, tile), x.shape[1]
    (x, stride), (values, _) = aligned_rows(x), aligned_rows(values.reshape(-1, size))
    launch(kernel, grid, THREADS, x, stride, in_features, values, *lines, y)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    tile = block_tile_of(size)
    grid = n_blocks * (size // tile.BN) ** 2
    kernel, (batch, in_features), out_features = (
        weight_grad_kernel(size, tile),
        x.shape,
        dy.shape[1],
    )
    sides = *aligned_rows(x), in_features, *aligned_rows(dy), out_features
    launch(kernel, grid, THREADS, batch, *sides, index.block_rows, index.block_columns, dvalues)


def tile_of(size: int, batch: int) -> Tile:
    """The tile of a (batch, features) output."""
    return Tile(64 if batch <= FEW else 128, min(size, 64), 32, 4)


def block_tile_of(size: int) -> Tile:
    """The tile of a (B, B) output; 4 KB a stage and operand."""
    side = min(size, 64)
    return Tile(side, side, 2048 // side, 4)


def forward_kernel(B: int, tile: Tile) -> Any:
    return line_kernel(B, tile, False)


def input_grad_kernel(B: int, tile: Tile) -> Any:
    return line_kernel(B, tile, True)


@cache
def line_kernel(B: int, tile: Tile, turned: bool) -> Any:
    """y = x @ w down the block columns of w; x = dy and w turned give dx along the block rows."""
    BM, BN, BK, STAGES = tile
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    DEPTH = min(B, BK)  # rows of a block in a step
    BLOCKS, PARTS = BK // DEPTH, B // DEPTH  # blocks in a step, steps in a block
    WM = BM // WARPS
    TM, TN = WM // 16, BN // 16  # squares of a warp
    X_SIZE, W_SIZE = BM * BK, BK * BN
    X_RING, W_RING = STAGES * X_SIZE, STAGES * W_SIZE
    X_PIECES, W_PIECES = BK // PIECE, (BK if turned else BN) // PIECE  # in a line of a tile
    X_LINES = THREADS // X_PIECES  # fetched at once
    X_COUNT, ACC = BM // X_LINES, (TM, TN, 8)
    fetch_x, fetch_w = fetch_rows(tile, DEPTH), fetch_block(B, tile, turned)
    add_products = products(TM, TN, BK // 16, X_PIECES, True, W_PIECES, turned)

    @cuda.jit(device=True)
    def find(indices, blocks, first, last, step, p, in_features):
        """(block, first feature) of block p in a step; no feature where there is none."""
        entry = first + uint32(step) // PARTS * BLOCKS + p
        if entry < last:
            return blocks[entry], indices[entry] * B + uint32(step) % PARTS * DEPTH
        return 0, in_features

    @cuda.jit
    def kernel(x, stride, in_features, values, indptr, indices, blocks, y):
        xs = cuda.shared.array(X_RING, float16, ALIGNMENT)  # (batch, in)
        ws = cuda.shared.array(W_RING, float16, ALIGNMENT)  # (in, out); turned (out, in)
        acc = cuda.local.array(ACC, float32)
        for m in range(TM):
            for k in range(TN):
                for i in range(8):
                    acc[m, k, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        batch, out_features = y.shape
        tiles = (out_features + BN - 1) // BN
        top, left = cuda.blockIdx.x // tiles * BM, cuda.blockIdx.x % tiles * BN
        column, j = left // B, left % B
        first, last = indptr[column], indptr[column + 1]
        steps = (last - first + BLOCKS - 1) // BLOCKS * PARTS
        starts = cuda.local.array(X_COUNT, int64)  # of the rows that this thread fetches
        for i in range(X_COUNT):
            # Beyond the last row it is read again, for outputs that are not written.
            starts[i] = min(top + t // X_PIECES + i * X_LINES, batch - 1) * stride

        # Of the step's blocks, those that this thread fetches from.
        x_part = t % X_PIECES * PIECE // DEPTH
        w_part = (t % W_PIECES * PIECE if turned else t // W_PIECES) // DEPTH
        _, x_c = find(indices, blocks, first, last, 0, x_part, in_features)
        block, c = find(indices, blocks, first, last, 0, w_part, in_features)
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                stage, offset = uint32(coming) % STAGES, uint32(coming) % PARTS * DEPTH
                fetch_x(x, starts, x_c, in_features, xs, stage * X_SIZE)
                fetch_w(values, block, j, offset, in_features - c, ws, stage * W_SIZE)
                _, x_c = find(indices, blocks, first, last, coming + 1, x_part, in_features)
                block, c = find(indices, blocks, first, last, coming + 1, w_part, in_features)
            cp_async_commit()
            if step >= 0:
                stage = uint32(step) % STAGES
                add_products(xs, stage * X_SIZE, warp * WM, 0, ws, stage * W_SIZE, 0, 0, acc)

        for m in range(TM):
            for k in range(TN):
                for i in range(8):
                    row = top + warp * WM + m * 16 + row_of(lane, i)
                    col = left + k * 16 + column_of(lane, i)
                    if row < batch and col < out_features:
                        y[row, col] = acc[m, k, i]

    return kernel


@cache
def weight_grad_kernel(B: int, tile: Tile) -> Any:
    BM, BN, BK, STAGES = tile
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    SIDE = min(BM, 32)  # of a warp's tile
    ACROSS, PARTS = BM // SIDE, B // BM
    SLICES = WARPS // (ACROSS * ACROSS)  # warps that share a tile, each with its rows of a step
    DEPTH = BK // SLICES
    SIZE, PIECES, SQUARES = BK * BM, BM // PIECE, SIDE // 16
    RING, SUMS, ACC = STAGES * SIZE, (SLICES, BM, BN), (SQUARES, SQUARES, 8)
    fetch = fetch_features(tile)
    add_products = products(SQUARES, SQUARES, DEPTH // 16, PIECES, False, PIECES, False)

    @cuda.jit
    def kernel(
        batch,
        x,
        x_stride,
        in_features,
        dy,
        dy_stride,
        out_features,
        block_rows,
        block_columns,
        dvalues,
    ):
        xs = cuda.shared.array(RING, float16, ALIGNMENT)  # (batch, in)
        dys = cuda.shared.array(RING, float16, ALIGNMENT)  # (batch, out)
        sums = cuda.shared.array(SUMS, float32)
        acc = cuda.local.array(ACC, float32)
        for m in range(SQUARES):
            for k in range(SQUARES):
                for i in range(8):
                    acc[m, k, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        mine = warp // (ACROSS * ACROSS)
        ty, tx = warp // ACROSS % ACROSS * SIDE, warp % ACROSS * SIDE
        part = cuda.blockIdx.x % (PARTS * PARTS)
        block = cuda.blockIdx.x // (PARTS * PARTS)
        top, left = part // PARTS * BM, part % PARTS * BN
        row, column = block_rows[block] * B + top, block_columns[block] * B + left

        steps = (batch + BK - 1) // BK
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                start = uint32(coming) % STAGES * SIZE
                fetch(x, x_stride, batch, coming * BK, row, in_features, xs, start)
                fetch(dy, dy_stride, batch, coming * BK, column, out_features, dys, start)
            cp_async_commit()
            if step >= 0:
                start, line = uint32(step) % STAGES * SIZE, mine * DEPTH
                add_products(xs, start, line, ty // PIECE, dys, start, line, tx // PIECE, acc)

        for m in range(SQUARES):
            for k in range(SQUARES):
                for i in range(8):
                    row_in, column_in = row_of(lane, i), column_of(lane, i)
                    sums[mine, ty + m * 16 + row_in, tx + k * 16 + column_in] = acc[m, k, i]
        cuda.syncthreads()
        for item in range(t, BM * BN, THREADS):
            i, j = item // BN, item % BN
            total = float32(0)
            if row + i < in_features and column + j < out_features:
                for s in range(SLICES):
                    total += sums[s, i, j]
            dvalues[block, top + i, left + j] = total

    return kernel


@cache
def fetch_rows(tile: Tile, DEPTH: int) -> Any:
    """tile[m] = features of BK // DEPTH blocks of x's row m, and 0 beyond the last feature."""
    PIECES = tile.BK // PIECE
    LINES = THREADS // PIECES  # fetched at once
    COUNT = tile.BM // LINES
    place_in = place(PIECES)

    @cuda.jit(device=True)
    def fetch(x, starts, c, in_features, tile, start):
        t = uint32(cuda.threadIdx.x)
        line, piece = t // PIECES, t % PIECES
        first = c + int64(piece * PIECE % DEPTH)
        n = bytes_of(in_features - first)
        for i in range(COUNT):
            item = start + place_in(line + i * LINES, piece)
            cp_async_zero_fill(tile, item, x, starts[i] + first, n)

    return fetch


@cache
def fetch_block(B: int, tile: Tile, turned: bool) -> Any:
    """Rows `offset` + i and columns `first` + j of blocks of w to tile[i, j], turned to tile[j, i].

    Rows from i = inside on are 0; turned, it is the block's columns that i counts.
    """
    DEPTH = min(B, tile.BK)
    WIDTH, HEIGHT = (tile.BK, tile.BN) if turned else (tile.BN, tile.BK)
    PIECES = WIDTH // PIECE
    LINES = min(THREADS // PIECES, HEIGHT)  # fetched at once
    place_in = place(PIECES)

    @cuda.jit(device=True)
    def fetch(values, block, first, offset, inside, tile, start):
        t = uint32(cuda.threadIdx.x)
        piece = t % PIECES
        if t < LINES * PIECES:
            for i in range(HEIGHT // LINES):
                line = t // PIECES + i * LINES
                if turned:
                    k = int64(piece * PIECE % DEPTH)
                    at, n = (first + line) * B + offset + k, bytes_of(inside - k)
                else:
                    k = int64(line % DEPTH)
                    at, n = (offset + k) * B + first + piece * PIECE, bytes_of((inside - k) * PIECE)
                item = start + place_in(line, piece)
                cp_async_zero_fill(tile, item, values, int64(block) * (B * B) + at, n)

    return fetch


@cache
def fetch_features(tile: Tile) -> Any:
    """tile[m] = features of a block in row first + m of x, and 0 beyond the edges."""
    PIECES = tile.BM // PIECE
    LINES = THREADS // PIECES  # fetched at once
    COUNT = tile.BK // LINES
    place_in = place(PIECES)

    @cuda.jit(device=True)
    def fetch(x, stride, batch, first, c, features, tile, start):
        t = uint32(cuda.threadIdx.x)
        piece = t % PIECES
        at = c + int64(piece * PIECE)
        n = bytes_of(features - at)
        for i in range(COUNT):
            line = t // PIECES + i * LINES
            row = first + int64(line)
            item = start + place_in(line, piece)
            inside = row < batch
            at_row = row if inside else 0
            cp_async_zero_fill(tile, item, x, at_row * stride + at, n if inside else uint32(0))

    return fetch


@cache
def products(
    TM: int, TN: int, DEPTH: int, X_PIECES: int, x_along: bool, W_PIECES: int, w_along: bool
) -> Any:
    """acc[m, k] += the 16 x 16 squares of x times those of w, DEPTH of them along the sum.

    The sum runs along the lines of a tile, or down its rows.
    """
    X_REGISTERS = (TM, 4)
    load_x, load_w = square(X_PIECES, x_along, x_along), square(W_PIECES, w_along, not w_along)

    @cuda.jit(device=True)
    def add_products(xs, x_start, x_line, x_piece, ws, w_start, w_line, w_piece, acc):
        xr = cuda.local.array(X_REGISTERS, uint32)
        for i in range(DEPTH):
            for m in range(TM):
                if x_along:
                    a = load_x(xs, x_start, x_line + 16 * m, x_piece + 2 * i)
                else:
                    a = load_x(xs, x_start, x_line + 16 * i, x_piece + 2 * m)
                xr[m, 0], xr[m, 1], xr[m, 2], xr[m, 3] = a
            for k in range(TN):
                if w_along:
                    b = load_w(ws, w_start, w_line + 16 * k, w_piece + 2 * i)
                else:
                    b = load_w(ws, w_start, w_line + 16 * i, w_piece + 2 * k)
                for m in range(TM):
                    for h in range(2):  # 16 x 8 each
                        c = acc[m, k]
                        c[4 * h], c[4 * h + 1], c[4 * h + 2], c[4 * h + 3] = mma_m16n8k16_f16(
                            xr[m, 0],
                            xr[m, 1],
                            xr[m, 2],
                            xr[m, 3],
                            b[2 * h],
                            b[2 * h + 1],
                            c[4 * h],
                            c[4 * h + 1],
                            c[4 * h + 2],
                            c[4 * h + 3],
                        )

    return add_products


@cache
def square(PIECES: int, along: bool, down_first: bool) -> Any:
    """The registers of 16 x 16 values of a tile, as an mma takes them.

    The quarters come down first or across first, each turned over where the sum runs down.
    """
    load = ldmatrix_x4 if along else ldmatrix_x4_trans
    place_in = place(PIECES)

    @cuda.jit(device=True)
    def load_square(tile, start, line, piece):
        lane = uint32(cuda.threadIdx.x) % 32
        quarter = lane // 8
        down = quarter % 2 if down_first else quarter // 2
        across = quarter // 2 if down_first else quarter % 2
        # `line` is a multiple of 16, where the swaps of pieces begin anew.
        within = place_in(lane % 8 + 8 * down, piece + across)
        return load(tile, start + line * (PIECES * PIECE) + within)

    return load_square


@cache
def place(PIECES: int) -> Any:
    """Where a piece of a line lies in a tile: eight of one column, or of one line, in all banks."""
    LINES = 8 // PIECES  # in 128 bytes, once over all banks

    @cuda.jit(device=True)
    def place_in(line, piece):
        return (line * PIECES + (piece ^ (line // LINES % PIECES))) * PIECE

    return place_in


@cuda.jit(device=True)
def bytes_of(inside):
    """Bytes of a piece, of which `inside` values lie before the edge."""
    return uint32(2 * min(max(inside, 0), PIECE))


# PTX ISA, "Matrix Fragments for mma.m16n8k16": where value i of two 16 x 8 results stands.


@cuda.jit(device=True)
def row_of(lane, i):
    return lane // 4 + i // 2 % 2 * 8


@cuda.jit(device=True)
def column_of(lane, i):
    return lane % 4 * 2 + i % 2 + i // 4 * 8
