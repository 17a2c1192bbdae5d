"""DeviceArray: a strided array in GPU memory that every GPU library can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from numbers import Number
from operator import index
from typing import Any

import numpy as np

from numbsparse.device import dlpack, memory, places, runtime, streams
from numbsparse.dtypes import as_array, as_dtype, is_bfloat16


class DeviceArray:
    """An array in GPU memory, with NumPy's shape, dtype and strides.

    It computes nothing by itself: the functions of numbsparse do. Slices, `.T` and `.reshape` of
    contiguous arrays are views. torch, CuPy, JAX and Numba read it without a copy, through
    `__cuda_array_interface__` or DLPack. Nothing is copied to the host unless `.numpy()` says so.

    Make one with `numbsparse.to_device`. `device` is its GPU, "cuda:0"; `.to("cuda:1")` copies it
    to another one, and is itself on its own.

    >>> import numpy as np, numbsparse as ns
    >>> x = ns.to_device(np.arange(6, dtype=np.float32).reshape(2, 3))
    >>> x.shape, x.T.strides, x[1].numpy()
    ((2, 3), (4, 12), array([3., 4., 5.], dtype=float32))
    """

    __slots__ = (
        "__weakref__",
        "_strides",
        "_views",
        "address",
        "dtype",
        "is_contiguous",
        "owner",
        "packed",
        "shape",
    )

    # NumPy steps back, so that `numpy_array @ w` and the like reach our own methods or fail.
    __array_ufunc__ = None

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        owner: Any = None,
    ):
        self.address = address
        self.shape = shape
        self.dtype = dtype = np.dtype(dtype)
        self.owner = owner
        self.packed: Any = None  # how kernels take it, worked out once: see device/launch.py
        self._strides = strides
        self._views: dict[Any, DeviceArray] | None = None  # those asked for before
        # Whether the values are in C order without gaps; an axis of one item may have any stride.
        self.is_contiguous = strides is None or _without_gaps(shape, strides, dtype.itemsize)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from an item to the next, along each axis."""
        if self._strides is None:
            self._strides = contiguous_strides(self.shape, self.dtype.itemsize)
        return self._strides

    @property
    def identity(self) -> tuple[Any, ...]:
        """What distinguishes one array in memory from another."""
        return self.address, self.shape, self._strides, self.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def device_id(self) -> int:
        """The number of the GPU."""
        if not runtime.several_devices:
            return runtime.only_device
        return memory.device_of(self._block, self.address)

    @property
    def device(self) -> str:
        """The GPU: "cuda:0"."""
        return f"cuda:{self.device_id}"

    def to(self, place: str) -> Any:
        """The values in another place: "cpu" (a NumPy array), "cuda" or "cuda:1"; itself there."""
        number = places.id_of(place)
        if number is None:
            return self.numpy()
        if number == self.device_id:
            return self
        with places.on(self.device_id):
            here = streams.current()
            memory.settle(self._block)
            memory.note((self._block,))  # before it serves again, its own stream waits for this one
        with places.on(number):
            there = streams.current()
            there.wait(here)
            fresh = _copied(self)
        here.wait(there)
        return fresh

    @property
    def batch_is_contiguous(self) -> bool:
        """Of (batch, features): whether it is feature-major."""
        return self.strides[0] == self.itemsize != self.strides[1]

    @property
    def T(self) -> DeviceArray:
        """The transposed view."""
        if self._views is not None and (known := self._views.get("T")) is not None:
            return known
        strides = self.strides[::-1]
        return self._keep(
            "T", DeviceArray(self.address, self.shape[::-1], self.dtype, strides, self.owner)
        )

    @property
    def span(self) -> DeviceArray:
        """The memory of this view, gaps counted, as an array of one axis."""
        if self._views is not None and (known := self._views.get("span")) is not None:
            return known
        if self.is_contiguous and len(self.shape) == 1:
            return self
        items = (span_of(self),)
        return self._keep("span", DeviceArray(self.address, items, self.dtype, None, self.owner))

    def _keep(self, name: Any, view: DeviceArray) -> DeviceArray:
        """Remember a view: those of long-lived arrays are needed at every launch."""
        if self._views is None:
            self._views = {}
        self._views[name] = view
        return view

    def reshape(self, *shape: Any) -> DeviceArray:
        """A view with another shape; of a C-contiguous array only."""
        if len(shape) == 1 and not isinstance(shape[0], int | np.integer):
            shape = tuple(shape[0])
        if self._views is not None and (known := self._views.get(shape)) is not None:
            return known
        asked = shape
        shape = tuple(map(index, shape))  # of NumPy's whole numbers too
        if shape == self.shape and self.is_contiguous:
            return self
        if shape.count(-1) == 1:
            rest = -prod(shape) or 1  # kernels take no blocks at all in rows of no length
            shape = tuple(self.size // rest if n == -1 else n for n in shape)
        if prod(shape) != self.size or min(shape, default=0) < 0:
            raise ValueError(f"an array of shape {self.shape} cannot take the shape {shape}")
        if not self.is_contiguous:
            raise ValueError("reshape takes a C-contiguous array; copy it first")
        return self._keep(asked, DeviceArray(self.address, shape, self.dtype, None, self.owner))

    def view(self, dtype: Any) -> DeviceArray:
        """The same bits as another dtype; of another size where the array is C-contiguous.

        The last axis is then as much longer or shorter.
        """
        dtype = as_dtype(dtype)
        if dtype.itemsize == self.itemsize:
            return DeviceArray(self.address, self.shape, dtype, self.strides, self.owner)
        *rest, n = self.shape or (0,)
        nbytes = n * self.itemsize
        if not (self.shape and self.is_contiguous) or nbytes % dtype.itemsize:
            raise ValueError(
                f"dtype takes {self.itemsize} bytes an item, or what fills the last axis of a "
                f"C-contiguous array, got {dtype}"
            )
        shape = (*rest, nbytes // dtype.itemsize)
        return DeviceArray(self.address, shape, dtype, None, self.owner)

    def __getitem__(self, key: Any) -> DeviceArray:
        """Basic indexing: integers, slices with positive steps, `...`, None. Always a view."""
        if type(key) is int and self.is_contiguous and self.shape and 0 <= key < self.shape[0]:
            shape = self.shape[1:]  # as below, at a tenth of the time
            address = self.address + key * prod(shape) * self.dtype.itemsize
            return DeviceArray(address, shape, self.dtype, None, self.owner)
        items = key if isinstance(key, tuple) else (key,)
        for item in items:
            if isinstance(item, slice):
                if item.step is not None and item.step < 0:
                    raise IndexError("slices of a DeviceArray take positive steps")
            elif item is None or item is Ellipsis:
                continue
            elif not isinstance(item, int | np.integer) or isinstance(item, bool):
                raise IndexError(
                    f"a DeviceArray takes integers and slices as indices, got {item!r}"
                )
        # With an ellipsis NumPy gives a view where it would else read a value.
        view = unread(self)[items if Ellipsis in items else (*items, ...)]
        address, _ = view.__array_interface__["data"]
        return DeviceArray(address, view.shape, self.dtype, view.strides, self.owner)

    def numpy(self) -> np.ndarray:
        """Copy to the host, waiting for pending work: a new NumPy array."""
        host = np.empty(self.shape if self.is_contiguous else span_of(self), self.dtype)
        with self._at_home():
            memory.settle(self._block)
            memory.copy_out(host, self.address)
        if self.is_contiguous:
            return host
        return np.lib.stride_tricks.as_strided(host, self.shape, self.strides).copy()

    def _at_home(self) -> AbstractContextManager[Any]:
        """In it work goes to this array's GPU."""
        return places.on(self.device_id) if runtime.several_devices else nullcontext()

    @property
    def _block(self) -> Any:
        """What the memory came from, or the object that lends it."""
        return next(owners_of((self,)))

    def item(self) -> Any:
        """The only value, as a Python number, copied from the device."""
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def _lend(self) -> None:
        if isinstance(block := self._block, memory.Block):
            block.is_lent = True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if is_bfloat16(self.dtype):  # hasattr() then says no, and libraries go on to DLPack
            raise AttributeError("__cuda_array_interface__ has no bfloat16: use DLPack")
        self._lend()
        with self._at_home():
            memory.settle(self._block)
            stream = None if runtime.SIMULATED else streams.current().handle
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None if self.is_contiguous else self.strides,
            "version": 3,
            "stream": stream,
        }

    def __dlpack__(self, **options: Any) -> Any:
        if is_bfloat16(self.dtype):  # cuda.core lends no bfloat16
            return dlpack.as_bfloat16(self.view(np.uint16).__dlpack__(**options))
        self._lend()
        reader = options.get("stream")  # -1: nothing is to wait
        with self._at_home():
            if reader != -1:
                memory.settle(self._block, None if reader is None else streams.at(reader))
            return self._strided_memory_view().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        view = self.view(np.uint16) if is_bfloat16(self.dtype) else self
        return view._strided_memory_view().__dlpack_device__()

    def _strided_memory_view(self) -> Any:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        buffer = Buffer.from_handle(self.address, span_of(self) * self.itemsize, owner=self)
        strides = tuple(s // self.itemsize for s in self.strides)
        return StridedMemoryView.from_buffer(buffer, self.shape, strides, dtype=self.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a DeviceArray is not copied to the host silently: call .numpy()")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (DeviceArray, np.ndarray, Number)):
            raise TypeError("a DeviceArray is not compared silently: call .numpy(), or ask by `is`")
        return NotImplemented

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("the truth of a DeviceArray is on the device: call .numpy()")

    def __reduce__(self) -> tuple[Any, ...]:
        return to_device, (self.numpy(),)

    def __repr__(self) -> str:
        where = f", device={self.device}" if runtime.several_devices else ""
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}{where})"


def owners_of(args: tuple[Any, ...]) -> Iterator[Any]:
    """What holds the memory of the arrays among a kernel's arguments."""
    for arg in args:
        if type(arg) is DeviceArray:
            owner = arg.owner
            while type(owner) is DeviceArray:  # of a view
                owner = owner.owner
            yield owner
        elif isinstance(arg, tuple):
            yield from owners_of(arg)


def empty(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """An array in GPU memory whose values are whatever was there."""
    dtype = np.dtype(dtype)
    owner = memory.allocate(prod(shape) * dtype.itemsize)
    return DeviceArray(owner.address, tuple(map(int, shape)), dtype, None, owner)


def to_device(host: Any, place: str = "cuda") -> DeviceArray:
    """Copy a NumPy array (or what `numpy.asarray` takes) to the GPU in use, or another: "cuda:1".

    Values of another byte order, as files have, arrive in the GPU's. A DeviceArray that is there
    comes back itself. Raises ValueError where there is no such GPU, RuntimeError where there is
    none, TypeError for Python's objects.

    >>> import numbsparse as ns
    >>> ns.to_device([1.0, 2.0]).numpy()
    array([1., 2.])
    """
    if isinstance(host, DeviceArray) and places.id_of(place) is not None:
        return host.to(place)  # type: ignore[no-any-return]
    host = as_array(host, "host")
    native = host.dtype if host.dtype.isnative else host.dtype.newbyteorder("=")
    host = np.ascontiguousarray(host, native).reshape(host.shape)
    if not isinstance(place, str) or place != "cuda":
        if (number := places.id_of(place)) is None:
            raise ValueError('place takes "cuda", or a GPU as in "cuda:1", got "cpu"')
        with places.on(number):
            return to_device(host)
    array = empty(host.shape, host.dtype)
    memory.copy_in(array.address, host)
    return array


def moved(array: Any, place: str) -> Any:
    """A NumPy array, or what else has `to`, in the memory of a place; itself if it is there."""
    if not isinstance(array, np.ndarray):
        return array.to(place)
    return array if places.id_of(place) is None else to_device(array, place)


def copy_of(array: DeviceArray) -> DeviceArray:
    """An array with memory of its own, of the same values and strides."""
    with array._at_home():
        _note(array)
        return _copied(array)


def _copied(array: DeviceArray) -> DeviceArray:
    """The same on the GPU in use, in the order of what this array's stream is given."""
    fresh = empty(array.span.shape, array.dtype)
    of = array.device_id if runtime.several_devices else None
    memory.copy_within(fresh.address, array.span.address, fresh.nbytes, of)
    strides = None if array.is_contiguous else array.strides
    return DeviceArray(fresh.address, array.shape, array.dtype, strides, fresh.owner)


def refill(target: DeviceArray, source: Any) -> None:
    """target[...] = source, C-contiguous both: a NumPy array or a DeviceArray of its dtype.

    A source on another GPU is copied from there.
    """
    with target._at_home():
        if isinstance(source, DeviceArray):
            source = source.to(target.device) if runtime.several_devices else source
            _note(target, source)
            memory.copy_within(target.address, source.address, target.nbytes)
        else:
            _note(target)
            memory.copy_in(target.address, np.ascontiguousarray(source))


def simulated(array: DeviceArray) -> np.ndarray:
    """The memory of a C-contiguous array itself, which in the simulator is the host's."""
    nbytes = memory.view(array.address, array.nbytes) if array.size else np.empty(0, np.uint8)
    return nbytes.view(array.dtype).reshape(array.shape)


def _note(*used: Any) -> None:
    """As launches do of their arguments, where memory is copied by address."""
    if streams.several:
        memory.note(owners_of(used))


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array in C order without gaps."""
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


def _without_gaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != itemsize and n != 1:
            return False
        itemsize *= n
    return True


def span_of(array: DeviceArray) -> int:
    """Items from the first to the last, gaps counted."""
    if array.is_contiguous or array.size == 0:
        return array.size
    last = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return last // array.itemsize + 1


def unread(array: DeviceArray) -> np.ndarray:
    """The array to NumPy, which is asked where parts of it are, and must read nothing of it."""
    return np.asarray(_Place(array))


class _Place:
    def __init__(self, a: DeviceArray):
        self.__array_interface__ = {
            "version": 3,
            "data": (a.address, True),
            "shape": a.shape,
            "strides": a.strides,
            "typestr": f"|V{a.itemsize}",
        }
