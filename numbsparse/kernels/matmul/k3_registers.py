"""Rung 3: several outputs per thread, wide loads.

A block of threads owns a BM x BN tile of the output, and each thread TM x TN of it, in registers:
for each step of a sum it reads TM + TN values from shared memory, four in one load, and makes
TM * TN products of them. Where B is small, the tiles in shared memory hold several blocks of w.

What changed since the rung before: both operands pass through shared memory, where a block of
threads reads each once for all its outputs, and `acc` is an array. It stays in registers only where
each of its places is known when the kernel is compiled, so kernels are now made by functions, for a
block size and a tile: what is written in capitals is a constant there, and loops over it are
unrolled. x is transposed on its way to shared memory, so that the values which a thread reads are
contiguous.

Reads per output, for a sum of K products: from global memory K / BM + K / BN, with BM = 128 or more
rows of a large batch, but BN at most B, because no two block columns keep the same rows; from
shared memory K / TM + K / TN, where one output a thread would take 2 * K. From global memory the
values are still loaded one by one, through registers, because only rows that start at a multiple of
16 bytes could be read in quads; and while these loads run, the threads multiply nothing: the next
rung removes both.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.device.runtime import SIMULATED
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
FEW = 128  # rows: batches up to here get smaller tiles, and so more of them to fill the GPU
SHARING = 16 if SIMULATED else 64  # threads of the weight-gradient: simulated ones take turns
# Shared tiles end in an axis of four: at a multiple of 16 bytes, four float32 are one load.
QUAD = 4
ALIGNMENT = None if SIMULATED else 16


class Tile(NamedTuple):
    """What a block of threads (BM, BN) and a thread (TM, TN) own, and BK, the length of a step."""

    BM: int
    BN: int
    BK: int
    TM: int
    TN: int

    @property
    def threads(self) -> int:
        return self.BM // self.TM * (self.BN // self.TN)


unsupported = reach("k3_registers", "cuda", BLOCK_SIZES, DTYPES)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    _along_lines(fetch_straight, x, values, index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    _along_lines(fetch_transposed, dy, values, index.rows, dx)


def _along_lines(fetch_of_w, x, values, lines, y):
    (batch, out_features), size = y.shape, values.shape[1]
    tile = tile_of(size, batch)
    grid = -(-batch // tile.BM) * -(-out_features // tile.BN)
    launch(line_kernel(size, tile, fetch_of_w), grid, tile.threads, x, values, *lines, y)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    side = min(size, 64)  # of a block's tile; where it takes few threads, SHARING compute several
    tile = Tile(side, side, 16 if size <= 8 else 32, 4, 4 if size <= 32 else 8)
    threads = max(tile.threads, SHARING)
    grid = -(-n_blocks * tile.threads // threads) * (size // tile.BN) ** 2
    kernel = weight_grad_kernel(size, tile)
    launch(kernel, grid, threads, x, dy, index.block_rows, index.block_columns, dvalues)


def tile_of(size: int, batch: int) -> Tile:
    """The tile of a (batch, features) output."""
    threads, TM = (64, 4) if batch <= FEW else (128, 8)
    if size < 32:
        threads = max(size, 8) if SIMULATED and batch <= FEW else threads // 2
    BN, TN = min(size, 64), 4 if size <= 32 else 8
    return Tile(threads * TN // BN * TM, BN, 16 if size <= 8 else 32, TM, TN)


@cache
def line_kernel(B: int, tile: Tile, fetch_of_w: Any) -> Any:
    """y = x @ w down the block columns of w; x = dy and w.T give dx along the block rows."""
    BM, BN, BK, TM, TN = tile
    TY, TX = BM // TM, BN // TN
    DEPTH = min(B, BK)  # rows of a block in a step
    BLOCKS = BK // DEPTH  # blocks in a step
    # A line is a quad longer than the tile: the quads that eight neighbours write to eight lines,
    # each in one store, then fill all banks once.
    X_SHAPE, W_SHAPE = (BK, BM // QUAD + 1, QUAD), (BK, BN // QUAD + 1, QUAD)
    fetch_x = fetch_transposed(DEPTH, BM, TY * TX)
    fetch_w = fetch_of_w(DEPTH, BN, TY * TX)
    add_products = products(tile)

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y):
        xs = cuda.shared.array(X_SHAPE, float32, ALIGNMENT)  # (in, batch)
        ws = cuda.shared.array(W_SHAPE, float32, ALIGNMENT)  # (in, out)
        acc = cuda.local.array((TM, TN), float32)
        for m in range(TM):
            for k in range(TN):
                acc[m, k] = 0
        t = uint32(cuda.threadIdx.x)
        ty, tx = t // TX, t % TX
        (batch, in_features), out_features = x.shape, y.shape[1]
        tiles = (out_features + BN - 1) // BN
        top, left = cuda.blockIdx.x // tiles * BM, cuda.blockIdx.x % tiles * BN
        column, j = left // B, left % B
        for first in range(indptr[column], indptr[column + 1], BLOCKS):
            for offset in range(0, B, DEPTH):
                for p in range(BLOCKS):
                    block, c, inside = 0, 0, 0
                    if first + p < indptr[column + 1]:
                        block, c = blocks[first + p], indices[first + p] * B + offset
                        inside = in_features - c
                    fetch_x(x, top, c, inside, xs, p * DEPTH)
                    fetch_w(values[block], j, offset, inside, ws, p * DEPTH)
                cuda.syncthreads()
                add_products(xs, ws, ty, tx, acc)
                cuda.syncthreads()
        for m in range(TM):
            n = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
            for i in range(TN):
                k = left + (tx + i // QUAD * TX) * QUAD + i % QUAD
                if n < batch and k < out_features:
                    y[n, k] = rounded(acc[m, i], y)

    return kernel


@cache
def weight_grad_kernel(B: int, tile: Tile) -> Any:
    BM, BN, BK, TM, TN = tile
    TY, TX, PARTS = BM // TM, BN // TN, B // BN
    BLOCKS = max(SHARING // tile.threads, 1)
    SHAPE = (BK, BLOCKS * BN // QUAD, QUAD)
    fetch = fetch_blocks(B, BLOCKS, tile)
    add_products = products(tile)

    @cuda.jit
    def kernel(x, dy, block_rows, block_columns, dvalues):
        xs = cuda.shared.array(SHAPE, float32, ALIGNMENT)  # (batch, in)
        dys = cuda.shared.array(SHAPE, float32, ALIGNMENT)  # (batch, out)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = 0
        t = uint32(cuda.threadIdx.x)
        mine, ty, tx = t // (TY * TX), t // TX % TY, t % TX  # mine: which of BLOCKS blocks
        part = cuda.blockIdx.x % (PARTS * PARTS)
        first_block = cuda.blockIdx.x // (PARTS * PARTS) * BLOCKS
        top, left = part // PARTS * BM, part % PARTS * BN
        for first in range(0, x.shape[0], BK):
            fetch(x, first, block_rows, first_block, top, xs)
            fetch(dy, first, block_columns, first_block, left, dys)
            cuda.syncthreads()
            add_products(xs, dys, mine * (BM // QUAD) + ty, mine * (BN // QUAD) + tx, acc)
            cuda.syncthreads()
        block = first_block + mine
        if block < dvalues.shape[0]:
            in_rows = x.shape[1] - block_rows[block] * B
            in_columns = dy.shape[1] - block_columns[block] * B
            for m in range(TM):
                i = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
                for k in range(TN):
                    j = left + (tx + k // QUAD * TX) * QUAD + k % QUAD
                    inside = i < in_rows and j < in_columns
                    value = acc[m, k] if inside else float32(0)
                    dvalues[block, i, j] = rounded(value, dvalues)

    return kernel


# In what follows, loops are `while` where the compiler then finds the four neighbours of a quad.


@cache
def fetch_straight(DEPTH: int, WIDTH: int, THREADS: int) -> Any:
    """tile[line + i, j] = w[offset + i, first + j] for i < DEPTH, and 0 from i = inside on."""
    ROWS = min(THREADS // WIDTH, DEPTH)  # fetched at once

    @cuda.jit(device=True)
    def fetch(w, first, offset, inside, tile, line):
        t = uint32(cuda.threadIdx.x)
        j, step = t % WIDTH, 0
        while step < DEPTH // ROWS:
            i = t // WIDTH % ROWS + step * ROWS
            value = widened(w[offset + i, first + j])
            tile[line + i, j // QUAD, j % QUAD] = value if i < inside else float32(0)
            step += 1

    return fetch


@cache
def fetch_transposed(DEPTH: int, WIDTH: int, THREADS: int) -> Any:
    """tile[line + i, j] = x[first + j, offset + i] for i < DEPTH, and 0 from i = inside on.

    Neighbouring threads read neighbours in a row, each from four rows, and write these as a quad.
    """
    QUADS = min(THREADS // DEPTH, WIDTH // QUAD)  # fetched at once

    @cuda.jit(device=True)
    def fetch(x, first, offset, inside, tile, line):
        quad = cuda.local.array(QUAD, float32)
        # Beyond the last row its values are read again, for outputs that are not written.
        rows, last = x[first:], uint32(min(x.shape[0] - first, WIDTH) - 1)
        t = uint32(cuda.threadIdx.x)
        i, step = t % DEPTH, 0
        c = min(offset + i, x.shape[1] - 1)
        while step < WIDTH // QUAD // QUADS:
            j = t // DEPTH % QUADS + step * QUADS
            for q in range(QUAD):
                value = widened(rows[min(uint32(j * QUAD + q), last), c])
                quad[q] = value if i < inside else float32(0)
            for q in range(QUAD):
                tile[line + i, j, q] = quad[q]
            step += 1

    return fetch


@cache
def fetch_blocks(B: int, BLOCKS: int, tile: Tile) -> Any:
    """tile[m] = x[first + m, features of some blocks] side by side, and 0 beyond the batch."""
    BN, BK, THREADS = tile.BN, tile.BK, BLOCKS * tile.threads
    LANES = min(BLOCKS * BN, THREADS)
    ROWS = THREADS // LANES  # fetched at once

    @cuda.jit(device=True)
    def fetch(x, first, lines, first_block, start, tile):
        t = uint32(cuda.threadIdx.x)
        rows, last = x[first:], uint32(min(x.shape[0] - first, BK) - 1)
        for part in range(BLOCKS * BN // LANES):
            i, step = t % LANES + part * LANES, 0
            line = lines[min(first_block + i // BN, lines.shape[0] - 1)]
            c = min(line * B + start + i % BN, x.shape[1] - 1)
            while step < BK // ROWS:
                m = uint32(t // LANES + step * ROWS)
                value = widened(rows[min(m, last), c])
                tile[m, i // QUAD, i % QUAD] = value if m <= last else float32(0)
                step += 1

    return fetch


@cache
def products(tile: Tile) -> Any:
    """acc[m, k] += sum over i of xs[i, row m of this thread] * ws[i, column k of this thread].

    The thread's rows are quads, TY quads apart, and its columns quads, TX apart: the quads that
    neighbouring threads read are adjacent.
    """
    BK, TM, TN = tile.BK, tile.TM, tile.TN
    TY, TX = tile.BM // TM, tile.BN // TN

    @cuda.jit(device=True)
    def add_products(xs, ws, ty, tx, acc):
        xr = cuda.local.array(TM, float32)
        wr = cuda.local.array(TN, float32)
        i = 0
        while i < BK:
            for m in range(TM):
                xr[m] = xs[i, ty + m // QUAD * TY, m % QUAD]
            for k in range(TN):
                wr[k] = ws[i, tx + k // QUAD * TX, k % QUAD]
            for m in range(TM):
                for k in range(TN):
                    acc[m, k] += xr[m] * wr[k]
            i += 1

    return add_products
