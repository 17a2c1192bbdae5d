"""Tensor's operators and methods. The tape knows no operation, so they are added here."""

import operator
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np

from numbsparse.autograd import Tensor, as_tensor, is_recording
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional import activations, arithmetic, products, shape
from numbsparse.nn.functional.arithmetic import data_of


def _reflected(function: Any) -> Any:
    return lambda self, other: function(other, self)


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    """The same values in another shape, given as one argument or as several; one may be -1."""
    return shape.reshape(self, sizes[0] if len(sizes) == 1 else sizes)


def _reduced(function: Any) -> Any:
    """The method. `numpy.sum` and `numpy.mean` of a Tensor call it, with dtype and out of None."""

    @wraps(function)
    def method(self: Tensor, axis: Any = None, keepdims: bool = False, **others: None) -> Tensor:
        for name, value in others.items():
            if name not in ("dtype", "out") or value is not None:
                raise TypeError(f"{function.__name__} takes axis and keepdims, got {name}={value}")
        return function(self, axis, keepdims)  # type: ignore[no-any-return]

    return method


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if isinstance(self.data, BlockSparse) or not self.ndim:
        raise TypeError(f"iteration takes a dense Tensor with axes, got {self!r}")
    return iter(shape.unbind(self))


def _lent(self: Tensor) -> Any:
    """The values of a dense Tensor, for another library to share their memory."""
    if self.requires_grad and is_recording():
        raise RuntimeError(
            "another library would not record what it computes with a Tensor that requires a "
            "gradient: give it the values, .numpy(), or .detach() on a GPU"
        )
    if isinstance(self.data, BlockSparse):
        raise TypeError("a block-sparse Tensor is not an array: give .numpy(), which is dense")
    return self.data


def _array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """What `numpy.asarray` gives: the values of a dense Tensor on the CPU, sharing its memory."""
    values = _lent(self)
    if not isinstance(values, np.ndarray):
        raise TypeError("NumPy takes the values of a Tensor on the CPU: give it .numpy()")
    return np.array(values, dtype, copy=copy)


def _dlpack(self: Tensor, **options: Any) -> Any:
    """What `torch.tensor`, `from_dlpack` and others take the values by, on a GPU too."""
    return _lent(self).__dlpack__(**options)


def _only(convert: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    """A conversion of a Tensor of one value."""

    def converted(self: Tensor) -> Any:
        if self.size != 1:
            which = "has none" if not self.size else "has several: which one, or all, or any?"
            raise ValueError(
                f"{convert.__name__}() takes a Tensor of one value, got the shape {self.shape}, "
                f"which {which}"
            )
        return convert(self.item())

    return converted


def _compared(compare: Callable[[Any, Any], Any], sign: str) -> Callable[[Tensor, Any], Any]:
    """A comparison of each value, as NumPy's: an array of booleans, on the host.

    Of block-sparse Tensors == and != give what their matrices do.
    """

    def compared(self: Tensor, other: Any) -> Any:
        if isinstance(self.data, BlockSparse):
            return compare(self.data, data_of(other))
        try:
            other = as_tensor(other, "other").numpy()
        except TypeError:  # None, or a word
            return NotImplemented
        try:
            return compare(self.numpy(), other)
        except ValueError:
            got = f"got {self.shape} and {other.shape}"
            raise ValueError(f"{sign} takes shapes that broadcast, {got}") from None

    return compared


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
    "__abs__": activations.abs,
    "__matmul__": products.matmul,
    "__rmatmul__": _reflected(products.matmul),
    "__getitem__": shape.getitem,
    "__iter__": _iterate,
    "__eq__": _compared(operator.eq, "=="),
    "__ne__": _compared(operator.ne, "!="),
    "__lt__": _compared(operator.lt, "<"),
    "__le__": _compared(operator.le, "<="),
    "__gt__": _compared(operator.gt, ">"),
    "__ge__": _compared(operator.ge, ">="),
    "__contains__": lambda self, value: bool(np.any(self == value)),
    "__bool__": _only(bool),
    "__int__": _only(int),
    "__float__": _only(float),
    "__format__": _format,
    "__array__": _array,
    "__dlpack__": _dlpack,
    "__dlpack_device__": lambda self: self.values.__dlpack_device__(),
    "astype": arithmetic.cast,
    "T": property(shape.transpose),
    "transpose": shape.transpose,
    "reshape": _reshape,
    "sum": _reduced(shape.sum),
    "mean": _reduced(shape.mean),
}

for _name, _function in _OPERATORS.items():
    setattr(Tensor, _name, _function)
