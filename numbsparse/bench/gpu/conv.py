"""Convolutions beside cuDNN's dense ones, channels last, and one of a single tap beside the matmul.

Each result is checked before it is timed. Of ours a row also tells what memory it takes beside its
operands and its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numbsparse import ops
from numbsparse.bench.gpu.conv_problem import ConvProblem
from numbsparse.bench.gpu.measure import fault_of, short
from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.peers import CUDNN
from numbsparse.bench.gpu.replay import Call, Graph, Recorder, graph_of, record, seconds_of
from numbsparse.device import Capture, DeviceArray, as_device_array, synchronize
from numbsparse.kernels.matmul import PRODUCTS

OURS, MATMUL = "numbsparse", "matmul"
# Taps along each axis, dtype and precision, and the block sizes.
KINDS = (
    (3, "float16", "highest", (16, 32, 64)),
    (1, "float16", "highest", (32,)),
    (3, "float32", "high", (32,)),
    (3, "float32", "highest", (32,)),
)
QUICK = ((3, "float16", "highest", (16,)), (1, "float16", "highest", (32,)))

Row = dict[str, Any]
Make = Callable[[ConvProblem, str], "Result"]
Pick = Callable[[DeviceArray, np.ndarray], np.ndarray]  # pixels of y or dx, or blocks of dw


class Case(NamedTuple):
    batch: int
    side: int  # of an image
    features: int
    taps_along: int  # each axis
    block_size: int


class Result:
    """What a call gave last; a call that is recorded gives it again with each replay."""

    def __init__(self, compute: Callable[[], Any], recorder: Recorder, pick: Pick):
        self._compute, self.record, self._pick = compute, recorder, pick
        self._got: Any = None

    def call(self) -> None:
        self._got = self._compute()

    @property
    def out(self) -> DeviceArray:
        return self._got if isinstance(self._got, DeviceArray) else as_device_array(self._got, "")

    def pick(self, picked: np.ndarray) -> np.ndarray:
        return self._pick(self.out, picked)


def conv(options: Options) -> Iterator[Row]:
    """3 x 3 and 1 x 1 at 512 features, 32 x 32 images, batch 64, density 0.1."""
    for problem, product, makers in cases(options):
        yield _measured(problem, product, makers, options)


def cases(options: Options) -> Iterator[tuple[ConvProblem, str, dict[str, Make]]]:
    """What is measured, row by row: of each name what makes its result."""
    from numbsparse.bench.gpu.conv_peers import cudnn

    batch, side, features = (1, 4, 32) if options.quick else (64, 32, 512)
    density = 1 if options.quick else 0.1
    for taps_along, dtype, precision, sizes in QUICK if options.quick else KINDS:
        where = batch, side, features, taps_along
        dense = ConvProblem(Case(*where, 32), dtype, precision, 1.0)
        for product in PRODUCTS:
            yield dense, product, {CUDNN: cudnn}
        for size in sizes:
            problem = ConvProblem(Case(*where, size), dtype, precision, density)
            own: dict[str, Make] = {OURS: ours}
            if taps_along == 1:
                own[MATMUL] = matmul
            for product in PRODUCTS:
                yield problem, product, own


def ours(problem: ConvProblem, product: str) -> Result:
    """The convolution as `ops` computes it, its result allocated too."""
    x, dy, w = problem.x.device, problem.dy.device, problem.w
    how = "auto", problem.precision
    compute = {
        "forward": lambda: ops.conv_in(x, w, problem.window, *how),
        "input_grad": lambda: ops.conv_transpose_in(
            dy, w, problem.window, 2, problem.features, *how
        ),
        "weight_grad": lambda: ops.conv_weight_grad_in(x, dy, w, problem.window, *how).values,
    }[product]
    return Result(compute, record, partial(_rows, problem))


def matmul(problem: ConvProblem, product: str) -> Result:
    """The product of matrices that one tap is."""
    x, dy = (a.device.reshape(-1, problem.features) for a in (problem.x, problem.dy))
    w, how = problem.w, {"precision": problem.precision}
    compute = {
        "forward": lambda: ops.matmul(x, w, **how),
        "input_grad": lambda: ops.matmul(dy, w.T, **how),
        "weight_grad": lambda: (
            ops.sddmm(x.T, dy, w.layout, block_size=problem.block_size, **how).values
        ),
    }[product]
    return Result(compute, record, partial(_rows, problem))


def _rows(problem: ConvProblem, out: Any, picked: np.ndarray) -> np.ndarray:
    lines = out if out.shape[1:] == (problem.block_size,) * 2 else out.reshape(-1, out.shape[-1])
    return np.stack([lines[int(row)].numpy() for row in picked])


def _measured(problem: ConvProblem, product: str, makers: dict[str, Any], options: Options) -> Row:
    row: Row = {
        "product": product,
        "dtype": problem.dtype,
        "precision": problem.precision,
        **problem.case._asdict(),
        "n_blocks": problem.layout.n_blocks,
        "density": problem.layout.density,
        "flops": problem.flops,
        "input_bytes": problem.x.device.nbytes,
        "errors": {},
        "not_timed": {},
    }
    graphs: dict[str, Graph] = {}
    for name, make in makers.items():
        graph = _recorded(name, make, row, problem)
        if graph is not None:
            graphs[name] = graph
    return row | {"seconds": seconds_of(graphs, options.seconds) if graphs else {}}


def _recorded(name: str, make: Any, row: Row, problem: ConvProblem) -> Graph | None:
    """A graph of calls whose result is right; else None, and the row says why."""
    try:
        result = make(problem, row["product"])
        result.call()  # compiles, and plans
        synchronize()
        graph = graph_of(result.record, result.call)
        row["errors"][name], fault = fault_of(graph, result, problem, row["product"])
        if fault is None:
            if name == OURS:
                row["workspace"] = _workspace(result.call) - result.out.nbytes
            return graph
    except Exception as error:  # a peer that fails costs its cell, not the table
        fault = f"failed: {short(error)}"
    row["not_timed"][name] = fault
    return None


def _workspace(call: Call) -> int:
    """Bytes that a call takes, its result counted."""
    capture = Capture()
    with capture.under_way():
        call()
    return capture.arena.nbytes
