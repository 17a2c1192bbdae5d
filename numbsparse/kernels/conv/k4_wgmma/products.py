"""What warpgroups multiply and store in forward and input-gradient, in 16 bits and in float32.

In 16 bits `wgmma` reads both operands from shared memory. Sums are rounded, stored as matrices into
shared memory, and the copy engine copies them to y, without what reaches beyond the image; a warp
has 16 pixels at a time, two lines of 8, or 16 of one line where images have no more.

In float32 threads read the pixels of their rows wherever they are, and split them into hi and lo as
`parts.split` says. The blocks of w are split before: see `parts.images`.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map, tensor_maps
from numbsparse.kernels.conv.boxes import in_box, place_of, plus, row_at, unpacked
from numbsparse.kernels.conv.window import PIXELS, SIDE, Three, View
from numbsparse.kernels.parts.images import images_of, load_image
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.parts.store import KINDS, Sums
from numbsparse.kernels.parts.store_boxes import panel_writer
from numbsparse.kernels.ptx import (
    Operand,
    as_uint32,
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    load_4xf32,
    store_2xu32,
    sync_warp,
    tma_load_2d,
    tma_store_5d,
    to_local,
    wgmma_split,
    wgmma_units,
    zeros,
)

ROWS = 16  # of a warp
CHUNK, RUN = 16, 4  # terms of a sum that four lanes hold, each four neighbours
NO_EDGE = 2**31 - 1  # features: only whole blocks are served


class LineProduct(NamedTuple):
    """Of warpgroups that have UNITS pieces of 64 outputs.

    item, NBYTES : what shared memory holds
    SUMS : the shape of a thread's accumulators in memory
    SLOT : items of a block of w
    BUFFER : items of shared memory that a warp stores y from
    fetch_block : fetch_block(w, block, ring, start, bars, full)
    begin : begin(y, places, warp, lane, box), where a thread's rows are in a box
    start : start(sums), accumulators of zeros, or None where they are `sums`
    add : add(acc, ring, x_place, shift, w_place, (sums, rows)), the accumulators with a tap added;
        None where they are `sums`. Places are in pieces of 16 bytes
    store : store(acc, sums, y, residue, places, warp, ring, buffer, image, top, column)
    """

    item: Any
    NBYTES: int
    SUMS: Any
    SLOT: int
    BUFFER: int
    fetch_block: Any
    begin: Any
    start: Any
    add: Any
    store: Any


def weight_of(
    values: DeviceArray, rows: DeviceArray, B: int, transposed: bool, arithmetic: str
) -> DeviceArray:
    """The blocks (n_blocks, size, size) for the copy engine: B x B of one at a time.

    rows : their block rows
    """
    size = values.shape[2]
    if values.itemsize == 2:
        return tensor_map(values.reshape(-1, size), (B, B))
    strides = (1, size) if transposed else (size, 1)  # along the sum and across
    return images_of(values, strides, rows, NO_EDGE, B, B, False, alone=arithmetic == "high")


class Output(NamedTuple):
    """y, as one axis, for threads that store it themselves."""

    batch: int
    view: View
    values: DeviceArray
    features: int


def output_of(y: DeviceArray, view: View, tile: Three, B: int) -> Any:
    """The outputs in y (batch, pixels, features): in 16 bits the map of each residue, (n, 16)."""
    batch, _, features = y.shape
    if y.itemsize == 4:
        return Output(batch, view, y.span, features)
    lines = (1, ROWS) if tile[2] > SIDE else (ROWS // SIDE, SIDE)
    images, box = y.reshape(batch, *view.out_sizes, features), (1, 1, *lines, B)
    along = (
        [slice(f, None, s) for f, s in zip(first, view.step, strict=True)]
        for first in np.ndindex(*view.residues)
    )
    return tensor_maps(*((images[(slice(None), *of)], box) for of in along))


@cache
def product_of_16_bit(
    dtype: str, B: int, PARTS: int, UNITS: int, GROUP: int, transposed: bool
) -> LineProduct:
    LINE, COUNT, OWN, BUFFER = 2 * B, UNITS * B // 2, UNITS * PIXELS, B * ROWS
    ROW16, BITS = LINE // 16, PARTS.bit_length() - 1  # pieces of 16 bytes of a row
    x_operand, w_operand = Operand(LINE, 0, group=GROUP * LINE), Operand(LINE, 0, not transposed)
    multiply = wgmma_units(KINDS[dtype], UNITS, B, B // 16, x_operand, w_operand)
    start_from = zeros(COUNT)
    write = panel_writer(Sums(KINDS[dtype], B, 1, UNITS, PIXELS), UNIT=2)
    lines_of, placed = lines_from(0, UNITS, ROW16), places_from(0, UNITS)

    @cuda.jit(device=True)
    def fetch_block(w_map, block, ring, start, bars, full):
        line, other = block >> BITS & PARTS - 1, block & PARTS - 1
        row, column = (line, other) if transposed else (other, line)
        row += block >> 2 * BITS << BITS
        tma_load_2d(ring, start, w_map, int32(column * B), int32(row * B), bars, full)

    @cuda.jit(device=True)
    def begin(y_maps, places, warp, lane, box):
        return lines_of(places, uint32(warp // 4 * OWN), box)

    @cuda.jit(device=True)
    def start(sums):
        return start_from()

    @cuda.jit(device=True)
    def add(acc, ring, x_place, shift, w_place, own):
        _, lines = own
        where = placed(lines, uint32(x_place + shift * ROW16), w_place)
        return multiply(acc, ring, 0, where, uint32(UNITS))

    @cuda.jit(device=True)
    def store(acc, sums, y_maps, residue, places, warp, ring, buffer, image, top, column):
        to_local(acc, sums)
        y_map = y_maps[residue]
        own, at = uint32(warp // 4 * OWN), buffer + warp * BUFFER
        for u in range(UNITS):
            packed = places[own + u * PIXELS + warp % 4 * ROWS]
            bulk_wait_read()
            sync_warp()
            write(sums, u, 0, ring, at)
            fence_proxy_async()
            sync_warp()
            if elect() != 0 and packed >= 0:
                n, q = unpacked(packed)
                z, y, x = plus(top, q)
                tma_store_5d(ring, at, y_map, column, x, y, z, int32(image + n))
                bulk_commit()

    return LineProduct(*(uint16, 2, COUNT, B * B, BUFFER, fetch_block, begin, start, add, store))


def lines_from(u: int, units: int, each: int) -> Any:
    """Where in a box, of lines of `each` pieces, the units from u on begin, in a tuple."""
    rest = lines_from(u + 1, units, each) if u + 1 < units else nothing

    @cuda.jit(device=True)
    def lines_of(places, own, box):
        return uint32(in_box(places[own + u * PIXELS], box) * each), *rest(places, own, box)

    return lines_of


def places_from(u: int, units: int) -> Any:
    """The places of both operands of the units from u on, as a tuple of two words for each."""
    rest = places_from(u + 1, units) if u + 1 < units else nothing

    @cuda.jit(device=True)
    def placed(words, at, other):
        return uint32(words[u] + at), other, *rest(words, at, other)

    return placed


@cuda.jit(device=True)
def nothing(*_):
    return ()


@cache
def product_of_float32(precision: str, B: int) -> LineProduct:
    exact, TB, REGISTERS, CHUNKS = precision == "highest", B // 8, B // 2, B // CHUNK
    SLOT, PIECES = (2 if exact else 1) * B * B, B // 4  # of 16 bytes of a line
    LINES = 8 // PIECES  # of which the pieces are swapped alike
    split = splitting(exact, fast=True)
    multiply = wgmma_split(B, TB, exact, 1, True, not exact)

    @cuda.jit(device=True)
    def first_row(warp, lane):
        """Which of 8 neighbouring pixels is line g of a product: no two lanes share a bank."""
        g = lane // 4
        return warp * ROWS + (g // 2 + g % 2 * 4 if B == 32 else g)

    @cuda.jit(device=True)
    def begin(y, places, warp, lane, box):
        own = first_row(warp, lane)
        return in_box(places[own], box), in_box(places[own + 8], box)

    @cuda.jit(device=True)
    def start(sums):
        clear(sums)

    @cuda.jit(device=True)
    def add(_, ring, x_place, shift, w_place, own):
        sums, rows = own
        hi, lo = cuda.local.array(REGISTERS, uint32), cuda.local.array(REGISTERS, uint32)
        q = uint32(cuda.threadIdx.x) % 4
        for h in range(2):
            line = uint32(rows[h] + shift)
            start, piece = uint32(x_place + line * PIECES), uint32(line // LINES % PIECES ^ q)
            for c in range(CHUNKS):
                run = load_4xf32(ring, uint32(4 * (start + (piece ^ 4 * c))))
                for j in range(RUN):
                    i = (c * 2 + j // 2) * 4 + j % 2 * 2 + h
                    hi[i], lo[i] = split(run[j])
        multiply(sums, hi, lo, ring, 4 * w_place)

    @cuda.jit(device=True)
    def store(_, sums, y, residue, places, warp, ring, buffer, image, top, column):
        lane = uint32(cuda.threadIdx.x) % 32
        own, (_, first) = first_row(warp, lane), place_of(residue, y.view.residues)
        for h in range(2):
            of = image, y.batch, top, y.view.step, first, y.view.out_sizes
            row = int64(row_at(places[own + 8 * h], *of))
            for k in range(TB):
                c = column + 8 * k + lane % 4 * 2
                if row >= 0 and c < y.features:
                    low, high = as_uint32(sums[0, k, 2 * h]), as_uint32(sums[0, k, 2 * h + 1])
                    store_2xu32(y.values, row * y.features + c, low, high)

    return LineProduct(
        *(float32, 4, (1, TB, 4), SLOT, 0, load_image(4 * SLOT), begin, start, add, store)
    )
