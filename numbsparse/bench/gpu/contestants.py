"""Who computes on the GPU. Peers stand in `peers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numbsparse.bench.gpu.problem import Problem, dtype_of
from numbsparse.bench.gpu.replay import Recorder, record
from numbsparse.device import DeviceArray
from numbsparse.kernels.matmul import function_of, serving_own
from numbsparse.ops.choice import choose, serving

FEATURE_MAJOR = "feature-major"


class Contestant(NamedTuple):
    """A call that computes one product into `out`, and how to look at the result."""

    call: Callable[[], Any]
    out: DeviceArray  # whole and contiguous
    pick: Callable[[np.ndarray], np.ndarray]  # rows of y or dx, blocks of dw
    record: Recorder


def chosen(problem: Problem, product: str) -> str:
    """The rung that `ops` takes by itself; ValueError with the reasons where none serves."""
    case = problem.block_size, problem.x.device, problem.batch, problem.precision, problem.layout
    return choose(product, "auto", *case)


def all_serving(problem: Problem, product: str) -> list[str]:
    """The GPU's rungs that take this problem, in reading order; those of users last."""
    dtype = dtype_of(problem.dtype)
    case = problem.block_size, dtype, "cuda", problem.batch, problem.precision
    return serving(product, *case)[::-1] + serving_own(product, *case)


def named(problem: Problem, product: str, kernels: str) -> list[str]:
    """ "auto": the rung that `ops` takes; "all" that serve; or those of a list with commas."""
    if kernels == "auto":
        return [chosen(problem, product)]
    names = all_serving(problem, product)
    return names if kernels == "all" else [name for name in names if name in kernels.split(",")]


def of_rung(problem: Problem, product: str, name: str, feature_major: bool = False) -> Contestant:
    """A rung of the ladder, called as `ops.matmul` and `ops.sddmm` call it.

    With `feature_major` as for `w @ x`: x, dy, y and dx are views of (features, batch).
    """
    whole = out = problem.out(product)
    x, dy, values = problem.x.device, problem.dy.device, problem.values.device
    if feature_major:
        x, dy = problem.x.feature_major, problem.dy.feature_major
        if product != "weight_grad":
            whole = whole.reshape(whole.shape[::-1])
            out = whole.T
    compute, index = function_of(name, product), problem.index
    operands = {
        "forward": (x, values, index),
        "input_grad": (dy, values, index),
        "weight_grad": (x, dy, index),
    }[product]

    def call() -> None:
        compute(*operands, out, problem.precision)

    def pick(rows: np.ndarray) -> np.ndarray:
        if whole is not out:
            return whole.numpy().T[rows]
        picked = [out[int(row)].numpy() for row in rows]
        return np.stack(picked) if picked else np.empty((0, *out.shape[1:]), out.dtype)

    return Contestant(call, whole, pick, record)
