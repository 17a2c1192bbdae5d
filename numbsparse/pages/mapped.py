"""What a map of the plane says: ours beside the peers; on a GPU cliffs along the batch and the
roofline too.

The roofline of a product is what a launch takes, and the longest of three times: the features that
random blocks meet, the blocks and the result once through the L2 cache, or through memory where the
cache does not hold them; the tensor cores, which multiply float32 at full precision in three
products; and shared memory, out of which each kept block takes B features of x. The card's limits
are those that were measured and committed (`bench --only limits`); a launch is as short as the
quickest product of the map.
"""

import csv
import io
from collections.abc import Iterator
from itertools import combinations
from itertools import product as every
from math import isnan, nan
from statistics import median
from typing import NamedTuple

from numbsparse.bench.contestants import OURS
from numbsparse.bench.plane import PLANES, Point, point_of
from numbsparse.bench.results import Row
from numbsparse.pages.committed import CACHE, MEMORY, PIPES, limits

TYPICAL = {"cuda": 0.1, "cpu": 0.2}  # a density: medians are told there
CACHED = 40e6  # bytes that stay in the L2 cache of an H200 from one replay to the next
SHARED = 1 / 32  # bytes from shared memory in the time of a float16 operation of wgmma
BESIDE = "fastest_peer", "its_microseconds", "roofline_microseconds"
FALL, STEP, FAR = 0.9, 1.3, 3.0  # how many times as long a larger batch, one row more, any product


def beside(place: str, rows: list[Row]) -> dict[Point, dict[str, float]]:
    """How many times as fast as each peer, wherever both were timed."""
    of_point = {point_of(row): row["microseconds"] for row in rows}
    found = {}
    for point, microseconds in of_point.items():
        peers = dict(microseconds)
        ours = peers.pop(OURS, None)
        if PLANES[place].dense:
            peers |= of_point.get(point.dense, {})
        if ours is not None and peers:
            found[point] = {name: theirs / ours for name, theirs in peers.items()}
    return found


def speed_ups(place: str, rows: list[Row]) -> list[tuple[Point, float, str]]:
    """(point, how many times as fast as the best peer, which one) wherever both were timed."""
    return [
        (point, *min((times, name) for name, times in of.items()))
        for point, of in beside(place, rows).items()
    ]


def beside_peers(place: str, rows: list[Row], most: int = 20) -> str:
    """How the speed-ups are spread, by block size and density, and where we lose most."""
    found = speed_ups(place, rows)
    lines = [f"{len(found)} products beside the fastest peer of each"]
    faults = [row for row in rows if row["faults"]]
    lines += [f"  not right: {point_of(row)}: {row['faults']}" for row in faults]
    typical: dict[tuple[str, ...], list[float]] = {}
    for point, peers in beside(place, rows).items():
        if point.density == TYPICAL[place]:
            for name, times in peers.items():
                typical.setdefault((point.dtype, point.precision, name), []).append(times)
    lines += [
        f"  at {TYPICAL[place]:g}, {dtype} {precision}: median {median(ratios):.2f} times {name}"
        for (dtype, precision, name), ratios in typical.items()
    ]
    plane = PLANES[place]
    for cell in every(plane.block_sizes, plane.densities, plane.numbers):
        if ratios := [ratio for p, ratio, _ in found if (*p[1:3], p[4:6]) == cell]:
            lines.append(
                f"  B = {cell[0]}, density {cell[1]:g}, {' '.join(cell[2])}: median "
                f"{median(ratios):.2f} times the best peer, least {min(ratios):.2f}, slower at "
                f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"
            )
    for point, ratio, peer in sorted(found, key=lambda each: each[1])[:most]:
        if ratio < 1:
            lines.append(f"  {ratio:.2f} of {peer}: {' '.join(map(str, point))}")
    return "\n".join(lines)


class Change(NamedTuple):
    """A product takes so many times as long with so many rows instead of its own."""

    times: float
    point: Point
    batch: int


def changes(took: dict[Point, float]) -> Iterator[Change]:
    """From each batch of a product to each larger one."""
    batches: dict[Point, list[int]] = {}
    for point in took:
        batches.setdefault(point._replace(batch=0), []).append(point.batch)
    for product, of in batches.items():
        for few, many in combinations(sorted(of), 2):
            before, after = product._replace(batch=few), product._replace(batch=many)
            yield Change(took[after] / took[before], before, many)


def ours(rows: list[Row]) -> dict[Point, float]:
    """Seconds of each product that we computed."""
    times = [(point_of(row), row["microseconds"].get(OURS)) for row in rows]
    return {point: microseconds * 1e-6 for point, microseconds in times if microseconds}


def lines(place: str, rows: list[Row]) -> str:
    """A CSV line for each of ours: the fastest peer, and on a GPU the roofline, beside it."""
    took, rung = ours(rows), {point_of(row): row["rung"] for row in rows}
    peers = {point: (times, peer) for point, times, peer in speed_ups(place, rows)}
    far = times_the_roofline(took) if place == "cuda" else {}
    table = io.StringIO(newline="")
    write = csv.writer(table).writerow
    write(("in_features", "out_features", *Point._fields[1:], "rung", "microseconds", *BESIDE))
    for point, seconds in took.items():
        times, peer = peers.get(point, (nan, ""))
        all_three = seconds, seconds * times, seconds / far.get(point, nan)
        own, theirs, roof = ("" if isnan(each) else f"{each * 1e6:.3g}" for each in all_three)
        write((*point.features, *point[1:], rung[point], own, peer, theirs, roof))
    return table.getvalue()


def roofline(point: Point, launch: float, rates: dict[str, float]) -> float:
    """Seconds; `launch` is what one takes, `rates` are the card's limits by name."""
    (n_in, n_out), kept = point.features, point.density * point.features[0] * point.features[1]
    is_16_bit, products = point.dtype != "float32", point.batch * kept
    itemsize, wgmma = 2 if is_16_bit else 4, rates[PIPES["wgmma"].format("float16")]
    met_by = lambda n: 1 - (1 - point.density) ** (n // point.block_size)  # noqa: E731
    x = n_in * (met_by(n_out) if point.product != "input_grad" else 1)  # few layouts meet all
    dy = n_out * (met_by(n_in) if point.product != "forward" else 1)
    nbytes = itemsize * (point.batch * (x + dy) + kept)
    passes = 1 if is_16_bit else 2 if point.precision == "high" else 6  # tf32 at half the pace
    return launch + max(
        nbytes / rates[CACHE if nbytes < CACHED else MEMORY],
        2 * products * passes / wgmma,
        products / point.block_size * itemsize / (wgmma * SHARED),
    )


def times_the_roofline(took: dict[Point, float]) -> dict[Point, float]:
    """How many times as long as its roofline each product takes."""
    rates, launch = limits(), min(took.values())
    return {point: seconds / roofline(point, launch, rates) for point, seconds in took.items()}


def summary(rows: list[Row], most: int = 10) -> str:
    """Where a larger batch takes less, one row more takes much more, and how far limits are."""
    if not (took := ours(rows)):
        return ""
    found = sorted(changes(took))
    falls = [each for each in found if each.times < FALL]
    steps = [each for each in found if each.batch == each.point.batch + 1]
    high = [each for each in steps if each.times > STEP][::-1]
    lines = [f"time falls below {FALL} with more rows at {len(falls)} of {len(found)} pairs"]
    lines += map(_told, falls[:most])
    lines.append(f"one row more takes over {STEP} times as long at {len(high)} of {len(steps)}")
    lines += map(_told, high[:most])
    far: dict[tuple[str, str, int], list[float]] = {}
    for point, ratio in times_the_roofline(took).items():
        far.setdefault((point.dtype, point.precision, point.block_size), []).append(ratio)
    lines += [
        f"{dtype} {precision}, B = {size}: median {median(of):.2f} times the roofline, "
        f"more than {FAR:g} at {sum(ratio > FAR for ratio in of)} of {len(of)}"
        for (dtype, precision, size), of in sorted(far.items())
    ]
    return "\n".join(lines)


def _told(each: Change) -> str:
    return f"  {each.times:.2f} at {each.batch} rows: {' '.join(map(str, each.point))}"
