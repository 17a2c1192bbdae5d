"""Launches of `ring_lines`: where the copy engine reaches x and w, and there is work for it."""

from __future__ import annotations

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import Bound
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import copy_engine, shared_memory
from numbsparse.kernels.matmul.aligned import is_aligned
from numbsparse.kernels.matmul.k8_small_batch import block_ring
from numbsparse.kernels.matmul.k8_small_batch.block_ring import BlockRing
from numbsparse.kernels.matmul.k8_small_batch.calls import Call
from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH, plan_blocks, plan_lines
from numbsparse.kernels.matmul.k8_small_batch.ring import SHARED_BYTES, Ring, boxes, with_stages
from numbsparse.kernels.matmul.k8_small_batch.ring_blocks import block_ring_kernel
from numbsparse.kernels.matmul.k8_small_batch.ring_lines import ring_kernel
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.views import span
from numbsparse.layout import Index

WARPS = 2 if SIMULATED else 8
FEW = 8  # units of a warp: below, halves gain more by launches that overlap than by long rings
SHORT = 3  # units of a warp: up to there, the first ones of all warps come before any other
MOST_MAPS = 2**14  # groups of them that are kept for ever

_maps: dict[int, DeviceArray] = {}


def has_rings() -> bool:
    """Whether the card has a copy engine, and room for a ring for each warp."""
    return copy_engine() and (shared_memory() or SHARED_BYTES) >= SHARED_BYTES


def serves(x: DeviceArray, values: DeviceArray) -> bool:
    """Whether whole tiles of x and w can be copied."""
    size, features = values.shape[1], x.shape[1]
    if size < WIDTH or features % WIDTH or not values.size or not has_rings():
        return False
    return values.address % 16 == 0 and (is_aligned(x) or is_aligned(x.T))


def by_rings(index: Index, x, values, y, turned: bool, form: Form, shares: int) -> Call:
    """y = x @ w, for x of at most 64 rows."""
    size, batch = values.shape[1], x.shape[0]
    x_across = not is_aligned(x)
    groups = 8 if batch > 32 else 4 if batch > 16 or x_across else 2
    far = groups == 8
    ring = Ring(form, size, turned, x_across, groups, _stored(y, form), WARPS, 0, far)
    few = form.halves and values.size < FEW * WARPS * shares * WIDTH**2
    ring = with_stages(ring, 1 if few else 2)
    slots = shares * (WARPS - 1) if far else 0
    work = planned(index, plan_lines, turned, size, shares, WARPS, ring.part, slots)
    ring = ring._replace(patient=ring.stages == 2 and work[1] <= SHORT)
    (x_box, x_line), (w_box, w_line) = boxes(ring)
    lines = values.reshape(-1, 2 * WIDTH if ring.paired else size)
    maps = tensor_maps((x.T if x_across else x, x_box, x_line), (lines, w_box, w_line))
    fresh = _fresh_each_time(maps)
    y_is = _strides(y)
    flat = span(y) if form.dtype == "float32" else _bits(y, "uint16")
    if form.halves and ring.y != "each":
        words = (y_is[2] // 2, 1) if ring.y == "across" else (1, y_is[3] // 2)
        flat, y_is = _bits(y, "uint32"), (*y_is[:2], *words)
    before, after = (span(x), _strides(x), span(values.reshape(1, -1)), maps), (*work, flat, y_is)
    where, shared = (ring_kernel(ring), shares, 32 * WARPS), ring.shared_bytes
    first = Bound(*where, *before, 1, *after, shared_bytes=shared)
    later = Bound(*where, *before, fresh, *after, shared_bytes=shared, overlap=True)
    return Call(first, later, (maps, *(a for a in work if isinstance(a, DeviceArray))))


def serves_blocks(x: DeviceArray, dy: DeviceArray, dvalues: DeviceArray) -> bool:
    """Whether whole tiles of x and dy can be copied."""
    size = dvalues.shape[1]
    if size < WIDTH or x.shape[1] % size or dy.shape[1] % size or not has_rings():
        return False
    there = all(is_aligned(a) or is_aligned(a.T) for a in (x, dy))
    return there and dvalues.address % 16 == 0


def blocks_by_rings(index: Index, x, dy, dvalues, form: Form, shares: int) -> Call:
    """dvalues = x.T @ dy at the kept blocks, for x and dy of at most 32 rows."""
    size, x_across, dy_across = dvalues.shape[1], is_aligned(x), is_aligned(dy)
    many = form.halves and dvalues.size >= FEW * WARPS * shares * WIDTH**2
    warps = 2 * WARPS if many else WARPS
    ring = BlockRing(form, size, x_across, dy_across, warps, shares, 0)
    ring = block_ring.with_stages(ring, 2)
    units, count = planned(index, plan_blocks, size)
    (box, line), (dw_box, dw_line) = block_ring.boxes(ring)
    squares = dvalues.reshape(-1, 2 * WIDTH if ring.paired else size)
    tiles = ((x if x_across else x.T, box, line), (dy if dy_across else dy.T, box, line))
    maps = tensor_maps(*tiles, (squares, dw_box, dw_line))
    fresh = _fresh_each_time(maps)
    before, after = (span(x), _strides(x), span(dy), _strides(dy), maps), (units, count)
    where, shared = (block_ring_kernel(ring), shares, 32 * ring.warps), ring.shared_bytes
    first = Bound(*where, *before, 1, *after, shared_bytes=shared)
    later = Bound(*where, *before, fresh, *after, shared_bytes=shared, overlap=True)
    return Call(first, later, (maps, units))


def _fresh_each_time(maps: DeviceArray) -> int:
    """Whether the copy engine must be told of these maps at every launch, not at the first alone.

    It remembers a map by its address, on each multiprocessor. Telling it takes 2 us, more than a
    small product; so maps are kept for ever, and no other one comes to their place. To let go of
    one would not do: the next one at its place could be taken for it. Beyond MOST_MAPS they are not
    kept, and it is told every time.
    """
    if len(_maps) < MOST_MAPS:
        _maps[maps.address] = maps
    return int(maps.address not in _maps)


def _stored(y: DeviceArray, form: Form) -> str:
    """In which direction y takes four float32 or two halves at once."""
    n, wide = (2, 4) if form.halves else (4, 16)
    for name, view in {"across": y, "along": y.T}.items():
        rows, columns = view.shape
        stride = view.strides[0] if rows > 1 else 0
        gapless = view.strides[1] == view.itemsize or columns == 1
        if gapless and columns % n == 0 and stride % wide == 0 and view.address % wide == 0:
            return name
    return "each"


def _strides(x: DeviceArray) -> tuple[int, ...]:
    return (*x.shape, *(stride // x.itemsize for stride in x.strides))


def _bits(y: DeviceArray, dtype: str) -> DeviceArray:
    """The memory of y as whole numbers."""
    flat = span(y)
    n = 2 if dtype == "uint32" else 1
    return DeviceArray(flat.address, (flat.size // n,), dtype, None, flat.owner)
