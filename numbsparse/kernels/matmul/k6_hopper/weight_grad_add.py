"""What adds the pieces of a weight-gradient that was cut over the batch, in a fixed order.

What it takes is its launch and three waits for the L2 cache, some 1.5 us of an H200, and 1 us for
each 350,000 sums: so threads share the pieces of few numbers, and read several at once.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import PIECES, STEP, Tile
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
SOME = 8  # pieces, where the GPU alone knows how many


def add_pieces(
    how: tuple[Any, ...], sums: DeviceArray, cut: DeviceArray, numbers: DeviceArray, n_sums: int,
    out: DeviceArray, dense: Any, gates: Any, soon: bool,
) -> None:  # fmt: skip
    """out = the sums of the pieces in `sums`, of what was cut.

    how : (tile, kind of 16 bits or None, whether NaN is repaired, orders as `repair_block` takes
        them, whether the plan was made on the GPU)
    cut, numbers, n_sums : as `cut_up` returns them
    gates : `Gates`, if blocks have any
    soon : whether the next kernel may start at once
    """
    (tile, kind, exact, orders, made), size = how, how[0].PART ** 2
    parts = tile.PARTS if gates else 0
    add = add_kernel(size, finisher(tile, kind, exact), parts, made)
    grid = grid_of(cut.size, size, SOME if made else n_sums // cut.size)
    launch(add, *grid, sums, cut, numbers, out, dense, orders, gates, int(soon), overlap=True)


def grid_of(sums: int, size: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block) of `add_kernel`, for sums of `size` numbers, of so many pieces each."""
    ways = min(1 << (-(-count // AT_ONCE) - 1).bit_length(), MOST_WAYS)
    threads = min(size // 4, THREADS // ways)
    return (sums, size // 4 // threads), (threads, ways)


@cache
def add_kernel(SIZE: int, finish: Any, PARTS: int = 0, MADE: bool = False) -> Any:
    """dvalues of what was cut, SIZE numbers each = the sums of its pieces, four for each thread.

    The pieces are added in batch order by threads that share them, and these in theirs.

    numbers : as `cut_up` returns them
    PARTS : of a block, where blocks have gates
    MADE : whether the plan is of kernels before this one
    """
    ALL, COMING = 4 * THREADS, (AT_ONCE, 4)

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
        count, step, part = int32(numbers[PIECES]), numbers[STEP], cut[k]
        if not MADE:
            wait_for_earlier_kernels()
        if k >= step or part < 0:
            return
        if PARTS and gates.of_blocks[part // PARTS] == 0:
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
def finisher(tile: Tile, kind: str, repairs: bool) -> Any:
    """Four numbers of a part of a block of dvalues = total; one for operands in all orders."""
    B, PART, PARTS = tile.B, tile.PART, tile.B // tile.PART
    rounded = PACK.get(kind)

    @cuda.jit(device=True)
    def finish(dvalues, part, i, total, dense, orders):
        at = int64(part) // PARTS * (PART * B) + part % PARTS * PART + i // PART * B + i % PART
        if rounded is not None:
            pairs = rounded(total[0], total[1]), rounded(total[2], total[3])
            store_2xu32(dvalues, at, pairs[0], pairs[1])
        else:
            store_4xf32(dvalues, at, total[0], total[1], total[2], total[3])
            if repairs:
                for e in range(4):
                    if total[e] != total[e]:
                        repair_block(dvalues, at + e, B, dense, orders)

    return finish
