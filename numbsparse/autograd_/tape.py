"""Tensor and the tape. The engine knows no operation: only that each has a way back.

An operation is an ordinary function that ends in `record(result, (input, vjp), ...)`. A `vjp`
("vector-Jacobian product") takes the gradient of the result, and the result, both as Tensors, and
gives the gradient of that input. Written with differentiable functions, a vjp can itself be
differentiated: gradients of gradients need nothing else.

After D. Maclaurin, D. Duvenaud, R. P. Adams, "Autograd: Effortless gradients in NumPy", 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, as_device_array, is_device_operand
from numbsparse.dtypes import as_array, is_floating

Vjp = Callable[["Tensor", "Tensor"], "Tensor"]

_recording: ContextVar[bool] = ContextVar("numbsparse_recording", default=True)
_noted: ContextVar[dict[int, Tensor] | None] = ContextVar("numbsparse_noted", default=None)


class Tensor:
    """An array, or a BlockSparse matrix, that remembers how it was computed.

    Parameters
    ----------
    data : array or BlockSparse
        A NumPy array, a GPU array of any library, or what `numpy.asarray` takes. Not copied.
    requires_grad : bool
        Whether `backward` computes the gradient with respect to this tensor.

    Attributes
    ----------
    data : NumPy array, DeviceArray or BlockSparse
    grad : Tensor or None
        Where `backward` adds the gradient: the same shape, place and layout as `data`.

    Examples
    --------
    >>> import numbsparse as ns
    >>> x = ns.Tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    Tensor([2., 4., 6.])
    """

    __slots__ = ("__weakref__", "_edges", "data", "grad", "requires_grad")
    __array_ufunc__ = None  # NumPy steps back: `array + tensor` is our own sum

    def __init__(self, data: Any, *, requires_grad: bool = False):
        data = as_data(data)
        if requires_grad and not is_floating(data.dtype):
            raise TypeError(f"requires_grad takes floating-point data, got {data.dtype}")
        self.data = data
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self._edges: tuple[tuple[Tensor, Vjp], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.nnz if isinstance(self.data, BlockSparse) else self.data.size

    @property
    def place(self) -> str:
        """ "cpu" or "cuda": where the values are."""
        if isinstance(self.data, BlockSparse):
            return self.data.place
        return "cuda" if isinstance(self.data, DeviceArray) else "cpu"

    @property
    def values(self) -> Any:
        """The numbers as one array: the data itself, or a BlockSparse's stored blocks."""
        return self.data.values if isinstance(self.data, BlockSparse) else self.data

    def detach(self) -> Tensor:
        """The same data, with no memory of how it was computed."""
        return Tensor(self.data)

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array; copied if they are on a GPU. A BlockSparse becomes dense."""
        if isinstance(self.data, BlockSparse):
            return self.data.toarray()
        return self.data.numpy() if isinstance(self.data, DeviceArray) else self.data

    def item(self) -> float:
        """The only value, as a Python number; what `float`, `int` and `if` take it by too.

        Raises ValueError where there are more values, or none.
        """
        values = self.numpy()
        if values.size != 1:
            raise ValueError(f"item takes a Tensor of one value, got the shape {self.shape}")
        return values.item()

    def backward(self, grad: Any = None, *, create_graph: bool = False) -> None:
        """Add the gradient of this tensor to `.grad` of every tensor that requires one.

        Parameters
        ----------
        grad : Tensor or array, optional
            The gradient of this tensor; needed unless it has one value, whose gradient is 1.
        create_graph : bool
            Whether the gradients are themselves differentiable.

        Raises RuntimeError if nothing that led here requires a gradient.
        """
        for leaf, gradient in _gradients(self, _seed(self, grad), create_graph):
            if not leaf._edges and leaf.requires_grad:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    if TYPE_CHECKING:  # brought by numbsparse.nn.functional.operators
        T: Tensor

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, exponent: float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __getitem__(self, key: Any) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __bool__(self) -> bool: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...
        def astype(self, dtype: Any) -> Tensor: ...
        def transpose(self, axes: Sequence[int] | None = None) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len takes a Tensor with axes, got the shape ()")
        return self.shape[0]

    def __repr__(self) -> str:
        if self.place == "cuda" or isinstance(self.data, BlockSparse):
            return f"Tensor({self.data!r})"
        body = np.array2string(self.data, separator=", ", prefix="Tensor(")
        suffix = "" if self.dtype in (np.float64, np.int64) else f", dtype={self.dtype}"
        return f"Tensor({body}{suffix})"


def grad(
    output: Tensor,
    inputs: Sequence[Tensor],
    *,
    grad_output: Any = None,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """The gradients of `output` with respect to each of `inputs`; None where it does not depend.

    With `create_graph=True` they can be differentiated again. Nothing is added to `.grad`.

    >>> import numbsparse as ns
    >>> x = ns.Tensor(3.0, requires_grad=True)
    >>> (first,) = ns.grad(x * x * x, [x], create_graph=True)
    >>> (second,) = ns.grad(first, [x])
    >>> first.item(), second.item()
    (27.0, 18.0)
    """
    if isinstance(inputs, Tensor):  # its rows are new tensors, which nothing depends on
        raise TypeError("inputs takes a list of Tensors, got a Tensor")
    wanted = {id(tensor) for tensor in inputs}
    found = {}
    for tensor, gradient in _gradients(output, _seed(output, grad_output), create_graph):
        if id(tensor) in wanted:
            found[id(tensor)] = gradient
    return [found.get(id(tensor)) for tensor in inputs]


def differentiable_grads(
    function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """`grad` of function(*inputs), one value, that can be differentiated again.

    What the inputs were computed from is not gone through now, only when that is done.
    """
    leaves = [Tensor(a.data, requires_grad=a.requires_grad) for a in inputs]
    gradients = grad(function(*leaves), leaves, create_graph=True)
    for leaf, a in zip(leaves, inputs, strict=True):
        leaf._edges = ((a, lambda dy, y: dy),) if a.requires_grad else ()
    return gradients


def as_data(data: Any) -> Any:
    """What a Tensor holds: a NumPy array, a DeviceArray or a BlockSparse."""
    if isinstance(data, Tensor):
        raise TypeError("data takes an array or a BlockSparse, got a Tensor: use .detach()")
    if type(data) is np.ndarray or isinstance(data, DeviceArray | BlockSparse):
        return data
    if is_device_operand(data):
        return as_device_array(data, "data")
    return as_array(data, "data")


def as_tensor(x: Any) -> Tensor:
    """A Tensor as it is; an array as one that takes no gradient."""
    return x if isinstance(x, Tensor) else Tensor(x)


def record(data: Any, *edges: tuple[Tensor, Vjp]) -> Tensor:
    """The Tensor of a result, with the way back to each input that requires a gradient."""
    result = Tensor(data)
    if _recording.get():
        result._edges = tuple(edge for edge in edges if edge[0].requires_grad)
        result.requires_grad = bool(result._edges)
    elif (noted := _noted.get()) is not None:
        noted.update((id(tensor), tensor) for tensor, _ in edges if tensor.requires_grad)
    return result


def once(vjp: Callable[..., Any]) -> Vjp:
    """A vjp given on arrays, `vjp(dy, y)`, for an operation without gradients of gradients."""

    def on_tensors(dy: Tensor, y: Tensor) -> Tensor:
        refuse_again()
        return Tensor(vjp(dy.data, y.data))

    return on_tensors


def refuse_again() -> None:
    """For a vjp that works on arrays alone, at its start."""
    if _recording.get():
        raise NotImplementedError(
            "the gradient of this function cannot be differentiated again (create_graph=True)"
        )


def is_recording() -> bool:
    """Whether operations are written on the tape now."""
    return _recording.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Within this context nothing is remembered: for evaluation, and for updating weights.

    >>> import numbsparse as ns
    >>> x = ns.Tensor([1.0], requires_grad=True)
    >>> with ns.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """
    with _set_recording(False):
        yield


@contextmanager
def noting() -> Iterator[dict[int, Tensor]]:
    """As `no_grad`, but the tensors with gradients that operations take are noted, by their ids."""
    noted: dict[int, Tensor] = {}
    token = _noted.set(noted)
    try:
        with no_grad():
            yield noted
    finally:
        _noted.reset(token)


@contextmanager
def recording() -> Iterator[None]:
    """Within this context operations are written on the tape: for a vjp that needs a tape."""
    with _set_recording(True):
        yield


def grads_at(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of `inputs` from (output, its gradient) pairs, and of nothing behind them."""
    with recording():
        joined = record(np.zeros(()), *((y, lambda _, z, dy=dy: dy) for y, dy in outputs))  # type: ignore[misc]
    ends = {id(tensor) for tensor in inputs}
    found = {}
    for tensor, gradient in _gradients(joined, Tensor(np.ones(())), False, ends):
        if id(tensor) in ends:
            found[id(tensor)] = gradient
    return [found.get(id(tensor)) for tensor in inputs]


@contextmanager
def _set_recording(value: bool) -> Iterator[None]:
    token = _recording.set(value)
    try:
        yield
    finally:
        _recording.reset(token)


def _seed(output: Tensor, gradient: Any) -> Tensor:
    """The gradient to start from."""
    if not output.requires_grad:
        raise RuntimeError("backward: nothing that led to this tensor requires a gradient")
    if gradient is None:
        if output.size != 1:
            raise ValueError(
                f"backward of a tensor of shape {output.shape} takes grad, of the same shape"
            )
        return Tensor(ops.full(output.shape, 1.0, output.dtype, output.place))
    gradient = as_tensor(gradient)
    if gradient.shape != output.shape or gradient.dtype != output.dtype:
        raise ValueError(
            f"grad takes {output.shape} of {output.dtype}, got {gradient.shape} of {gradient.dtype}"
        )
    if gradient.place != output.place:
        raise ValueError(f"grad takes the place {output.place}, got {gradient.place}")
    sparse = isinstance(output.data, BlockSparse)
    if isinstance(gradient.data, BlockSparse) != sparse:
        raise ValueError(f"grad takes {'a BlockSparse' if sparse else 'an array'} here")
    if sparse and gradient.data.stored_as(output.data, "grad") is not gradient.data:
        raise ValueError("grad takes blocks stored as this tensor's, got a transposed view's")
    return gradient


def _gradients(
    output: Tensor, seed: Tensor, create_graph: bool, ends: Collection[int] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor behind `output` with its gradient, from the output back.

    `ends` are the ids of tensors that nothing is looked for behind.
    """
    gradients = {id(output): seed}
    with _set_recording(create_graph):
        for tensor in _from_output_back(output, ends):
            dy = gradients.pop(id(tensor))
            yield tensor, dy
            for parent, vjp in () if id(tensor) in ends else tensor._edges:
                gradient = vjp(dy, tensor)
                known = gradients.get(id(parent))
                gradients[id(parent)] = gradient if known is None else known + gradient


def _from_output_back(output: Tensor, ends: Collection[int]) -> list[Tensor]:
    """The tensors behind `output`, each before all that it was computed from."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack: list[tuple[Tensor, bool]] = [(output, False)]
    while stack:
        tensor, parents_done = stack.pop()
        if parents_done:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            stack.append((tensor, True))
            if id(tensor) not in ends:
                stack.extend((parent, False) for parent, _ in tensor._edges)
    return order[::-1]
