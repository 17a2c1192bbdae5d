"""From what tiles were multiplied to, to a line of y: batch rows of x's lines, features of w's."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32, uint64

from numbsparse.kernels.matmul.k8_small_batch.outputs import item_of, packing
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.ring import Ring
from numbsparse.kernels.matmul.k8_small_batch.tiles import line_of
from numbsparse.kernels.ptx import store_4xf32


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
    none of which are there: four float32, or two halves as a word of y, which is then an array of
    words. "each" stores one by one.
    """
    if ring.y == "across":
        return store_pairs(ring) if ring.form.halves else store_features(ring)
    if ring.y == "along":
        return store_row_pairs(ring) if ring.form.halves else store_rows(ring)
    return store_each(ring)


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
def store_pairs(ring: Ring) -> Any:
    M, HALF = ring.groups // 2, WIDTH // 2
    row_of, pack = line_of(ring.form, ring.x_across), packing(ring.form)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, y_batch, _ = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        first = line * HALF + q
        for m in range(M):
            for r in range(2):
                b = row_of(2 * m + r, g)
                for t in range(4):
                    if b < batch and 2 * first + 8 * t < out_features:
                        # Numba asks of a signed index whether it counts from the end.
                        place = uint64(b * y_batch + first + 4 * t)
                        y[place] = pack(acc[m, t, 2 * r], acc[m, t, 2 * r + 1])

    return put


@cache
def store_row_pairs(ring: Ring) -> Any:
    """Of sums that were multiplied the other way round, see `swapped_tiles`."""
    M, N = ring.sums
    pack = packing(ring.form)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, _, y_feature = y_is
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(M):
            for r in range(2):
                feature = line * WIDTH + 16 * m + 8 * r + g
                for t in range(N):
                    if 8 * t + 2 * q < batch and feature < out_features:
                        place = uint64(feature * y_feature + 4 * t + q)
                        y[place] = pack(acc[m, t, 2 * r], acc[m, t, 2 * r + 1])

    return put


@cache
def store_rows(ring: Ring) -> Any:
    TILES = ring.groups // 4
    feature_of = line_of(ring.form, not ring.turned)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
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

    return put


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
