"""Time the rungs and their tiles on the card at hand; `kernel="auto"` takes the fastest."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from numbsparse import device, ops
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import Capture, to_device
from numbsparse.device.waits import shown
from numbsparse.dtypes import type_name
from numbsparse.ops import choice, tuned
from numbsparse.patterns.checks import flag, integer

SECONDS = 5e-3  # of work in a sample
CALLS = (10, 100)  # at least and at most, in a sample
SAMPLES = 7
ERRORS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far results may differ, relative to their size."""


def tune(
    w: BlockSparse, batch: int, *, precision: str = "highest", feature_major: bool = False
) -> dict[str, dict[str, float]]:
    """Time every rung, with every tile it has, on the products of a weight; remember the fastest.

    From then on `kernel="auto"` takes them wherever a product is alike: the same dtype, precision,
    block size and order, and batch, features and density within a factor of about 1.4. They are in
    the cache folder (NUMBSPARSE_CACHE_DIR, or `numbsparse` in the user's), a file for each card,
    until the library's kernels change. Where nothing was measured "auto" uses the times of one card
    that come with the library (`numbsparse/kernels/times.json`). A terminal shows how far it is.

    Parameters
    ----------
    w : BlockSparse, on the GPU
    batch : int
        Rows of the dense operand.
    precision : "highest" or "high"
        As in `matmul`.
    feature_major : bool
        Whether features come before the batch in memory, as in `w @ x`. What is measured in one
        order is not taken in the other.

    Returns
    -------
    dict of product ("forward", "input_grad", "weight_grad") to dict of rung to seconds
        The fastest first; "k6_hopper/1" is that rung with its second tile. Rungs that do not
        serve the case are absent; the time of one whose result disagrees with the first rung's is
        infinite, and it is never chosen.

    Raises ValueError for what is no such matrix, and where no rung serves it, with the reasons.

    Examples
    --------
    >>> import numbsparse as ns
    >>> layout = ns.patterns.random(64, 64, 0.1, seed=0)
    >>> layer = ns.nn.Linear(2048, 2048, layout=layout)
    >>> seconds = ns.tune(layer.to("cuda").weight.data, batch=32)  # doctest: +SKIP
    >>> seconds["forward"]  # doctest: +SKIP
    {'k3_registers': 8.1e-06, 'k1_naive': 5.2e-05, ...}
    """
    if not isinstance(w, BlockSparse) or w.place != "cuda":
        why = device.why_unavailable() or "see BlockSparse.to"
        got = "one on the CPU" if isinstance(w, BlockSparse) else type_name(w)
        raise ValueError(f"w takes a BlockSparse on the GPU, got {got}: {why}")
    integer("batch", batch)
    across = flag("feature_major", feature_major)
    if w.values.device_id != device.runtime.current_id():
        with device.on(w.device):
            return tune(w, batch, precision=precision, feature_major=across)
    w = w.T if w.is_transposed else w
    results, fastest = {}, {}
    for product, call in _products(w, batch, precision, across).items():
        choice.choose(product, "auto", w.block_size, w.values, batch, precision, w.stored_layout)
        names = choice.with_tiles(product, w.block_size, w.dtype, "cuda", batch, precision)
        right = sample(call(names[-1]))
        seconds = {}
        for name in shown(names, f"tuning {product}"):
            agrees = agree(sample(call(name)), right, w.dtype, precision)
            seconds[name] = _seconds(partial(call, name)) if agrees else float("inf")
        results[product] = dict(sorted(seconds.items(), key=lambda pair: pair[1]))
        of = product, w.block_size, w.dtype, batch, precision, w.stored_layout
        fastest[tuned.case(*of, across)] = next(iter(results[product]))
    tuned.remember(fastest)
    choice.forget()
    return results


def _products(
    w: BlockSparse, batch: int, precision: str, feature_major: bool
) -> dict[str, Callable[[str], Any]]:
    """Each product as a function of the rung's name, on random operands."""
    rng = np.random.default_rng(0)

    def dense(features: int) -> Any:
        shape = (features, batch) if feature_major else (batch, features)
        return to_device(rng.standard_normal(shape, np.float32).astype(w.dtype))

    x, dy = dense(w.shape[0]), dense(w.shape[1])
    y, dx = (device.empty(a.shape, a.dtype) for a in (dy, x))
    forward, input_grad = ((w.T, x), (w, dy)) if feature_major else ((x, w), (dy, w.T))
    factors = (x, dy.T) if feature_major else (x.T, dy)
    how: Any = {"precision": precision}
    return {
        "forward": lambda name: ops.matmul(*forward, out=y, kernel=name, **how),
        "input_grad": lambda name: ops.matmul(*input_grad, out=dx, kernel=name, **how),
        "weight_grad": lambda name: ops.sddmm(*factors, w, kernel=name, **how).values,
    }


def sample(result: Any) -> np.ndarray:
    """The first and the last rows, or blocks, on the host."""
    n = len(result)
    few = [result[: min(n, 64)], result[max(n - 64, 0) :]]
    return np.concatenate([part.numpy().astype(np.float64) for part in few])


def agree(result: np.ndarray, right: np.ndarray, dtype: Any, precision: str) -> bool:
    """Whether two samples are as near as ERRORS allows."""
    error = ERRORS["float16" if precision == "high" else str(dtype)]
    return bool(np.linalg.norm(result - right) <= error * np.linalg.norm(right))


def _seconds(call: Callable[[], Any]) -> float:
    """The GPU's time of one call: the shortest of a few samples of many, captured in a graph."""
    if device.SIMULATED:
        return timed(call)
    least, most = CALLS
    n = min(max(int(SECONDS / min(timed(call) for _ in range(SAMPLES))), least), most)
    capture = Capture()
    with capture.under_way():
        for _ in range(n):
            call()
    capture.launch()
    return min(timed(capture.launch) for _ in range(SAMPLES)) / n


def timed(work: Callable[[], Any]) -> float:
    """Seconds until what a call began has ended."""
    device.synchronize()
    began = perf_counter()
    work()
    device.synchronize()
    return perf_counter() - began
