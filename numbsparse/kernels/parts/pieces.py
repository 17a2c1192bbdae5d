"""Sums in the registers of a warp, (M, N, 4), and how pieces of a sum are added: in a fixed order.

A piece is left in memory as the lanes hold it, their 16 bytes side by side. The last warp
adds up the pieces of a sum in their order, so the same sum has the same bits in every run.
"""

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
def save(M: int, N: int) -> Any:
    """Leave the sums as piece number k of an array."""
    PIECE = floats_of(M, N)

    @cuda.jit(device=True)
    def save_sums(pieces, k, acc):
        start = k * PIECE + uint32(cuda.threadIdx.x) % 32 * 4
        for m in range(M):
            for n in range(N):
                c = acc[m, n]
                store_4xf32(pieces, start + (m * N + n) * 128, c[0], c[1], c[2], c[3])

    return save_sums


@cache
def add_saved(M: int, N: int) -> Any:
    """acc += piece number k of an array."""
    PIECE = floats_of(M, N)

    @cuda.jit(device=True)
    def add_piece(pieces, k, acc):
        start = k * PIECE + uint32(cuda.threadIdx.x) % 32 * 4
        for m in range(M):
            for n in range(N):
                v = load_4xf32(pieces, start + (m * N + n) * 128)
                for i in range(4):
                    acc[m, n, i] += v[i]

    return add_piece


@cache
def join(M: int, N: int, STEP: int = 1) -> Any:
    """Save piece number k of a sum of `many`, STEP apart from `first` on; the last warp adds them.

    Returns whether this was the last one, and acc is then the whole sum, added in the order of its
    pieces. Tickets are zero before and after.
    """
    save_sums, add_piece, clear_sums = save(M, N), add_saved(M, N), clear(M, N)

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
        clear_sums(acc)
        for piece in range(first, first + many * STEP, STEP):
            add_piece(pieces, piece, acc)
        if cuda.threadIdx.x % 32 == 0:
            tickets[first] = 0
        return True

    return join_pieces
