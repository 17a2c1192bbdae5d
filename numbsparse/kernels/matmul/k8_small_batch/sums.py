"""The sums of a warp in its registers: set to zero, added up, left for another warp."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.ptx import load_4xf32, shfl_idx, store_4xf32, sync_warp


def part_of(M: int, JB: int) -> int:
    """float32 of a warp's sums."""
    return 32 * 4 * M * JB


@cache
def clear(M: int, JB: int) -> Any:
    @cuda.jit(device=True)
    def clear_sums(acc):
        for m in range(M):
            for n in range(JB):
                for i in range(4):
                    acc[m, n, i] = float32(0)

    return clear_sums


@cache
def add(M: int, JB: int) -> Any:
    @cuda.jit(device=True)
    def add_sums(acc, more):
        for m in range(M):
            for n in range(JB):
                for i in range(4):
                    acc[m, n, i] += more[m, n, i]

    return add_sums


@cache
def save(M: int, JB: int) -> Any:
    """Leave the sums as part number k of an array, each lane 16 bytes beside the next one's."""
    PART = part_of(M, JB)

    @cuda.jit(device=True)
    def save_sums(parts, k, acc):
        start = k * PART + uint32(cuda.threadIdx.x) % 32 * 4
        for m in range(M):
            for n in range(JB):
                c = acc[m, n]
                store_4xf32(parts, start + (m * JB + n) * 128, c[0], c[1], c[2], c[3])

    return save_sums


@cache
def add_saved(M: int, JB: int) -> Any:
    """acc += part number k of an array."""
    PART = part_of(M, JB)

    @cuda.jit(device=True)
    def add_part(parts, k, acc):
        start = k * PART + uint32(cuda.threadIdx.x) % 32 * 4
        for m in range(M):
            for n in range(JB):
                v = load_4xf32(parts, start + (m * JB + n) * 128)
                for i in range(4):
                    acc[m, n, i] += v[i]

    return add_part


@cache
def join_parts(M: int, JB: int) -> Any:
    """Save part number k of a line of `many` from `first` on; the last one to come adds them all.

    Returns whether this was the last one, and acc is then the sum over the line, added in the order
    of its parts. Tickets are zero before and after.
    """
    save_sums, add_part, clear_sums = save(M, JB), add_saved(M, JB), clear(M, JB)

    @cuda.jit(device=True)
    def join(partials, tickets, k, first, many, acc):
        save_sums(partials, k, acc)
        cuda.threadfence()
        sync_warp()
        ticket = int32(0)
        if cuda.threadIdx.x % 32 == 0:
            ticket = int32(cuda.atomic.add(tickets, first, 1))
        ticket = shfl_idx(ticket, 0)
        if ticket < many - 1:
            return False
        cuda.threadfence()
        clear_sums(acc)
        for part in range(first, first + many):
            add_part(partials, part, acc)
        tickets[first] = 0
        return True

    return join
