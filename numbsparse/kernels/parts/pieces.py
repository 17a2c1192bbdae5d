"""Sums in the registers of a warp, (M, N, 4), and how pieces of a sum are added: in a fixed order.

A piece is left in memory as the lanes hold it, their 16 bytes side by side. The last warp
adds up the pieces of a sum in their order, so the same sum has the same bits in every run.
"""

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.ptx import add_acq_rel, load_4xf32, shfl_idx, store_4xf32, sync_warp


def floats_of(M: int, N: int) -> int:
    """float32 of a piece."""
    return 32 * 4 * M * N


@cuda.jit(device=True)
def clear(acc):
    for m in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for i in range(4):
                acc[m, n, i] = float32(0)


@cuda.jit(device=True)
def add(acc, more):
    """acc += more, as much as that has."""
    for m in range(more.shape[0]):
        for n in range(more.shape[1]):
            for i in range(4):
                acc[m, n, i] += more[m, n, i]


@cuda.jit(device=True)
def save(pieces, k, acc):
    """Leave the sums as piece number k of an array."""
    start = k * (128 * acc.shape[0] * acc.shape[1]) + uint32(cuda.threadIdx.x) % 32 * 4
    for m in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            c = acc[m, n]
            at = start + (m * acc.shape[1] + n) * 128
            store_4xf32(pieces, at, c[0], c[1], c[2], c[3])


@cuda.jit(device=True)
def add_saved(pieces, k, acc):
    """acc += piece number k of an array."""
    start = k * (128 * acc.shape[0] * acc.shape[1]) + uint32(cuda.threadIdx.x) % 32 * 4
    for m in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            v = load_4xf32(pieces, start + (m * acc.shape[1] + n) * 128)
            for i in range(4):
                acc[m, n, i] += v[i]


@cuda.jit(device=True)
def join(pieces, tickets, k, first, many, step, acc):
    """Save piece number k of a sum of `many`, `step` apart from `first` on; the last warp adds
    them.

    Returns whether this was the last one, and acc is then the whole sum, added in the order of its
    pieces. Tickets are zero before and after.
    """
    save(pieces, k, acc)
    sync_warp()
    ticket = int32(0)
    if cuda.threadIdx.x % 32 == 0:
        ticket = add_acq_rel(tickets, first, int32(1))
    if shfl_idx(ticket, 0) < many - 1:
        return False
    sync_warp()
    clear(acc)
    for piece in range(first, first + many * step, step):
        add_saved(pieces, piece, acc)
    if cuda.threadIdx.x % 32 == 0:
        tickets[first] = 0
    return True
