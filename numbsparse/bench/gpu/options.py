"""How the benchmark of the GPU runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numbsparse.bench.gpu.measure import measure


@dataclass(frozen=True)
class Options:
    """`kernels`: "auto", "all" rungs that serve, or names with commas; `quick`: small, for tests.

    `measure` is called with a problem, a product, `kernels`, the names of peers, and `seconds`.
    """

    kernels: str = "auto"
    quick: bool = False
    measure: Callable[..., dict[str, Any]] = measure

    @property
    def seconds(self) -> float:
        """What each cell is timed for."""
        return 0.0 if self.quick else 0.05
