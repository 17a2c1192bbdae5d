"""Arithmetic, elementwise, with NumPy's broadcasting."""

from collections.abc import Callable
from operator import and_, or_
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, Vjp, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import as_dtype, type_name
from numbsparse.nn.functional.shape import sum_to


def add(a: Any, b: Any) -> Tensor:
    """a + b; each a Tensor, an array or a number. Block-sparse sums have the blocks of both.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.add(Tensor([1.0, 2.0]), 1)  # or Tensor([1.0, 2.0]) + 1
    Tensor([2., 3.])
    """
    a, b = _operand(a, "a"), _operand(b, "b")
    if is_block_sparse(a) or is_block_sparse(b):
        return _add_block_sparse(a, b)
    return record(
        ops.add(data_of(a), data_of(b)),
        *edges((a, lambda dy, y: sum_to(dy, a.shape)), (b, lambda dy, y: sum_to(dy, b.shape))),
        reads=(),
    )


def subtract(a: Any, b: Any) -> Tensor:
    """a - b; each a Tensor, an array or a number. Block-sparse sums have the blocks of both.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.subtract(Tensor([1.0, 2.0]), Tensor([1.0, 1.0]))
    Tensor([0., 1.])
    """
    a, b = _operand(a, "a"), _operand(b, "b")
    if is_block_sparse(a) or is_block_sparse(b):
        return _add_block_sparse(a, negative(b) if is_block_sparse(b) else b)
    return record(
        ops.subtract(data_of(a), data_of(b)),
        *edges(
            (a, lambda dy, y: sum_to(dy, a.shape)),
            (b, lambda dy, y: sum_to(negative(dy), b.shape)),
        ),
        reads=(),
    )


def multiply(a: Any, b: Any) -> Tensor:
    """a * b; each a Tensor, an array or a number.

    A block-sparse tensor takes a number, or another one; the product has the blocks that both have.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.multiply(Tensor([[1.0], [2.0]]), Tensor([3.0, 4.0]))
    Tensor([[3., 4.],
            [6., 8.]])
    """
    a, b = _operand(a, "a"), _operand(b, "b")
    if is_block_sparse(a) and is_block_sparse(b):
        return _multiply_block_sparse(a, b)
    if is_block_sparse(a):
        return _scale_block_sparse(a, b)
    if is_block_sparse(b):
        return _scale_block_sparse(b, a, argument="a")
    return record(
        ops.multiply(data_of(a), data_of(b)),
        *edges(
            (a, lambda dy, y: sum_to(multiply(dy, b), a.shape)),
            (b, lambda dy, y: sum_to(multiply(dy, a), b.shape)),
        ),
    )


def divide(a: Any, b: Any) -> Tensor:
    """a / b; each a Tensor, an array or a number. A block-sparse tensor takes a number as b.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.divide(1, Tensor([1.0, 2.0]))
    Tensor([1. , 0.5])
    """
    a, b = _operand(a, "a"), _operand(b, "b")
    if is_block_sparse(a):
        return _scale_block_sparse(a, b, ops.divide, "/")
    return record(
        ops.divide(data_of(a), data_of(b)),
        *edges(
            (a, lambda dy, y: sum_to(divide(dy, b), a.shape)),
            (b, lambda dy, y: sum_to(negative(divide(multiply(dy, y), b)), b.shape)),
        ),
    )


def negative(a: Any) -> Tensor:
    """-a.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.negative(Tensor([1.0, -2.0]))
    Tensor([-1.,  2.])
    """
    a = as_tensor(a, "a")
    if is_block_sparse(a):
        return _scale_block_sparse(a, -1.0)
    return record(ops.negative(a.data), (a, lambda dy, y: negative(dy)))


def power(a: Any, exponent: float) -> Tensor:
    """a ** exponent, for a number as the exponent.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.power(Tensor([1.0, 2.0]), 3)
    Tensor([1., 8.])
    """
    if not isinstance(exponent, ops.NUMBERS):
        raise TypeError(f"exponent takes a number, got {type_name(exponent)}")
    a = as_tensor(a, "a")
    less = exponent - 1 if exponent else 0  # the slope of a ** 0 is 0 * a ** 0, at a = 0 too
    slope = lambda dy: multiply(dy, multiply(power(a, less), exponent))  # noqa: E731
    return record(ops.power(a.data, exponent), (a, lambda dy, y: slope(dy)))


def exp(a: Any) -> Tensor:
    """e ** a.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.exp(Tensor([0.0, 1.0]))
    Tensor([1.        , 2.71828183])
    """
    a = as_tensor(a, "a")
    return record(ops.exp(a.data), (a, lambda dy, y: multiply(dy, y)))


def expm1(a: Any) -> Tensor:
    """e ** a - 1, with all its digits near a = 0.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.expm1(Tensor([1e-12, 1.0]))
    Tensor([1.00000000e-12, 1.71828183e+00])
    """
    a = as_tensor(a, "a")
    return record(ops.expm1(a.data), (a, lambda dy, y: multiply(dy, add(y, 1.0))))


def log(a: Any) -> Tensor:
    """The natural logarithm of a.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.log(Tensor([1.0, 10.0]))
    Tensor([0.        , 2.30258509])
    """
    a = as_tensor(a, "a")
    return record(ops.log(a.data), (a, lambda dy, y: divide(dy, a)))


def sqrt(a: Any) -> Tensor:
    """The square root of a.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.sqrt(Tensor([4.0, 9.0]))
    Tensor([2., 3.])
    """
    a = as_tensor(a, "a")
    return record(ops.sqrt(a.data), (a, lambda dy, y: divide(dy, multiply(y, 2.0))))


def cast(a: Any, dtype: Any) -> Tensor:
    """a rounded to float16, bfloat16, float32 or float64; the gradient is rounded to a's dtype.

    Of that dtype already, `a` is returned as it is. Float64 is only for the CPU.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.cast(Tensor([1 / 3]), "float16")
    Tensor([0.3333], dtype=float16)
    """
    a = as_tensor(a, "a")
    if a.dtype == (dtype := as_dtype(dtype)):
        return a
    values = ops.cast(a.values, dtype)
    rounded = a.data.with_values(values) if is_block_sparse(a) else values
    return record(rounded, (a, lambda dy, y: cast(dy, a.dtype)))


def data_of(a: Any) -> Any:
    """The array in a Tensor; an array or a number as it is."""
    return a.data if isinstance(a, Tensor) else a


def edges(*pairs: tuple[Any, Vjp]) -> list[tuple[Tensor, Vjp]]:
    """The (input, vjp) pairs whose input is a Tensor: numbers and arrays have no gradient."""
    return [pair for pair in pairs if isinstance(pair[0], Tensor)]


_OPERANDS = (Tensor, *ops.NUMBERS)


def _operand(a: Any, argument: str) -> Any:
    """An array, or a BlockSparse, as a Tensor; a number as it is."""
    return a if isinstance(a, _OPERANDS) else as_tensor(a, argument)


def as_matrix(w: Any, argument: str = "w") -> Tensor:
    """A Tensor of a BlockSparse, or a BlockSparse as one; anything else is refused."""
    w = as_tensor(w, argument)
    if not is_block_sparse(w):
        got = type_name(unread(w))
        raise TypeError(f"{argument} takes a Tensor of a BlockSparse, got one of {got}")
    return w


def is_block_sparse(a: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(unread(a), BlockSparse)


def _add_block_sparse(a: Any, b: Any) -> Tensor:
    for argument, one, other in (("b", a, b), ("a", b, a)):
        if isinstance(other, ops.NUMBERS) and not other:  # as the sum() of several begins
            return one
        if not is_block_sparse(other):
            got = type_name(data_of(other))
            raise ValueError(f"{argument} takes a BlockSparse as the other one, or 0, got {got}")
    a, b = _in_one_layout(a, b, or_)
    total = a.matrix.with_values(ops.add(a.values, b.values))
    return record(total, (a, lambda dy, y: dy), (b, lambda dy, y: dy))


def remap(w: Any, layout: Any) -> Tensor:
    """A block-sparse tensor in another layout, as `BlockSparse.remap`; differentiable.

    Blocks of both layouts keep their values, new ones are zero; so have their gradients.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((2, 4, 4)), [[1, 1, 0]]), requires_grad=True)
    >>> F.sum(F.remap(w, [[0, 1, 1]])).backward()
    >>> w.grad.data.block_norms("l1")
    array([ 0., 16.])
    """
    w = as_matrix(w)
    own = w.matrix.layout
    return record(ops.remap(w.data, layout), (w, lambda dv, v: remap(dv, own)))


def _in_one_layout(a: Tensor, b: Tensor, of_both: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Two block-sparse tensors with the same blocks, stored in the same order."""
    one, other = a.matrix.layout, b.matrix.layout
    if one.shape == other.shape and one != other:
        layout = of_both(one, other)
        a, b = remap(a, layout), remap(b, layout)
    return a, _stored_as(b, a.matrix, "b")


def _stored_as(a: Tensor, like: BlockSparse, argument: str) -> Tensor:
    """A block-sparse tensor with its values in the order of those of `like`."""
    stored, own = a.matrix.stored_as(like, argument), a.matrix
    return a if stored is own else record(stored, (a, lambda dy, y: _stored_as(dy, own, "dy")))


def _multiply_block_sparse(a: Tensor, b: Tensor) -> Tensor:
    a, b = _in_one_layout(a, b, and_)
    product = a.matrix.with_values(ops.multiply(a.values, b.values))
    return record(product, (a, lambda dy, y: multiply(dy, b)), (b, lambda dy, y: multiply(dy, a)))


def _scale_block_sparse(
    a: Tensor, by: Any, function: Any = ops.multiply, sign: str = "*", argument: str = "b"
) -> Tensor:
    if not isinstance(by, ops.NUMBERS):
        beside, got = f"{sign} and a block-sparse tensor", type_name(data_of(by))
        raise TypeError(f"{argument} takes a number with {beside}, got {got}")
    scaled = a.matrix.with_values(function(a.matrix.values, by))
    return record(scaled, (a, lambda dy, y: _scale_block_sparse(dy, by, function, sign)))
