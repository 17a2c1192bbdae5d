"""Rung 2: what the taps see, side by side in memory, and a product of matrices.

Row o of a matrix has, tap after tap, the features of the pixel that output o sees through it. Then
a convolution is a product of `numbsparse.kernels.matmul`, whose rungs know small blocks and few
rows:

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
from numbsparse.kernels.conv.costs import multipliers
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
IN_CACHE, IN_MEMORY = 1 << 25, 1 << 28  # bytes of a part: of all taps, and of some
THREADS, RUN = 256, 4  # pieces of 16 bytes of a thread; of one, 1.08 to 1.12 times as long (H200)
NONE = -1
DENSE = "k9_dense_tiles"  # where many blocks are kept, in place of k7_small_blocks

unsupported = reach("k2_unfolded", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def _lines(product, x, values, index, window, y, precision="highest", by=None):
    """y[:] = conv(x, w), or conv_transpose(x, w), by a rung of that name, or the fastest."""
    of = window.whole(product)
    (sources,), B = planned(index, sources_of, of), values.shape[1]
    if x.shape[2] % B:
        big, small = (x, y) if product == "forward" else (y, x)
        values = without_edge(values, index, window.taps, big.shape[2], small.shape[2])
    lines = index
    if product == "input_grad":
        lines, *_ = planned(index, taps_in_lines, window.taps, product, of)
    rows = rows_of(y, of, B)
    how = unfolding(x, sources, len(of.seen[0]), -(-x.shape[2] // B) * B)
    together = max(IN_CACHE // max(4 * how.words * how.taps * ROWS, 1), 1) * ROWS
    for first in range(0, rows.shape[0], together):
        part = rows[first : first + together]
        u = unfolded(how, first, part.shape[0], x.dtype)
        multiply = multiplier(by, product, values, lines, precision, *u.shape, rows.shape[1])
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
        rows, begin, end = planned(index, taps_in_lines, window.taps, "weight_grad", part)
        (sources,) = planned(index, sources_of, part)
        how = unfolding(x, sources, len(part.taps), width)
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
    by_time = multipliers(*of, *rows, values.shape[0], 0)
    name = next((name for _, name in by_time), "k3_registers")
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
    (places,) = planned(index, places_of, of)
    how = unfolding(squares, places, 1, -(-features // run) * run)
    out = whole if features % run == 0 else empty((whole.shape[0], how.words * run // 4), y.dtype)
    unfold(how, 0, out)
    if out is not whole:
        copy_matrices((whole, out[:, :features]))


def places_of(index: Index, of: Pass) -> tuple[np.ndarray]:
    """(of each pixel of an image, its place among the residues of all outputs, or NONE,)."""
    pixels = np.stack([of.outputs(residue) for residue in of.reached[0]], 1).reshape(-1)
    places = np.full(prod(of.view.out_sizes), NONE, np.int32)
    places[pixels[pixels >= 0]] = np.flatnonzero(pixels >= 0)
    return (places,)


class Unfolding(NamedTuple):
    """How images are unfolded; one argument of a kernel."""

    x: DeviceArray  # uint32; rows begin at multiples of 16 bytes, and are 0 after the features
    stride: int  # from row to row
    pixels: int  # of an image
    row_words: int  # of a row, in whole pieces of 16 bytes
    words: int  # for them in the matrix
    taps: int  # with different offsets
    sources: DeviceArray  # (outputs of an image * taps): the pixel, or NONE


def unfolding(x: DeviceArray, sources: DeviceArray, taps: int, room: int) -> Unfolding:
    """Of x, or for the input-gradient dy (batch, pixels, features), with so many for each tap."""
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
        *(pixels, min(width, room) // per_word, room // per_word, taps, sources),
    )


def sources_of(index: Index, of: Pass) -> tuple[np.ndarray]:
    """(of each output of an image, and each that it sees, the pixel or NONE,)."""
    sources = [of.sources(offset) for offset in of.seen[0]]
    return (np.array(sources, np.int32).T.reshape(-1),)


def unfolded(how: Unfolding, first: int, rows: int, dtype: Any) -> DeviceArray:
    """(rows, taps * features): what the outputs from `first` on see through each tap."""
    matrix = empty((rows, how.taps * how.words * 4 // np.dtype(dtype).itemsize), dtype)
    unfold(how, first, matrix)
    return matrix


def unfold(how: Unfolding, first: int, matrix: DeviceArray) -> None:
    overlap, words = copy_engine(), matrix.span.view("uint32")
    image, entry = divmod(first * how.taps, how.sources.size)
    pieces = words.size // 4
    run = RUN if pieces > 2 * RUN * THREADS * multiprocessors() else 1
    launch(
        unfold_kernel(run, overlap), -(-pieces // (run * THREADS)), THREADS,
        how, image, entry, words,
        overlap=overlap,
    )  # fmt: skip


@cache
def unfold_kernel(RUN: int, overlap: bool) -> Any:
    """A thread copies RUN pieces; from image `image` on, and the `entry`-th of its sources.

    With one piece it needs few registers, and starts beside the last blocks of a small product.
    """
    PIECES = (RUN, 4)

    @cuda.jit
    def kernel(how, image, entry, matrix):
        if overlap:
            let_next_kernel_start()
        first = uint32(cuda.blockIdx.x * (RUN * THREADS) + cuda.threadIdx.x)
        of_image, of_line = uint32(how.sources.size), uint32(how.words // 4)
        pieces, own = uint32(matrix.size // 4), cuda.local.array(PIECES, uint32)
        rows, words = cuda.local.array(RUN, int64), cuda.local.array(RUN, uint32)
        for r in range(RUN):  # known before earlier kernels have written x
            at = uint32(first + r * THREADS)
            line = uint32(at // of_line)
            words[r], number = uint32(4 * (at - line * of_line)), uint32(entry + line)
            images = uint32(number // of_image)
            source = how.sources[uint32(number - images * of_image)]
            rows[r] = int64(image + images) * how.pixels + source if source >= 0 else int64(-1)
            if at >= pieces or words[r] >= how.row_words:
                rows[r] = -1
        if overlap:
            wait_for_earlier_kernels()
        for r in range(RUN):
            for i in range(4):
                own[r, i] = 0
            if rows[r] >= 0:
                own[r, 0], own[r, 1], own[r, 2], own[r, 3] = load_4xu32(
                    how.x, rows[r] * how.stride + words[r]
                )
        for r in range(RUN):
            at = uint32(first + r * THREADS)
            if at < pieces:
                store_4xu32(matrix, 4 * int64(at), own[r, 0], own[r, 1], own[r, 2], own[r, 3])

    return kernel


def taps_in_lines(
    index: Index,
    n_taps: int,
    product: str,
    of: Pass,
    together: int = 1,
    whole: bool = False,
    boxes: Boxes | None = None,
) -> tuple[Index, int, int]:
    """(index of the blocks of a pass in the product of what its taps see, begin, end).

    They are in rows (offset, in_block), for the input-gradient in columns (offset, out_block), of
    each offset a multiple of `together`, and rows (residue, in_block), of residues that taps reach;
    `whole`, of all. With `boxes` that taps share there are rows (box, `together` in_blocks, shift,
    in_block of these). In a weight-gradient taps are neighbours: its blocks, `begin` to `end`, are
    counted from the first one.
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
    sides[1 - seen] = reached[tap] * counts[1 - seen] + sides[1 - seen]
    counts[1 - seen] *= len(residues)
    blocks = scipy.sparse.coo_array((kept - begin, sides), shape=counts)
    walks = ((a.indptr, a.indices, a.data) for a in (blocks.tocsr(), blocks.tocsc()))
    lines, columns = (Walk(*(a.astype(np.int32) for a in arrays)) for arrays in walks)
    of_blocks = (a.astype(np.int32) for a in sides)
    return Sent(Index(lines, columns, *of_blocks)), begin, begin + kept.size
