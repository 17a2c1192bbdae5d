"""Rung 6: Hopper's copy engine and `wgmma`, whose operands never pass through registers.

A warp or two do nothing but request tiles from the copy engine (TMA): a box of x or a block of w is
a single instruction, arrives in shared memory swizzled, with zeros beyond the edges, and tells a
barrier how many bytes have arrived. Warpgroups of four warps each wait at that barrier, multiply 64
rows by whole blocks with wgmma straight from shared memory, and release the stage at another
barrier; nothing else waits. The blocks of threads are persistent, one on each multiprocessor:
they go from tile to tile while the copies for the next one already run, and those of y still do.
The order of the blocks is worked out once for every layout.

Reads per output, for a sum of K products: from global memory K / (B * U) of x, where a tile of x
serves U of the columns that a block of threads computes at once, and K / (ROWS * CLUSTER) of w,
which the blocks of threads of a cluster share; the rung before read K / min(B, 64) + K / BM.
Columns that keep the same inputs are computed together: of 8 columns of a random layout at density
0.1 a tile of x serves 1.6, where neighbours would share it among 1.4, and all 8 where columns are
alike. From shared memory it is K / B + K / 64, at the tensor cores' own pace.

float32 is the same machine with products of tf32: x is split into hi and lo in registers, w before
the kernel; `parts.split` says what these are. Its reads are K / B of x, or K / 64 where two columns
of blocks of 32 keep the same inputs, and K / 128 of w. What limits it is shared memory: wgmma takes
64 bytes a cycle of w from there, at the tensor cores' own pace, and other traffic adds to it: with
x in and out and w in, 192 cycles become 336 for 64 rows and a block of 32, and 272 where a tile of
x serves two blocks, or one of 64. An H200 at 1.72 GHz took about 340 and 265.

Of few rows a result may have a tile for each second multiprocessor. Then two blocks of threads of
a cluster have half of its steps each, and a half of the result each to add and to store.

The weight-gradient sums down the batch: see `weight_grad`. Of few rows see `swapped`.

What limits it at a small B is the L2 cache, which sends x to every multiprocessor: it is limited
both in requests, one for each line of a tile, and in bandwidth. Only sharing more of x would help.
With few blocks kept it is the bandwidth of memory, for x and y.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint8, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import multiprocessors, resident
from numbsparse.kernels.matmul.k6_hopper import plan_on_gpu  # noqa: F401
from numbsparse.kernels.matmul.k6_hopper import weight_grad as gradient
from numbsparse.kernels.matmul.k6_hopper.plan import ALIGNED, LINE, Form, Plan, line_tiles, steps_of
from numbsparse.kernels.matmul.k6_hopper.warps import W, X, consumer, producer, w_box, x_box
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned, aligned_either_way, of_any_blocks
from numbsparse.kernels.parts.deal import even_rows, schedule
from numbsparse.kernels.parts.images import images_of
from numbsparse.kernels.parts.pieces import meeting, slice_of
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.repair import dense_of
from numbsparse.kernels.parts.ring import begin_ring, show_barriers
from numbsparse.kernels.parts.store import FEATURES, KINDS, by_boxes, order_of, output_of
from numbsparse.kernels.parts.store_boxes import y_box
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cluster_sync,
    fewer_registers,
    first_multiple,
    mbarrier_init,
    more_registers,
    prefetch_tensor_map,
    shfl_idx,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index

BLOCK_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
# Of others blocks that are zero are left out, and scaled, before.
TAKES_UNKNOWN_GATES = TAKES_PLACES = ("forward", "input_grad", "weight_grad")
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out

unsupported = reach("k6_hopper", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), later=False)

# Multiply-adds up to which gates of 16 bits are read in the product: see `gated`.
FEW = SCALES_IN_STAGES = {32: 2**32, 64: 2**33, 128: 2**33}
PANEL = 16  # rows of a warp: even tiles, see `even_rows`, have as many each, or lines of x.T
TOGETHER = 2  # tiles of float32 that take a block of w in turn, from L2: 10 % less at B = 128


def forward(x, values, index, y, precision="highest", tile=0, gates=None):
    """y[:] = x @ w, or x @ (gates[b] * w[b] of each block)."""
    along_lines(x, values, index, y, False, (precision, tile, gates))


def input_grad(dy, values, index, dx, precision="highest", tile=0, gates=None):
    """dx[:] = dy @ w.T, with gates as in forward."""
    along_lines(dy, values, index, dx, True, (precision, tile, gates))


def weight_grad(x, dy, index, dvalues, precision="highest", tile=0, gates=None):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b], anything where gates[b] is 0."""
    gradient.weight_grad(x, dy, index, dvalues, precision, gates)


def tile_choices(product, block_size, dtype, batch, precision="highest"):
    several = product != "weight_grad" and dtype != "float32"
    return line_tiles(block_size, max(batch, 1)) if several else (None,)


@of_any_blocks
def along_lines(x: Any, values: Any, index: Index, y: Any, transposed: bool, how: Any) -> None:
    """y = x @ w, or x @ w.T; `how` is the precision, the number of a tile and the gates, if any."""
    precision, number, gates = how
    (batch, features), (n_blocks, size, _) = y.shape, values.shape
    is_16_bit, edge = str(x.dtype) in KINDS, x.shape[1] % size
    in_two = gates is not None and is_16_bit and batch * values.size > FEW[size]
    whole = in_two or index.made is not None  # a tile has all steps
    per_strip = -1 if whole else index.block_rows.size * size / features
    tile = line_tiles(size, batch, features, x.itemsize, per_strip)[number or 0]
    tile = tile._replace(SPLIT=1) if whole else tile
    values = aligned(values.reshape(n_blocks, -1)).reshape(values.shape)
    (lines,), (x_transposed,) = aligned_either_way(x)
    if gates is None and not number and not x_transposed:
        from numbsparse.kernels.matmul.k6_hopper import swapped

        if swapped.serves(lines, size, y, index):
            return swapped.along_lines(lines, values, index, y, transposed)
    ragged = is_16_bit and edge > 0  # float32's images are zero there
    kind = KINDS.get(str(x.dtype), precision)
    gated, all_gates = gates is not None and not in_two, () if gates is None or in_two else gates
    form = Form(tile, kind, transposed, x_transposed, ragged, order_of(y, lines=True), gated)
    # 64 to 1,024 rows of 256 to 1,024 features took 0.76 to 0.92 of the time so, of 2,048 and 4,096
    # features 0.91 to 0.98 (16 bits, H200).
    form = form._replace(ahead=not in_two and index.made is None)

    units = multiprocessors() * resident(tile.SHARED_BYTES) // tile.CLUSTER  # clusters at once
    row_tiles = -(-batch // (tile.ROWS * tile.CLUSTER))
    run = LINE // x.itemsize if x_transposed else PANEL
    rows = min(-(-even_rows(batch, row_tiles * tile.CLUSTER) // run) * run, tile.ROWS)
    form = form._replace(even=rows < tile.ROWS and (is_16_bit or size == 32))
    records, strips, lengths = planned(index, steps_of, transposed, tile, ragged)
    together = 1 if is_16_bit else TOGETHER
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units, tile.SPLIT, together)
    plan, all_values = Plan(records, strips, tiles, tile_starts), [values]
    if in_two:
        from numbsparse.kernels.matmul.k6_hopper.gated import steps_wanted

        plan, all_values = steps_wanted(plan, tile, index, values, gates, lines, row_tiles, units)
        form = form._replace(w_maps=4)
    images: Any = ()
    dense: Any = ()
    if is_16_bit:
        maps = maps_of(form, lines, all_values, edge, y, rows if form.even else 0)
    else:
        maps = tensor_maps((lines, x_box(form, rows if form.even else 0)))
        lines_of_w = index.block_columns if transposed else index.block_rows
        x = lines.T if x_transposed else lines
        dense = dense_of(x, values, index, transposed, all_gates)
        cut = tile.N, tile.DEPTH, x_transposed
        images = images_of(values, dense.w_strides, lines_of_w, x.shape[1], *cut, gates)
    cluster = max(tile.CLUSTER, tile.SPLIT)
    launch(
        line_kernel(form),
        (len(tile_starts) - 1) * tile.CLUSTER,
        tile.THREADS,
        *(maps, unannounced(maps), images, plan),
        *(output_of(y), dense, all_gates, rows if form.even else ()),
        shared_bytes=tile.SHARED_BYTES,
        cluster=(cluster,) if cluster > 1 else None,
        overlap=True,
    )


def maps_of(
    form: Form, x: DeviceArray, values: list[DeviceArray], edge: int, y: DeviceArray, rows: int
) -> DeviceArray:
    """The maps of x, of each w and of it with nothing beyond the edge along the sum, and of y."""
    boxes: list[Any] = [(x, x_box(form, rows))]
    w = w_box(form)
    for own in values:
        inside = own if edge == 0 else own[:, :, :edge] if form.transposed else own[:, :edge]
        boxes += [(own, w), (inside, w)]
    if by_boxes(form.order):
        of_y = slice_of(form.tile.sums(form.kind), form.tile.SPLIT)
        boxes.append((y.T if form.order == FEATURES else y, y_box(of_y, form.order)))
    return tensor_maps(*boxes)


@cache
def line_kernel(form: Form) -> Any:
    """A block of threads, some warps of which multiply, some fetch.

    images : of w, in float32, like `dense`; 16 bits have neither
    rows : of a tile, where tiles are even
    """
    tile, IS_16_BIT = form.tile, form.tile.ITEM == 2
    LAST = W + form.w_maps if by_boxes(form.order) else X
    STAGES, BARRIERS, WARPS, CLUSTER = tile.STAGES, 2 * tile.STAGES, tile.WARPS, tile.CLUSTER
    SPLIT = tile.SPLIT
    MASKS, WORDS, SCALERS = STAGES * tile.SHARES, tile.MASKS, 0
    if form.gated and IS_16_BIT:
        BARRIERS, WORDS, SCALERS = BARRIERS + tile.SHARES, WORDS + STAGES * tile.BLOCKS, tile.SHARES
    (MORE, FEWER), EVEN, ROWS, AHEAD = tile.REGISTERS, form.even, tile.ROWS, form.ahead
    N_MAPS = LAST + 1 if IS_16_BIT else 1
    produce, consume, meet = producer(form), consumer(form), meeting()
    # Values begin at the first stage: their places need nothing added in every step.
    SLICED, VALUE = (1, float32) if tile.UNIT == 4 else (0, uint8)

    @cuda.jit(**tile.options)
    def kernel(maps, fresh, images, plan, y, dense, gates, rows):
        whole = cuda.shared.array(0, VALUE, ALIGNMENT)
        base = first_multiple(whole, ALIGNED)
        shared, base = whole[base * SLICED :], uint32(base * (1 - SLICED))
        # A stage is full; a stage is empty; a share has scaled its blocks.
        bars = cuda.shared.array(BARRIERS, uint64)
        # Masks, for each share those of all stages; zeros; gates of the blocks of each stage.
        info = cuda.shared.array(WORDS, uint32)
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            if AHEAD and fresh == 0:
                for m in range(N_MAPS):
                    prefetch_tensor_map(maps[m])
            begin_ring(bars, 0, STAGES, 1, WARPS * CLUSTER)
            for i in range(SCALERS):
                mbarrier_init(bars, 2 * STAGES + i, WARPS // SCALERS)
            for i in range(STAGES):
                info[MASKS + i] = uint32(0)
        show_barriers(t, CLUSTER)
        if not AHEAD:
            wait_for_earlier_kernels()
        unit = cuda.blockIdx.x // CLUSTER
        first, last = plan.tile_starts[unit], plan.tile_starts[unit + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            if FEWER:
                fewer_registers(FEWER)
            fetcher = uint32(warp - WARPS)
            if not FEWER or fetcher == 0:
                source = maps, images, rows if EVEN else ROWS, gates
                produce(fetcher, fresh, source, plan, first, last, shared, base, bars, info)
            if SPLIT > 1:
                meet()
        else:
            if MORE:
                more_registers(MORE)
            more = maps[LAST] if IS_16_BIT else dense
            tile_rows = rows if EVEN else ROWS
            if AHEAD:
                wait_for_earlier_kernels()
            consume(plan, tile_rows, fresh, first, last, shared, base, bars, info, y, more)
        if CLUSTER > 1:
            cluster_sync()  # the others may still arrive at barriers here

    return kernel
