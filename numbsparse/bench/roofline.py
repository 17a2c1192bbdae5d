"""The roofline of a product: how fast the card's limits let it be, by what it moves and computes.

Each limit alone takes some time: the arithmetic, the bytes that come from the L2 cache, those that
cross the memory's bus. The product takes at least the longest of them. The limits are measured
(`bench --only limits`), the bytes are the profiler's where it read them, else those of the formula
at the head of each step or rung, which leaves out what the L1 cache serves again.

S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", 2009.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numbsparse.bench.ladder import arriving
from numbsparse.bench.problem import random
from numbsparse.bench.results import on_gpu, profiled
from numbsparse.kernels import ladder

MEMORY, CACHE = "device memory, read", "L2 cache, read (17 MB)"
PIPES = {  # the limit of the arithmetic of each dtype, by instruction
    "fma": "float32 multiply-add",
    "mma": "mma.sync {}, operands in registers",
    "wgmma": "wgmma {}, operands in shared memory",
}


class Roofline(NamedTuple):
    """Seconds that each limit asks for."""

    arithmetic: float
    cache: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        """The limit that asks for most."""
        return ("arithmetic", "L2", "memory")[self.index(self.seconds)]


def roofline(name: str, row: dict[str, Any]) -> Roofline | None:
    """Of a step or rung, forward, at the shape of a benchmark's row; None without a formula."""
    nbytes = bytes_from_cache(name, row)
    if nbytes is None:
        return None
    rates = {row["limit"]: row["rate"] for row in on_gpu()["limits"]["rows"]}
    pipe = PIPES[pipe_of(name, row["dtype"])].format(row["dtype"])
    times = row["flops"] / rates[pipe], nbytes / rates[CACHE], row["bytes"] / rates[MEMORY]
    return Roofline(*times)


def bytes_from_cache(name: str, row: dict[str, Any]) -> float | None:
    """What comes from the L2 cache: as the profiler read it at this shape, or by the formula."""
    shape = {"rung": name, "dtype": row["dtype"], "batch": row["batch"]}
    shape |= {"in_features": row["features"], "block_size": row["block_size"]}
    section = "steps" if name in ladder.NAMES else row["dtype"]
    for read in profiled().get(section, {"rows": []})["rows"]:
        if shape.items() <= read.items():
            return float(read["readings"]["L2 to L1 bytes"])
    size, itemsize = row["block_size"], 4 if row["dtype"] == "float32" else 2
    layout = random(row["features"], size, 0.1)  # as the benchmark's
    values = arriving(name, layout, size, row["batch"], row["dtype"])
    return None if values is None else values * row["batch"] * row["features"] * itemsize


def pipe_of(name: str, dtype: str) -> str:
    """The instruction that multiplies."""
    if dtype == "float32":
        return "fma"
    hopper = ladder.NAMES[ladder.NAMES.index("s10_wgmma") :]
    return "wgmma" if name in hopper or name == "k6_hopper" else "mma"
