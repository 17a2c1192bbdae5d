"""The same products by others, through torch where it is installed: cuBLAS, Triton, cuSPARSE.

Each gets its operands as it likes them best, made before the clock runs: the sparse ones multiply
from the left, y.T = w.T @ x.T, with activations feature-major.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from numbsparse.bench.gpu.contestants import Contestant
from numbsparse.bench.gpu.problem import Problem
from numbsparse.bench.gpu.replay import record_torch
from numbsparse.device import DeviceArray, empty, is_available

CUBLAS, TRITON, CUSPARSE = "cuBLAS dense", "torch BSR", "cuSPARSE CSR"
CUDNN = "cuDNN dense"


def torch_on_gpu() -> Any:
    """torch, where it is installed with CUDA; else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if is_available() and torch.cuda.is_available() else None


def peers(problem: Problem, product: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The named peers that can take this product: functions that make the contestant."""
    if torch_on_gpu() is None:
        return {}
    makers = {CUBLAS: _cublas, TRITON: _triton, CUSPARSE: _cusparse}
    serves = {
        # Its time depends on nothing but the features and the batch.
        CUBLAS: problem.layout.density == 1,
        TRITON: problem.precision == "highest",
        CUSPARSE: problem.dtype == "float32"
        and problem.precision == "highest"
        and product != "weight_grad",
    }
    return {name: make for name, make in makers.items() if name in names and serves[name]}


def _cublas(problem: Problem, product: str) -> Contestant:
    """The dense product; of a layout that keeps every block."""
    torch = torch_on_gpu()
    torch.set_float32_matmul_precision(problem.precision)
    x, dy = as_torch(problem.x.device), as_torch(problem.dy.device)
    (rows, columns), size = problem.layout.shape, problem.block_size
    if product == "weight_grad":
        out = empty((problem.in_features, problem.out_features), problem.x.device.dtype)
        dw = as_torch(out)
        blocks = dw.view(rows, size, columns, size).transpose(1, 2)

        def pick(b: np.ndarray) -> np.ndarray:
            b_rows, b_columns = torch.from_numpy(b // columns), torch.from_numpy(b % columns)
            return _host(blocks[b_rows.cuda(), b_columns.cuda()])

        return Contestant(lambda: torch.mm(x.T, dy, out=dw), out, pick, record_torch)
    w = as_torch(problem.values.device).view(rows, columns, size, size)
    w = w.transpose(1, 2).reshape(problem.in_features, problem.out_features)
    operand, matrix = (x, w) if product == "forward" else (dy, w.T)
    out = problem.out(product)
    y = as_torch(out)
    return Contestant(
        lambda: torch.mm(operand, matrix, out=y), out, lambda r: _host(y[_places(r)]), record_torch
    )


def _triton(problem: Problem, product: str) -> Contestant:
    """PyTorch's Triton kernels for its block-sparse tensors."""
    from torch.sparse import _triton_ops

    if product == "weight_grad":
        out = problem.out(product)
        dw = _bsr(problem, transposed=False, values=as_torch(out))
        x, dy = as_torch(problem.x.device).T.contiguous(), as_torch(problem.dy.device)
        return Contestant(
            lambda: _triton_ops.sampled_addmm(dw, x, dy, beta=0.0, out=dw, skip_checks=True),
            out,
            lambda b: _host(dw.values()[_places(b)]),
            record_torch,
        )
    w, operand, out, y = _from_the_left(problem, product)
    return Contestant(
        lambda: _triton_ops.bsr_dense_addmm(y, w, operand, beta=0, out=y),
        out,
        lambda r: _host(y[:, _places(r)].T),
        record_torch,
    )


def _cusparse(problem: Problem, product: str) -> Contestant:
    """cuSPARSE's product of single values; torch's float32 BSR product is Triton's again."""
    torch = torch_on_gpu()
    w, operand, out, y = _from_the_left(problem, product)
    w = w.to_dense().to_sparse_csr()
    crow, column = w.crow_indices().int(), w.col_indices().int()
    w = torch.sparse_csr_tensor(crow, column, w.values(), size=w.shape)
    return Contestant(
        lambda: torch.addmm(y, w, operand, beta=0, out=y),
        out,
        lambda r: _host(y[:, _places(r)].T),
        record_torch,
    )


def _from_the_left(problem: Problem, product: str) -> tuple[Any, Any, DeviceArray, Any]:
    """(w.T or w, the operand feature-major, the output, its view in torch)."""
    forward = product == "forward"
    operand = (problem.x if forward else problem.dy).device
    features = problem.out_features if forward else problem.in_features
    out = empty((features, problem.batch), operand.dtype)
    return _bsr(problem, forward), as_torch(operand).T.contiguous(), out, as_torch(out)


def _bsr(problem: Problem, transposed: bool, values: Any = None) -> Any:
    """w, or w.T, as a sparse tensor of torch; with `values`, those instead, not copied."""
    torch, index = torch_on_gpu(), problem.layout.index
    lines = index.columns if transposed else index.rows
    if values is None:
        order = torch.from_numpy(lines.blocks.astype(np.int64)).cuda()
        values = as_torch(problem.values.device)[order]
        values = values.transpose(1, 2).contiguous() if transposed else values
    shape = (problem.in_features, problem.out_features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse BSR tensors are in beta
        return torch.sparse_bsr_tensor(
            torch.from_numpy(lines.indptr.copy()).cuda(),
            torch.from_numpy(lines.indices.copy()).cuda(),
            values,
            size=shape[::-1] if transposed else shape,
        )


def as_torch(array: DeviceArray) -> Any:
    """The same memory as a tensor."""
    torch = torch_on_gpu()
    bits = array.view(np.dtype(f"int{8 * array.itemsize}"))
    return torch.as_tensor(bits, device="cuda").view(getattr(torch, array.dtype.name))


def _places(indices: np.ndarray) -> Any:
    return torch_on_gpu().from_numpy(indices).cuda()


def _host(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy()
