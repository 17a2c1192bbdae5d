"""Pieces of sums of blocks, which many blocks of threads have, added up by a kernel behind.

What it takes is its launch and three waits for the L2 cache, some 1.5 us of an H200, and 1 us for
each 350,000 sums: so threads share the pieces of few numbers, and read several at once. The order
is fixed.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.repair import repair_block
from numbsparse.kernels.parts.store import PACK
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    let_next_kernel_start,
    load_4xf32,
    store_2xu32,
    store_4xf32,
    wait_for_earlier_kernels,
)

THREADS, AT_ONCE = 256, 4  # pieces that a thread reads before it adds them
MOST_WAYS = 32  # threads that share the pieces of a number: others have what lies beside it
PIECES, STEP = range(2)  # of the numbers of a cut: pieces, and how many parts one of them has


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
