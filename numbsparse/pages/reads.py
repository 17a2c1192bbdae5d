"""What a product moves, by formula, and how fast the card's limits let it be: its roofline.

A formula, with the tiles of a rung or step, gives the values of x and w that are read for each
value of y = x @ w. Index arrays and edges are left out. `counted` in `profile.json` counts the same
in the simulator; the tests hold one against the other.

Each limit of the card alone takes some time: the arithmetic, the bytes that come from the L2 cache,
those that cross the memory's bus. The product takes at least the longest of them. The limits are
measured (`bench --only limits`), the bytes are the profiler's where it read them, else those of the
formula, which leaves out what the L1 cache serves again.

S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", 2009.
"""

from typing import Any, NamedTuple

from numbsparse.bench.problem import random
from numbsparse.bench.results import Row
from numbsparse.kernels import ladder
from numbsparse.kernels.matmul import k3_registers, k5_tensor_core
from numbsparse.kernels.matmul.k6_hopper.plan import TILES, steps_of
from numbsparse.kernels.matmul.k9_dense_tiles.plan import SQUARE, depth_of, plan_tiles, shape_of
from numbsparse.kernels.parts.groups import steps_in_strips
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.strip import WARP_COLUMNS
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Layout
from numbsparse.pages.committed import CACHE, MEMORY, PIPES, in_section, limits, profiled

UNITS = 132  # multiprocessors of the cards in the tables
STRIP_ROWS, STRIP_WARPS, GROUP = 64, 16, 32  # of k7_small_blocks on compute capability 9.0


class Reads(NamedTuple):
    """Values read per output, from each memory, by an average output."""

    from_global: float
    from_shared: float


def reads_at(name: str, row: Row, dtype: str) -> Reads | None:
    """Of a rung at the shape of a row of the benchmark's ladder."""
    layout = random(row["features"], row["block_size"], round(row["density"], 2))  # as it has
    return reads(name, layout, row["block_size"], row["batch"], dtype)


def reads(name: str, layout: Layout, size: int, batch: int, dtype: str) -> Reads | None:
    """Of the forward product; None where there is no formula (the CPU, float32 of two rungs)."""
    K = layout.n_blocks / layout.shape[1] * size  # products of an average output
    if name in ladder.NAMES:
        return _of_step(ladder.step(name), layout, size, K)
    if name == "k1_naive":
        return Reads(2 * K, 0)
    if name == "k3_registers":
        tile: Any = k3_registers.tile_of(size, batch)
        return Reads(K / tile.BM + K / tile.BN, K / tile.TM + K / tile.TN)
    if name == "k5_tensor_core":
        arithmetic = "highest" if dtype == "float32" else dtype
        BM, BN, _, _ = tile = k5_tensor_core.line_tiles(size, batch, arithmetic)[0]
        from_shared = K / (BM // tile.warps) + K / BN
        return Reads(K / min(BM, batch) + K / BN, from_shared * _filled_up(batch, BM))
    if name == "k8_small_batch":
        each = K / batch + K / min(size, WIDTH)
        return Reads(each, each)
    if dtype == "float32":
        return None
    if name == "k6_hopper":
        return _of_hopper(layout, size, batch, K)
    if name == "k9_dense_tiles":
        return _of_dense_tiles(layout, size, batch, K)
    return _of_small_blocks(layout, size, K) if name == "k7_small_blocks" else None


def arriving(name: str, layout: Layout, size: int, batch: int, dtype: str) -> float | None:
    """Values per output that come from the L2 cache: what a cluster requests once comes to each."""
    found = reads(name, layout, size, batch, dtype)
    if found is None:
        return None
    K, again = layout.n_blocks / layout.shape[1] * size, 0.0
    if name == "k6_hopper":
        rows, cluster = TILES[size].ROWS, TILES[size].CLUSTER
        again = K / min(rows, batch) - K / min(rows * cluster, batch)
    elif name in ladder.NAMES and hasattr(module := ladder.step(name), "CLUSTER"):
        again = K / module.BM - K / (module.BM * module.CLUSTER)
    return found.from_global + again


def _of_step(step: Any, layout: Layout, size: int, K: float) -> Reads:
    """By the tiles that a step names: BM x BN, of a warp WM rows, of a thread TM x TN."""
    if hasattr(step, "plan"):
        inputs = step.TERMS // min(size, step.TERMS)
        _, _, records = planned(layout.index, step.plan, step.BN // size, inputs)
        x = (len(records) - 1) * inputs / layout.shape[1]
        w = K / (step.BM * getattr(step, "CLUSTER", 1))
        return Reads(x + w, K / size + K / step.WM)
    BN = getattr(step, "BN", size)
    tiles = K / BN + K / step.BM
    if hasattr(step, "WM"):
        return Reads(tiles, K / BN + K / step.WM)
    if hasattr(step, "BK"):
        return Reads(tiles, K / getattr(step, "TN", 1) + K / getattr(step, "TM", 1))
    return Reads(2 * K, 0)


def _of_hopper(layout: Layout, size: int, batch: int, K: float) -> Reads:
    """x once for all columns of a group that meet it, w once for the rows of a cluster."""
    tile = TILES[size]
    records, _, _ = planned(layout.index, steps_of, False, tile, False)
    tiles_of_x = int((records[:, tile.SHARES] & 255).sum())
    x = tiles_of_x * tile.DEPTH / (layout.shape[1] * size)
    from_shared = (K / size + K / 64) * _filled_up(batch, 64)
    return Reads(x + K / min(tile.ROWS * tile.CLUSTER, batch), from_shared)


def _filled_up(batch: int, rows: int) -> float:
    """How many rows are computed for each one of the batch, in tiles of so many."""
    return -(-batch // rows) * rows / batch


def _of_small_blocks(layout: Layout, size: int, K: float) -> Reads:
    """x once for all columns of a strip, in groups of features; w once for its rows."""
    width = STRIP_WARPS * WARP_COLUMNS
    kept, _, _ = steps_in_strips(layout.index, size, False, width, GROUP, 16 // size)
    groups = layout.n_blocks / (kept * (width // size) * (GROUP // size))  # of all strips
    x = groups * GROUP / (layout.shape[1] * size)
    return Reads(x + K / STRIP_ROWS, K / size + K / STRIP_ROWS)


def _of_dense_tiles(layout: Layout, size: int, batch: int, K: float) -> Reads:
    """x once for the columns of a tile that keep any of its features, w once for its rows."""
    n_in, n_out = (n * size for n in layout.shape)
    groups, _, columns = shape_of(batch, n_out, n_in / SQUARE, UNITS)
    rows, depth = min(SQUARE * groups, batch), depth_of(groups)
    starts, *_ = planned(layout.index, plan_tiles, False, n_in, size, depth, columns)
    features = int(starts[-1]) * depth / -(-n_out // columns)
    return Reads(features / columns + K / rows, features / columns + features / SQUARE)


class Roofline(NamedTuple):
    """Seconds that each limit takes."""

    arithmetic: float
    cache: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        """The limit that takes longest."""
        return ("arithmetic", "L2", "memory")[self.index(self.seconds)]


def roofline(name: str, row: Row) -> Roofline | None:
    """Of a step or rung, forward, at the shape of a benchmark's row; None without a formula."""
    nbytes = bytes_from_cache(name, row)
    if nbytes is None:
        return None
    rates, read = limits(), read_at(name, row)
    pipe = PIPES[pipe_of(name, row["dtype"])].format(row["dtype"])
    beyond = bytes_of(read)[1] if read else row["bytes"]
    return Roofline(row["flops"] / rates[pipe], nbytes / rates[CACHE], beyond / rates[MEMORY])


def read_at(name: str, row: Row) -> Row | None:
    """What the profiler read at this shape, if it did."""
    section = "steps" if name in ladder.NAMES else row["dtype"]
    shape = {key: row[key] for key in ("dtype", "batch", "block_size")}
    rows = in_section(profiled(), section, rung=name, in_features=row["features"], **shape)
    return rows[0]["readings"] if rows else None


def bytes_of(readings: Row) -> tuple[float, float]:
    """Of what the profiler read: those from the L2 cache, and those that crossed memory's bus."""
    return (
        readings["L2 to L1 bytes"],
        readings["memory bytes read"] + readings["memory bytes written"],
    )


def bytes_from_cache(name: str, row: Row) -> float | None:
    """What comes from the L2 cache: as the profiler read it at this shape, or by the formula."""
    if (read := read_at(name, row)) is not None:
        return bytes_of(read)[0]
    size, itemsize = row["block_size"], 4 if row["dtype"] == "float32" else 2
    layout = random(row["features"], size, round(row["density"], 2))
    values = arriving(name, layout, size, row["batch"], row["dtype"])
    return None if values is None else values * row["batch"] * row["features"] * itemsize


def pipe_of(name: str, dtype: str) -> str:
    """The instruction that multiplies."""
    if dtype == "float32":
        return "fma"
    hopper = ladder.NAMES[ladder.NAMES.index("s10_wgmma") :]
    return "wgmma" if name in hopper or name == "k6_hopper" else "mma"
