"""From what tiles were multiplied to, to a line of y: batch rows of x's lines, features of w's."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32, uint64

from numbsparse.kernels.matmul.k8_small_batch.outputs import item_of, packing
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.ring import Ring
from numbsparse.kernels.matmul.k8_small_batch.tiles import in_order, line_of
from numbsparse.kernels.ptx import as_uint32, store_2xu32, store_4xf32


@cache
def places(ring: Ring) -> Any:
    """place(n) = (row of the batch, feature of the line) of output n of this lane."""
    row_of, feature_of = line_of(ring.form, ring.x_across), line_of(ring.form, not ring.turned)

    @cuda.jit(device=True)
    def place(n):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        m, t, r, p = n // 16, n // 4 % 4, n // 2 % 2, n % 2
        return row_of(2 * m + r, g), feature_of(t, 2 * q + p)

    return place


@cache
def store_tiles(ring: Ring) -> Any:
    """y[b * y_batch + i * y_feature] = output (b, i of the line), where they are inside.

    "across" stores neighbouring features at once, "along" neighbouring rows of the batch, all or
    none of which are there: four float32 or two, or two halves as a word of y, which is then an
    array of words. "each" stores one by one.
    """
    if ring.y == "each":
        return store_each(ring)
    if ring.form.halves:
        return store_words(ring)
    return store_features(ring) if ring.y == "across" else store_rows(ring)


@cache
def store_features(ring: Ring) -> Any:
    M, ACROSS = ring.groups // 2, not ring.turned
    row_of = line_of(ring.form, ring.x_across)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, y_batch, _ = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(M):
            for r in range(2):
                b = row_of(2 * m + r, g)
                for h in range(2):
                    i = 2 * r
                    if ACROSS:
                        first = line * WIDTH + 8 * q + 4 * h
                        v0, v1, v2, v3 = (
                            acc[m, 0, i + h],
                            acc[m, 1, i + h],
                            acc[m, 2, i + h],
                            acc[m, 3, i + h],
                        )
                    else:
                        first = line * WIDTH + 16 * h + 4 * q
                        v0, v1 = acc[m, 2 * h, i], acc[m, 2 * h + 1, i]
                        v2, v3 = acc[m, 2 * h, i + 1], acc[m, 2 * h + 1, i + 1]
                    if b < batch and first < out_features:
                        store_4xf32(y, b * y_batch + first, v0, v1, v2, v3)

    return put


@cache
def store_words(ring: Ring) -> Any:
    """Two halves at once: neighbouring features, or rows of sums that are `swapped`."""
    (M, N), SWAPPED, HALF, pack = ring.sums, ring.swapped, WIDTH // 2, packing(ring.form)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, y_batch, y_feature = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        if SWAPPED:
            top, rows, stride, word, columns = line * WIDTH, out_features, y_feature, q, batch
        else:
            top, rows, stride, word, columns = 0, batch, y_batch, line * HALF + q, out_features
        for m in range(M):
            for r in range(2):
                row = top + in_order(2 * m + r, g)
                for t in range(N):
                    if row < rows and 2 * word + 8 * t < columns:
                        # Numba asks of a signed index whether it counts from the end.
                        place = uint64(row * stride + word + 4 * t)
                        y[place] = pack(acc[m, t, 2 * r], acc[m, t, 2 * r + 1])

    return put


@cache
def store_rows(ring: Ring) -> Any:
    """Four rows at once where x lies feature by feature, else two: so many neighbours a lane has,
    by `line_of`."""
    TILES, PAIRS = ring.groups // 4, ring.groups // 2
    feature_of = line_of(ring.form, not ring.turned)

    @cuda.jit(device=True)
    def fours(y, line, y_is, acc):
        batch, out_features, _, y_feature = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(TILES):
            b = 4 * g + 32 * u
            for t in range(4):
                for p in range(2):
                    feature = line * WIDTH + feature_of(t, 2 * q + p)
                    if b < batch and feature < out_features:
                        v0, v1 = acc[2 * u, t, p], acc[2 * u, t, 2 + p]
                        v2, v3 = acc[2 * u + 1, t, p], acc[2 * u + 1, t, 2 + p]
                        store_4xf32(y, feature * y_feature + b, v0, v1, v2, v3)

    @cuda.jit(device=True)
    def twos(y, line, y_is, acc):
        batch, out_features, _, y_feature = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(PAIRS):
            b = 2 * g + 16 * m
            for t in range(4):
                for p in range(2):
                    feature = line * WIDTH + feature_of(t, 2 * q + p)
                    if b < batch and feature < out_features:
                        v0, v1 = as_uint32(acc[m, t, p]), as_uint32(acc[m, t, 2 + p])
                        store_2xu32(y, feature * y_feature + b, v0, v1)

    return fours if ring.x_across else twos


@cache
def store_each(ring: Ring) -> Any:
    M = ring.groups // 2
    row_of, feature_of = line_of(ring.form, ring.x_across), line_of(ring.form, not ring.turned)
    item = item_of(ring.form)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, y_batch, y_feature = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(M):
            for r in range(2):
                b = row_of(2 * m + r, g)
                for t in range(4):
                    for p in range(2):
                        feature = line * WIDTH + feature_of(t, 2 * q + p)
                        if b < batch and feature < out_features:
                            place = uint64(b * y_batch + feature * y_feature)
                            y[place] = item(acc[m, t, 2 * r + p])

    return put
