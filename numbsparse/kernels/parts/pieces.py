"""Sums in the registers of a warp, (M, N, 4), and how pieces of a sum are added: in a fixed order.

`save`, `add_saved` and `join` take flat sums too, (4 M,): then N is 0. A piece is left in memory
as the lanes hold it, their 16 bytes side by side. The last warp adds up the pieces of a sum in
their order, so the same sum has the same bits in every run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.ptx import add_acq_rel, load_4xf32, shfl_idx, store_4xf32, sync_warp


def floats_of(M: int, N: int) -> int:
    """float32 of a piece."""
    return 32 * 4 * M * N


@cache
def clear(M: int, N: int) -> Any:
    @cuda.jit(device=True)
    def clear_sums(acc):
        for m in range(M):
            for n in range(N):
                for i in range(4):
                    acc[m, n, i] = float32(0)

    return clear_sums


@cache
def add(M: int, N: int) -> Any:
    @cuda.jit(device=True)
    def add_sums(acc, more):
        for m in range(M):
            for n in range(N):
                for i in range(4):
                    acc[m, n, i] += more[m, n, i]

    return add_sums


@cache
def fours_of(M: int, N: int) -> tuple[Any, Any]:
    """get(acc, k, i) and put(acc, k, i, value) of value i of the k-th four of sums."""

    @cuda.jit(device=True)
    def get(acc, k, i):
        return acc[k // N, k % N, i]

    @cuda.jit(device=True)
    def put(acc, k, i, value):
        acc[k // N, k % N, i] = value

    @cuda.jit(device=True)
    def get_flat(acc, k, i):
        return acc[4 * k + i]

    @cuda.jit(device=True)
    def put_flat(acc, k, i, value):
        acc[4 * k + i] = value

    return (get, put) if N else (get_flat, put_flat)


@cache
def save(M: int, N: int) -> Any:
    """Leave the sums as piece number k of an array."""
    FOURS, (get, _) = M * max(N, 1), fours_of(M, N)

    @cuda.jit(device=True)
    def save_sums(pieces, k, acc):
        start = k * (FOURS * 128) + uint32(cuda.threadIdx.x) % 32 * 4
        for f in range(FOURS):
            a, b, c, d = get(acc, f, 0), get(acc, f, 1), get(acc, f, 2), get(acc, f, 3)
            store_4xf32(pieces, start + f * 128, a, b, c, d)

    return save_sums


@cache
def add_saved(M: int, N: int) -> Any:
    """acc += piece number k of an array."""
    FOURS, (get, put) = M * max(N, 1), fours_of(M, N)

    @cuda.jit(device=True)
    def add_piece(pieces, k, acc):
        start = k * (FOURS * 128) + uint32(cuda.threadIdx.x) % 32 * 4
        for f in range(FOURS):
            v = load_4xf32(pieces, start + f * 128)
            for i in range(4):
                put(acc, f, i, get(acc, f, i) + v[i])

    return add_piece


@cache
def join(M: int, N: int) -> Any:
    """Save piece number k of a sum of `many` from `first` on; the last warp adds them all.

    Returns whether this was the last one, and acc is then the whole sum, added in the order of its
    pieces. Tickets are zero before and after.
    """
    save_sums, add_piece = save(M, N), add_saved(M, N)
    FOURS, (_, put) = M * max(N, 1), fours_of(M, N)

    @cuda.jit(device=True)
    def join_pieces(pieces, tickets, k, first, many, acc):
        save_sums(pieces, k, acc)
        sync_warp()
        ticket = int32(0)
        if cuda.threadIdx.x % 32 == 0:
            ticket = add_acq_rel(tickets, first, int32(1))
        if shfl_idx(ticket, 0) < many - 1:
            return False
        sync_warp()
        for f in range(FOURS):
            for i in range(4):
                put(acc, f, i, float32(0))
        for piece in range(first, first + many):
            add_piece(pieces, piece, acc)
        if cuda.threadIdx.x % 32 == 0:
            tickets[first] = 0
        return True

    return join_pieces
