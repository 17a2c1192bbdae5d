"""Tensors of torch by a shortcut: read by their attributes, made by torch itself.

The protocols take three times as long to lend a tensor, and five times as long to hand one back.
They still see to the rest: other types, dtypes and GPUs, and torch working on another stream.
"""

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from numbsparse.device import memory, runtime, streams
from numbsparse.device.array import DeviceArray, contiguous_strides
from numbsparse.dtypes import as_dtype


def read(x: Any) -> DeviceArray | None:
    """A view of a tensor on the GPU in use; None for what is left to the protocols."""
    torch = _torch_of(x)
    if torch is None or not x.is_cuda or x.layout is not torch.strided or x.is_neg():
        return None
    if x.requires_grad and torch.is_grad_enabled():  # which is refused
        return None
    dtype, index, current = _numpy_dtype(x.dtype), x.get_device(), streams.current()
    if dtype is None or index != current.device:
        return None
    if (raw_stream(torch)(index) or streams.LEGACY) != current.handle:
        return None
    strides = None
    if not x.is_contiguous():
        strides = tuple(stride * dtype.itemsize for stride in x.stride())
    return DeviceArray(x.data_ptr(), tuple(x.shape), dtype, strides, owner=x)


def identity(x: Any) -> tuple[Any, ...] | None:
    """What distinguishes one tensor in the memory of a GPU; None for what `read` refuses."""
    torch = sys.modules.get("torch")  # as `_torch_of` does, a call less
    if torch is None or runtime.SIMULATED or type(x) not in _types_of(torch) or not x.is_cuda:
        return None
    if x.layout is not torch.strided or x.is_neg():
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return None
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def stream_handle(x: Any) -> int:
    """The number of the stream that torch works on, of the GPU that its tensor x is on; else 0."""
    torch = sys.modules.get("torch")
    if torch is None or runtime.SIMULATED or type(x) not in _types_of(torch) or not x.is_cuda:
        return 0
    return raw_stream(torch)(x.get_device()) or streams.LEGACY


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new tensor of the dtype of x; None where x is not torch's, or torch has no memory."""
    if _torch_of(x) is None:
        return None
    try:
        return new_empty(x, shape)
    except RuntimeError:
        return None


def new_empty(x: Any, shape: tuple[int, ...]) -> Any:
    """x.new_empty(shape), x being a plain tensor on a GPU, as compiled code does it: 1 us less."""
    quick, device_in_use = _maker(sys.modules["torch"])
    if quick is None or device_in_use() != x.get_device():
        return x.new_empty(shape)
    return quick(shape, _strides(shape), x.dtype)


@cache
def _maker(torch: Any) -> tuple[Any, Any]:
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda", None), torch._C._cuda_getDevice


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In items, as torch has them."""
    return contiguous_strides(tuple(max(n, 1) for n in shape), 1)


def address_of(x: Any) -> int:
    return int(x.data_ptr())


def stream_of(x: Any) -> streams.Stream | None:
    """The stream that torch works on, on the GPU of x, where x is a tensor of its own."""
    torch = _torch_of(x)
    if torch is None or not x.is_cuda:
        return None
    index = x.get_device()
    return streams.at(raw_stream(torch)(index), device=index)


def is_recording() -> bool:
    """Whether torch would keep what is done with a tensor that requires grad, and could not."""
    return bool(sys.modules["torch"].is_grad_enabled())


def made_by_torch(array: DeviceArray) -> Any:
    """The array as the tensor that lent its memory, where one did for a graph of torch's."""
    lent = array.owner
    if type(lent) is not memory.Lent or array.address != lent.address or not array.is_contiguous:
        return None
    torch = sys.modules["torch"]
    dtype = getattr(torch, array.dtype.name)
    return lent.buffer[: array.nbytes].view(dtype).view(array.shape)


def _torch_of(x: Any) -> Any:
    """The module torch where x is a tensor of its own; a subclass may mean other values."""
    torch = sys.modules.get("torch")
    own = torch is not None and not runtime.SIMULATED and type(x) in _types_of(torch)
    return torch if own else None


@cache
def _types_of(torch: Any) -> tuple[type, ...]:
    return torch.Tensor, torch.nn.Parameter


@cache
def _numpy_dtype(dtype: Any) -> np.dtype | None:
    try:
        return as_dtype(str(dtype).removeprefix("torch."))
    except (TypeError, ImportError):  # known only to torch, or bfloat16 without ml_dtypes
        return None


@cache
def raw_stream(torch: Any) -> Callable[[int], int]:
    """What returns the number of a GPU's current stream; 0 is the legacy default stream."""
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda index: torch.cuda.current_stream(index).cuda_stream)
