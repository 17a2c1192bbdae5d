"""The same LSTM by torch: cuDNN's dense one, and one of torch's block-sparse products (Triton)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.bench.lstm import WEIGHTS, B, Sequence, Trainer
from numbsparse.bench.peers import bsr_tensor
from numbsparse.bench.timing import record_torch
from numbsparse.block_sparse import BlockSparse
from numbsparse.layout import Layout


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
