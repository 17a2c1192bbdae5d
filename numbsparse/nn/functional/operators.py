"""Tensor's operators and methods. The tape knows no operation, so this room brings them."""

from __future__ import annotations

from typing import Any

from numbsparse.autograd import Tensor
from numbsparse.nn.functional import arithmetic, products, shape


def _reflected(function: Any) -> Any:
    return lambda self, other: function(other, self)


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    return shape.reshape(
        self, sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    )


_OPERATORS = {
    "__add__": arithmetic.add,
    "__radd__": _reflected(arithmetic.add),
    "__sub__": arithmetic.subtract,
    "__rsub__": _reflected(arithmetic.subtract),
    "__mul__": arithmetic.multiply,
    "__rmul__": _reflected(arithmetic.multiply),
    "__truediv__": arithmetic.divide,
    "__rtruediv__": _reflected(arithmetic.divide),
    "__pow__": arithmetic.power,
    "__neg__": arithmetic.negative,
    "__matmul__": products.matmul,
    "__rmatmul__": _reflected(products.matmul),
    "__getitem__": shape.getitem,
    "astype": arithmetic.cast,
    "T": property(shape.transpose),
    "transpose": shape.transpose,
    "reshape": _reshape,
    "sum": shape.sum,
    "mean": shape.mean,
}

for _name, _function in _OPERATORS.items():
    setattr(Tensor, _name, _function)
