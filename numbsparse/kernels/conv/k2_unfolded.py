"""Rung 2: what the taps see, side by side in memory, and a product of matrices.

Row o of a matrix has, tap after tap, the features of the pixel that output o sees through it, in
blocks, without those that no block of w multiplies. Then a convolution is a product of
`numbsparse.kernels.matmul`, whose rungs know small blocks and few rows:

    forward       y = unfolded(x) @ w
    input_grad    dx = unfolded(dy) @ v.T      v: the same blocks, all taps of an in-block in a line
    weight_grad   dw = unfolded(x).T @ dy

At a stride a row of the input-gradient's result is a square of pixels of dx, one of each residue:
few taps reach each, so v has lines for each, and rows are unfolded once for all of them. Pixels
that no tap reaches have no lines; they are zeros as the others are copied into their places.

Memory is bounded: rows that together would outgrow the L2 cache are unfolded in parts, and for the
weight-gradient some taps at a time.

Reads per output: those of the product, and what it reads of x is written once before. That limits
many outputs: unfolded images are `taps` times as large as images. Few outputs lie in the L2 cache,
and their sums, which rungs that cut images into tiles give to a few blocks of threads, are shared
by all multiprocessors.
"""

from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels import matmul
from numbsparse.kernels.card import copy_engine, multiprocessors
from numbsparse.kernels.conv.costs import IN_CACHE, multipliers
from numbsparse.kernels.conv.window import Boxes, Pass, seen_in_boxes
from numbsparse.kernels.edge import inside
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned, aligned_values, copy_matrices
from numbsparse.kernels.parts.plans import Sent, planned
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    load_4xu32,
    store_4xu32,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index, Walk

BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
PRODUCT_ERROR = 6  # that of the rungs that multiply
ROWS = 64  # of a part, a multiple
IN_MEMORY = 1 << 28  # bytes of a part of some taps, as IN_CACHE of all
THREADS, RUN = 256, 4  # pieces of 16 bytes of a thread; of one, 1.08 to 1.12 times as long (H200)
NONE = -1
BLOCK_BITS, BLOCK = 16, 0xFFFF
DENSE = "k9_dense_tiles"  # where many blocks are kept, in place of k7_small_blocks

unsupported = reach("k2_unfolded", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest", by=None):
    """y[:] = conv(x, w), or conv_transpose(x, w), by a rung of that name, or the fastest."""
    of = window.whole(product)
    (sources, same), B, features = planned(index, sources_of, of), values.shape[1], x.shape[2]
    if features % B:
        big, small = (x, y) if product == "forward" else (y, x)
        values = without_edge(values, index, window.taps, big.shape[2], small.shape[2])
    packed = not same or features % B > 0
    lines_of = packed_taps if packed else taps_in_lines
    lines, _, _, seen = planned(index, lines_of, window.taps, product, of)
    if not seen.shape[0]:
        fill(y, 0.0)
        return
    rows, n_seen = rows_of(y, of, B), len(of.seen[0]) * -(-features // B) * B
    how = unfolding(x, sources, len(of.seen[0]), seen, B)
    together = max(IN_CACHE // (4 * how.words * seen.shape[0] * ROWS), 1) * ROWS
    together = together if packed else max(rows.shape[0], 1)
    for first in range(0, rows.shape[0], together):
        part = rows[first : first + together]
        n = part.shape[0]
        u = unfolded(how, first, n, x.dtype) if packed else x.reshape(n, n_seen)
        multiply = multiplier(by, product, values, lines, precision, n, n_seen, rows.shape[1])
        getattr(multiply, product)(u, values, lines, part, precision)
    interleave(rows, index, of, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest", by=None):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    B, dy = dvalues.shape[1], dy.reshape(-1, dy.shape[2])
    sizes = dy.shape[0], x.shape[2] * window.taps, dy.shape[1]
    of = multiplier(by, "weight_grad", dvalues, index, precision, *sizes)
    width, whole = -(-x.shape[2] // B) * B, window.whole("weight_grad")
    together = max(IN_MEMORY // max(width * x.itemsize * dy.shape[0], 1), 1)
    for first in range(0, window.taps, together):
        part = whole.some(range(first, min(first + together, window.taps)))
        rows, begin, end, seen = planned(index, packed_taps, window.taps, "weight_grad", part)
        if begin == end:
            continue
        sources, _ = planned(index, sources_of, part)
        how = unfolding(x, sources, len(part.taps), seen, B)
        # Not named: its memory is there for the next part.
        of.weight_grad(
            unfolded(how, 0, dy.shape[0], x.dtype), dy, rows, dvalues[begin:end], precision
        )


def multiplier(
    by: str | None, product: str, values: DeviceArray, index: Index, precision: str, *rows: Any
) -> Any:
    """The rung of that name, or the fastest that this card has: of (outputs, seen, features)."""
    if by:
        return matmul.rung(by)
    of = product, values.shape[1], values.dtype, precision
    name = next(iter(multipliers(*of, *rows, values.shape[0])), "k3_registers")
    if name == "k7_small_blocks" and matmul.rung(DENSE).suits(*of[:3], rows[0], index):
        name = DENSE
    return matmul.rung(name)


def without_edge(
    values: DeviceArray, index: Index, n_taps: int, in_features: int, out_features: int
) -> DeviceArray:
    """The blocks with zeros beyond the features, which end within a block of each tap."""
    in_blocks, whole = (index.rows.indptr.size - 1) // n_taps, empty(values.shape, values.dtype)
    places = index.block_rows, index.block_columns
    inside(aligned_values(values), *places, in_blocks, in_features, out_features, whole)
    return whole


def rows_of(y: DeviceArray, of: Pass, B: int) -> DeviceArray:
    """The matrix that has y's features in rows; one to `interleave` where residues have lines."""
    batch, _, features = y.shape
    if prod(of.view.residues) == 1:
        return y.reshape(-1, features)
    width = len(of.reached[0]) * -(-features // B) * B
    return empty((batch * prod(of.view.counts), width), y.dtype)


def interleave(rows: DeviceArray, index: Index, of: Pass, y: DeviceArray) -> None:
    """y (batch, pixels, features) from the matrix of `rows_of`, if it is not y itself."""
    (batch, _, features), run = y.shape, 16 // y.itemsize
    if prod(of.view.residues) == 1 or not y.size:
        return
    width = rows.shape[1] // len(of.reached[0])
    squares, whole = rows.reshape(batch, -1, width), y.reshape(-1, features)
    places, alone = planned(index, places_of, of)
    how = unfolding(squares, places, 1, alone, -(-features // run) * run)
    out = whole if features % run == 0 else empty((whole.shape[0], how.words * run // 4), y.dtype)
    unfold(how, 0, out)
    if out is not whole:
        copy_matrices((whole, out[:, :features]))


def places_of(index: Index, of: Pass) -> tuple[np.ndarray, np.ndarray]:
    """(of each pixel of an image, its place among the residues of all outputs, or NONE; and what is
    copied of one)."""
    pixels = np.stack([of.outputs(residue) for residue in of.reached[0]], 1).reshape(-1)
    places = np.full(prod(of.view.out_sizes), NONE, np.int32)
    places[pixels[pixels >= 0]] = np.flatnonzero(pixels >= 0)
    return places, np.zeros(1, np.int32)


class Unfolding(NamedTuple):
    """How images are unfolded; one argument of a kernel."""

    x: DeviceArray  # uint32; rows begin at multiples of 16 bytes, and are 0 after the features
    stride: int  # from row to row
    pixels: int  # of an image
    row_words: int  # of a row, in whole pieces of 16 bytes
    words: int  # of a block of them
    taps: int  # with different offsets
    sources: DeviceArray  # (outputs of an image * taps): the pixel, or NONE
    seen: DeviceArray  # (blocks of a row of the matrix): tap << BLOCK_BITS | block of the pixel


def unfolding(
    x: DeviceArray, sources: DeviceArray, taps: int, seen: DeviceArray, size: int
) -> Unfolding:
    """Of x, or for the input-gradient dy (batch, pixels, features), blocks of so many features."""
    (_, pixels, features), per_word, run = x.shape, 4 // x.itemsize, 16 // x.itemsize
    rows, width = x.reshape(-1, features), -(-features // run) * run
    if features < width:
        rows = empty((rows.shape[0], width), x.dtype)
        fill(rows, 0.0)
        copy_matrices((rows[:, :features], x.reshape(-1, features)))
    rows = aligned(rows)  # of a copy there are gaps between them
    return Unfolding(
        rows.span.view("uint32"),
        rows.strides[0] // 4,
        *(pixels, width // per_word, size // per_word, taps, sources, seen),
    )


def sources_of(index: Index, of: Pass) -> tuple[np.ndarray, bool]:
    """(of each output of an image, and each that it sees, the pixel or NONE; whether all outputs
    see the pixels as they are)."""
    sources = np.array([of.sources(offset) for offset in of.seen[0]], np.int32).T.reshape(-1)
    return sources, np.array_equal(sources, np.arange(prod(of.view.sizes)))


def unfolded(how: Unfolding, first: int, rows: int, dtype: Any) -> DeviceArray:
    """(rows, blocks * features): what the outputs from `first` on see through each tap."""
    matrix = empty((rows, how.seen.shape[0] * how.words * 4 // np.dtype(dtype).itemsize), dtype)
    unfold(how, first, matrix)
    return matrix


def unfold(how: Unfolding, top: int, matrix: DeviceArray) -> None:
    overlap, words = copy_engine(), matrix.span.view("uint32")
    rows, pieces = matrix.shape[0], words.size // 4
    run = RUN if pieces > 2 * RUN * THREADS * multiprocessors() else 1
    threads = -(-rows // run) * (pieces // max(rows, 1))
    launch(
        unfold_kernel(run, overlap), -(-threads // THREADS), THREADS,
        how, top, rows, words,
        overlap=overlap,
    )  # fmt: skip


@cache
def unfold_kernel(RUN: int, overlap: bool) -> Any:
    """A thread copies a piece of RUN neighbouring rows, which are outputs from `top` on.

    With one row it needs few registers, and starts beside the last blocks of a small product.
    """
    PIECES = (RUN, 4)

    @cuda.jit
    def kernel(how, top, n_rows, matrix):
        if overlap:
            let_next_kernel_start()
        at = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        of_block, taps = uint32(how.words // 4), uint32(how.taps)
        of_row = uint32(uint32(how.seen.size) * of_block)
        group = uint32(at // of_row)
        line, column = uint32(group * RUN), uint32(at - group * of_row)
        block = uint32(column // of_block)
        own = uint32(how.seen[block])
        word = uint32(4 * (column - block * of_block) + (own & BLOCK) * uint32(how.words))
        of_image, output = uint32(uint32(how.sources.size) // taps), uint32(top + line)
        image = uint32(output // of_image)
        within = uint32(output - image * of_image)
        left = min(int64(n_rows) - int64(line), int64(RUN))
        rows, copied = cuda.local.array(RUN, int64), cuda.local.array(PIECES, uint32)
        for r in range(RUN):  # known before earlier kernels have written x
            rows[r] = -1
            if r < left and word < how.row_words:
                source = how.sources[uint32(within * taps + (own >> BLOCK_BITS))]
                if source >= 0:
                    rows[r] = int64(image) * how.pixels + source
            within = uint32(within + 1)
            if within == of_image:
                within, image = uint32(0), uint32(image + 1)
        if overlap:
            wait_for_earlier_kernels()
        for r in range(RUN):
            for i in range(4):
                copied[r, i] = 0
            if rows[r] >= 0:
                copied[r, 0], copied[r, 1], copied[r, 2], copied[r, 3] = load_4xu32(
                    how.x, rows[r] * how.stride + word
                )
        for r in range(RUN):
            if r < left:
                to = 4 * (int64(line + r) * of_row + column)
                store_4xu32(matrix, to, copied[r, 0], copied[r, 1], copied[r, 2], copied[r, 3])

    return kernel


def taps_in_lines(
    index: Index,
    n_taps: int,
    product: str,
    of: Pass,
    together: int = 1,
    whole: bool = False,
    boxes: Boxes | None = None,
    packed: bool = False,
) -> tuple[Index, int, int, np.ndarray]:
    """(index of the blocks of a pass in the product of what its taps see, begin, end, seen).

    They are in rows (offset, in_block), for the input-gradient in columns (offset, out_block), of
    each offset a multiple of `together`, and rows (residue, in_block), of residues that taps reach;
    `whole`, of all. With `boxes` that taps share there are rows (box, `together` in_blocks, shift,
    in_block of these). In a weight-gradient taps are neighbours: its blocks, `begin` to `end`, are
    counted from the first one. Where `packed`, rows without a block are left out, and `seen` has
    the offset << BLOCK_BITS | in_block of the others.
    """
    counts = [(index.rows.indptr.size - 1) // n_taps, index.columns.indptr.size - 1]
    tap, rows = np.divmod(index.block_rows, counts[0])
    kept = np.flatnonzero(np.isin(tap, of.taps))
    sides, tap = [rows[kept], index.block_columns[kept]], np.searchsorted(of.taps, tap[kept])
    (offsets, which), (residues, reached) = of.seen, of.reached
    n_boxes, shifts, shift = len(offsets), 1, np.zeros(len(of.taps), int)
    if boxes:
        n_boxes, shifts = len(boxes.chunks), boxes.shifts
        which, shift = seen_in_boxes(boxes.chunks, boxes.box)
    if whole:
        residues, reached = tuple(range(prod(of.view.residues))), np.array(of.residues, int)
    seen, begin = int(product == "input_grad"), 0
    if product == "weight_grad" and kept.size:
        begin = int(kept[0])
    groups, (group, within) = -(-counts[seen] // together), np.divmod(sides[seen], together)
    group = (which[tap] * groups + group) * shifts + shift[tap]
    sides[seen] = group * together + within
    counts[seen] = n_boxes * groups * shifts * together
    which, places = np.unique(sides[seen], return_inverse=True)
    if packed:
        sides[seen], counts[seen] = places, which.size
    sides[1 - seen] = reached[tap] * counts[1 - seen] + sides[1 - seen]
    counts[1 - seen] *= len(residues)
    blocks = scipy.sparse.coo_array((kept - begin, sides), shape=counts)
    walks = ((a.indptr, a.indices, a.data) for a in (blocks.tocsr(), blocks.tocsc()))
    lines, columns = (Walk(*(a.astype(np.int32) for a in arrays)) for arrays in walks)
    of_blocks = (a.astype(np.int32) for a in sides)
    tap, block = np.divmod(which, groups)
    which = (tap << BLOCK_BITS | block).astype(np.int32)
    return Sent(Index(lines, columns, *of_blocks)), begin, begin + kept.size, which


packed_taps = partial(taps_in_lines, packed=True)
