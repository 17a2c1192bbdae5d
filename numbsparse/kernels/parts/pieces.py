"""Sums in the registers of a warp, (M, N, 4), and how pieces of a sum are added: in a fixed order.

A piece is left in memory as the lanes hold it, their 16 bytes side by side. The last warp
adds up the pieces of a sum in their order, so the same sum has the same bits in every run.

The first blocks of a cluster take a slice of the sum each. All leave their pieces of it in that
block's shared memory, and it adds them up, in their order too.

Pieces of blocks, which many blocks of threads have, are added up by a kernel behind (`add_pieces`).
What it takes is its launch and three waits for the L2 cache, some 1.5 us of an H200, and 1 us for
each 350,000 sums: so threads share the pieces of few numbers, and read several at once.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.repair import repair_block
from numbsparse.kernels.parts.store import Sums
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    add_acq_rel,
    cluster_sync,
    let_next_kernel_start,
    load_4xf32,
    shfl_idx,
    store_2xu32,
    store_4xf32,
    store_4xf32_at,
    sync_warp,
    wait_for_earlier_kernels,
)

# Bytes of x and dy up to which the next kernel starts while pieces are added. So 1,024 to 4,096
# rows of 128 to 1,024 features took an H200 0.8 to 0.95 of the time, in 7 us; 33 MB took up to
# 1.15 times as long.
SOON = 20_000_000
THREADS, AT_ONCE = 256, 4  # pieces that a thread reads before it adds them
MOST_WAYS = 32  # threads that share the pieces of a number: others have what lies beside it
PIECES, STEP = range(2)  # of the numbers of a cut: pieces, and how many parts one of them has


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


class Added(NamedTuple):
    """What is added up: blocks of B x B, or parts of PART x PART of these."""

    B: int
    PART: int
    kind: Any  # of 16 bits, see `store.KINDS`; else None
    repairs: bool = False  # NaN, of float32
    gated: bool = False
    made: bool = False  # whether the plan is of kernels before this one
    all: bool = False  # parts are cut, in their order

    @property
    def PARTS(self) -> int:
        return (self.B // self.PART) ** 2


def add_pieces(
    of: Added, many: tuple[int, int], sums: DeviceArray, cut: Any, numbers: Any, out: DeviceArray,
    soon: bool, dense: Any = (), orders: Any = (), gates: Any = (),
) -> None:  # fmt: skip
    """out = the sums of the pieces in `sums`, float32, piece after piece.

    many : parts at most, and pieces
    cut, numbers : which parts of `out` they are, below 0 where there is none; see PIECES and STEP
    soon : whether the next kernel may start at once
    dense, orders : `repair.Factors` and what `repair_block` takes beside, if it `repairs`
    gates : with `of_blocks` of each block, if they are `gated`: where they are 0 nothing is written
    """
    grid = grid_of(*many, of.PART**2)
    args = sums, cut, numbers, out, dense, orders, gates, int(soon)
    launch(add_kernel(of), *grid, *args, overlap=True)


def grid_of(parts: int, count: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block) of `add_kernel`, for parts of `size` numbers, of so many pieces each."""
    ways = min(1 << (-(-count // AT_ONCE) - 1).bit_length(), MOST_WAYS)
    threads = min(size // 4, THREADS // ways)
    return (parts, size // 4 // threads), (threads, ways)


@cache
def add_kernel(of: Added) -> Any:
    """The sums of pieces, four numbers for each thread.

    The pieces are added in order by threads that share them, and these in theirs.
    """
    ALL, COMING, finish = 4 * THREADS, (AT_ONCE, 4), finisher(of)
    SIZE, PARTS, GATED, MADE, WHOLE = of.PART**2, of.PARTS, of.gated, of.made, of.all

    @cuda.jit
    def kernel(sums, cut, numbers, dvalues, dense, orders, gates, soon):
        shared = cuda.shared.array(ALL, float32, ALIGNMENT)
        total, coming = cuda.local.array(4, float32), cuda.local.array(COMING, float32)
        k, way, ways = int64(cuda.blockIdx.x), int32(cuda.threadIdx.y), int32(cuda.blockDim.y)
        i = 4 * int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        if soon:
            let_next_kernel_start()
        if MADE:
            wait_for_earlier_kernels()
        count, step = int32(numbers[PIECES]), numbers[STEP]
        part = k if WHOLE else cut[k]
        if not MADE:
            wait_for_earlier_kernels()
        if k >= step or part < 0:
            return
        if GATED and gates.of_blocks[part // PARTS] == 0:
            return
        for e in range(4):
            total[e] = float32(0)
        piece = way
        while piece < count:
            for p in range(AT_ONCE):  # the last one is read again
                at = int64(min(int32(piece + p * ways), int32(count - 1)))
                four = load_4xf32(sums, (at * step + k) * SIZE + i)
                for e in range(4):
                    coming[p, e] = four[e]
            for p in range(AT_ONCE):
                if piece + p * ways < count:
                    for e in range(4):
                        total[e] += coming[p, e]
            piece = int32(piece + AT_ONCE * ways)
        if ways > 1:
            own = 4 * int32(cuda.threadIdx.x)
            at = int32(4 * way * cuda.blockDim.x) + own
            store_4xf32(shared, at, total[0], total[1], total[2], total[3])
            cuda.syncthreads()
            for e in range(4):
                total[e] = float32(0)
            for other in range(ways if way == 0 else 0):
                four = load_4xf32(shared, int32(4 * other * cuda.blockDim.x) + own)
                for e in range(4):
                    total[e] += four[e]
        if way == 0:
            finish(dvalues, part, i, total, dense, orders)

    return kernel


@cache
def finisher(of: Added) -> Any:
    """Four numbers of a part of a block = total; one for operands in all orders."""
    B, PART, PARTS, repairs = of.B, of.PART, of.B // of.PART, of.repairs
    write = writing(of.kind)

    @cuda.jit(device=True)
    def finish(dvalues, part, i, total, dense, orders):
        at = int64(part) // PARTS * (PART * B) + part % PARTS * PART + i // PART * B + i % PART
        write(dvalues, at, total[0], total[1], total[2], total[3])
        if repairs:
            for e in range(4):
                if total[e] != total[e]:
                    repair_block(dvalues, at + e, B, dense, orders)

    return finish


@cache
def writing(kind: Any) -> Any:
    """write(out, at, a, b, c, d): four neighbours, float32 or rounded to 16 bits of that kind."""
    if kind is None:
        return store_4xf32
    pack = PACK[kind]

    @cuda.jit(device=True)
    def write(out, at, a, b, c, d):
        store_2xu32(out, at, pack(a, b), pack(c, d))

    return write
