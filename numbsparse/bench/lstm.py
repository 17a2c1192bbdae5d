"""A small-world LSTM, forward and backward over a sequence, beside torch's dense one as wide.

All compute the same: torch's dense weights are zero where no block is kept. The outputs and the
gradients of each are checked against the CPU's, in float32 and of the same weights.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from numbsparse import nn, patterns
from numbsparse.autograd import no_grad
from numbsparse.bench.measure import Options, Wrong, cell
from numbsparse.bench.results import Row
from numbsparse.bench.timing import Graph, seconds_of
from numbsparse.device import SIMULATED, memory, synchronize, to_device
from numbsparse.device.runtime import current_device
from numbsparse.dtypes import as_dtype
from numbsparse.graph import graph

INPUTS, BATCH, STEPS, DENSITY, B = 64, 64, 64, 0.03, 32
WIDTHS = (18432, 36864)  # the second is too wide for a dense one
DTYPES = [("float16", "highest"), ("float32", "high"), ("float32", "highest")]
WEIGHTS = ("weight_ih", "weight_hh", "bias")
BLOCKS = 8  # of the weight-gradient that are looked at
ALLOWED = {"float16": 2e-2, "float32": 5e-3}  # relative; tf32 has float16's mantissa


class Sequence:
    """An LSTM of one layer on the GPU, its input x and the gradient dy of its output."""

    def __init__(
        self,
        hidden: int,
        dtype: str,
        precision: str,
        steps: int,
        batch: int,
        pattern: np.ndarray,
        **norm: bool,
    ):
        self.hidden, self.dtype, self.precision = hidden, dtype, precision
        self.steps, self.batch, self.pattern, self.norm = steps, batch, pattern, norm
        self.lstm = self._made(precision)
        self.layer = self.lstm.layers[0]
        self.weights = {name: getattr(self.layer, name).data for name in WEIGHTS}
        self.lstm.to("cuda")
        rng = np.random.default_rng(0)
        self.x, self.dy = (
            to_device(rng.standard_normal((steps, batch, n), np.float32).astype(as_dtype(dtype)))
            for n in (INPUTS, hidden)
        )
        blocks = self.weights["weight_hh"].layout.n_blocks
        self.blocks = np.unique(rng.integers(0, blocks, BLOCKS))

    def _made(self, precision: str, *wider: type) -> nn.LSTM:
        """On the host, with numbers of its dtype, which a wider one may hold."""
        how: Any = {"layout": self.pattern, "block_size": B, "precision": precision, **self.norm}
        lstm = nn.LSTM(INPUTS, self.hidden, seed=0, **how)
        for parameter in lstm.parameters():
            for dtype in (as_dtype(self.dtype), *wider):
                data: Any = parameter.data
                parameter.data = data.astype(dtype)
        return lstm

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The output and blocks of the gradient of weight_hh, by the CPU in float32."""
        lstm = self._made("highest", np.float32)
        y, _ = lstm(self.x.numpy().astype(np.float32))
        y.backward(self.dy.numpy().astype(np.float32))
        gradient = lstm.layers[0].weight_hh.grad.matrix  # type: ignore[union-attr]
        return y.numpy(), gradient.values[self.blocks]


def small_world(hidden: int) -> np.ndarray:
    """A Barabasi-Albert pattern of about DENSITY."""
    n = hidden // B
    edges = max(round(DENSITY * n / 2), 1)  # of each node: 2 * edges * n blocks of n * n
    return patterns.barabasi_albert(n, edges, seed=0)


class Trainer(NamedTuple):
    """A forward and backward pass; then the output, and blocks of the gradient of weight_hh."""

    run: Callable[[], Any]
    outputs: Callable[[], np.ndarray]  # (time, batch, hidden)
    gradient: Callable[[], np.ndarray]  # (blocks, B, B)
    nbytes: Callable[[], int]  # the most that it took at once


def lstm(options: Options) -> Iterator[Row]:
    """LSTMs, forward and backward over a sequence: a row a dtype and width."""
    from numbsparse.bench.lstm_peers import PEERS

    for hidden in (64,) if options.quick else WIDTHS:
        for dtype, precision in DTYPES[:1] if options.quick else DTYPES:
            shape = (2, 3) if options.quick else (STEPS, BATCH)
            sequence = Sequence(hidden, dtype, precision, *shape, small_world(hidden))
            peers = PEERS if hidden < WIDTHS[-1] else {}
            yield _measured(sequence, {"numbsparse": ours} | peers, options)


def ours(sequence: Sequence) -> Trainer:
    """One captured step of training, without an optimizer."""
    module, weight = sequence.lstm, sequence.layer.weight_hh
    results: list[Any] = []

    def step() -> Any:
        y, _ = module(sequence.x)
        module.zero_grad()
        y.backward(sequence.dy)
        return y[-1].detach()

    pool = None if SIMULATED else current_device().memory_resource
    before = 0 if pool is None else pool.attributes.used_mem_current
    memory.forget_peak()
    captured = graph(step)

    def run() -> None:
        results[:] = [captured()]

    for _ in range(2):  # runs, and is captured
        run()
    taken = 0 if pool is None else pool.attributes.used_mem_high - before

    def gradient() -> np.ndarray:
        values = weight.grad.data.values  # type: ignore[union-attr]
        return np.stack([values[int(b)].numpy() for b in sequence.blocks]).astype(np.float64)

    held = sum(p.values.nbytes for p in module.parameters()) + sequence.x.nbytes

    def outputs() -> np.ndarray:
        with no_grad():
            y = module(sequence.x)[0].numpy()
        if (y[-1] != results[0].numpy()).any():
            raise Wrong("captured, it gives another output")
        return y.astype(np.float64)

    return Trainer(run, outputs, gradient, lambda: taken + held + sequence.dy.nbytes)


def _measured(
    sequence: Sequence, makers: dict[str, Callable[[Sequence], Trainer]], options: Options
) -> Row:
    row: Row = {
        "hidden": sequence.hidden,
        "steps": sequence.steps,
        "batch": sequence.batch,
        "inputs": INPUTS,
        "block_size": B,
        "dtype": sequence.dtype,
        "precision": sequence.precision,
        "density": float(sequence.pattern.mean()),
        "bytes": {},
        "errors": {},
        "not_timed": {},
    }
    exact = sequence.exact()
    seconds: dict[str, float] = {}
    contestant: Trainer | None
    for name, make in makers.items():
        with cell(row, name):
            contestant = make(sequence)
            contestant.run()
            synchronize()
            got = contestant.outputs(), contestant.gradient()
            norm, both = np.linalg.norm, zip(got, exact, strict=True)
            error = row["errors"][name] = float(
                np.max([norm(a - b) / (norm(b) or 1.0) for a, b in both])
            )
            if not error <= ALLOWED[sequence.dtype]:
                raise Wrong(f"relative error {error:.1e}")
            once = {name: Graph(contestant.run, 1, contestant.run)}
            seconds |= seconds_of(once, 10 * options.seconds)
            row["bytes"][name] = contestant.nbytes()
        contestant = None  # its memory is for the next one
    return row | {"seconds": seconds}
