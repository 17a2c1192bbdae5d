"""Few rows of 16 bits with the operands swapped: features are wgmma's M, rows of the batch its N.

y.T = w.T @ x.T, a strip of 64 features at once. N is any multiple of 8 up to 256, where M is 64: so
a block of threads has all rows of a small batch, or one of a few parts of it, none is multiplied in
vain, and w is read once for each part. It has one strip and nothing else, and reads the layout as
it is: no plan that says where to begin has to arrive before the first copy.

The sums are y.T; `stmatrix` transposes them on their way to the copy engine, which stores y.

What limits it is how long the first copies take to arrive, and the longest strip. Sums cut among
warpgroups of a block or blocks of a cluster took longer, at 36 of 48 products, than a batch in one
part or two (H200).
"""

from functools import cache, lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.parts.aligned import is_aligned
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.ring import begin_ring, following, show_barriers
from numbsparse.kernels.parts.shares import longest_line
from numbsparse.kernels.parts.store import KINDS, ROWS, order_of
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    prefetch_tensor_map,
    shfl_idx,
    stmatrix_x4_trans,
    sync_some,
    tma_load_2d,
    tma_load_3d,
    tma_store_2d,
    to_local,
    wait_for_earlier_kernels,
    wgmma,
    zeros,
)
from numbsparse.layout import Index

BLOCK_SIZES, PRODUCTS = (64, 128), ("forward", "input_grad")
SIDE, LINE = 64, 128  # features of a strip, and of a step; their bytes
W_BYTES = SIDE * LINE
ALIGNED = 1024  # bytes: where the ring begins
ROOM = 224 * 1024  # bytes of shared memory, which two blocks share
MOST_STAGES, WARPS = 2 if SIMULATED else 8, 4
# Of more rows k6's other tiles took 0.92 to 1.2 of the time of the best parts (400, 512; H200), of
# fewer k8 0.6 to 1.8; of more strips than multiprocessors k6's others 0.78 to 1.4, least where most
# blocks are kept.
FEWER_ROWS, MOST_ROWS, PARTS = 16, 256, (1, 2, 3, 4, 6, 8)
# Microseconds, fitted to 254 of 48 and 44 drawn products (H200, float16): of a launch and a first
# copy; of 64 rows; of a step of the longest strip, and its 64 rows; of as many blocks of threads as
# there are multiprocessors, and of a step that each of these has. They are off by 9 % (rms); the
# parts that they choose took 1.017 of the least time, at worst 1.57 (clustered blocks).
TO_START, OF_ROWS, OF_STEP, OF_STEP_ROWS, OF_BLOCKS, OF_LOAD = 0.71, 0.31, 0.09, 0.075, 0.59, 0.1
X, W, Y = range(3)  # tensor maps


class Form(NamedTuple):
    """What a kernel is compiled for."""

    kind: str  # "f16" or "bf16"
    B: int
    N: int  # rows of a part of the batch
    transposed: bool  # y = x @ w.T
    beside: int  # blocks of threads that a multiprocessor has room for

    @property
    def STAGE_BYTES(self) -> int:
        return W_BYTES + LINE * self.N

    @property
    def BUFFER_BYTES(self) -> int:
        """Of y: `stmatrix` stores 16 rows at once."""
        return -(-self.N // 16) * 16 * LINE

    @property
    def STAGES(self) -> int:
        free = ROOM // self.beside - 2 * ALIGNED - self.BUFFER_BYTES
        return min(free // self.STAGE_BYTES, MOST_STAGES)

    @property
    def SHARED_BYTES(self) -> int:
        return self.STAGES * self.STAGE_BYTES + self.BUFFER_BYTES + ALIGNED


def serves(x: DeviceArray, size: int, y: DeviceArray, index: Index) -> bool:
    """Whether the copy engine can load and store whole tiles, of a layout that the host knows."""
    (batch, features), units = y.shape, multiprocessors()
    fits = suits(size, x.itemsize, batch, features, units) and x.shape[1] % size == 0
    return fits and index.made is None and is_aligned(x) and order_of(y) == ROWS


def suits(size: int, itemsize: int, batch: int, features: int, units: int) -> bool:
    """Whether this takes less time than k6's other tiles where it serves, so many features of y."""
    few = FEWER_ROWS < batch <= MOST_ROWS and features <= SIDE * units
    return size in BLOCK_SIZES and itemsize == 2 and few


def along_lines(
    x: Any, values: Any, index: Index, y: Any, transposed: bool, parts: int = 0, beside: int = 0
) -> None:
    """y = x @ w, or x @ w.T, with the batch in so many parts; 0, as many as take least time."""
    across = values.shape[1] // SIDE
    if parts == 0:
        (longest,) = planned(index, longest_line, transposed, values.shape[1], SIDE)
        steps = longest, index.block_rows.size * across**2
        parts = in_parts(x.shape[0], -(-y.shape[1] // SIDE), *steps, multiprocessors())[1]
    n = rows_of(x.shape[0], parts)
    (order,) = planned(index, longest_first, transposed, across)
    blocks = order.size * ceil(x.shape[0] / n)
    beside = beside or (2 if blocks > multiprocessors() else 1)
    form = Form(KINDS[str(x.dtype)], values.shape[1], n, transposed, beside)
    maps = tensor_maps((x, (n, SIDE)), (values, (1, SIDE, SIDE)), (y, (n, SIDE)))
    launch(
        *(line_kernel(form), blocks, 32 * (WARPS + 1), maps, unannounced(maps)),
        *(index.rows if transposed else index.columns),
        order,
        shared_bytes=form.SHARED_BYTES,
        overlap=True,
    )


def rows_of(batch: int, parts: int) -> int:
    """Rows of a part, of which the last one may have fewer: few numbers of them, as each has a
    kernel of its own."""
    rows = max(ceil(batch / parts), 32)
    unit = 16 if rows <= 128 else 32
    return ceil(rows / unit) * unit


@lru_cache(1024)
def in_parts(batch: int, strips: int, longest: int, steps: int, units: int) -> tuple[float, int]:
    """(microseconds, parts of the batch), for the least time that strips take of `steps` in all, of
    which the longest has so many."""

    def cost(parts: int) -> float:
        n = rows_of(batch, parts)
        of_all, high = ceil(batch / n) / units, n / 64
        of_strip = longest * (OF_STEP + OF_STEP_ROWS * high)
        beside = strips * OF_BLOCKS + steps * OF_LOAD
        return TO_START + OF_ROWS * high + of_strip + of_all * beside

    return min((cost(parts), parts) for parts in PARTS)


def longest_first(index: Index, transposed: bool, across: int) -> tuple[np.ndarray]:
    """The strips of 64 features, `across` of each line of blocks, in the order of their lengths."""
    starts = (index.rows if transposed else index.columns).indptr
    lines = np.argsort(-np.diff(starts), kind="stable")
    return ((lines[:, None] * across + np.arange(across)).reshape(-1).astype(np.int32),)


@cache
def line_kernel(form: Form) -> Any:
    """A warp that fetches, behind a warpgroup that multiplies."""
    N, STAGES, STAGE_BYTES, SUMS = form.N, form.STAGES, form.STAGE_BYTES, form.N // 2
    BARRIERS, ACROSS, PARTS = 2 * STAGES, form.B // SIDE, form.B // SIDE
    RING_BYTES = STAGES * STAGE_BYTES
    w = Operand(LINE, 0) if form.transposed else Operand(LINE, W_BYTES, True)
    multiply, no_sums = wgmma(form.kind, 1, N, SIDE // 16, w, Operand(LINE, 0)), zeros(SUMS)
    produce, store = producer(form), storer(form)

    @cuda.jit(**registers(32 * WARPS + 128))
    def kernel(maps, fresh, indptr, inputs, blocks, order):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        bars = cuda.shared.array(BARRIERS, uint64)  # of full stages, then of empty ones
        base, t = first_multiple(shared, ALIGNED), uint32(cuda.threadIdx.x)
        if t == 0:
            for m in range(3):
                if fresh != 0:
                    fence_tensor_map(maps[m])
                prefetch_tensor_map(maps[m])
            begin_ring(bars, 0, STAGES, 1, WARPS)
        show_barriers(t, 1)
        warp, lane, strips = shfl_idx(uint32(t // 32), 0), t % 32, order.size
        strip, row = order[cuda.blockIdx.x % strips], int32(cuda.blockIdx.x // strips * N)
        first, last = indptr[strip // ACROSS], indptr[strip // ACROSS + 1]
        if warp == WARPS:
            if fresh != 0:
                fence_tensor_map(maps[X])
                fence_tensor_map(maps[W])
            feature = int32(strip % ACROSS * SIDE)
            produce(maps, inputs, blocks, first, last, feature, row, shared, base, bars)
        else:
            if fresh != 0:
                fence_tensor_map(maps[Y])
            acc, sums = no_sums(), cuda.local.array(SUMS, float32)
            stage, phase = uint32(0), uint32(0)
            for _ in range((last - first) * PARTS):
                mbarrier_wait(bars, stage, phase)
                start = uint32(base + stage * STAGE_BYTES)
                acc = multiply(acc, shared, start, shared, uint32(start + W_BYTES))
                if lane == 0:
                    mbarrier_arrive(bars, STAGES + stage)
                stage, phase = following(stage, phase, STAGES)
            to_local(acc, sums)
            wait_for_earlier_kernels()
            store(sums, shared, uint32(base + RING_BYTES), maps, int32(strip * SIDE), row)

    return kernel


@cache
def producer(form: Form) -> Any:
    """produce(maps, inputs, blocks, first, last, feature, row, shared, base, bars): the tiles of
    the blocks from `first` on, before `last`; each lane reads one of 32 blocks ahead."""
    B, STAGES, STAGE_BYTES, PARTS = form.B, form.STAGES, form.STAGE_BYTES, form.B // SIDE
    TRANSPOSED = form.transposed

    @cuda.jit(device=True)
    def produce(maps, inputs, blocks, first, last, feature, row, shared, base, bars):
        lane, stage, phase = uint32(cuda.threadIdx.x) % 32, uint32(0), uint32(1)
        for begin in range(first, last, 32):
            here = begin + lane < last
            own_input = inputs[begin + lane] if here else int32(0)
            own_block = blocks[begin + lane] if here else int32(0)
            if begin == first:
                wait_for_earlier_kernels()
            for k in range(min(last - begin, 32)):
                which, block = shfl_idx(own_input, k), shfl_idx(own_block, k)
                for part in range(PARTS):
                    mbarrier_wait(bars, STAGES + stage, phase)
                    if elect() != 0:
                        mbarrier_expect(bars, stage, STAGE_BYTES)
                        at, inner = uint32(base + stage * STAGE_BYTES), int32(part * SIDE)
                        corner = (inner, feature) if TRANSPOSED else (feature, inner)
                        tma_load_3d(shared, at, maps[W], corner[0], corner[1], block, bars, stage)
                        x_at, column = uint32(at + W_BYTES), int32(which * B + inner)
                        tma_load_2d(shared, x_at, maps[X], column, row, bars, stage)
                    stage, phase = following(stage, phase, STAGES)

    return produce


@cache
def storer(form: Form) -> Any:
    """store(sums, shared, buffer, maps, column, row): the sums, transposed, by way of a buffer."""
    STRIPS, pack = form.N // 8, PACK[form.kind]

    @cuda.jit(device=True)
    def store(sums, shared, buffer, maps, column, row):
        t = uint32(cuda.threadIdx.x)
        # A lane has a row of one of four matrices: of two strips of rows, and in each two halves of
        # the warp's features.
        matrix, warp = t // 8 % 4, t // 32
        line = matrix // 2 * 8 + t % 8
        byte = uint32(line * LINE + ((warp * 2 + matrix % 2) ^ line % 8) * 16)
        for s in range(0, STRIPS, 2):
            a, b = 4 * s, 4 * (s + 1) if s + 1 < STRIPS else 4 * s
            stmatrix_x4_trans(
                shared,
                uint32(buffer + byte + 8 * s * LINE),
                pack(sums[a], sums[a + 1]),
                pack(sums[a + 2], sums[a + 3]),
                pack(sums[b], sums[b + 1]),
                pack(sums[b + 2], sums[b + 3]),
            )
        fence_proxy_async()
        sync_some(1, 32 * WARPS)
        if warp == 0 and elect() != 0:
            tma_store_2d(shared, buffer, maps[Y], column, row)
            bulk_commit()
            bulk_wait_read()

    return store
