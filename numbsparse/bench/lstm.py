"""A small-world LSTM, forward and backward over a sequence, beside torch's of the same width.

All compute the same: cuDNN's dense weights are zero where no block is kept, and one is written with
torch's block-sparse products (Triton). The outputs and the gradients of each are checked against
the CPU's, in float32 and of the same weights.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from numbsparse import nn, patterns
from numbsparse.autograd import no_grad
from numbsparse.bench.contestants import bsr_tensor
from numbsparse.bench.measure import Options, Wrong, cell
from numbsparse.bench.results import Row
from numbsparse.bench.timing import Graph, record_torch, seconds_of
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import SIMULATED, memory, synchronize, to_device
from numbsparse.device.runtime import current_device
from numbsparse.dtypes import as_dtype
from numbsparse.graph import graph
from numbsparse.layout import Layout

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


def cudnn(sequence: Sequence) -> Trainer:
    """torch.nn.LSTM; tf32 is allowed in float32."""
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    dtype, n = getattr(torch, sequence.dtype), sequence.hidden // B
    x, dy = (torch.as_tensor(a.numpy(), device="cuda") for a in (sequence.x, sequence.dy))
    nbytes = most_memory(x, dy)
    lstm = torch.nn.LSTM(x.shape[2], sequence.hidden, device="cuda", dtype=dtype)
    (w_ih, _), (w_hh, places) = (gate_major(sequence.weights[name]) for name in WEIGHTS[:2])
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(torch.from_numpy(w_ih.toarray().T))
        lstm.weight_hh_l0.copy_(torch.from_numpy(w_hh.toarray().T))
        lstm.bias_ih_l0.copy_(torch.from_numpy(bias_by_gate(sequence)))
        lstm.bias_hh_l0.zero_()
    results: list[Any] = []

    def run() -> None:
        lstm.zero_grad()
        y, _ = lstm(x)
        y.backward(dy)
        results[:] = [y.detach()]

    def gradient() -> np.ndarray:
        blocks, index = places[sequence.blocks], w_hh.layout.index
        rows, columns = (a[blocks].astype(int) for a in (index.block_rows, index.block_columns))
        found = lstm.weight_hh_l0.grad.view(4 * n, B, n, B)[columns, :, rows]
        return found.transpose(1, 2).double().cpu().numpy()

    return Trainer(run, lambda: results[0].double().cpu().numpy(), gradient, nbytes)


def triton(sequence: Sequence) -> Trainer:
    """Written with torch's products of block-sparse matrices and its fused cell, in a CUDA graph.

    Activations are (features, batch), as those products take them: gates = w.T @ h.
    """
    import torch

    if sequence.precision == "high":
        raise NotImplementedError("torch's BSR products know one precision")
    from torch.sparse import _triton_ops

    aten = torch.ops.aten
    dtype, units = getattr(torch, sequence.dtype), sequence.hidden
    x, dy = (torch.as_tensor(a.numpy(), device="cuda") for a in (sequence.x, sequence.dy))
    steps, batch, _ = x.shape
    nbytes = most_memory(x, dy)
    (w_ih, _), (w_hh, places) = (gate_major(sequence.weights[name]) for name in WEIGHTS[:2])
    blocks = torch.from_numpy(w_hh.values).cuda()
    forward, backward = (bsr_tensor(w_hh.layout, blocks, across) for across in (True, False))
    dw = bsr_tensor(w_hh.layout, torch.zeros_like(blocks), True)
    w_ih = torch.from_numpy(w_ih.toarray()).cuda()
    bias = torch.from_numpy(bias_by_gate(sequence)).cuda()
    hs = torch.zeros(steps + 1, batch, units, device="cuda", dtype=dtype)
    dz = torch.zeros(steps, batch, 4 * units, device="cuda", dtype=dtype)
    z, dh = (torch.empty(n, batch, device="cuda", dtype=dtype) for n in (4 * units, units))
    zero = torch.zeros(batch, units, device="cuda", dtype=dtype)
    results: list[Any] = []

    def run() -> None:
        from_inputs = torch.addmm(bias, x.view(steps * batch, -1), w_ih).view(steps, batch, -1)
        cs, saved = [zero], []
        for t in range(steps):
            _triton_ops.bsr_dense_addmm(z, forward, hs[t].T, beta=0, out=z)
            h, c, gates_ = aten._thnn_fused_lstm_cell(from_inputs[t], z.T.contiguous(), cs[t])
            hs[t + 1] = h
            cs.append(c)
            saved.append(gates_)
        dc, from_next = zero, zero
        for t in reversed(range(steps)):
            given = dy[t] + from_next, dc, cs[t], cs[t + 1], saved[t]
            dz_t, dc, _ = aten._thnn_fused_lstm_cell_backward_impl(*given, False)
            dz[t] = dz_t
            _triton_ops.bsr_dense_addmm(dh, backward, dz_t.T, beta=0, out=dh)
            from_next = dh.T
        rows_of_all = dz.view(steps * batch, -1)
        before_each = hs[:-1].reshape(steps * batch, -1)
        _triton_ops.sampled_addmm(
            dw, rows_of_all.T.contiguous(), before_each, beta=0.0, out=dw, skip_checks=True
        )
        results[:] = [x.view(steps * batch, -1).T @ rows_of_all, rows_of_all.sum(0)]

    run()

    def gradient() -> np.ndarray:
        own = np.argsort(w_hh.layout.index.columns.blocks)[places[sequence.blocks]]
        return dw.values()[own].transpose(1, 2).double().cpu().numpy()

    outputs = lambda: hs[1:].double().cpu().numpy()  # noqa: E731
    replay = record_torch(run, 1)

    def replayed(held: Any = run) -> None:  # with the memory that it uses
        replay()

    return Trainer(replayed, outputs, gradient, nbytes)


PEERS: dict[str, Callable[[Sequence], Trainer]] = {"cuDNN dense": cudnn, "torch BSR": triton}


def most_memory(*held: Any) -> Callable[[], int]:
    """From now on: gives the most bytes that were taken at once, with those of these tensors."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(t.numel() * t.element_size() for t in held)
    return lambda: torch.cuda.max_memory_allocated() - before


def gate_major(w: BlockSparse) -> tuple[BlockSparse, np.ndarray]:
    """A weight with all columns of a gate together, as torch has them; each block's place there."""
    index, n = w.layout.index, w.layout.shape[1] // 4
    columns = index.block_columns % 4 * n + index.block_columns // 4
    pattern, order = np.zeros(w.layout.shape, bool), np.lexsort((columns, index.block_rows))
    pattern[index.block_rows, columns] = True
    return BlockSparse(w.values[order], Layout(pattern)), np.argsort(order)


def bias_by_gate(sequence: Sequence) -> np.ndarray:
    """The same of the bias."""
    bias: np.ndarray = sequence.weights["bias"]
    return bias.reshape(-1, 4, B).swapaxes(0, 1).reshape(-1)
