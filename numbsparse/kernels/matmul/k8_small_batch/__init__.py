"""Rung 8: batches up to 64, where reading w once is all the work.

With few rows of x each value of w is multiplied at most 64 times, so the warps of a block have
nothing to share. A layout is cut once into equal shares, one per multiprocessor, and each share
into equal runs, one per warp (`plan`), so that neither long lines nor few blocks leave a part of
the GPU idle. On a card with a copy engine and 225 KiB of shared memory that engine brings each warp
the tiles that it multiplies next, to a ring of its own (`ring`, `tiles`, `ring_lines`). Elsewhere,
for blocks under 32 and where features end inside a tile, a warp loads blocks of w, and what they
meet of x, straight to the registers of its mma instructions (`fragments`, `lines`), 32 rows of x at
most: batches end there without rings, for blocks under 32, and in `weight_grad`, which comes both
ways too (`ring_blocks`, `blocks`).

A product is one launch: whoever comes last adds up the parts of a line that was cut, in their
order. It starts while the kernel before it ends, and the host works out a launch once (`calls`).

Reads per output of a sum of K terms: K / batch of w and K / min(B, 32) of x, which comes from the
L2 cache. float32 is multiplied as hi + lo, two tf32 each, in three products. Those of 16
terms start from zero, of 8 in `weight_grad`, whose sums are the shortest, and are added in float32,
because tensor cores cut off what they add.

What is left, in float32: the tensor cores, which need half the time that the kernel takes, and get
their operands two warps at a time. In halves: the L2 cache, from which comes as much of x as of w,
and at batches over 32 twice as much. At low densities: the time to start and to end; in float32,
12,288 features, batch 32 and density 0.01, of some 8,000 clocks of an H200 from one kernel to the
next about 2,000 until the first tiles are there, 2,500 for three units on each tensor core, 1,000
to join and write lines, and 1,000 from the last block's end to the start of the next kernel. A
clustered layout takes as long as a random one: w is read once in any of them, and a product that
read nothing of x, all else the same, took 4 to 13 % less on an H200 (batch 32, densities of 0.02
and up).
"""

from __future__ import annotations

from functools import cache

from numbsparse.device import SIMULATED, DeviceArray, compute_capability
from numbsparse.device.launch import Bound
from numbsparse.device.runtime import current_device
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.k8_small_batch.blocks import BlockWay, block_kernel
from numbsparse.kernels.matmul.k8_small_batch.calls import Call, again
from numbsparse.kernels.matmul.k8_small_batch.fragments import Form, Side
from numbsparse.kernels.matmul.k8_small_batch.lines import Way, line_kernel
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH, plan_blocks, plan_lines
from numbsparse.kernels.matmul.k8_small_batch.products import tiles as tiles_of
from numbsparse.kernels.matmul.k8_small_batch.ring_launch import (
    blocks_by_rings,
    by_rings,
    has_rings,
    serves,
    serves_blocks,
)
from numbsparse.kernels.matmul.k8_small_batch.sums import part_of
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.views import span

BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("float32", "float16", "bfloat16")
PRODUCT_ERROR = 6  # each factor is off by 2^-22 of itself, and lo * lo is left out
LARGEST_BATCH = 64  # with rings
OTHERWISE = 32


def unsupported(product, block_size, dtype, place, batch=1, precision="highest"):
    """None, or why this rung does not compute it."""
    rings = product != "weight_grad" and block_size >= WIDTH
    rings = rings and place == "cuda" and has_rings()
    limits = _reach(LARGEST_BATCH if rings else OTHERWISE)
    return limits(product, block_size, dtype, place, batch, precision)


@cache
def _reach(largest_batch):
    return reach(
        "k8_small_batch",
        "cuda",
        BLOCK_SIZES,
        DTYPES,
        largest_batch=largest_batch,
        capability=(8, 0),
    )


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    _product(index, x, values, y, False, precision)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    _product(index, dy, values, dx, True, precision)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    if x.shape[0] == 0:
        fill(dvalues, 0.0)
    elif dvalues.size:
        again(index, _block_by_block, (x, dy, dvalues), precision)


def _product(index, x, values, y, turned, precision):
    if x.shape[0] > WIDTH and not serves(x, values):
        for rows in (slice(WIDTH), slice(WIDTH, None)):
            _product(index, x[rows], values, y[rows], turned, precision)
    elif 0 not in y.shape:
        again(index, _along_lines, (x, values, y), turned, precision)


def _along_lines(index, x, values, y, turned, precision):
    form = _form(values, precision)
    if serves(x, values):
        return by_rings(index, x, values, y, turned, form, _multiprocessors())
    return _by_warps(index, x, values, y, turned, form)


def _by_warps(index, x, values, y, turned, form):
    (batch, in_features), size = x.shape, values.shape[1]
    whole = "whole" if size >= WIDTH and in_features % size == 0 else "runs"
    if in_features % form.run:
        whole = "each"
    J, JB = min(size // 8, 4), _lines_of(batch)
    w_check = whole if values.address % 16 == 0 else "each"
    way = Way(
        form,
        size,
        turned,
        Side(J, not turned, w_check),
        _activations(x, form, JB, whole),
        _stored(y, J, JB),
        _warps(form.split),
        _overlaps(),
    )
    shares = _multiprocessors()
    part = part_of(tiles_of(J), JB)
    work = planned(index, plan_lines, turned, size, shares, way.warps, part)
    (x, x_is), (y, y_is), (values, _) = map(_flat, (x, y, values.reshape(1, -1)))
    args = (x, x_is, values, *work, y, y_is)
    where, shared = (line_kernel(way), shares, 32 * way.warps), (way.warps - 1) * part * 4
    first = Bound(*where, *args, shared_bytes=shared)
    later = Bound(*where, *args, shared_bytes=shared, overlap=way.overlap)
    return Call(first, later, tuple(a for a in work if isinstance(a, DeviceArray)))


def _block_by_block(index, x, dy, dvalues, precision):
    size, form = dvalues.shape[1], _form(dvalues, precision)
    if serves_blocks(x, dy, dvalues):
        return blocks_by_rings(index, x, dy, dvalues, form, _multiprocessors())
    (batch, in_features), out_features = x.shape, dy.shape[1]
    edge = in_features % size != 0 or out_features % size != 0
    check = "each" if edge else "whole" if batch == WIDTH else "runs"
    way = BlockWay(
        form,
        size,
        _terms_down(dy, form, 4, check),
        _terms_down(x, form, min(size // 8, 4), check),
        edge,
        "across" if dvalues.address % 16 == 0 else "each",
        _warps(False),
        _multiprocessors(),
        _overlaps(),
    )
    units, count = planned(index, plan_blocks, size)
    (x, x_is), (dy, dy_is), (dvalues, _) = map(_flat, (x, dy, dvalues.reshape(1, -1)))
    args = (x, x_is, dy, dy_is, units, count, dvalues)
    where = block_kernel(way), way.shares, 32 * way.warps
    return Call(Bound(*where, *args), Bound(*where, *args, overlap=way.overlap), (units,))


def _form(values, precision):
    dtype = values.dtype.name
    return Form(dtype, dtype == "float32" and precision == "highest")


def _warps(many_registers):
    """Warps of a multiprocessor, with 255 registers a thread or with 168."""
    return 2 if SIMULATED else 8 if many_registers else 12


def _lines_of(batch):
    """Lines of x a lane: eight times as many in a warp."""
    return 1 if batch <= 8 else 2 if batch <= 16 else 4


def _activations(x, form, J, check):
    """How x (batch, features) lies, where the sum runs over its features."""
    if check == "whole" and x.shape[0] != 8 * J:
        check = "runs"
    if check == "each":
        return Side(J, False, check)
    if _gapless(x, form.run):
        return Side(J, False, check)
    if _gapless(x.T, J) and x.shape[0] % J == 0:
        return Side(J, True, check)
    return Side(J, False, "each")


def _terms_down(x, form, J, check):
    """How x (batch, features) lies, where the sum runs over the batch."""
    if check == "each":
        return Side(J, False, check)
    if _gapless(x, J):
        return Side(J, True, check)
    if _gapless(x.T, form.run) and x.shape[0] % form.run == 0:
        return Side(J, False, check)
    return Side(J, False, "each")


def _stored(y, J, JB):
    if J == 4 and _gapless(y, 4) and y.shape[1] % 4 == 0:
        return "across"
    if JB == 4 and y.shape[0] == WIDTH and _gapless(y.T, 8):
        return "along"
    return "each"


def _gapless(x, items):
    """Whether pieces of `items` items of a row can be loaded at once."""
    n = min(items * x.itemsize, 16)
    rows = x.strides[0] if x.shape[0] > 1 else 0
    columns = x.strides[1] if x.shape[1] > 1 else x.itemsize
    return columns == x.itemsize and rows >= 0 and rows % n == 0 and x.address % n == 0


def _flat(x):
    """The memory of x, halves as bits; and (rows, columns, strides in items)."""
    rows, columns = x.shape
    strides = (stride // x.itemsize for stride in x.strides)
    return span(x if x.itemsize == 4 else x.view("uint16")), (rows, columns, *strides)


@cache
def _overlaps():
    """Whether a kernel can start while the one before it ends."""
    return not SIMULATED and compute_capability() >= (9, 0)


@cache
def _multiprocessors():
    """How many shares of equal size there are."""
    return 3 if SIMULATED else current_device().properties.multiprocessor_count
