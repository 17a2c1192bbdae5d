"""Sums in the registers of a warp, (M, N, 4), and how pieces of a sum are added: in a fixed order.

A piece is left in memory as the lanes hold it, their 16 bytes side by side. The last warp
adds up the pieces of a sum in their order, so the same sum has the same bits in every run.

The first blocks of a cluster take a slice of the sum each. All leave their pieces of it in that
block's shared memory, and it adds them up, in their order too.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.parts.store import Sums
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    add_acq_rel,
    cluster_sync,
    load_4xf32,
    shfl_idx,
    store_4xf32,
    store_4xf32_at,
    sync_warp,
)

# Bytes of x and dy up to which the next kernel starts while pieces are added. So 1,024 to 4,096
# rows of 128 to 1,024 features took an H200 0.8 to 0.95 of the time, in 7 us; 33 MB took up to
# 1.15 times as long.
SOON = 20_000_000


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
def add_times(acc, more, factors):
    """acc += more times the first factor."""
    for m in range(more.shape[0]):
        for n in range(more.shape[1]):
            for i in range(4):
                acc[m, n, i] += factors[0] * more[m, n, i]


@cuda.jit(device=True)
def add_once(acc, more, factors):
    add(acc, more)


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


@cuda.jit(device=True)
def join_all(pieces, tickets, k, first, many, step, acc):
    """`join` by whole blocks of threads: a piece has the sums of all warps of one."""
    warps, warp = uint32(cuda.blockDim.x) // 32, uint32(cuda.threadIdx.x) // 32
    save(pieces, k * warps + warp, acc)
    cuda.syncthreads()
    last = int32(0)
    if cuda.threadIdx.x == 0 and add_acq_rel(tickets, first, int32(1)) == many - 1:
        last = int32(1)
    if not cuda.syncthreads_or(last):
        return False
    clear(acc)
    for piece in range(first, first + many * step, step):
        add_saved(pieces, piece * warps + warp, acc)
    if cuda.threadIdx.x == 0:
        tickets[first] = 0
    return True


def part_bytes(warps: int, count: int) -> int:
    """Shared memory for `count` float32 of each lane."""
    return warps * 32 * 4 * count


def parts_at(stages: int, stage_bytes: int, bytes_of_parts: int) -> int:
    """The first byte of the last stages of a ring that have room for so much."""
    return (stages - -(-bytes_of_parts // stage_bytes)) * stage_bytes


@cache
def add_parts(
    BLOCKS: int, SLICES: int, LINES: int, TILES: int, FOURS: int, FREE: bool = False
) -> Any:
    """add(acc, own, warp, base): own = a slice of the sums of all blocks, where there is one.

    All threads of the cluster come here or call `meet`, after the last use of what shared memory
    holds from byte `base` on. Where that is FREE, as nothing else uses it, the cluster has met once
    before (14 products of k7 took 1.05 to 1.19 times as long without it, 1.12 at the mean, H200).
    acc (LINES, TILES, FOURS, 4) and own, TILES / SLICES tiles or one more, are flat in each lane.

    Block k of the first SLICES has the k-th of them, and the others leave their parts of it there:
    stores need not wait for each other, as loads from another block do.
    """
    OWN = -(-TILES // SLICES)
    COUNT = LINES * OWN * FOURS

    @cuda.jit(device=True)
    def add(acc, own, warp, base):
        floats = cuda.shared.array(0, float32, ALIGNMENT)
        lane, block = uint32(cuda.threadIdx.x) % 32, uint32(cuda.blockIdx.x) % BLOCKS
        start = uint32(base // 4 + (warp * (32 * BLOCKS * COUNT) + lane) * 4)
        there = uint32(start + 128 * COUNT * block)
        if not FREE:
            cluster_sync()  # all have read what was there
        for j in range(LINES):
            for tile in range(TILES):
                for i in range(FOURS):
                    c = acc[((j * TILES + tile) * FOURS + i) * 4 :]
                    at = uint32(there + 128 * ((j * OWN + tile % OWN) * FOURS + i))
                    store_4xf32_at(floats, at, uint32(tile // OWN), c[0], c[1], c[2], c[3])
        cluster_sync()
        for k in range(4 * COUNT):
            own[k] = 0
        for i in range(COUNT):
            if block * OWN + i // FOURS % OWN < TILES:
                for other in range(BLOCKS):
                    four = load_4xf32(floats, uint32(start + 128 * (COUNT * other + i)))
                    for k in range(4):
                        own[4 * i + k] += four[k]

    return add


@cache
def slice_of(sums: Sums, parts: int) -> Sums:
    """One of so many slices of a lane's sums: of fewer block columns, of fewer tiles of rows, or of
    fewer columns."""
    strips = sums.B // 8
    own = sums.COLUMNS * sums.TILES * strips // parts  # strips of 8 columns, in tiles of 16 rows
    columns, tiles = max(own // (sums.TILES * strips), 1), min(max(own // strips, 1), sums.TILES)
    return sums._replace(B=8 * min(own, strips), COLUMNS=columns, TILES=tiles)


@cache
def joining(SPLIT: int, all_sums: Sums) -> Any:
    """join(sums, columns, base): the slice that this block of a cluster stores, of all its blocks.

    The slice takes the first place among the sums, and its strips that of the columns, counted in
    what `slice_of` has for a block. Gives the first row of it.
    """
    TILES, STRIPS, (_, B, COLUMNS, *_) = all_sums.TILES, all_sums.B // 8, slice_of(all_sums, SPLIT)
    WIDTH, ACROSS, APART = B // 8, all_sums.B // B, all_sums.APART
    OWN = all_sums.COLUMNS * TILES * STRIPS // SPLIT
    SUMS, add = 4 * OWN, add_parts(SPLIT, SPLIT, 1, SPLIT, OWN)

    @cuda.jit(device=True)
    def join(sums, columns, base):
        own, t = cuda.local.array(SUMS, float32), uint32(cuda.threadIdx.x)
        add(sums, own, shfl_idx(uint32(t // 32), 0), base)
        for k in range(SUMS):
            sums[k] = own[k]
        first = int32(cuda.blockIdx.x % SPLIT * OWN)
        for c in range(COLUMNS):
            column = columns[first // (TILES * STRIPS) + c]
            strip = first % STRIPS // WIDTH
            columns[c] = column * ACROSS + strip if column >= 0 else -1
        return first // STRIPS % TILES * APART

    return join


@cache
def meeting(FREE: bool = False) -> Any:
    """meet(): for a warp that has no part of the sums, see `add_parts`."""

    @cuda.jit(device=True)
    def meet():
        if not FREE:
            cluster_sync()
        cluster_sync()

    return meet
