"""A pattern taken from the weights that matter."""

from typing import Any

import numpy as np

from numbsparse.patterns.checks import Pattern, integer, number, real_array


def from_dense(
    weights: Any,
    block_size: int,
    *,
    density: float | None = None,
    threshold: float | None = None,
) -> Pattern:
    """The blocks of a dense matrix that have the largest norm.

    The norm of a block is sqrt(sum(weights[block]**2)), in float64. Exactly one of `density` and
    `threshold` is given.

    Parameters
    ----------
    weights : array_like of real numbers, (in_features, out_features)
        Without NaN or infinity. If a side is not a multiple of `block_size`, zeros are added at its
        end.
    block_size : int
    density : float, optional
        Keep round(density * blocks) blocks, those of largest norm; of equal ones, the first in row
        order. 0 to 1.
    threshold : float, optional
        Keep the blocks with norm >= threshold. 0 or more.

    Returns
    -------
    pattern : (ceil(in_features / block_size), ceil(out_features / block_size))

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> weights = np.diag([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> ns.patterns.from_dense(weights, 2, density=0.2).astype(int)
    array([[0, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    >>> ns.patterns.from_dense(weights, 2, threshold=5.0).diagonal()
    array([False,  True,  True])
    """
    block_size = integer("block_size", block_size)
    if (density is None) == (threshold is None):
        got = "neither" if density is None else "both"
        raise ValueError(f"exactly one of density and threshold must be given, got {got}")
    if threshold is not None:
        threshold = number("threshold", threshold)
        return _block_norms(weights, block_size) >= threshold
    density = number("density", density, most=1)
    norms = _block_norms(weights, block_size)
    largest_first = np.argsort(-norms, axis=None, kind="stable")
    pattern = np.zeros(norms.shape, dtype=bool)
    pattern.flat[largest_first[: round(density * norms.size)]] = True
    return pattern


def _block_norms(weights: Any, block_size: int) -> np.ndarray:
    takes = "a 2-D array of finite numbers, (in_features, out_features)"
    weights = real_array("weights", weights, takes)
    if weights.ndim != 2 or 0 in weights.shape:
        raise ValueError(f"weights takes {takes}, got shape {weights.shape}")
    if not np.isfinite(weights).all():
        raise ValueError(f"weights takes {takes}, got NaN or infinity")
    edge = [(0, -side % block_size) for side in weights.shape]
    padded = np.pad(weights.astype(np.float64), edge)
    in_blocks, out_blocks = (side // block_size for side in padded.shape)
    blocks = padded.reshape(in_blocks, block_size, out_blocks, block_size)
    return np.sqrt(np.einsum("ibjc,ibjc->ij", blocks, blocks))
