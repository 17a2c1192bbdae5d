"""What layers compute."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, also_from, as_tensor, is_recording, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import type_name
from numbsparse.nn.functional.arithmetic import add, data_of, divide, multiply, sqrt, subtract
from numbsparse.nn.functional.products import matmul
from numbsparse.nn.functional.shape import mean, sum_to
from numbsparse.nn.functional.shape import sum as sum_over
from numbsparse.ops.operands import on_gpu


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate: Any = None,
    precision: str | None = None,
) -> Tensor:
    """x @ weight + bias, with a block-sparse weight (in_features, out_features).

    `gate`, a number for each block of the weight, multiplies it: see `matmul`.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> weight = ns.Tensor(ns.BlockSparse(np.ones((1, 4, 4)), [[1, 0]]))
    >>> F.linear(ns.Tensor([[1.0, 2.0, 3.0, 4.0]]), weight, ns.Tensor(np.arange(8.0)))
    Tensor([[10., 11., 12., 13.,  4.,  5.,  6.,  7.]])
    """
    if not isinstance(weight, Tensor | BlockSparse):
        raise TypeError(f"weight takes a Tensor of a BlockSparse, got {type_name(weight)}")
    check_features(weight.shape[1:], weight.dtype, bias=bias)
    return with_bias(matmul(x, weight, gate=gate, precision=precision), bias)


def with_bias(y: Any, bias: Any) -> Any:
    """What a layer has just made of x, on the device of x, and its bias: in the same memory.

    The sum as a tensor of its own would keep y beside it until its gradient is there.
    """
    if bias is None:
        return y
    y, bias = as_tensor(y, "y"), as_tensor(bias, "bias")
    try:
        ops.add_into(y.data, bias.data)
    except ValueError:
        if y.place == bias.place:
            raise
        got = f"{bias.device}, got {y.device}"
        raise ValueError(f"x takes the device of the weights, {got}") from None
    return also_from(y, bias, lambda dy, y: sum_to(dy, bias.shape))


def check_features(shape: tuple[int, ...], dtype: np.dtype | None, **of_features: Any) -> None:
    """Refuse what has not one number for each feature, which would broadcast; None is taken.

    `dtype` is that of the numbers; None, any that is computed with.
    """
    for name, a in of_features.items():
        if a is not None:
            a = unread(a) if isinstance(a, Tensor) else ops.operand(a, name)
            if a.shape != shape:
                raise ValueError(f"{name} takes the shape {shape} here, got {a.shape}")
            on_gpu(a, name)
            if dtype is not None and a.dtype != dtype:
                raise TypeError(f"{name} takes {dtype} here, got {a.dtype}")


def embedding(table: Tensor, indices: Any) -> Tensor:
    """Rows of a table (rows, width): indices (...) to (..., width).

    >>> import numpy as np
    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.embedding(Tensor([[0.0, 1.0], [2.0, 3.0]]), np.array([1, 0, 1]))
    Tensor([[2., 3.],
            [0., 1.],
            [2., 3.]])
    """
    table, indices = as_tensor(table, "table"), ops.operand(data_of(indices), "indices")
    kept = as_tensor(indices, "indices")

    def gradient(dy: Tensor, y: Tensor) -> Tensor:
        sums = ops.sum_rows(dy.data, kept.data, table.shape[0])
        return record(sums, (dy, lambda g, z: embedding(g, kept)), held=[kept])

    return record(ops.take_rows(table.data, indices), (table, gradient), held=[kept])


def layer_norm(
    x: Any, gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias, over the last axis; differentiable again.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.layer_norm(Tensor([[1.0, 2.0, 3.0]]))
    Tensor([[-1.22473569,  0.        ,  1.22473569]])
    """
    x = as_tensor(x)
    check_features(x.shape[-1:], x.dtype, gain=gain, bias=bias)
    normalised, inverse_std = ops.layer_norm(x.data, eps)

    def gradient(dy: Tensor, y: Tensor) -> Tensor:
        if not is_recording():
            return Tensor(ops.layer_norm_grad(y.data, inverse_std, dy.data))
        centred = subtract(x, mean(x, -1, True))
        variance = mean(multiply(centred, centred), -1, True)
        along = multiply(y, mean(multiply(dy, y), -1, True))
        across = subtract(subtract(dy, mean(dy, -1, True)), along)
        return divide(across, sqrt(add(variance, eps)))

    y = record(normalised, (x, gradient))
    if gain is not None:
        return with_bias(multiply(y, gain), bias)
    return y if bias is None else add(y, bias)


def inner_product(results: Iterable[Tensor], dys: Iterable[Tensor]) -> Tensor:
    """The sum of results times their gradients: one value, of which these are the gradients."""
    first, *terms = (sum_over(multiply(y, dy)) for y, dy in zip(results, dys, strict=True))
    for term in terms:
        first = add(first, term)
    return first
