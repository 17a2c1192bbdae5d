"""XLA's foreign function interface, served from Python: no compiler, and no copy of an operand.

XLA calls a C function with a call frame: the buffers to read, those to fill, and attributes. ctypes
makes that function of a Python one. The structures are those of xla/ffi/api/c_api.h, in the folder
that `jax.ffi.include_dir()` names; members after the last one that is read here are left out.

On a GPU the buffers are in its memory, and work goes to the stream that XLA names. Handlers do not
claim to be fit for XLA's command buffers, its CUDA graphs: a kernel may need memory beside, and XLA
says no more of a graph's end than of its beginning. So XLA ends a graph before such a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from math import prod
from threading import get_ident
from time import monotonic, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numbsparse.device import DeviceArray, on_this_gpu, stream

METADATA, STRING, INTERNAL = 1, 4, 13  # an extension's type, an attribute's, an error's code
DTYPES = {  # by XLA's number
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(jnp.bfloat16),
}
HEAD = ("struct_size", c_size_t), ("extension", c_void_p)  # of most structures


class Version(ctypes.Structure):
    _fields_ = (*HEAD, ("major", c_int), ("minor", c_int))


class Metadata(ctypes.Structure):  # filled by the handler
    _fields_ = ("struct_size", c_size_t), ("version", Version), ("traits", ctypes.c_uint32)


class Extension(ctypes.Structure):  # the one for metadata, which others begin like
    _fields_ = (
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(Metadata)),
    )


class NewError(ctypes.Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


class StreamOf(ctypes.Structure):  # of an execution context: its stream is filled in by XLA
    _fields_ = (*HEAD, ("context", c_void_p), ("stream", c_void_p))


class Api(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", ctypes.CFUNCTYPE(c_void_p, POINTER(NewError))),
        ("error_message", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", ctypes.CFUNCTYPE(c_void_p, POINTER(StreamOf))),
    )


class Buffer(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class Buffers(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("items", POINTER(POINTER(Buffer))),
    )


class Word(ctypes.Structure):  # not ended by a zero byte
    _fields_ = ("start", c_void_p), ("size", c_size_t)


class Attributes(ctypes.Structure):  # all of ours are words
    _fields_ = (
        *HEAD,
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(Word))),
        ("items", POINTER(POINTER(Word))),
    )


class CallFrame(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    )


Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))  # gives an error, or a null pointer
PLATFORMS = ("cpu", "CUDA")
_handlers: dict[tuple[str, str], Any] = {}  # XLA knows their addresses alone
QUIET = 0.2  # seconds without a call
_under_way: set[int] = set()  # threads in a handler
_last_call = 0.0


def register(name: str, compute: Callable[..., None]) -> None:
    """Let XLA call `compute(*operands, *results, **attributes)` by this name.

    Operands and results are arrays of XLA's memory, in C order: NumPy's on the CPU, on a GPU
    DeviceArrays, with XLA's stream as the current one. Attributes are words. XLA calls from threads
    of its own, several at a time. What `compute` raises becomes XLA's error.
    """
    for platform, work in zip(PLATFORMS, (_on_cpu, _on_gpu), strict=True):
        handler = _handlers[name, platform] = Handler(_guarded(work, compute))
        address = ctypes.cast(handler, c_void_p).value
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=platform)


def _guarded(work: Callable[..., None], compute: Callable[..., None]) -> Callable[..., int | None]:
    def handle(pointer: Any) -> int | None:
        global _last_call
        frame, thread = pointer.contents, get_ident()
        _under_way.add(thread)
        try:
            if frame.extension:
                _describe(frame)
            else:
                work(frame, compute)
        except BaseException as error:  # C has no exceptions
            return _error(frame, f"{type(error).__name__}: {error}")
        finally:
            _under_way.discard(thread)
            _last_call = monotonic()
        return None

    return handle


def _on_cpu(frame: CallFrame, compute: Callable[..., None]) -> None:
    _call(frame, compute, _numpy_array)


def _on_gpu(frame: CallFrame, compute: Callable[..., None]) -> None:
    asked = StreamOf(ctypes.sizeof(StreamOf), None, frame.context)
    if frame.api.contents.stream_get(ctypes.byref(asked)):
        raise RuntimeError("XLA names no stream for this call")
    on_this_gpu("an array of JAX")
    with stream(asked.stream or 0):
        _call(frame, compute, DeviceArray)


def _call(frame: CallFrame, compute: Callable[..., None], array: Callable[..., Any]) -> None:
    buffers = *_buffers(frame.operands), *_buffers(frame.results)
    compute(*(array(*of) for of in buffers), **dict(_words(frame.attributes)))


def wait_for_calls() -> None:
    """Wait for XLA's work, as far as it can be known.

    Of work whose results nobody kept, nothing tells the end but that no handler is called.
    """
    for platform in {"cpu", jax.default_backend()}:
        jax.block_until_ready(jax.live_arrays(platform))
    started = monotonic()
    while _under_way or monotonic() - max(started, _last_call) < QUIET:
        sleep(QUIET / 10)


def _describe(frame: CallFrame) -> None:
    """Answer what XLA asks before the first call: which version of the interface this is."""
    extension = Extension.from_address(frame.extension)
    if extension.type == METADATA:
        version = extension.metadata.contents.version
        # Members are only added from one minor version to the next; another major one XLA refuses.
        # Those that ask without their own version are 0.1.
        version.major, version.minor = 0, frame.api.contents.version.minor if frame.api else 1


def _buffers(buffers: Buffers) -> Iterator[tuple[int, tuple[int, ...], np.dtype]]:
    """Address, shape and dtype of each."""
    for i in range(buffers.size):
        buffer = buffers.items[i].contents
        yield buffer.data or 0, tuple(buffer.dims[: buffer.rank]), DTYPES[buffer.dtype]


def _numpy_array(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    memory: Any = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory)


def _words(attributes: Attributes) -> Iterator[tuple[str, str]]:
    for i in range(attributes.size):
        if attributes.types[i] != STRING:
            raise TypeError(f"attributes take words, got XLA's type {attributes.types[i]}")
        pair = attributes.names[i].contents, attributes.items[i].contents
        name, word = (ctypes.string_at(part.start, part.size).decode() for part in pair)
        yield name, word


def _error(frame: CallFrame, message: str) -> int:
    how = NewError(ctypes.sizeof(NewError), None, message.encode(), INTERNAL)
    error: int = frame.api.contents.error_create(ctypes.byref(how))
    return error
