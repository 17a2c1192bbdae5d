"""How long each rung takes, as one card measured it on a grid: the basis of `auto`.

`times.json` has microseconds over batch, features and density of random layouts of as many input as
output features; `python -m numbsparse times` makes it. Of DENSE it has those up to WIDE features;
beyond, what is known of it is where it begins to be faster. Between the points of the grid the
logarithm of a time is interpolated; before the first it is that of the first, and beyond the last
it goes on as between the last two. Beyond the last features all rungs take longer as there are more
values: some that have places to spare until then would seem to gain for ever. What counts is the
order of the rungs, not their times: on another card it may differ, and `numbsparse.tune` measures
it there.

The file was not made in one run. Of k6, k7 and k8 half of the points of 8 to 2,048 rows and of
1,024 features and more, 6,568, were measured at once, all of float16 but for some in blocks of 16
and 64, by the GPU's clock; the others are as before, scaled as their neighbours changed. Of 128 and
512 features 2,300 were, at densities of 0.1 and 0.3 and six batches; other batches are
interpolated, and density 0.02 and what was missing follows the neighbours. Of 1,024 features DENSE
has the times of STRIPS at the density where it begins to be faster. Weight-gradients of k6 and k7
are newer, 2,017 points. A weight that is not square is as a square one with the same values, whose
sides are between a line of the result and the mean of both sides: that came nearest to 151 products
that nobody tuned.

The grid has random layouts, and rows in order. What a long line adds, of a layout that is uneven,
and feature-major rows, was fitted to 479 drawn products, each in both orders and by all rungs.
"""

import json
from functools import cache
from itertools import product as every
from math import ceil, inf, isnan, nan, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.matmul import rung
from numbsparse.layout import Layout

FILE = Path(__file__).with_name("times.json")
AXES = ("features", "densities", "batches")
TILES = ((16, 1), (64, 16), (inf, 32))  # up to so many rows a rung takes them by so many
STRIPS, DENSE = "k7_small_blocks", "k9_dense_tiles"
LARGER = 32  # blocks than those of these rungs
WIDE = 1024  # features
WHOLE = ("k1_naive", "k3_registers", "k5_tensor_core")  # whose blocks of threads have whole lines
ROWS, PLACES = 64, 512  # of such a block; how many of those run at once
# By rung and bytes of a value: microseconds that a block of the longest line takes, by block size,
# and rows from which on it takes as many times longer.
LINES: dict[tuple[str, int], tuple[dict[int, float], int]] = {
    ("k6_hopper", 2): ({32: 0.1, 64: 0.18, 128: 0.67}, 1024),
    ("k6_hopper", 4): ({32: 0.5, 64: 1.2, 128: 3.0}, 1024),
    ("k7_small_blocks", 2): ({8: 0.035, 16: 0.046}, 320),
    ("k7_small_blocks", 4): ({8: 0.035, 16: 0.06}, 128),
}
# Of a layout made on a GPU any line may be the longest, and have all blocks that it can: then so
# many times as long at most, for k8, which cuts lines, takes little more where they are even, and
# where one was full, of 133 to 530 rows, 0.24 to 0.43 of the time (H200).
UNKNOWN = 1.2
# Its weight-gradients by k6 read more, and do not begin an item before the last one ends: 15 drawn
# ones of up to 128 rows took 1.5 times as long as planned by the host, 1.3 to 2.2, 57 of more rows
# 1.3. By k8, whose plan is the same there, 1.0 to 1.1.
PLANNED_THERE, ROWS_THERE = (1.4, 1.2), 128
MULTIPROCESSORS, WIDTH = 132, 32  # of the card; features of what a warp of k8 multiplies at once
WARPS = {2: 16, 4: 8}  # of k8's blocks of threads, by bytes of a value; 8 in large blocks of w too
BYTES = 16  # from multiples of which on rows are aligned
LAUNCH, ADDED = 1.5, 1.5  # microseconds: of a launch; of k8's, which adds parts of a line up
COPIED = {"forward": 2.0, "input_grad": 2.0, "weight_grad": 2.9}  # what is not aligned, and more
A_MEGABYTE = 0.45  # of both
ONE_BY_ONE = 0.6  # what k8 takes more than k6 where lines of y in 16 bits begin anywhere
READ, FEW = {2: 0.7, 4: 0.85}, 1.3  # times as long: k8's of small blocks; of 64 rows, not aligned


class Times(NamedTuple):
    """The grid, in logarithms to base 2, and at each of its points those of microseconds.

    axes : of AXES, each ascending
    of : case (see `case_of`) to rung to an array over all axes, NaN where the rung does not serve
    """

    axes: tuple[np.ndarray, ...]
    of: dict[str, dict[str, np.ndarray]]


def expected(
    product: str,
    block_size: int,
    dtype: Any,
    batch: int,
    precision: str,
    layout: Layout,
    feature_major: bool = False,
) -> dict[str, float]:
    """Microseconds of each rung that was measured at all points around this one.

    `feature_major` says whether the batch is contiguous in what is read, and in what is written.
    """
    values = layout.n_blocks * block_size**2
    if not values or not batch:
        return {}
    n_in, n_out = (n * block_size for n in layout.shape)
    sides = {"forward": n_out, "input_grad": n_in, "weight_grad": (n_in * n_out) ** 0.5}
    features = sides[product] ** 0.5 * (n_in * n_out) ** 0.25
    tile = next(tile for most, tile in TILES if batch <= most)
    rows = -(-batch // tile) * tile
    times, point = measured(), np.log2([features, values / features**2, rows])
    beyond = max(point[0] - times.axes[0][-1], 0.0)
    point[0] -= beyond
    of_rung = times.of.get(case_of(product, block_size, dtype, precision), {})
    logs = {name: _at(array, times.axes, point) + 2 * beyond for name, array in of_rung.items()}
    unknown = isnan(logs.get(DENSE, nan)) and STRIPS in of_rung
    if unknown and is_dense(product, block_size, dtype, batch, layout):
        point[1] = min(point[1], np.log2(_dense().least_kept(product, block_size, dtype, batch)))
        logs[DENSE] = _at(of_rung[STRIPS], times.axes, point) + 2 * beyond
    found = {name: 2**log for name, log in logs.items() if log == log}
    itemsize = 4 if str(dtype) == "float32" else 2
    if product != "weight_grad":
        _add_lines(found, product, block_size, itemsize, batch, layout)
    elif not any(layout.longest) and "k6_hopper" in found:
        found["k6_hopper"] *= PLANNED_THERE[batch > ROWS_THERE]
    if feature_major:
        copied = COPIED[product] + A_MEGABYTE * batch * (n_in + n_out) * itemsize / 1e6
        _add_order(found, block_size, itemsize, batch, copied)
    return found


def _add_lines(
    found: dict[str, float],
    product: str,
    block_size: int,
    itemsize: int,
    batch: int,
    layout: Layout,
) -> None:
    """What the longest line takes: k5 and before, k6 and k7 leave it to a multiprocessor."""
    late, longest = lateness(product, batch, layout), layout.longest[product == "forward"]
    for name in found:
        found[name] *= late if name in WHOLE else 1.0
        of_blocks, rows = LINES.get((name, itemsize), ({}, 1))
        if block_size in of_blocks:
            wide = min(layout.shape[product == "forward"] * block_size / WIDE, 1.0)
            most = longest or layout.shape[product == "input_grad"]
            alone = LAUNCH + of_blocks[block_size] * most * max(wide * batch / rows, 1.0)
            if not longest:
                alone = min(alone, found[name] * (UNKNOWN if batch <= rows else 1.0))
            found[name] = max(found[name], alone)
    if "k8_small_batch" in found:
        share = share_of(layout.n_blocks, block_size, itemsize, batch)
        if usual(product, layout) < share:  # lines of a random layout would not be cut
            found["k8_small_batch"] += ADDED * min(max(longest / share - 1, 0.0), 1.0)


def share_of(n_blocks: int, block_size: int, itemsize: int, batch: int) -> float:
    """Blocks of a line of a result that a multiprocessor has of k8's; its warps have as many each.

    Lines that are longer are cut. So 45 products of clustered and of uneven layouts took what was
    expected where the longest line was up to 1.4 times as long, and 1.2 to 1.8 us more where it was
    longer (4 to 64 rows, H200).
    """
    size = block_size / WIDTH
    warps = WARPS[itemsize] if block_size < WIDTH else WARPS[4]
    units = n_blocks * size * max(size, 1) * -(-batch // ROWS)
    return ceil(units / (MULTIPROCESSORS * warps)) * warps / size


def _add_order(
    found: dict[str, float], block_size: int, itemsize: int, batch: int, copied: float
) -> None:
    """What feature-major rows take more: they are copied where the batch is not aligned."""
    aligned = batch * itemsize % BYTES == 0
    for name in found:
        if name == "k8_small_batch" and batch > ROWS and block_size < 32:
            found[name] *= READ[itemsize]
        elif name == "k8_small_batch" and batch > ROWS and batch * itemsize % 4:
            found[name] += ONE_BY_ONE
        if name == "k8_small_batch" and batch <= ROWS:  # reads them where they are
            found[name] *= 1 if aligned else FEW
        else:
            found[name] += 0 if aligned else copied


def is_dense(
    product: str, block_size: int, dtype: Any, batch: int, layout: Layout, part: float = 1.0
) -> bool:
    """Whether so much is kept, times `part`, that DENSE takes less time than STRIPS.

    It takes as long as these do where that begins, for as many blocks as there are.
    """
    how = product, block_size, dtype, batch
    return block_size < LARGER and bool(_dense().suits(*how, layout.index, part))


def _dense() -> Any:
    return rung(DENSE)


def lateness(product: str, batch: int, layout: Layout) -> float:
    """How many times as long the longest line of a result of rows takes as all others.

    Or as the longest of a random layout, if that takes longer.

    >>> from numbsparse import Layout, patterns
    >>> round(lateness("forward", 64, Layout(patterns.random(64, 64, 0.2, seed=0))), 1)
    1.0
    """
    longest = layout.longest[product == "forward"]
    others = layout.n_blocks * -(-batch // ROWS) / PLACES
    return max(longest / max(usual(product, layout), others, 1), 1.0)


def usual(product: str, layout: Layout) -> float:
    """Blocks of the longest line of a random layout with as many."""
    mean = layout.n_blocks / layout.shape[product == "forward"]
    return float(mean + 3 * mean**0.5)


def case_of(product: str, block_size: int, dtype: Any, precision: str) -> str:
    """bfloat16 takes as long as float16; only float32 has a precision."""
    numbers = f"float32 {precision}" if str(dtype) == "float32" else str(dtype)
    return f"{product} {numbers.replace('bfloat16', 'float16')} B={block_size}"


@cache
def measured() -> Times:
    """What the file holds."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    axes = tuple(np.log2(content[axis]) for axis in AXES)
    shape = [axis.size for axis in axes]
    return Times(
        axes,
        {
            case: {
                name: np.log2(np.array(times, float)).reshape(shape)
                for name, times in of_rung.items()
            }
            for case, of_rung in content["microseconds"].items()
        },
    )


def _at(logs: np.ndarray, axes: tuple[np.ndarray, ...], point: np.ndarray) -> float:
    return sum(weight * float(logs[place]) for place, weight in _corners(axes, point))


def _corners(axes: tuple[np.ndarray, ...], point: np.ndarray) -> Any:
    """(place in the grid, weight) of the points around one, or of the last ones before it."""
    sides = []
    for axis, at in zip(axes, point, strict=True):
        at = max(at, axis[0])
        i = min(int(np.searchsorted(axis, at, "right")) - 1, axis.size - 2)
        part = float((at - axis[i]) / (axis[i + 1] - axis[i]))
        sides.append([(i, 1 - part), (i + 1, part)])
    for corner in every(*sides):
        places, weights = zip(*corner, strict=True)
        if weight := prod(weights):
            yield places, weight
