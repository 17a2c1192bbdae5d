"""Arrays of other GPU libraries in, and results back in the caller's library."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from numbsparse.device import cupy_arrays, memory, places, runtime, streams, torch_tensors
from numbsparse.device.array import DeviceArray, empty
from numbsparse.dtypes import is_bfloat16

SHORT_WAYS = (torch_tensors, cupy_arrays)


def is_device_operand(x: Any) -> bool:
    """Whether `x` lives in GPU memory: ours, or any library's that says so."""
    if isinstance(x, DeviceArray):
        return True
    if getattr(x, "_remembers", False):  # a Tensor, of which an array would forget the tape
        return False
    if (known := getattr(x, "is_cuda", None)) is not None:  # of torch, which answers it soonest
        return bool(known)
    if hasattr(x, "__dlpack_device__"):
        cuda, managed = 2, 13  # DLPack's numbers of the kinds of device
        return x.__dlpack_device__()[0] in (cuda, managed)
    return hasattr(x, "__cuda_array_interface__")


def is_read_only(x: Any) -> bool:
    """Whether a GPU array is not to be written: of JAX, or its library says so."""
    library = _library_of(x)
    if library in ("torch", "cupy", "numbsparse"):
        return False
    interface = getattr(x, "__cuda_array_interface__", None)
    return library == "jaxlib" or (interface is not None and interface["data"][1])


def in_order_with(x: Any) -> AbstractContextManager[Any]:
    """A context in which work is in order with that of x's library.

    Work goes to the stream that the library works on. Within `stream(...)` it stays there: the
    library's stream comes before it and after it. JAX gives no stream to wait on: the work is
    done at the end. Arrays on the CPU are in no order.
    """
    ours = streams.current()
    if runtime.capturing() is None:
        if _library_of(x) == "jaxlib":
            return _done_at_the_end() if is_device_operand(x) else nullcontext()
        for way in SHORT_WAYS:
            if (theirs := way.stream_of(x)) is not None and not theirs.is_same(ours):
                away = runtime.several_devices and theirs.device != ours.device
                alone = ours.handle == streams.LEGACY or away  # a default stream, of any GPU
                return theirs if alone else streams.joined(theirs, ours)
    return nullcontext()


@contextmanager
def _done_at_the_end() -> Iterator[None]:
    yield
    streams.finish()


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def read_quickly(x: Any) -> DeviceArray | None:
    """A view by a shortcut, of a library that works on the current stream; else None."""
    for way in SHORT_WAYS:
        if (array := way.read(x)) is not None:
            return array
    return None


def as_device_array(x: Any, argument: str = "x") -> DeviceArray:
    """A view of a GPU array of torch, CuPy, JAX, Numba or ourselves; nothing is copied."""
    if isinstance(x, DeviceArray):
        return x
    array = read_quickly(x)
    if array is None:
        array = _lent(x, argument)
        if any(places % array.itemsize for places in (array.address, *array.strides)):
            raise ValueError(f"{argument} takes values at multiples of their size: pass a copy")
    if not array.is_contiguous and array.size and min(array.strides) < 0:
        raise ValueError(f"{argument} takes strides from 0 up, got {array.strides}: pass a copy")
    return array


def _lent(x: Any, argument: str) -> DeviceArray:
    if not is_device_operand(x):
        raise TypeError(f"{argument} takes an array in GPU memory, got {type(x).__name__}")
    if hasattr(x, "is_neg") and x.is_neg():  # torch lends the values as they were before the sign
        raise ValueError(f"{argument} is a view with another sign: pass {argument}.resolve_neg()")
    runtime.require()
    if getattr(x, "requires_grad", False):
        if torch_tensors.is_recording():
            raise ValueError(
                f"{argument} requires grad, and torch would not see what is done with it: use "
                f"numbsparse.torch, {argument}.detach(), or work within torch.no_grad()"
            )
        x = x.detach()  # torch lends only tensors that its own tape does not watch
    if (number := memory.device_of(x)) != runtime.current_id():
        with places.on(number):
            return _lent(x, argument)
    if runtime.SIMULATED:
        return _from_interface(x)
    from cuda.core.utils import StridedMemoryView

    # Stream number 1 names the legacy default stream in both protocols; 0 is not allowed.
    stream = streams.current()
    with stream.context():
        view = StridedMemoryView.from_any_interface(x, stream_ptr=stream.handle)
    try:
        dtype = np.dtype(view.dtype)
    except (NotImplementedError, TypeError) as error:
        raise TypeError(
            f"{argument} has a dtype that NumPy does not know here, {getattr(x, 'dtype', '')}: "
            "bfloat16 needs the package ml_dtypes, pip install 'numbsparse[bfloat16]'"
        ) from error
    strides = None if view.strides is None else tuple(s * dtype.itemsize for s in view.strides)
    if type(x).__module__.startswith("numba."):
        strides = x.strides  # its protocols call an array contiguous that repeats a line
    return DeviceArray(view.ptr, tuple(view.shape), dtype, strides, owner=x)


def empty_in_library_of(x: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, DeviceArray]:
    """A new array for a result, in the library that `x` came from, and a view of it.

    Where that library has no memory, ours says how much was asked for, and gives up what it keeps.
    JAX's arrays are never written: theirs is made of the view, by `in_library_of`, and None now.
    """
    if not runtime.is_capturing():  # a graph's memory is its own
        for way in SHORT_WAYS:
            if (made := way.empty_like(x, shape)) is not None:
                return made, DeviceArray(way.address_of(made), shape, dtype, None, made)
    array = empty(shape, dtype)
    return None if _library_of(x) == "jaxlib" else in_library_of(x, array), array


def empty_quickly(x: Any, shape: tuple[int, ...]) -> Any:
    """New memory beside an array of ours or a tensor of torch; None for others, or if captured."""
    if runtime.is_capturing():
        return None
    return empty(shape, x.dtype) if type(x) is DeviceArray else torch_tensors.empty_like(x, shape)


def in_library_of(x: Any, result: Any) -> Any:
    """The result as an array of the library that `x` came from.

    Beside torch, CuPy and JAX their own type, without a copy where they share memory, as JAX does
    not; any other caller gets the result as it is: a NumPy array, or a DeviceArray, which speaks
    DLPack.
    """
    if type(x) is np.ndarray or isinstance(x, DeviceArray):
        return result
    library = _library_of(x)
    if isinstance(result, np.ndarray):
        if library == "torch":
            return _torch_of_bits(result, sys.modules["torch"].from_numpy)
        return sys.modules["jax"].numpy.asarray(result) if library == "jaxlib" else result
    if library not in ("torch", "cupy", "jaxlib"):
        return result
    if library == "jaxlib":  # which may drop what is lent while its work on it still waits
        jax = sys.modules["jax"]
        streams.finish()
        lent = jax.dlpack.from_dlpack(result)
        copied = jax.block_until_ready(jax.numpy.array(lent, copy=True))
        lent.delete()  # here, and not in a thread of XLA's
        return copied
    module = sys.modules[library]
    if library == "torch":
        if (tensor := torch_tensors.made_by_torch(result)) is not None:
            return tensor
        return _torch_of_bits(result, lambda bits: module.as_tensor(bits, device=result.device))
    bits = result.view(np.uint16) if is_bfloat16(result.dtype) else result
    lent = module.asarray(bits)
    return lent if bits is result else lent.view(result.dtype)


def _torch_of_bits(result: Any, lend: Any) -> Any:
    """bfloat16 goes by its bits: NumPy and __cuda_array_interface__ have no name for it."""
    if not is_bfloat16(result.dtype):
        return lend(result)
    return lend(result.view(np.int16)).view(sys.modules["torch"].bfloat16)


def _from_interface(x: Any) -> DeviceArray:
    """Read __cuda_array_interface__ (version 3) by hand: the simulator has no cuda.core."""
    interface = x.__cuda_array_interface__
    address, shape = interface["data"][0], tuple(interface["shape"])
    return DeviceArray(address, shape, interface["typestr"], interface.get("strides"), owner=x)


def one_gpu(operands: Mapping[str, Any]) -> int | None:
    """The number of the GPU that all operands on a GPU are on; None where there are none.

    Raises ValueError, which names the operand, where they are on several. A block-sparse matrix
    says where the others must be, else the first of them.
    """
    found = list(_on_gpus(operands.items()))
    if len({number for *_, number in found}) < 2:
        return found[0][2] if found else None
    home, _, number = next((each for each in found if each[1]), found[0])
    other, _, elsewhere = next(each for each in found if each[2] != number)
    raise ValueError(
        f"{other} takes an array on cuda:{number}, where {home} is, got one on cuda:{elsewhere}: "
        f'move it with .to("cuda:{number}")'
    )


def _on_gpus(operands: Any) -> Iterator[tuple[str, bool, int]]:
    """(name, whether it is a block-sparse matrix, number of the GPU) of those on a GPU."""
    for name, operand in operands:
        values = getattr(operand, "values", operand)
        if isinstance(values, DeviceArray):
            yield name, values is not operand, values.device_id
        elif isinstance(operand, list | tuple):
            names = getattr(operand, "_fields", [f"{name}[{i}]" for i in range(len(operand))])
            yield from _on_gpus(zip(names, operand, strict=True))
        elif is_device_operand(operand):
            yield name, False, memory.device_of(operand)
