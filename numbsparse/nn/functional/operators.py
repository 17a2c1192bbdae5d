"""Tensor's operators and methods. The tape knows no operation, so this room brings them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from numbsparse.autograd import Tensor, is_recording
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional import arithmetic, products, shape


def _reflected(function: Any) -> Any:
    return lambda self, other: function(other, self)


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    return shape.reshape(
        self, sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    )


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if isinstance(self.data, BlockSparse) or not self.ndim:
        raise TypeError(f"iteration takes a dense Tensor with axes, got {self!r}")
    return iter(shape.unbind(self))


def _array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """What `numpy.asarray` gives: the values of a dense Tensor on the CPU, sharing its memory."""
    if self.requires_grad and is_recording():
        raise RuntimeError(
            "NumPy would not record what it computes with a Tensor that requires a gradient: "
            "give it the values, .numpy()"
        )
    if not isinstance(self.data, np.ndarray):
        raise TypeError("NumPy takes the values of a dense Tensor on the CPU: give it .numpy()")
    return np.array(self.data, dtype, copy=copy)


def _format(self: Tensor, spec: str) -> str:
    """f"{loss:.3f}": of a Tensor without axes its number is formatted."""
    if spec and self.shape:
        raise TypeError(f"the format {spec!r} takes a Tensor without axes, got {self.shape}")
    return format(self.item(), spec) if spec else str(self)


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
    "__iter__": _iterate,
    "__contains__": None,  # == compares Tensors, not their values: `1.0 in x` would be False
    "__bool__": lambda self: bool(self.item()),
    "__int__": lambda self: int(self.item()),
    "__float__": lambda self: float(self.item()),
    "__format__": _format,
    "__array__": _array,
    "astype": arithmetic.cast,
    "T": property(shape.transpose),
    "transpose": shape.transpose,
    "reshape": _reshape,
    "sum": shape.sum,
    "mean": shape.mean,
}

for _name, _function in _OPERATORS.items():
    setattr(Tensor, _name, _function)
