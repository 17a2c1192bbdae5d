"""Rung 3: tensor cores, and each pixel loaded once for many taps.

Neighbouring outputs see nearly the same pixels through neighbouring taps. A block of threads takes
a tile of outputs and loads, for a block of features, the box of pixels that a chunk of up to nine
taps sees from there. In shared memory a tap is a shift of rows: `ldmatrix` takes an address for
each row, so the shifted tile feeds `mma.sync` without being copied. Pixels outside the image are
zeros that `cp.async` fills in.

Reads per output of a 3 x 3 convolution with all taps kept, from global memory: a row of x is read
(8 + 2) * (32 + 2) / (8 * 32) = 1.3 times for 9 taps, with tiles of 8 x 32 pixels, where the rung
before read it 9 times; w is read once a tile.

A stride of the forward product makes a box of every s-th pixel; that of the input-gradient makes
lines for the outputs of each residue, which few taps reach.

For 16 bits alone: float32, which `mma.sync` takes as tf32 in three products, is unfolded, as are
weight-gradients. It is for cards before Hopper, on which later rungs are faster everywhere. 32
images of 28 x 28 pixels, 256 features, took an H200 0.46 to 0.75 of the time of what those cards
have to multiply unfolded ones, 16 of 14 x 14 and a stride of 2 0.98 to 1.6.
"""

from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.conv.boxes import fetch_rows, find_rows, in_box, place_of, spread, tile_of
from numbsparse.kernels.conv.walks import Units, line_units
from numbsparse.kernels.conv.window import cut
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts import fragments
from numbsparse.kernels.parts.aligned import aligned, aligned_values
from numbsparse.kernels.parts.copies import copying
from numbsparse.kernels.parts.fragments import PIECE
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.store_tile import store_tile, stored
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait

BLOCK_SIZES = (16, 32, 64)
DTYPES = ("float16", "bfloat16")
STAGES = 2
ENOUGH = 512  # blocks of threads: fewer take smaller tiles


class Rows(NamedTuple):
    """Rows of features, as one argument of a kernel."""

    values: Any  # along one axis
    stride: int  # from row to row
    features: int


class Shape(NamedTuple):
    """Of a block of threads: warps, the taps of a chunk, the rows of a box, of 32 to 48 KB."""

    WARPS: int
    taps: int
    ROWS: int
    height: int  # of a warp's tile, in 16 rows


SHAPES = {16: Shape(4, 9, 1024, 4), 32: Shape(8, 9, 768, 2), 64: Shape(4, 3, 384, 2)}
if SIMULATED:
    SHAPES = {size: shape._replace(WARPS=1) for size, shape in SHAPES.items()}


unsupported = reach(
    *("k3_tensor_core", "cuda", BLOCK_SIZES, DTYPES),
    capability=(8, 0),
    refused=lambda product, *_: "has no weight-gradient" if product == "weight_grad" else None,
)


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, dtype, transposed = values.shape[1], x.dtype.name, product == "input_grad"
    shape, batch, features = SHAPES[size], x.shape[0], y.shape[2]
    if not batch:
        return
    x, values, y = (a.view(np.uint16) for a in (x, values, y))
    x = aligned(x.reshape(-1, x.shape[2]))
    x = Rows(x.span, x.strides[0] // x.itemsize, x.shape[1])
    values = aligned_values(values).span
    y, _, wide = stored(y)
    lines = -(-features // size)
    of = window.seeing(product)
    residues, outputs = prod(of.view.residues), batch * prod(of.view.counts)
    height = shape.height
    while height > 1 and -(-outputs // (16 * height * shape.WARPS)) * residues * lines < ENOUGH:
        height //= 2
    rows = 16 * height * shape.WARPS
    how, chunks = cut(of, batch, rows, shape.taps, most_rows(shape, size, shared_memory()))
    units = Units(*planned(index, line_units, window.taps, product, of, how.box, chunks))
    tiles = prod(how.tiles)
    # Lines of a block of threads, of one residue.
    together = min(max(1, residues * lines * tiles // ENOUGH), lines)
    stage = how.rows * size + shape.taps * size * size
    launch(
        line_kernel(dtype, size, height, transposed, x.features % size > 0, wide, residues > 1),
        tiles * residues * -(-lines // together), 32 * shape.WARPS,
        x, values, batch, how, of.view,
        units, lines, together, y, features, stage,
        shared_bytes=STAGES * stage * values.itemsize,
    )  # fmt: skip


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def most_rows(shape: Shape, size: int, shared: int | None) -> int:
    """Of a box, whole lines of swizzled rows, on a card with so many bytes of shared memory: beside
    the ring there is where rows and outputs are."""
    if shared is None:
        return shape.ROWS
    beside = 12 * shape.ROWS + 64 * shape.height * shape.WARPS
    rows = (shared - beside) // (2 * STAGES * size) - shape.taps * size
    return min(rows // 8 * 8, shape.ROWS)


@cache
def line_kernel(
    dtype: str, B: int, TA: int, transposed: bool, edge: bool, wide: bool, squares: bool
) -> Any:
    WARPS, _, ROWS, _ = SHAPES[B]
    THREADS, BM, WM, TB = 32 * WARPS, 16 * TA * WARPS, 16 * TA, B // 8
    SLOT, AHEAD, PENDING, ACC = B * B, STAGES - 1, STAGES - 2, (TA, TB, 4)
    of_w, places_of = fragments.Side(B // PIECE, transposed), fragments.places(B // PIECE)
    _, load_x = fragments.square(B // PIECE, True, True)
    store, (place_in, _) = store_tile(dtype, TA, TB, wide, row_at), places_of
    fetch_x = fetch_rows(B, THREADS, PIECE, place_in)
    fetch_w = fetch_blocks(B, THREADS, transposed, PIECE, places_of)

    @cuda.jit(device=True)
    def read_x(ring, at, i, m):
        """Rows one by one, because those of a tile are not at equal distances."""
        return load_x(ring, at[m], 0, 2 * i)

    begin_w, add_products = fragments.adding_16(dtype, TA, TB, B, read_x, of_w)

    @cuda.jit
    def kernel(x, values, batch, tiling, view, units, lines, together, y, features, stage):
        ring = cuda.shared.array(0, uint16, ALIGNMENT)  # stages, each a box of x and blocks of w
        rows = cuda.shared.array(ROWS, int32)
        places = cuda.shared.array(ROWS, int64)  # of the tile's outputs, then of the box's pixels
        out_rows = cuda.shared.array(BM, int32)
        acc = cuda.local.array(ACC, float32)
        base, x_at = cuda.local.array(TA, int32), cuda.local.array(TA, uint32)
        groups = (lines + together - 1) // together
        line, number = cuda.blockIdx.x % groups * together, int32(cuda.blockIdx.x // groups)
        tile, first, before = number, (int32(0), int32(0), int32(0)), int64(0)
        if squares:
            tile, first = place_of(number, view.residues)
            before = (number - tile * ((units.ptr.size - 1) // lines)) * lines
        begin = units.ptr[before + line]
        end = units.ptr[before + min(line + together, lines)]
        image, top = tile_of(tile, tiling)
        spread(places, BM, tiling.images, tiling.tile)
        cuda.syncthreads()
        step, sizes = view.step, view.out_sizes
        find_rows(out_rows, places, BM, image, batch, top, step, first, sizes, 1)

        lane = uint32(cuda.threadIdx.x) % 32
        own = uint32(cuda.threadIdx.x) // 32 * WM
        across = lane // 16
        for m in range(TA):  # what the lane reads for `ldmatrix`
            base[m] = in_box(places[own + 16 * m + 8 * (lane // 8 % 2) + lane % 8], tiling.box)
        clear(acc)
        cuda.syncthreads()
        spread(places, tiling.rows, tiling.images, tiling.box)
        w_lane = tiling.rows * B + begin_w(0, 0)
        seen = -1  # the chunk whose box `rows` names
        now = then = int64(0)  # where the stages start that are multiplied, and fetched
        for unit in range(begin - AHEAD, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = unit + AHEAD
            if coming < end:
                entry = units.entry_ptr[coming]
                count = units.entry_ptr[coming + 1] - entry
                if count > 0:
                    chunk = units.chunk[coming]
                    if chunk != seen:
                        find_rows(
                            rows, places, tiling.rows, image, batch, top, view.scale,
                            units.origins[chunk], view.sizes, x.stride // PIECE,
                        )  # fmt: skip
                        seen = chunk
                        cuda.syncthreads()
                    c = units.other[coming] * B
                    fetch_x(x, c, rows, tiling.rows, ring, then)
                    inside = int64(x.features - c if edge else B)
                    at = then + tiling.rows * B
                    fetch_w(values, units.block, entry, count, inside, ring, at)
                then = then + stage if then + stage < STAGES * stage else 0
            cp_async_commit()
            if unit >= begin:
                entry, last = uint32(units.entry_ptr[unit]), uint32(units.entry_ptr[unit + 1])
                x_start, w_at = uint32(now), uint32(now + w_lane)
                coming_shift = units.shift[entry] if entry < last else int32(0)
                while entry < last:
                    shift, entry = coming_shift, uint32(entry + 1)
                    if entry < last:  # under way while this tap is multiplied
                        coming_shift = units.shift[entry]
                    for m in range(TA):
                        x_at[m] = x_start + place_in(uint32(base[m] + shift), across)
                    add_products(ring, x_at, w_at, acc)
                    w_at = uint32(w_at + SLOT)
                now = now + stage if now + stage < STAGES * stage else 0
                line = units.line[unit]
                if unit + 1 == end or units.line[unit + 1] != line:
                    store(acc, y, (out_rows, own), int64((line - before) * B), features)
                    clear(acc)

    return kernel


@cuda.jit(device=True)
def row_at(where, u, g):
    """Of line g of unit u of a warp's tile, -1 where it is not an output; see `store_tile`."""
    out_rows, own = where
    return int64(out_rows[own + 8 * u + g])


@cache
def fetch_blocks(B: int, THREADS: int, transposed: bool, PIECE: int, places: Any) -> Any:
    """ring[start + .] = the blocks of w from `entry` on, with 0 after `inside` features."""
    AT_ONCE, own, copy = copying(B, B, PIECE, THREADS, places)
    SLOT = B * B

    @cuda.jit(device=True)
    def fetch(values, entry_block, entry, count, inside, ring, start):
        slot, last = uint32(entry + own()), uint32(entry + count)
        at, lines, items = uint32(start + own() * SLOT), inside, int64(B)
        if transposed:
            lines, items = items, lines
        while slot < last:
            line, none = int64(entry_block[slot]) * B, int64(0)
            copy(values, B, line, none, lines, items, ring, at)
            slot, at = uint32(slot + AT_ONCE), uint32(at + AT_ONCE * SLOT)

    return fetch
