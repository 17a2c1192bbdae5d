"""The same convolutions by torch: cuDNN's dense ones, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse.bench.gpu.conv import Result
from numbsparse.bench.gpu.conv_problem import ConvProblem
from numbsparse.bench.gpu.peers import as_torch, torch_on_gpu
from numbsparse.bench.gpu.replay import record_torch


def cudnn(problem: ConvProblem, product: str) -> Result:
    """Of a layout that keeps every block; cuDNN tries its kernels first."""
    torch = torch_on_gpu()
    if torch is None:
        raise ImportError("torch with CUDA is not installed")
    torch.backends.cudnn.allow_tf32 = problem.precision == "high"
    torch.backends.cudnn.benchmark = True
    x, dy = (as_torch(a.device).permute(0, 3, 1, 2) for a in (problem.x, problem.dy))
    size, k = problem.block_size, problem.taps_along
    n = problem.features // size
    blocks = as_torch(problem.values.device).view(k, k, n, n, size, size)
    w = blocks.permute(3, 5, 2, 4, 0, 1).reshape(problem.features, problem.features, k, k)
    w = w.contiguous(memory_format=torch.channels_last)
    padding = [k // 2] * 2

    def compute() -> Any:
        if product == "forward":
            return torch.nn.functional.conv2d(x, w, padding=padding)
        wanted = (product == "input_grad", product == "weight_grad", False)
        strides = [1, 1], padding, [1, 1], False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(dy, x, w, None, *strides, wanted)
        return found[0] if product == "input_grad" else found[1]

    def as_it_lies() -> Any:
        return compute().permute(0, 2, 3, 1)

    def pick(out: Any, picked: np.ndarray) -> np.ndarray:
        result = torch.as_tensor(out, device="cuda")
        if product != "weight_grad":
            return _host(result.reshape(-1, problem.features)[torch.from_numpy(picked).cuda()])
        # (out_features, k, k, in_features), as blocks (k, k, n, n, size, size)
        dw = result.view(n, size, k, k, n, size).permute(2, 3, 4, 0, 5, 1)
        return _host(dw.reshape(-1, size, size)[torch.from_numpy(picked).cuda()])

    return Result(as_it_lies, record_torch, pick)


def _host(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy()
