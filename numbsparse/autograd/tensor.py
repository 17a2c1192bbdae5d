"""Tensor: an array, or a BlockSparse matrix, that remembers how it was computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse import edits
from numbsparse.autograd.contexts import AT_WORK, Vjp
from numbsparse.autograd.reducers import adding
from numbsparse.autograd.watch import check_unchanged, values_of
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, as_device_array, forget_captures, is_device_operand
from numbsparse.dtypes import NO_NUMBERS, as_array, is_floating
from numbsparse.patterns.checks import flag


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
        Other values may take their place. What an operation needs for its gradient may not change
        before `backward`: see there.
    grad : Tensor or None
        Where `backward` adds the gradient: the same shape, place and layout as `data`. It may share
        memory with other gradients, and with what `backward` was given: to change it assign
        another, `p.grad = p.grad * 0.5`.

    Raises TypeError for what is no array of numbers, and where integers require a gradient.

    Examples
    --------
    >>> import numbsparse as ns
    >>> x = ns.Tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    Tensor([2., 4., 6.])

    Comparisons are of each value, as NumPy's, and give booleans on the host. A set or a dict knows
    a Tensor itself; look for one in a list with `is`.

    >>> x.grad == 4, x < 1.5
    (array([False,  True, False]), array([ True, False, False]))
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "_edges",
        "_edit",
        "_prints",
        "_serial",
        "grad",
        "requires_grad",
    )
    __array_ufunc__ = None  # NumPy steps back: `array + tensor` is our own sum
    _remembers = True  # no array for functions of arrays, although it lends its values

    def __init__(self, data: Any, *, requires_grad: bool = False):
        data = as_data(data)
        if type(requires_grad) is not bool:
            requires_grad = flag("requires_grad", requires_grad)
        if requires_grad and not is_floating(data.dtype):
            raise TypeError(f"data takes floats where requires_grad is True, got {data.dtype}")
        self._data = data
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self._edges: tuple[tuple[Tensor, Vjp], ...] = ()
        self._edit: edits.Edit | None = None  # when other data took the place of the first
        self._prints: dict[int, int] | None = None  # fingerprints of operands, by their ids
        self._serial = edits.serial()

    @property
    def data(self) -> np.ndarray | DeviceArray | BlockSparse:
        if (at_work := AT_WORK.get()) is not None:
            check_unchanged(self, *at_work)
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._set_data(as_data(data))

    @property
    def matrix(self) -> BlockSparse:
        """`data` where it is a BlockSparse, which type checkers cannot know; else TypeError.

        >>> import numpy as np, numbsparse as ns
        >>> ns.Tensor(ns.BlockSparse(np.ones((1, 4, 4)), [[1, 0]])).matrix.layout
        Layout(1 x 2, 1 blocks, density 0.5)
        """
        if not isinstance(data := self.data, BlockSparse):
            raise TypeError(f"matrix is of a tensor that is block-sparse, got {self!r}")
        return data

    def _set_data(self, data: Any) -> None:
        if self.requires_grad and not is_floating(data.dtype):
            raise TypeError(f"data takes floating-point numbers here, got {data.dtype}")
        by = "an assignment to .data"
        if data is self._data:  # as by `x.data *= 2`, which writes first
            edits.note(values_of(data), by)
        self._data, self._edit = data, edits.Edit(edits.serial(), by)
        forget_captures()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.nnz if isinstance(self._data, BlockSparse) else self._data.size

    @property
    def place(self) -> str:
        """ "cpu" or "cuda": where the values are."""
        if isinstance(self._data, BlockSparse):
            return self._data.place
        return "cuda" if isinstance(self._data, DeviceArray) else "cpu"

    @property
    def device(self) -> str:
        """ "cpu", or the GPU: "cuda:0"."""
        device: str = self._data.device  # as NumPy's arrays have it too
        return device

    @property
    def values(self) -> Any:
        """The numbers as one array: the data itself, or a BlockSparse's stored blocks."""
        return values_of(self.data)

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

        It may be called again: the tensor keeps all that it was computed from for as long as it is
        there itself. So of the loss of a step that is over, keep `loss.item()` or `loss.detach()`.
        Several threads may do so at once, where no tensor is one of `DataParallel`.

        Parameters
        ----------
        grad : Tensor or array, optional
            The gradient of this tensor; needed unless it has one value, whose gradient is 1.
        create_graph : bool
            Whether the gradients are themselves differentiable.

        Raises
        ------
        RuntimeError
            If nothing that led here requires a gradient; and where a gradient needs an operand, or
            a result, that was changed since: by a step of an optimizer, by other `data`, by another
            function of this library that writes in place, or with NumPy. The last is noticed by a
            sample of 128 values, so reliably in small arrays only; what other libraries write to
            GPU memory is not noticed.

        Examples
        --------
        >>> import numbsparse as ns
        >>> p = ns.nn.Parameter([3.0])
        >>> loss, optimizer = p * p, ns.nn.optim.SGD([p], lr=0.1)
        >>> p.grad = ns.Tensor([1.0])
        >>> optimizer.step()
        >>> loss.backward()  # the gradient of 3 * 3 would be made of 2.9
        Traceback (most recent call last):
        RuntimeError: ... of multiply, a Parameter of shape (1,), float64, was changed by SGD...
        """
        from numbsparse.autograd.tape import gradients_of, seed_of

        create_graph = flag("create_graph", create_graph)
        with adding(create_graph) as add:
            for leaf, gradient in gradients_of(self, seed_of(self, grad), create_graph):
                if not leaf._edges and leaf.requires_grad:
                    add(leaf, gradient)

    if TYPE_CHECKING:  # added by numbsparse.nn.functional.operators
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

        __hash__ = object.__hash__

        def __eq__(self, other: object) -> Any: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Any: ...  # type: ignore[override]
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __contains__(self, value: Any) -> bool: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __getitem__(self, key: Any) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __bool__(self) -> bool: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...
        def __dlpack__(self, **options: Any) -> Any: ...
        def __dlpack_device__(self) -> tuple[int, int]: ...
        def astype(self, dtype: Any) -> Tensor: ...
        def transpose(self, axes: Sequence[int] | None = None) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._edges:
            raise TypeError("a Tensor that was computed is not pickled or copied: .detach() is")
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in ((n, v) for part in state for n, v in (part or {}).items()):
            setattr(self, name, value)
        # A copy is new here: another process has numbers of its own.
        self._edit, self._prints, self._serial = None, None, edits.serial()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len takes a Tensor with axes, got the shape ()")
        return self.shape[0]

    def __repr__(self) -> str:
        if self.place == "cuda" or isinstance(self.data, BlockSparse):
            return f"Tensor({self.data!r})"
        body = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
        suffix = "" if self.dtype in (np.float64, np.int64) else f", dtype={self.dtype}"
        return f"Tensor({body}{suffix})"


def as_data(data: Any, argument: str = "data") -> Any:
    """What a Tensor holds: a NumPy array, a DeviceArray or a BlockSparse."""
    if type(data) is np.ndarray and data.dtype.kind not in NO_NUMBERS:
        return data  # most are such; a test of any other kind takes longer
    if isinstance(data, Tensor):
        raise TypeError("data takes an array or a BlockSparse, got a Tensor: use .detach()")
    if isinstance(data, DeviceArray | BlockSparse):
        return data
    if is_device_operand(data):
        return as_device_array(data, argument)
    return as_array(data, argument)


def as_tensor(x: Any, argument: str = "x") -> Tensor:
    """A Tensor as it is; an array as one that takes no gradient. Errors call it by `argument`."""
    return x if isinstance(x, Tensor) else Tensor(as_data(x, argument))


def listed(argument: str, given: Any) -> list[Any]:
    """What an argument lists; refused are a Tensor, whose rows would be copies, and a module."""
    alone = isinstance(given, Tensor) or not getattr(given, "ndim", 1)
    holds = hasattr(given, "parameters")
    if alone or holds or not isinstance(given, Iterable):
        see = ": pass its .parameters()" if holds else ""
        raise TypeError(f"{argument} takes a list of Tensors, got a {type(given).__name__}{see}")
    return list(given)


def tensors_of(argument: str, given: Any) -> list[Tensor]:
    """The Tensors that an argument lists; anything else is refused."""
    found = listed(argument, given)
    for i, each in enumerate(found):
        if not isinstance(each, Tensor):
            raise TypeError(f"{argument}[{i}] takes a Tensor, got {type(each).__name__}")
    return found


def unread(a: Any) -> Any:
    """What a Tensor holds, of which no values will be read; anything else as it is."""
    return a._data if isinstance(a, Tensor) else a
