"""Parts that copy and multiply tiles in shared memory, beside NumPy."""

import numpy as np
import pytest
from numba import cuda, float32, int64, uint16
from ptx_helpers import needs_ampere, run

from numbsparse.dtypes import as_dtype
from numbsparse.kernels.parts.banks import place, swap_for_lanes, swap_for_rows
from numbsparse.kernels.parts.copies import copying, copying_matrix
from numbsparse.kernels.parts.fragments import MMA, Side, coordinates, piece_of, products
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait

pytestmark = needs_ampere
LINES = 16


@pytest.mark.parametrize("pieces", [2, 4, 8, 16])
@pytest.mark.parametrize("swap_for", [swap_for_rows, lambda pieces: swap_for_lanes(pieces, 4)])
def test_each_piece_has_a_place_and_moves_reach_it(pieces, swap_for):
    place_in, move = place(pieces, 8, swap_for(pieces))

    @cuda.jit
    def kernel(out):
        line, piece = cuda.threadIdx.x // pieces, cuda.threadIdx.x % pieces
        out[0, cuda.threadIdx.x] = place_in(line, piece)
        out[1, cuda.threadIdx.x] = move(place_in(0, 0), line, piece)

    count = LINES * pieces
    at, moved = run(kernel, out=np.zeros((2, count), np.int64), threads=count)
    assert sorted(at) == list(range(0, count * 8, 8))
    np.testing.assert_array_equal(moved, at)


@pytest.mark.parametrize("threads", [32, 64, 256], ids="{} threads".format)
@pytest.mark.parametrize(("line", "item"), [(0, 0), (5, 8)], ids=["whole", "over the edges"])
def test_tiles_are_copied_and_zero_beyond_the_edges(line, item, threads, rng):
    """Three tiles below each other, 16 x 32, of a matrix of 50 x 36 values in lines of 40."""
    WIDTH, TILES, SIZE = 32, 3, 3 * LINES * 32

    @cuda.jit(device=True)
    def no_swap(line):
        return 0

    AT_ONCE, own, copy = copying(LINES, WIDTH, 8, threads, place(WIDTH // 8, 8, no_swap))

    @cuda.jit
    def kernel(x, out):
        ring = cuda.shared.array(SIZE, uint16, ALIGNMENT)
        for first in range(0, TILES, AT_ONCE):
            i = first + own()
            if i < TILES:
                top, start = int64(line + i * LINES), i * (LINES * WIDTH)
                copy(x, 40, top, item, 50 - top, 36 - item, ring, start)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        for k in range(cuda.threadIdx.x, SIZE, threads):
            out[k] = ring[k]

    x = rng.integers(1, 2**16, (64, 40), dtype=np.uint16)
    got = run(kernel, x.reshape(-1), out=np.zeros(SIZE, np.uint16), threads=threads)
    inside = np.zeros_like(x)
    inside[:50, :36] = x[:50, :36]
    expected = np.zeros((TILES * LINES, WIDTH), np.uint16)
    there = inside[line : line + TILES * LINES, item : item + WIDTH]
    expected[: there.shape[0], : there.shape[1]] = there
    np.testing.assert_array_equal(got.reshape(TILES * LINES, WIDTH), expected)


ROWS, DEPTH, TERMS = 32, 32, 29  # of the tiles multiplied; terms of the sum


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("b_along", [False, True], ids=["b down", "b along"])
@pytest.mark.parametrize("a_along", [False, True], ids=["a down", "a along"])
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "highest", "high"])
def test_products_of_tiles_in_either_order(arithmetic, a_along, b_along, columns, rng):
    """a (32, 29) @ b (29, columns), small numbers, whose sums are exact; NaN beyond their edges."""
    dtype = as_dtype(arithmetic if arithmetic in MMA else "float32")
    PIECE, TA, TB, WIDTH = piece_of(arithmetic), ROWS // 16, columns // 8, columns
    a_side = Side((DEPTH if a_along else ROWS) // PIECE, a_along)
    b_side = Side((DEPTH if b_along else columns) // PIECE, b_along)
    made = products(arithmetic, TA, TB, DEPTH, a_side, b_side)
    _, _, copy_a = copying_matrix(ROWS, DEPTH, PIECE, 32, not a_along, made.a_places)
    _, _, copy_b = copying_matrix(WIDTH, DEPTH, PIECE, 32, not b_along, made.b_places)
    begin_a, begin_b, add, ACC = made.begin_a, made.begin_b, made.add, (TA, TB, 4)
    row_in, column_in = coordinates(arithmetic, 2 * TA), coordinates(arithmetic, TB)
    ITEM, SIZE = uint16 if dtype.itemsize == 2 else float32, (ROWS + WIDTH) * DEPTH

    @cuda.jit
    def kernel(a, b, out):
        ring = cuda.shared.array(SIZE, ITEM, ALIGNMENT)
        acc = cuda.local.array(ACC, float32)
        copy_a(a, a_stride, 0, ROWS, 0, TERMS, ring, 0)
        copy_b(b, b_stride, 0, WIDTH, 0, TERMS, ring, ROWS * DEPTH)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] = 1
        add(ring, begin_a(0, 0), ROWS * DEPTH + begin_b(0, 0), acc)
        g, q = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    out[row_in(2 * m + i // 2, g), column_in(n, 2 * q + i % 2)] = acc[m, n, i]

    a, b = (rng.integers(-4, 5, (n, TERMS)).astype(np.float32) for n in (ROWS, columns))
    (a_lines, a_stride), (b_lines, b_stride) = in_lines(a, a_along), in_lines(b, b_along)
    stored = (lines.astype(dtype).view(np.uint16 if dtype.itemsize == 2 else dtype)
              for lines in (a_lines, b_lines))  # fmt: skip
    got = run(kernel, *stored, out=np.zeros((ROWS, columns), np.float32))
    np.testing.assert_array_equal(got, 1 + a @ b.T)


def in_lines(matrix, along):
    """A matrix or its transpose, each line from a multiple of 16 bytes, and their stride."""
    lines = matrix if along else matrix.T
    stride = -(-lines.shape[1] // 8) * 8
    padded = np.full((lines.shape[0], stride), np.nan, np.float32)
    padded[:, : lines.shape[1]] = lines
    return padded.reshape(-1), stride


@pytest.mark.parametrize("count", [1, 2, 5])
def test_functions_run_one_by_one(count):
    def make(k):
        @cuda.jit(device=True)
        def multiply(out):
            out[0] = out[0] * 10 + k

        return multiply

    run_all = one_by_one(make, count)

    @cuda.jit
    def kernel(out):
        out[0] = 0
        run_all(out)

    assert run(kernel, out=np.zeros(1, np.int64), threads=1) == int("01234"[:count])
