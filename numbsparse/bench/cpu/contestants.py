"""Who computes on the CPU: numbsparse, and the peers that are installed.

A contestant of a product is a pair (call, host): `call()` computes and gives a result,
`host(result)` makes it a NumPy array of the shape that `Problem.exact` has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.bench.cpu.problem import Problem
from numbsparse.block_sparse import BlockSparse
from numbsparse.kernels.matmul import serving_own
from numbsparse.layout import Layout

Contestant = tuple[Callable[[], Any], Callable[[Any], np.ndarray]]


def contestants_of(problem: Problem, product: str) -> dict[str, Contestant]:
    """k0_cpu, users' rungs, NumPy's dense product, SciPy's BSR, torch's BSR where it is installed.

    SciPy and torch have no weight-gradient; there NumPy's small products, block by block, stand in.
    """
    contestants = {
        name: _of_rung(problem, product, name)
        for name in (
            "k0_cpu",
            *serving_own(product, problem.shape.block_size, problem.x.dtype, "cpu"),
        )
    }
    dense, sparse = problem.w.toarray(), problem.w.to_scipy()
    x, dy = problem.x, problem.dy
    if product == "weight_grad":
        contestants["NumPy dense"] = (lambda: x.T @ dy, lambda dw: kept(dw, problem.layout))
        # SciPy has no sampled product: NumPy fills the blocks, each by a product of its own.
        contestants["NumPy by block"] = (lambda: _block_by_block(problem), np.asarray)
        return contestants
    operand, matrix, bsr = (x, dense, sparse) if product == "forward" else (dy, dense.T, sparse.T)
    contestants["NumPy dense"] = (lambda: operand @ matrix, np.asarray)
    contestants["SciPy BSR"] = (lambda: operand @ bsr, np.asarray)
    if (torch := _torch()) is not None:
        # torch multiplies a sparse matrix from the left: y.T = w.T @ x.T.
        left = _torch_bsr(torch, problem.w.T if product == "forward" else problem.w)
        right = torch.from_numpy(operand).T
        contestants["torch BSR"] = (lambda: torch.mm(left, right), lambda y: y.T.numpy())
    return contestants


def kept(dense: np.ndarray, layout: Layout) -> np.ndarray:
    """The kept blocks of a dense matrix, (n_blocks, B, B)."""
    size = dense.shape[0] // layout.shape[0]
    return BlockSparse.from_dense(dense, layout, block_size=size).values


def _of_rung(problem: Problem, product: str, name: str) -> Contestant:
    x, dy, w = problem.x, problem.dy, problem.w
    calls = {
        "forward": lambda: ops.matmul(x, w, kernel=name),
        "input_grad": lambda: ops.matmul(dy, w.T, kernel=name),
        "weight_grad": lambda: ops.sddmm(x.T, dy, w, kernel=name).values,
    }
    return calls[product], np.asarray


def _block_by_block(problem: Problem) -> np.ndarray:
    """The weight-gradient as a small dense product for each kept block."""
    size, index = problem.shape.block_size, problem.layout.index
    x, dy = problem.x, problem.dy
    blocks = np.empty_like(problem.w.values)
    places = zip(index.block_rows.tolist(), index.block_columns.tolist(), strict=True)
    for b, (row, column) in enumerate(places):
        x_rows, dy_columns = x[:, row * size :][:, :size], dy[:, column * size :][:, :size]
        np.matmul(x_rows.T, dy_columns, out=blocks[b])
    return blocks


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _torch_bsr(torch: Any, w: BlockSparse) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse BSR tensors are in beta
        return torch.sparse_bsr_tensor(
            torch.from_numpy(w.indptr.astype(np.int64)),
            torch.from_numpy(w.indices.astype(np.int64)),
            torch.from_numpy(w.data),
            size=w.shape,
        )
