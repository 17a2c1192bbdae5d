"""The same LSTM by torch: cuDNN's dense one, and one of torch's block-sparse products (Triton)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.bench.lstm import B, Sequence, Trainer
from numbsparse.bench.peers import bsr_tensor, require_torch
from numbsparse.bench.timing import record_torch


def cudnn(sequence: Sequence) -> Trainer:
    """torch.nn.LSTM; tf32 is allowed in float32."""
    torch = require_torch()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    dtype, n = getattr(torch, sequence.dtype), sequence.hidden // B
    x, dy = (torch.as_tensor(a.numpy(), device="cuda") for a in (sequence.x, sequence.dy))
    before = _forget_peak()
    lstm = torch.nn.LSTM(x.shape[2], sequence.hidden, device="cuda", dtype=dtype)
    w, blocks = sequence.weights, sequence.blocks
    with torch.no_grad():
        for name, theirs in (("weight_ih", lstm.weight_ih_l0), ("weight_hh", lstm.weight_hh_l0)):
            theirs.zero_()
            rows, gates, columns = _places(w[name])
            _by_blocks(theirs, n)[gates, columns, :, rows] = _transposed(w[name])
        bias = torch.as_tensor(w["bias"].reshape(n, 4, B), device="cuda")
        lstm.bias_ih_l0[:] = bias.transpose(0, 1).reshape(-1)
        lstm.bias_hh_l0.zero_()
    results: list[Any] = []

    def run() -> None:
        lstm.zero_grad()
        y, _ = lstm(x)
        y.backward(dy)
        results[:] = [y.detach()]

    def gradient() -> np.ndarray:
        rows, gates, columns = (place[blocks] for place in _places(w["weight_hh"]))
        found = _by_blocks(lstm.weight_hh_l0.grad, n)[gates, columns, :, rows]
        return found.transpose(1, 2).double().cpu().numpy()

    nbytes = lambda: torch.cuda.max_memory_allocated() - before + _bytes(x, dy)  # noqa: E731
    return Trainer(run, lambda: results[0].double().cpu().numpy(), gradient, nbytes)


def triton(sequence: Sequence) -> Trainer:
    """Written with torch's products of block-sparse matrices and its fused cell, in a CUDA graph.

    Activations are (features, batch), as those products take them: gates = w.T @ h.
    """
    torch = require_torch()
    if sequence.precision == "high":
        raise NotImplementedError("torch's BSR products know one precision")
    from torch.sparse import _triton_ops

    aten = torch.ops.aten
    dtype, units = getattr(torch, sequence.dtype), sequence.hidden
    x, dy = (torch.as_tensor(a.numpy(), device="cuda") for a in (sequence.x, sequence.dy))
    steps, batch, _ = x.shape
    before = _forget_peak()
    w = sequence.weights["weight_hh"]
    rows, gates, columns = _places(w)
    lines = gates * (units // B) + columns  # of w.T, in torch's order: all of a gate together
    across = _transposed(w)
    forward, order = _bsr(lines, rows, across, (4 * units, units))
    backward, _ = _bsr(rows, lines, across.transpose(1, 2), (units, 4 * units))
    zeros = torch.zeros_like(forward.values())
    dw = bsr_tensor(forward.crow_indices(), forward.col_indices(), zeros, (4 * units, units))
    w_ih = torch.as_tensor(sequence.weights["weight_ih"].toarray(), device="cuda")
    w_ih = w_ih.view(-1, units // B, 4, B).transpose(1, 2).reshape(-1, 4 * units)
    bias = torch.as_tensor(sequence.weights["bias"].reshape(-1, 4, B), device="cuda")
    bias = bias.transpose(0, 1).reshape(-1)
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
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cuda")

    def gradient() -> np.ndarray:
        found = dw.values()[place[torch.as_tensor(sequence.blocks, device="cuda")]]
        return found.transpose(1, 2).double().cpu().numpy()

    nbytes = lambda: torch.cuda.max_memory_allocated() - before + _bytes(x, dy)  # noqa: E731
    outputs = lambda: hs[1:].double().cpu().numpy()  # noqa: E731
    replay = record_torch(run, 1)

    def replayed(held: Any = run) -> None:  # with the memory that it uses
        replay()

    return Trainer(replayed, outputs, gradient, nbytes)


PEERS: dict[str, Callable[[Sequence], Trainer]] = {"cuDNN dense": cudnn, "torch BSR": triton}


def _forget_peak() -> int:
    """Begin to look for the most memory; gives what is taken now."""
    torch = require_torch()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _bytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _places(w: Any) -> tuple[Any, Any, Any]:
    """Of each kept block: its block row, its gate, and its block of units."""
    index = w.layout.index
    torch, columns = require_torch(), index.block_columns.astype(np.int64)
    numbers = index.block_rows.astype(np.int64), columns % 4, columns // 4
    return tuple(torch.as_tensor(a, device="cuda") for a in numbers)  # type: ignore[return-value]


def _transposed(w: Any) -> Any:
    """The kept blocks, each transposed."""
    return require_torch().as_tensor(w.values, device="cuda").transpose(1, 2)


def _by_blocks(weight: Any, n: int) -> Any:
    """(4 * hidden, features) as (gate, block of units, B, block row, B)."""
    return weight.view(4, n, B, -1, B)


def _bsr(lines: Any, columns: Any, blocks: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """A BSR tensor of blocks anywhere, and the order in which it has them."""
    torch = require_torch()
    order = torch.argsort(lines * shape[1] + columns)
    counts = torch.bincount(lines, minlength=shape[0] // B)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    values = blocks[order].contiguous()
    return bsr_tensor(starts, columns[order], values, shape), order
