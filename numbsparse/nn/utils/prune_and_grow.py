"""Prune and grow: the blocks of largest weight stay, those of largest gradient come back."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from numbsparse.autograd import Tensor
from numbsparse.layout import Layout
from numbsparse.nn.module import Module
from numbsparse.nn.utils.pruning import cubic
from numbsparse.nn.utils.rewiring import Rewiring
from numbsparse.nn.utils.weights import Weight, largest


class PruneAndGrow(Rewiring):
    """Train from dense to sparse, where blocks that were pruned too early come back.

    Every few steps, with n = round(density(t) * blocks of the grid), a weight keeps its n blocks of
    largest norm, and in addition those of the n largest norms of its gradient: at most 2n. Those
    that were not there begin with zeros, and stay if they have grown by the next time. At step
    `stop` none comes, so that the density is the last one. It falls along the cubic of
    `GradualPruning`, from that of each weight as it is now.

    Parameters
    ----------
    model, by, remap, every, candidates, seed : as in `Rewiring`
        With as many `candidates` as a grid has blocks, all of the gradient is looked at.
    density : float, 0 to 1
        Of each weight from step `stop` on.
    stop : int

    Raises what `Rewiring` raises.

    Notes
    -----
    Called, captured and resumed as `Rewiring`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse import nn
    >>> layer = nn.Linear(256, 256, seed=0)
    >>> optimizer = nn.optim.Adam(layer.parameters())
    >>> blast = nn.utils.PruneAndGrow(layer, density=0.25, every=5, stop=20, remap=optimizer)
    >>> x = np.ones((4, 256), np.float32)
    >>> for step in range(20):
    ...     layer.zero_grad()
    ...     nn.functional.sum(layer(x)).backward()
    ...     blast.step()
    ...     optimizer.step()
    >>> layer.weight.data.density
    0.25

    After Okanovic et al., "BLaST: High Performance Inference and Pretraining using BLock Sparse
    Transformers", 2025. There the gradient is dense in memory, here it is that of the blocks that
    are there and of candidates.
    """

    _density_at = staticmethod(cubic)

    def __init__(
        self,
        model: Module | Iterable[Tensor],
        density: float,
        *,
        stop: int,
        every: int = 100,
        candidates: int | None = None,
        by: str = "l2",
        remap: Any = (),
        seed: int | None = None,
    ):
        how: dict[str, Any] = {"stop": stop, "every": every, "candidates": candidates}
        super().__init__(model, density=density, by=by, remap=remap, seed=seed, **how)

    def _chosen(
        self, weight: Weight, layout: Layout, norms: np.ndarray, step: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        n, wide = self._count_at(weight, step), weight.data.layout
        stay = largest(norms, n)
        if step == self.stop:
            return stay, layout.flat_indices[:0]
        steepest, own = largest(self._slopes(weight), n), layout.positions_in(wide)
        stay |= steepest[own]
        steepest[own] = False
        return stay, wide.flat_indices[steepest]
