"""Arrays of CuPy by a shortcut: read by their attributes, made by CuPy itself.

As in `torch_tensors`, the protocols see to the rest: other GPUs, and CuPy on another stream.
"""

import sys
from typing import Any

from numbsparse.device import runtime, streams
from numbsparse.device.array import DeviceArray


def read(x: Any) -> DeviceArray | None:
    """A view of an array on the GPU in use; None for what is left to the protocols."""
    cupy, current = _cupy_of(x), streams.current()
    if cupy is None or x.device.id != current.device:
        return None
    if (cupy.cuda.get_current_stream().ptr or streams.LEGACY) != current.handle:
        return None
    strides = None if x.flags.c_contiguous else x.strides
    if strides is not None and min(strides) < 0:  # which the protocols' way refuses
        return None
    return DeviceArray(x.data.ptr, x.shape, x.dtype, strides, owner=x)


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the dtype of x; None where x is not CuPy's, or CuPy has no memory."""
    if (cupy := _cupy_of(x)) is None:
        return None
    try:
        return cupy.empty(shape, dtype=x.dtype)
    except MemoryError:
        return None


def address_of(x: Any) -> int:
    return int(x.data.ptr)


def stream_of(x: Any) -> streams.Stream | None:
    """The stream that CuPy works on, on the GPU of x, where x is an array of its own."""
    if (cupy := _cupy_of(x)) is None:
        return None
    theirs = cupy.cuda.get_current_stream(x.device.id)
    return streams.at(theirs.ptr, theirs, x.device.id)


def _cupy_of(x: Any) -> Any:
    """The module cupy where x is an array of its own; a subclass may mean other values."""
    cupy = sys.modules.get("cupy")
    own = cupy is not None and not runtime.SIMULATED and type(x) is cupy.ndarray
    return cupy if own else None
