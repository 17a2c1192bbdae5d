"""Who computes: numbsparse's rungs and convolutions. Others stand in `peers`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.bench.problem import Problem
from numbsparse.bench.timing import Recorder, record
from numbsparse.device import DeviceArray, as_device_array
from numbsparse.kernels import conv, ladder
from numbsparse.kernels.matmul import function_of, serving_own
from numbsparse.ops.choice import choose, serving
from numbsparse.ops.conv_operands import as_pixels

FEATURE_MAJOR = "feature-major"
OURS = "numbsparse"  # a convolution

Make = Callable[[Problem, str], "Contestant"]
Makers = dict[str, Make]
Pick = Callable[[Any, np.ndarray], np.ndarray]


class Contestant:
    """A call that computes one product; a call that is recorded does so again with each replay.

    Attributes
    ----------
    record : makes a graph of calls
    got : what `call` computed last, whole
    """

    def __init__(
        self, compute: Callable[[], Any], pick: Pick, record: Recorder = record, out: Any = None
    ):
        """`out` is what is computed into; None, `compute` gives the result."""
        self._compute, self._pick, self.record, self._given = compute, pick, record, out
        self.got: Any = None

    def call(self) -> None:
        result = self._compute()
        self.got = result if self._given is None else self._given

    @property
    def out(self) -> DeviceArray:
        """`got` on the GPU, contiguous."""
        return self.got if isinstance(self.got, DeviceArray) else as_device_array(self.got, "")

    def pick(self, picked: np.ndarray) -> np.ndarray:
        """Rows of y or dx (of images: pixels), or blocks of dw, on the host."""
        return self._pick(self.got, picked)


def contestants_of(
    problem: Problem, product: str, kernels: str, others: tuple[str, ...] = ()
) -> Makers:
    """Ours by name: see `named`; with FEATURE_MAJOR among `others`, each in that order too."""
    if problem.side:
        if kernels in ("", "auto"):
            return {OURS: by_ops} if kernels else {}
        names = kernels.split(",")
        return {name: by_ops if name == OURS else partial(of_rung, kernel=name) for name in names}
    names = named(problem, product, kernels)
    make = by_ops if problem.place == "cpu" else of_rung
    makers: Makers = {name: partial(make, kernel=name) for name in names}
    if problem.place == "cpu" and kernels == "auto":  # as users call it, who name no rung
        makers = dict.fromkeys(names, by_ops)
    if FEATURE_MAJOR in others:
        by_feature = partial(of_rung, feature_major=True)
        makers |= {f"{name} {FEATURE_MAJOR}": partial(by_feature, kernel=name) for name in names}
    return makers


def chosen(problem: Problem, product: str, feature_major: bool = False) -> str:
    """The rung that `ops` takes by itself; ValueError with the reasons where none serves."""
    if problem.side:
        return OURS
    x = problem.here(problem.x)
    case = problem.block_size, x, problem.batch, problem.precision, problem.layout
    return choose(product, "auto", *case, feature_major=feature_major)


def named(problem: Problem, product: str, kernels: str) -> list[str]:
    """ "auto": the rung that `ops` takes; "all" that serve; or those of a list with commas.

    They stand in reading order, users' rungs behind; a list may name taught steps as well.
    """
    if kernels == "auto":
        return [chosen(problem, product)]
    dtype, place = problem.x.dtype, problem.place
    case = product, problem.block_size, dtype, place, problem.batch, problem.precision
    names = serving(*case)[::-1] + serving_own(*case)
    if kernels == "all":
        return names
    wanted = kernels.split(",")
    steps = [name for name in ladder.NAMES if name in wanted]
    names += [name for name in steps if ladder.step(name).unsupported(*case) is None]
    return [name for name in names if name in wanted]


def of_rung(problem: Problem, product: str, kernel: str, feature_major: bool = False) -> Contestant:
    """A rung or a taught step, called as `ops.matmul` and `ops.sddmm` call it, on a GPU.

    With `feature_major` as for `w @ x`: x, dy, y and dx are views of (features, batch). Of images a
    rung of convolutions, as `ops.conv` calls it.
    """
    whole = out = problem.out(product)
    x, dy, values = problem.x.device, problem.dy.device, problem.values.device
    index, pick, window = problem.index, rows_of, tuple[Any, ...]()
    if feature_major:
        x, dy = problem.x.feature_major, problem.dy.feature_major
        if product != "weight_grad":
            whole = whole.reshape(whole.shape[::-1])
            out, pick = whole.T, columns_of
    if problem.side:
        compute, window = conv.function_of(kernel, product), (problem.window,)
        x, dy = as_pixels(x), as_pixels(dy)
        out = whole if product == "weight_grad" else as_pixels(whole)
    else:
        taught = kernel in ladder.NAMES
        compute = ladder.step(kernel).forward if taught else function_of(kernel, product)
    operands = {
        "forward": (x, values, index),
        "input_grad": (dy, values, index),
        "weight_grad": (x, dy, index),
    }[product]
    call = partial(compute, *operands, *window, out, problem.precision)
    return Contestant(call, pick, out=whole)


def by_ops(problem: Problem, product: str, kernel: str = "auto") -> Contestant:
    """A product or a convolution as users call it, its result allocated too."""
    x, dy, w = problem.here(problem.x), problem.here(problem.dy), problem.w
    how: Any = {"kernel": kernel, "precision": problem.precision}
    window = problem.window
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: ops.matmul(x, w, **how),
        "input_grad": lambda: ops.matmul(dy, w.T, **how),
        "weight_grad": lambda: ops.sddmm(x.T, dy, w, **how).values,
    }
    if problem.side:
        calls = {
            "forward": lambda: ops.conv(x, w, window, **how),
            "input_grad": lambda: ops.conv_transpose(dy, w, window, 2, problem.in_features, **how),
            "weight_grad": lambda: ops.conv_weight_grad(x, dy, w, window, **how).values,
        }
    return Contestant(calls[product], rows_of)


def columns_of(out: DeviceArray, picked: np.ndarray) -> np.ndarray:
    """Some rows of y or dx, where they lie feature-major."""
    return out.numpy().T[picked]


def rows_of(out: Any, picked: np.ndarray) -> np.ndarray:
    """Some rows of y or dx, pixels of images, or blocks of dw (n_blocks, B, B)."""
    is_blocks = out.ndim == 3 and out.shape[1] == out.shape[2]
    lines = out if is_blocks else out.reshape(-1, out.shape[-1])
    if isinstance(out, np.ndarray):
        return lines[picked]
    found = [lines[int(row)].numpy() for row in picked]
    return np.stack(found) if found else np.empty((0, *lines.shape[1:]), out.dtype)
