"""How long each rung takes, as one card measured it on a grid: the basis of `auto`.

`times.json` has microseconds over batch, features and density of random layouts of as many input as
output features; `python -m numbsparse times` makes it. Between the points of the grid the logarithm
of a time is interpolated; before the first it is that of the first, and beyond the last it goes on
as between the last two. Beyond the last features all rungs take longer as there are more values:
some that have places to spare until then would seem to gain for ever. What counts is the order of
the rungs, not their times: on another card it may differ, and `numbsparse.tune` measures it there.
Those at 2,048 features are interpolated, all but k7's and k6's forward. What k8 gained since was
measured at some points forward, and scales the others; so do 72 products of k7's float32, forward.
k6's in 16 bits were measured forward at 64 to 512 rows, with the tiles that are chosen; 48 rows are
taken for 64, and input-gradients, of which six were measured, for forward. At other batches they
are scaled by how few tiles there were before, and 5 % longer. Its weight-gradients of 96 to 1,024
rows were measured with 4,096 and 8,192 features; those of 16 bits with blocks of 128 and up to 256
rows are scaled by what their tile gained at densities 0.1 and 0.25. A
weight that is not square is as a square one with the same values, whose sides are between a line of
the result and the mean of both sides: that came nearest to 151 products that nobody tuned.
"""

import json
from functools import cache
from itertools import product as every
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.matmul import as_dense_from
from numbsparse.layout import Layout

FILE = Path(__file__).with_name("times.json")
AXES = ("features", "densities", "batches")
TILES = ((16, 1), (64, 16), (inf, 32))  # up to so many rows a rung takes them by so many
WHOLE = ("k1_naive", "k3_registers", "k5_tensor_core")  # whose blocks of threads have whole lines
ROWS, PLACES = 64, 512  # of such a block; how many of those run at once


class Times(NamedTuple):
    """The grid, in logarithms to base 2, and at each of its points those of microseconds.

    axes : of AXES, each ascending
    of : case (see `case_of`) to rung to an array over all axes, NaN where the rung does not serve
    """

    axes: tuple[np.ndarray, ...]
    of: dict[str, dict[str, np.ndarray]]


def expected(
    product: str, block_size: int, dtype: Any, batch: int, precision: str, layout: Layout
) -> dict[str, float]:
    """Microseconds of each rung that was measured at all points around this one."""
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
    as_dense = point.copy()
    if product != "weight_grad" and str(dtype) != "float32":
        as_dense[1] = min(point[1], np.log2(as_dense_from(block_size, batch)))
    logs = {
        name: _at(array, times.axes, as_dense if name == "k7_small_blocks" else point) + 2 * beyond
        for name, array in of_rung.items()
    }
    late = dict.fromkeys(WHOLE, lateness(product, batch, layout))
    return {name: 2**log * late.get(name, 1) for name, log in logs.items() if log == log}


def lateness(product: str, batch: int, layout: Layout) -> float:
    """How many times as long the longest line takes as one of a random layout, or as all others.

    >>> from numbsparse import Layout, patterns
    >>> round(lateness("forward", 64, Layout(patterns.random(64, 64, 0.2, seed=0))), 1)
    1.0
    """
    if product == "weight_grad":
        return 1.0
    longest = layout.longest[product == "forward"]
    mean = layout.n_blocks / layout.shape[product == "forward"]
    others = layout.n_blocks * -(-batch // ROWS) / PLACES
    return max(longest / max(mean + 3 * mean**0.5, others, 1), 1.0)


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
