"""Many steps in one kernel: warps that copy and warps that multiply, and pieces of lines over time.

A kernel says what sums begin with, what is loaded besides and what becomes of them. A piece of a
line is multiplied read by read; where several blocks of threads share the line, the last of them
adds their sums.

Of more rows of the batch than a tile has, each tile has pieces of its own, and other blocks of
threads: a step takes little longer as long as some of these have nothing to do. Sequences need
nothing of each other, so a tile's rows of a step are written when those blocks of threads that have
pieces of it say so. What the next step multiplies is stored first, the rest when that is said.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.lstm import WARPS
from numbsparse.kernels.lstm.deal import BLOCKS, Plan, deal, places
from numbsparse.kernels.lstm.producers import OF_ROWS, OF_WEIGHTS, THREADS, Ring, copying
from numbsparse.kernels.lstm.units import TWOS
from numbsparse.kernels.parts.pieces import clear, floats_of, join
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.ring import begin_ring, following
from numbsparse.kernels.ptx import (
    add_release,
    fence_mbarrier_init,
    fence_proxy_async_global,
    first_multiple,
    from_local,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    sync_warp,
    to_local,
)
from numbsparse.layout import Index


def run_steps(
    kernel: Any,
    ring: Ring,
    groups: int,
    index: Index,
    operands: Any,
    given: Any,
    arrived: DeviceArray,
    of_steps: tuple[int, int, int],
    size: tuple[int, int, int],
) -> None:
    """Launch a kernel of `streaming`, whose threads have so many groups of `units.SUMS` each.

    `operands` are weights and the rows that they meet, and those of inputs, if any: each with its
    box. The rest is what the kernel takes.
    """
    count, tiles = places() // (BLOCKS // ring.BLOCKS), -(-size[0] // ring.tile)
    part = WARPS * floats_of(groups, TWOS)
    of = ring.transposed, ring.ITEM, part, tiles, ring.tile, ring.block
    plan = planned(index, deal, count, *of)
    launch(
        kernel, count, THREADS,
        tensor_maps(*operands),
        Plan(*plan), given, arrived, of_steps, size,
        shared_bytes=1024 + ring.STAGE * ring.STAGES, together=of_steps[0] > 1,
    )  # fmt: skip


@cache
def streaming(ring: Ring, multiply_steps: Any) -> Any:
    """kernel(maps, plan, given, arrived, of_steps, size): each warp in its role.

    `of_steps` is how many there are, the first row of what is copied for the first of them, and how
    far down it is to the next; `size` (batch, units, width).
    """
    STAGES, BARS, TOLD = ring.STAGES, 2 * ring.STAGES + 1, 2 * ring.STAGES
    copy_weights, copy_rows = copying(ring, False), copying(ring, True)
    WORDS = float32 if ring.exact else uint16
    limits = {} if SIMULATED else {"launch_bounds": (THREADS, ring.BLOCKS)}

    @cuda.jit(**limits)
    def kernel(maps, plan, given, arrived, of_steps, size):
        shared = cuda.shared.array(0, WORDS)
        bars = cuda.shared.array(BARS, uint64)
        place, warp = cuda.blockIdx.x, cuda.threadIdx.x // 32
        first, last = plan.read_starts[place], plan.read_starts[place + 1]
        base = first_multiple(shared, uint32(1024))
        engine = maps, plan.reads, first, last, plan.awaited, shared, base, bars
        if cuda.threadIdx.x == 0:
            begin_ring(bars, 0, STAGES, 2, WARPS)
            mbarrier_init(bars, TOLD, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp == OF_WEIGHTS:
            copy_weights(engine, of_steps, arrived)
        elif warp == OF_ROWS:
            copy_rows(engine, of_steps, arrived)
        else:
            work = plan.pieces, plan.starts[place], plan.starts[place + 1]
            cut = plan.partials, plan.tickets
            multiply_steps(engine, work, cut, given, arrived, of_steps, size)

    return kernel


@cache
def multiplying(
    ring: Ring, multiply: Any, GROUPS: int, of_line: tuple[Any, Any, Any, Any], ahead: bool
) -> Any:
    """run(sums, loaded, engine, work, cut, given, arrived, of_steps, size): all steps of a warp.

    sums : (GROUPS, *units.SUMS)

    `of_line` is of functions: begin(sums, given, where), if any, is first in a line, load(loaded,
    given, where) next where `ahead`, else after the products, finish(sums, loaded, given, where)
    stores what the next step multiplies, and `rest` what is left, when the others are told or just
    before. `where` is (line, first row of the step, row of the batch that the tile begins with,
    batch, units, width).
    """
    take = taking_reads(ring, multiply, GROUPS)
    (begin, load, finish, rest), TILED, TILE = of_line, ring.tiled, ring.tile
    BACK, TOLD = ring.transposed, 2 * ring.STAGES  # BACK: what is copied is of the step after
    FIRST = ring.rest_first

    @cuda.jit(device=True)
    def run(sums, loaded, engine, work, cut, given, arrived, of_steps, size):
        (pieces, first, last), (partials, tickets), (steps, row, down) = work, cut, of_steps
        batch, units, width = size
        if BACK:
            row += down
        number, told, warp = uint32(0), uint32(0), int64(cuda.threadIdx.x // 32)
        for step in range(steps):
            for k in range(first, last):
                line, count, part = pieces[k, 0], pieces[k, 1], pieces[k, 2]
                first_part, many, ends = pieces[k, 3], pieces[k, 4], pieces[k, 6]
                top = int64(pieces[k, 5]) if TILED else int64(0)
                where = int64(line), row, top, batch, units, width
                clear(sums)
                if begin is not None and part == first_part:
                    begin(sums, given, where)
                loads = ahead and many == 1  # then what is loaded is this thread's own
                if loads:
                    load(loaded, given, where)
                take(sums, number, count, engine)
                whole = True
                if many > 1:
                    own, origin = part * WARPS + warp, first_part * WARPS + warp
                    whole = join(partials, tickets, own, origin, many, WARPS, sums)
                if whole:
                    if not loads:
                        load(loaded, given, where)
                    finish(sums, loaded, given, where)
                    if FIRST:
                        rest(sums, loaded, given, where)
                if ends != 0:
                    tell(arrived, step * engine[4].size + top // TILE, engine[7], TOLD, told)
                    told ^= uint32(1)
                if whole and not FIRST:
                    rest(sums, loaded, given, where)
                number += uint32(count)
            row += down

    return run


@cache
def taking_reads(ring: Ring, multiply: Any, GROUPS: int) -> Any:
    """take(sums, number, count, engine): products of reads, from read `number` of all steps on."""
    STAGE, STAGES, AFTER = ring.STAGE // ring.WORD, ring.STAGES, ring.AFTER // ring.WORD
    to_tuple, ROWS = from_local(4 * GROUPS * TWOS), ring.WEIGHTS // ring.WORD

    @cuda.jit(device=True)
    def take_exact(sums, number, count, engine):
        _, _, _, _, _, shared, base, bars = engine
        stage, parity = uint32(number % STAGES), uint32(number // STAGES % 2)
        for _ in range(count):
            mbarrier_wait(bars, stage, parity)
            at = int64(base + stage * STAGE)
            multiply(sums, shared, at + ROWS, at)
            sync_warp()  # all lanes have read their rows
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, parity = following(stage, parity, STAGES)

    @cuda.jit(device=True)
    def take(sums, number, count, engine):
        acc = to_tuple(sums)
        _, _, _, _, _, shared, base, bars = engine
        stage, parity = uint32(number % STAGES), uint32(number // STAGES % 2)
        for _ in range(count):
            mbarrier_wait(bars, stage, parity)
            at = uint32(base + stage * STAGE)
            acc = multiply(acc, shared, at + AFTER, shared, at)
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, parity = following(stage, parity, STAGES)
        to_local(acc, sums)

    return take_exact if ring.exact else take


@cuda.jit(device=True)
def tell(arrived, i, bars, bar, parity):
    """All warps that multiply have written what counter i counts: the first of them says so.

    A warp whose piece has no reads waits for nothing else, and would be here twice.
    """
    mbarrier_wait(bars, bar, uint32(parity ^ 1))
    sync_warp()
    if cuda.threadIdx.x % 32 == 0:
        mbarrier_arrive(bars, bar)
    if cuda.threadIdx.x < 32:
        mbarrier_wait(bars, bar, parity)
        if cuda.threadIdx.x == 0:
            fence_proxy_async_global()
            add_release(arrived, i, 1)
