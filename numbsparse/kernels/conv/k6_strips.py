"""Rung 6: the rows of rung 2, which are never made.

A block of 8 fills half of the 16 products that a tensor core sums, and merged with neighbours it is
mostly zeros. `matmul.k7_small_blocks` sums two blocks at once, wherever they are, and reads a
feature of 64 rows once for up to 512 columns of y. Its rows are those that rung 2 unfolds; here the
copy engine finds them in the images, tap by tap, and a table has the places of their sums: see
`parts.pixels`. That is what limits it: so taps share a box of pixels where fewer are then loaded,
and each finds its rows in it.

Reads per output: those of that rung; of x from the L2 cache, where all taps and strips meet. In
boxes of 10 x 10 pixels for 8 x 8 outputs nine taps read 1.6 pixels, not 9. What a region of a
weight-gradient loads is what limits it, and in boxes it loads a pixel once for all taps of a chunk.
Of float32 lanes read at places of their own, which no box shifts: there each tap has its own.
"""

from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import times
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.conv.costs import Sizes as Convolution
from numbsparse.kernels.conv.costs import sizes_of
from numbsparse.kernels.conv.k1_naive import repair_blocks, repair_lines
from numbsparse.kernels.conv.k2_unfolded import taps_in_lines
from numbsparse.kernels.conv.window import (
    Boxes,
    Pass,
    Three,
    boxes_of_chunks,
    even_chunks,
    spread_of,
)
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.k7_small_blocks import region_plan
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import SPARE, Way, small_way
from numbsparse.kernels.matmul.k7_small_blocks.regions import in_regions
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    MOST_STEPS,
    ROWS,
    WIDE,
    WIDTH,
    Costs,
    Sizes,
    filled,
    fitted,
    groups_of,
    is_packed,
    plan_strips,
    shared_out,
    warps_for,
)
from numbsparse.kernels.matmul.k7_small_blocks.strips import Plan, launch_strips, strip_kernel
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import aligned, aligned_values, of_bits
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.groups import counted, steps_in_strips
from numbsparse.kernels.parts.pixels import (
    AT_ONCE,
    IMAGES,
    UNEVEN,
    Four,
    Images,
    PixelRows,
    Shared,
    boxes_of,
    fits,
    has_room,
    places_in_squares,
    spread_rows,
    tile_that_fits,
    tops_of,
)
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.store import PIXELS
from numbsparse.kernels.parts.strip import LINE, WARP_COLUMNS, Region, Strip, blocks_of_step
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

BLOCK_SIZES = (8, 16)
DTYPES = ("float16", "bfloat16", "float32")
# Pixels that are loaded while a tile's columns are multiplied, for each: by block size. At 56 x 56
# pixels and 256 features tiles of 8 x 8 took 74 us instead of 78 in blocks of 8 (H200).
A_COLUMN, MOST_COLUMNS = {8: 0.25, 16: 0.2}, 1024
MOST_OF_W = 48 * 1024  # bytes of it in a stage, where taps share boxes
# Warps: a multiprocessor has two such blocks of images, as a warp that has a scheduler alone waits
# for itself (H200: 128 to 128 features, 28 x 28 images, blocks of 16: 28 us, not 37).
BESIDE_UP_TO = 4
PACK_FROM = 8192  # rows, of 16 bits
# Of 58 drawn products whose strips are others than with `beside` of 1.5, which favours narrow ones,
# the mean takes 0.91 of the time, 0.46 to 1.53. Clusters of four run at once up to 112 blocks, of
# 128 some wait; with more than 66 allowed 16 products take 0.60 to 1.06 of the time, 0.86 at the
# mean (H200).
COSTS = {  # of 16 bits, by block size; of float32 those of a matrix
    8: Costs(0.0043, 0.0035, 8.7, 0.0, 0.2, (1.0, 0.0, 0.85)),
    16: Costs(0.0007, 0.0185, 6.5, 0.0, 0.2, (1.0, 0.0, 0.85)),
}
# Taps share boxes where this part of the pixels is loaded, at most, and so many at once; of
# weight-gradients up to how many features it was timed. Of 48 drawn products that had no part in
# these limits they take 0.45 to 1.38 of the time, 0.90 at the mean, 11 more than 1.05; of 26 whose
# taps are two apart, and boxes up to three times as large as tiles, 0.95 (H200).
WORTH, LARGEST, MOST_FEATURES = 0.75, 200, 1024
STAGE_ROWS, A_TILE = 32, 32  # of a region; pixels that are loaded while one is multiplied
# By block size groups that a large region loads for each slot, tap by tap, from which on boxes pay:
# where there are fewer, multiplying takes longer, and regions in boxes are smaller. In boxes 21 of
# 68 products, which load fewer, take 0.79 to 1.64 of the time tap by tap, 1.11 at the mean, the
# others 0.41 to 1.30, 0.86 (H200).
LOADS_OF_A_SLOT = {8: 0.1, 16: 0.16}
A_LINE, SECOND_PASS = 0.003, (2.0, 0.03, 2.0)  # microseconds of a line; see `region_plan`
# By block size microseconds of a row in the first region; warps and their slots, microseconds, how
# many times as long a row takes in proportion, and blocks of a cluster at most.
A_ROW = {8: 0.031, 16: 0.019}
REGIONS: Any = {
    8: (((12, 14), 3.0, 1.0, 2), ((8, 9), 2.2, 1.13, 8), ((8, 4), 2.2, 1.48, 8)),
    16: (((8, 8), 2.2, 1.0, 4), ((8, 4), 2.2, 1.04, 8), ((8, 2), 2.2, 1.37, 8)),
}
if SIMULATED:
    SMALL = (((2, 24), 1.0, 1.0, 8), ((2, 12), 1.0, 1.0, 8))
    REGIONS = dict.fromkeys(REGIONS, SMALL)
PRODUCT_ERROR = 6  # each operand is off by 2^-22 of itself, and lo * lo is left out


def refused(product: str, size: int, _dtype: str, _batch: int, *call: Any) -> str | None:
    """What the copy engine does not serve."""
    if not call:
        return None
    window, in_features, out_features = call
    read = out_features if product == "input_grad" else in_features
    step, along = max(window.stride), zip(window.stride, window.small, strict=True)
    if step > 2 or (product != "input_grad" and any(s < step and n > 1 for s, n in along)):
        return f"takes a stride of 1 or 2, along all axes, got {window.stride}"
    whole = (read,) if product == "weight_grad" else (in_features, out_features)
    if any(n % size for n in whole):
        return f"takes multiples of {size} features in {product}, got {whole}"
    if not has_room(window.big, in_features, size):
        return f"takes fewer pixels, got {window.big}"
    if not fits(window.seeing(product).offsets, -(-max(in_features, out_features) // WIDTH)):
        return f"takes fewer features, and taps less far apart, got {window}"
    return None


unsupported = reach("k6_strips", "cuda", BLOCK_SIZES, DTYPES, capability=(9, 0), refused=refused)


def _lines(product, x, values, index, window, y, precision="highest", shared=True):
    """y[:] = conv(x, w), or conv_transpose(x, w); taps may have `shared` boxes."""
    of, B, transposed = window.seeing(product), values.shape[1], product == "input_grad"
    columns = y.shape[2] * prod(of.view.residues)
    tile, boxes = tile_and_boxes(of, max(x.shape[0], 1), B, columns, shared)
    group = WIDE if boxes and x.itemsize == 2 and x.shape[2] % WIDE == 0 else WIDTH
    how = window.taps, product, of, group // B, True, boxes
    lines, *_ = planned(index, taps_in_lines, *how)
    if not x.size or not lines.block_rows.size:
        fill(y, 0.0)
        return
    seen = [chunk.origin for chunk in boxes.chunks] if boxes else of.seen[0]
    images = images_of(x, of.view.sizes, of.view.counts, seen, group, max(of.view.scale))
    if boxes:
        images = sharing(images, boxes, tile, group)
    if images.shared and not has_steps(lines, B, x.itemsize, transposed, columns, images.shared):
        _lines(product, x, values, index, window, y, precision, False)
        return
    box = images.seen(tile) if images.shared else None
    places, offsets = planned(index, places_of, of, x.shape[0], tile, box)
    out = PixelRows(y.reshape(-1, y.shape[2]), tile, places, offsets)
    along_strips(images, values, lines, out, transposed, precision)
    if precision == "highest" and y.itemsize == 4:
        repair_lines(product, x, values, index, window, y)


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    of, B = window.whole("weight_grad"), dvalues.shape[1]
    features = LINE // x.itemsize
    call = x.shape[0], window, x.shape[2], dy.shape[2], dvalues.shape[0]
    tile, boxes = boxes_of_weight_grad(sizes_of("weight_grad", B, x.dtype, *call))
    how = taps_in_lines, window.taps, "weight_grad", of, features // B, False, boxes
    lines, *_ = planned(index, *how)
    seen = [chunk.origin for chunk in boxes.chunks] if boxes else of.seen[0]
    x_images = images_of(x, window.big, window.small, seen, features, max(window.stride))
    if boxes:
        x_images = sharing(x_images, boxes, tile, features)
    dy_images = images_of(dy, window.small, window.small, [(0, 0, 0)], 1)
    ways = ways_of(lines, B, x_images, dy.shape[2])
    of_boxes = None, ways, tile if boxes else None
    whole = in_regions(x_images, dy_images, lines, dvalues, precision, *of_boxes)
    if not whole or (precision == "highest" and x.itemsize == 4):
        repair_blocks(x, dy, index, window, dvalues)


def along_strips(
    x: Images, values: Any, index: Any, y: PixelRows, transposed: bool, precision: str
) -> None:
    """y[:] = x @ w, or with w transposed; sums that a split made NaN stay so."""
    values, tops, (_, features) = aligned_values(values), x.tops(index, y.tile), x.shape
    wide = features if x.shared is None else features // x.shared.shifts * x.shared.room // ROWS
    sizes = tops.shape[0] * ROWS, wide, y.shape[1]
    how = transposed, sizes, x.width, x.shared
    strip = strip_of_images(index, values.shape[1], y.itemsize, *how)
    of = transposed, features, strip.bare, x.taps, y.offsets
    lengths, *steps = planned(index, plan_images, *of)
    units = multiprocessors() * strip.BESIDE
    tiles = planned(index, schedule, lengths, tops.shape[0], units, strip.SPLIT)
    rows, loaded, within = prod(y.tile), prod(x.seen(y.tile)), x.within(index, y.tile, ROWS, True)
    plan = Plan._make((*steps, *tiles, rows, tops, (), loaded, within))
    arithmetic = precision if y.itemsize == 4 else y.dtype.name
    kernel = strip_kernel(strip, arithmetic, IMAGES, PIXELS, transposed)
    x_map = tensor_map(*x.boxes(y.tile, strip.WIDTH))
    launch_strips(kernel, strip, plan, values, transposed, x_map, y.output(), ())


def strip_of_images(
    index: Any, B: int, item: int, transposed: bool, sizes: Sizes, tap: int, shared: Shared | None
) -> Strip:
    """As `strip_of`; `tap` is the features of one, and `shared` what several see."""
    n_blocks, units, widest = index.block_rows.size, multiprocessors(), warps_for(sizes[2], item)
    costs = COSTS[B] if item == 2 else None
    warps, split, rows = shared_out(sizes, B, item, n_blocks, units, False, costs)
    width = warps * WARP_COLUMNS
    tiles = -(-sizes[2] // width) * -(-sizes[0] // rows)
    group, box, shifts = (shared or (WIDTH, 0, 1))[:3]
    if shared:
        of = B, transposed, width, group * shifts, blocks_of_step(B, item)
        _, mean, most = planned(index, steps_in_strips, *of)
    else:
        how = index, B, item, transposed, width, tap % WIDE == 0
        group, (_, mean, most) = groups_of(*how)
    packed = sizes[0] > PACK_FROM if item == 2 else is_packed(sizes, B, item, n_blocks)
    fetchers = 1 if item == 4 and packed and warps < 12 else 4
    ring = 3, 1, fetchers, item, split, packed, "", False, box, shifts
    base = Strip(B, rows, warps, group, 0, 0, *ring)
    beside = 2 if warps <= BESIDE_UP_TO and tiles > units else 1
    strip, limit = fitted(base._replace(BESIDE=beside), mean, most)
    if strip.STAGES < 2:
        strip, limit = fitted(base, mean, most)
    return strip if warps == widest and split == 1 else filled(strip, limit)


def plan_images(
    index: Index,
    transposed: bool,
    features: int,
    strip: Strip,
    taps: tuple[Four, ...],
    squares: tuple[int, ...],
) -> tuple[Any, ...]:
    """As `plan_strips`, but groups are what `boxes_of` makes of them, where taps see by these
    offsets; and lines, in squares of pixels at these offsets, what `places_in_squares` does."""
    *plan, groups, lines = plan_strips(index, transposed, features, strip)
    walk = index.rows if transposed else index.columns
    places = places_in_squares(lines, squares, walk.indptr.size - 1)
    groups = boxes_of(groups, taps, features // len(taps) // strip.SPAN)
    return *plan, groups, np.where(lines < 0, -1, places).astype(np.int32)


def places_of(index: Index, of: Pass, batch: int, tile: Four, box: Four | None) -> tuple[Any, ...]:
    """(`PixelRows.places`, its offsets): of all pixels of an output, reached by taps or zeros; of
    tiles that are read in a box in `spread_rows`."""
    view, within = of.view, np.indices(tile).reshape(4, -1).T
    if box is not None:
        within = within[spread_rows(tile, box)]
    tops = tops_of(index, batch, view.counts, tile)[0][:, ::-1]
    at = (tops[:, None] + within).reshape(-1, 4) * (1, *view.step)
    residues = np.indices(view.residues).reshape(3, -1).T
    strides = [prod(view.out_sizes[axis:]) for axis in range(4)]
    inside = (at[:, None, 1:] + residues < view.out_sizes).all(2) & (at[:, :1] < batch)
    bits = inside @ (1 << np.arange(len(residues)))
    places = np.stack([np.where(bits, at @ strides, 0), bits], 1).astype(np.int32)
    return places, tuple((residues @ strides[1:]).tolist())


@lru_cache(1024)
def tile_and_boxes(
    of: Pass, batch: int, B: int, columns: int, shared: bool
) -> tuple[Four, Boxes | None]:
    """How outputs are cut into tiles, and the boxes that taps share, if they may, and it pays."""
    tile_for = partial(tile_that_fits, batch, of.view.counts, ROWS)
    a_tile, seen = A_COLUMN[B] * min(columns, MOST_COLUMNS), len(of.seen[0])
    if shared and seen > 1:
        chunks = even_chunks(of)
        spread, part = spread_of(chunks), len(chunks) / seen
        tile = tile_for(a_tile, 1.0, spread)
        box: Any = tuple(t + s for t, s in zip(tile[1:], spread, strict=True))
        pixels = tile[0] * prod(box)
        if part * pixels <= WORTH * prod(tile) and pixels <= LARGEST:
            return tile, boxes_of_chunks(chunks, box)
    return tile_for(a_tile), None


def has_steps(
    index: Index, B: int, item: int, transposed: bool, columns: int, shared: Shared
) -> bool:
    """Whether a stage has room for the steps of any box that taps share."""
    width, a_step = warps_for(columns, item) * WARP_COLUMNS, blocks_of_step(B, item)
    how = B, transposed, width, shared.width * shared.shifts, a_step
    most = planned(index, steps_in_strips, *how)[2]
    return most < MOST_STEPS and most * item * a_step * B**2 <= MOST_OF_W


def sharing(images: Images, boxes: Boxes, tile: Four, group: int) -> Images:
    """Whose taps share boxes, for such a tile; a stage has room for whole periods of lines."""
    lines, (_, box, shifts) = PERIOD // (group * images.pixels.itemsize), boxes
    shared = Shared(group, -(-tile[0] * prod(box) // lines) * lines, shifts, box)
    return images._replace(width=images.width * shifts, shared=shared)


def images_of(
    x: DeviceArray, sizes: Three, outputs: Three, seen: Any, group: int, step: int = 1
) -> Images:
    """x (batch, pixels, features) as taps see it, from these offsets, every pixel or every second
    one; whole groups of features."""
    batch, _, features = x.shape
    pixels, taps = aligned(of_bits(x).reshape(-1, features)), tuple((step - 1, *by) for by in seen)
    return Images(pixels, batch, sizes, outputs, taps, -(-features // group) * group)


@lru_cache(1024)
def boxes_of_weight_grad(sizes: Convolution) -> tuple[Any, Boxes | None]:
    """How outputs are cut into tiles, and the boxes that taps share, if it pays."""
    of, batch, seen = sizes.whole, sizes.batch, len(sizes.whole.seen[0])
    few = max(sizes.in_features, sizes.out_features) <= MOST_FEATURES
    if sizes.itemsize > 2 or seen == 1 or max(of.view.scale) > 1 or not few:
        return None, None
    chunks = even_chunks(of)
    spread, part = spread_of(chunks), len(chunks) / seen
    tile = tile_that_fits(batch, of.view.counts, STAGE_ROWS, A_TILE, UNEVEN, spread)
    box: Any = tuple(t + s for t, s in zip(tile[1:], spread, strict=True))
    rows, pixels = int(np.prod(tile)), tile[0] * int(np.prod(box))
    full = rows == STAGE_ROWS and tile[3] % AT_ONCE == 0
    fewer = part * pixels <= WORTH * rows and pixels <= LARGEST
    if full and fewer and loads_of_a_slot(sizes) >= LOADS_OF_A_SLOT[sizes.size]:
        return tile, boxes_of_chunks(chunks, box)
    return None, None


def loads_of_a_slot(sizes: Convolution) -> float:
    """Groups that the large regions of a weight-gradient load, tap by tap, for each slot."""
    region = region_plan.ways_for(sizes.density, sizes.size, "float16", False, True)[0].region
    unfolded = sizes.outputs, sizes.reads * len(sizes.whole.seen[0]), sizes.makes, sizes.n_blocks
    product = times.in_random("weight_grad", sizes.size, "float16", *unfolded)
    (n, height, of_dy), slots = times.regions_of(product, region)
    return (n * height + of_dy) / max(slots, 1e-9)


def ways_of(index: Any, B: int, x: Images, columns: int) -> tuple[Way, ...]:
    """Regions that hold the blocks of a column in any group, with groups for their part of the
    features; none where taps share no boxes."""
    if x.shared is None:
        return ()
    of_group = LINE // 2 * x.shared.shifts
    slots, most = planned(index, slots_in_groups, B, of_group // B)
    groups = x.shape[1] // of_group, -(-columns // (LINE // 2))
    return ways_in_boxes(B, x.shared.room, x.shared.shifts, groups, slots, most)


def ways_in_boxes(
    B: int, room: int, shifts: int, groups: tuple[int, int], slots: int, most: int
) -> tuple[Way, ...]:
    """Where x and dy have so many groups, and these so many slots, of a column at most."""
    found, box = list[Way](), max(room, STAGE_ROWS)
    meeting = region_plan.MEETING_OF_IMAGES if B == 16 else 1.0  # boxes are of 16 bits alone
    for (warps, each), *how in REGIONS[B]:
        if warps * each >= most:
            high = -(-groups[0] // max(-(-slots // (warps * each)), 1))
            many = max(high + groups[1], -(-4 * high // 3))  # x has three quarters at most
            region = Region(warps, each, many, STAGE_ROWS, 2, 4, BOX=box, SHIFTS=shifts)
            region = in_stages(region, B)
            found = found or [Way(region, A_ROW[B])]
            found.append(small_way(found[0], region, *how, A_LINE, SECOND_PASS, SPARE, meeting))
    return tuple(found)


def in_stages(region: Region, B: int) -> Region:
    """With up to four stages, as there is room, that hold the sums of a block of a cluster."""
    sums = 16 * B * region.WARPS * (4 * region.SLOTS + 2)
    for stages in (2,) if SIMULATED else (4, 3, 2):
        groups = max(region.GROUPS, -(-sums // (stages * region.GROUP_BYTES)))
        wanted = region._replace(GROUPS=groups, STAGES=stages)
        if SIMULATED or region_plan.fitted(wanted) == wanted:
            return wanted
    return region_plan.fitted(wanted)


def slots_in_groups(index: Index, B: int, of_group: int) -> tuple[int, int]:
    """(slots of all columns, the most of one column in a group of so many block rows)."""
    n, columns = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    lines, shift = np.arange(columns)[None], of_group.bit_length() - 1
    counts = counted(index.columns, lines, -(-n // of_group), shift)[0]
    slots = -(-counts.sum(0, dtype=np.int64) // (16 // B))
    return int(slots.sum()), -(-int(counts.max()) // (16 // B))
