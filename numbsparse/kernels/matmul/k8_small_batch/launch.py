"""Launches: how the operands of a product are reached, and what its kernel is made for."""

from __future__ import annotations

from typing import Any

from numbsparse.device import SIMULATED, DeviceArray, compute_capability, multiprocessors
from numbsparse.device.launch import Bound
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import copy_engine, shared_memory
from numbsparse.kernels.matmul.k8_small_batch.blocks import Blocks, block_kernel
from numbsparse.kernels.matmul.k8_small_batch.lines import Lines, line_kernel
from numbsparse.kernels.matmul.k8_small_batch.outputs import Sums
from numbsparse.kernels.matmul.k8_small_batch.plan import plan_blocks, plan_lines
from numbsparse.kernels.matmul.k8_small_batch.ring import Source
from numbsparse.kernels.parts.aligned import BYTES, is_aligned
from numbsparse.kernels.parts.calls import Call, fresh_each_time
from numbsparse.kernels.parts.gathers import Reach
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.parts.transpose import transposed_copy
from numbsparse.kernels.views import span
from numbsparse.layout import Index

SHARED_BYTES = 225 * 1024  # of a block, without the barriers'
BARRIERS = 2 * 1024  # bytes
WARPS = 2 if SIMULATED else 8
FEW = 8  # units of a warp: below, 16-bit gains more by launches that overlap than by long rings
SHORT = 3  # units of a warp: up to there, the first ones of all warps precede any other
MOST = 4  # stages that lanes fill: pieces of 16 bytes are longer on their way
MANY = 1 if SIMULATED else 6  # lines of all tiles of 32 rows, for each multiprocessor
NEAR = 2**31  # items whose places fit 32 bits
LINES = 3500  # of 128 bytes, one a clock: what a multiprocessor reads while x is transposed


def has_engine() -> bool:
    """Whether the card has a copy engine, and shared memory for a long ring for each warp."""
    return copy_engine() and (shared_memory() or SHARED_BYTES) >= SHARED_BYTES


def serves(x: DeviceArray, values: DeviceArray) -> bool:
    """Whether the copy engine can load whole tiles of x and w."""
    size = values.shape[1]
    return size >= WIDTH and x.shape[1] % size == 0 and values.size > 0 and has_engine()


def by_feature(x: DeviceArray, n_blocks: int, size: int, alone: bool = True) -> DeviceArray:
    """x, or where lanes read it in many fewer lines of 128 bytes so, a feature-major copy.

    Of a small block 16 bytes are in a line of each row, but a whole line of each feature. Of 16
    features it is 32 bytes, which memory is read by. When the copy pays was measured (H100, H200):
    for more than 32 rows, or for one of two operands, later.
    """
    if x.itemsize != 2 or size >= WIDTH or not is_aligned(x):
        return x
    rows = x.shape[0]
    fewer = rows - size * -(-2 * rows // 128)
    lines = n_blocks * fewer * (1 if size == 8 else 0.7)
    later = 2.5 if not alone else 1 if rows <= WIDTH else 1.5 if size == 8 else 2
    least = LINES * _multiprocessors() * later
    return transposed_copy(x) if lines > least + 0.15 * x.size else x


def along_lines(index: Index, x, values, y, transposed: bool, form: Form) -> Call:
    """y = x @ w; tiles of the batch have shares of the multiprocessors in parallel."""
    lines = _lines(x, values, y, transposed, form, _source(serves(x, values), x))
    tiles, warps = -(-x.shape[0] // lines.rows), lines.warps
    shares = max(_multiprocessors() // tiles, 1)
    slots = tiles * shares * (warps - 1) if lines.far else 0
    size, engine = values.shape[1], lines.source.engine
    work = planned(index, plan_lines, transposed, size, shares, warps, lines.piece, slots, tiles)
    lines = lines._replace(patient=engine and lines.source.stages == 2 and work[1] <= SHORT)
    paired, length = _lines_of(size, form, engine)
    x_across = not is_aligned(x)
    w_view = size, _shift(length), paired
    maps, fresh = work[0], 0
    if engine:
        x_box = WIDTH if x_across else 8 * lines.sums.x.groups, WIDTH
        x_tiles = (x.T if x_across else x, x_box, WIDTH * x.itemsize)
        maps = tensor_maps(x_tiles, _squares(values, paired, length))
        fresh = fresh_each_time(maps)
    before = span(x), _view(x), span(values.reshape(1, -1)), w_view, maps
    after = (*work, *_output(y, lines.sums))
    where, shared = (line_kernel(lines), (shares, tiles), 32 * warps), lines.shared_bytes
    first = Bound(*where, *before, 1, *after, shared_bytes=shared)
    overlap = lines.source.overlap
    later = Bound(*where, *before, fresh, *after, shared_bytes=shared, overlap=overlap)
    return Call(first, later, (maps, *(a for a in work if isinstance(a, DeviceArray))))


def _lines(x, values, y, transposed: bool, form: Form, source: Source) -> Lines:
    """What its kernel is made for."""
    size, x_across = values.shape[1], not is_aligned(x)
    depth, batch = min(size, WIDTH), x.shape[0]
    groups = _tile_rows(batch, -(-y.shape[1] // depth), size, form, x_across) // 8
    x_side = Operand(x_across, groups, _together(form, x_across))
    w_side = Operand(not transposed, depth // 8, _together(form, not transposed, depth))
    sums = Sums(form, x_side, w_side, stored(y, form, depth))
    warps, tiled = _warps(form, not source.engine), batch > 8 * groups
    lines = Lines(sums, depth, source, warps, far=groups == 8, tiled=tiled)
    tiles = -(-batch // lines.rows)
    few = form.is_16_bit and tiles * values.size < FEW * WARPS * _multiprocessors() * WIDTH**2
    return with_stages(lines, (1 if few else 2) if source.engine else MOST)


def _tile_rows(batch: int, lines: int, size: int, form: Form, x_across: bool) -> int:
    """Rows of a tile: 64 read w half as often as 32, but occupy half as many multiprocessors.

    Measured (H100): 32 took up to 1.6 times as long, 64 up to 2.5 times, and these, on average,
    1.01 to 1.02 times as long as the quicker one.
    """
    if batch <= WIDTH:
        return WIDTH if batch > 16 or x_across else 16
    if not form.is_16_bit and size > 8:
        return WIDTH  # registers hold the sums of 32 at once
    most = MANY * (1 if size > 8 else 2 if form.is_16_bit else 1 / 2)
    return WIDTH if lines * -(-batch // WIDTH) <= most * _multiprocessors() else 2 * WIDTH


def _together(form: Form, across: bool, depth: int = WIDTH) -> int:
    """Neighbouring lines of a lane, as many as it loads at once or half of that."""
    return 1 if form.is_16_bit or depth < WIDTH else 4 if across else 2


def along_blocks(index: Index, x, dy, dvalues, form: Form) -> Call:
    """dvalues = x.T @ dy at the kept blocks."""
    size, x_across, dy_across = dvalues.shape[1], is_aligned(x), is_aligned(dy)
    depth, shares = min(size, WIDTH), _multiprocessors()
    engine = size >= WIDTH and has_engine()
    x_side, dy_side = Operand(x_across, depth // 8), Operand(dy_across, 4, _together(form, True))
    many = not engine or dvalues.size >= FEW * WARPS * shares * WIDTH**2
    units, count = planned(index, plan_blocks, size)
    steps = -(-x.shape[0] // WIDTH)
    warps = _warps(form, many)
    busy = (WARPS // 2 if warps > WARPS else WARPS) * shares  # more gained nothing (H200)
    split = _split(steps, count, busy)
    source = _source(engine, x, dy)
    blocks = Blocks(form, depth, x_side, dy_side, source, warps, shares, steps > 1, split)
    blocks = with_stages(blocks, 2 if engine else MOST)
    paired, length = _lines_of(size, form, engine)
    w_view = size, _shift(length), paired
    maps, fresh = units, 0
    if engine:
        box = (WIDTH, WIDTH), WIDTH * x.itemsize
        tiles = (x if x_across else x.T, *box), (dy if dy_across else dy.T, *box)
        maps = tensor_maps(*tiles, _squares(dvalues, paired, length))
        fresh = fresh_each_time(maps)
    before = span(x), _view(x), span(dy), _view(dy), w_view, maps
    after = units, count, span(dvalues.reshape(1, -1))
    where, shared = (block_kernel(blocks), shares, 32 * warps), blocks.shared_bytes
    first = Bound(*where, *before, 1, *after, shared_bytes=shared)
    overlap = blocks.source.overlap
    later = Bound(*where, *before, fresh, *after, shared_bytes=shared, overlap=overlap)
    return Call(first, later, (maps, units))


def _warps(form: Form, many: bool) -> int:
    """Of a block of threads: 16-bit sums leave registers for twice as many."""
    return 2 * WARPS if many and form.is_16_bit else WARPS


def _split(steps: int, units: int, warps: int) -> int:
    """Neighbouring warps for each unit: two steps for each of them, all units at once."""
    split = 1
    while 2 * split * units <= warps and 2 * split <= min((steps + 1) // 2, WARPS):
        split *= 2
    return split


def _source(engine: bool, *operands: DeviceArray) -> Source:
    """How they are loaded into a stage."""
    overlap = SIMULATED or compute_capability() >= (9, 0)
    if engine:
        return Source(engine, 0, overlap)
    near = all(span(x).size < NEAR for x in operands)
    whole = all(_in_pieces(x, 1) and (is_aligned(x) or _in_pieces(x, 0)) for x in operands)
    return Source(engine, 0, overlap, Reach(near, whole))


def _in_pieces(x: DeviceArray, axis: int) -> bool:
    return x.shape[axis] * x.itemsize % BYTES == 0


def with_stages(kernel: Any, most: int) -> Any:
    """As many stages as fit."""
    nbytes = min(SHARED_BYTES, (shared_memory() or SHARED_BYTES + BARRIERS) - BARRIERS)
    free = nbytes - kernel.shared_bytes
    stages = min(free // (4 * kernel.warps * kernel.stage_words), most)
    return kernel._replace(source=kernel.source._replace(stages=stages))


def _lines_of(size: int, form: Form, engine: bool) -> tuple[int, int]:
    """(`paired` as in `tiles`, values in a line of w for the copy engine).

    Two rows of a 16-bit square of 32 make a line of 128 bytes: it counts lines.
    """
    if engine and form.is_16_bit and size == WIDTH:
        return 16, 2 * WIDTH
    return 0, size


def _shift(length: int) -> int:
    return max(length // WIDTH, 1).bit_length() - 1


def _squares(values: DeviceArray, paired: int, length: int) -> tuple[Any, tuple[int, int], int]:
    """What `tensor_maps` takes of squares of 32."""
    box = (WIDTH // 2, 2 * WIDTH) if paired else (WIDTH, WIDTH)
    return values.reshape(-1, length), box, box[1] * values.itemsize


def stored(y: DeviceArray, form: Form, depth: int) -> str:
    """In which direction y takes four float32 or two 16-bit values at once: see `outputs.Sums`."""
    n, wide = (2, 4) if form.is_16_bit else (4, 16)
    for name, view in {"along features": y, "along batch": y.T}.items():
        rows, columns = view.shape
        stride = view.strides[0] if rows > 1 else 0
        gapless = view.strides[1] == view.itemsize or columns == 1
        if gapless and columns % n == 0 and stride % wide == 0 and view.address % wide == 0:
            apart = depth < WIDTH and not form.is_16_bit and name == "along features"
            return "each" if apart else name
    return "each"


def _output(y: DeviceArray, sums: Sums) -> tuple[DeviceArray, tuple[int, ...]]:
    """The memory of y, 16-bit values as bits, and its view; in words where those are stored."""
    flat, view = span(y), _view(y)
    if not sums.form.is_16_bit:
        return flat, view
    if sums.y == "each":
        return _as(flat, "uint16", flat.size), view
    strides = (view[2] // 2, 1) if sums.y == "along features" else (1, view[3] // 2)
    return _as(flat, "uint32", flat.size // 2), (*view[:2], *strides)


def _as(flat: DeviceArray, dtype: str, size: int) -> DeviceArray:
    return DeviceArray(flat.address, (size,), dtype, None, flat.owner)


def _view(x: DeviceArray) -> tuple[int, ...]:
    """(rows, columns, strides in items)."""
    return (*x.shape, *(stride // x.itemsize for stride in x.strides))


def _multiprocessors() -> int:
    """How many shares of equal size there are."""
    return 3 if SIMULATED else multiprocessors()
