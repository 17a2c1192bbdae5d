"""XLA's foreign function interface, served from Python: no compiler, and no copy of an operand.

XLA calls a C function with a call frame: the buffers to read, those to fill, and attributes. ctypes
makes that function of a Python one. The structures are those of xla/ffi/api/c_api.h, in the folder
that `jax.ffi.include_dir()` names; members after the last one that is read here are left out.

On a GPU the buffers are in its memory, and work goes to the stream that XLA names. XLA may be
capturing it in a command buffer, its CUDA graph, which it launches again without a call. It does
not tell of the graph's end, so what kernels need beside operands is kept for good: an arena for
each result, by its address. No two calls use it at once, as both would write there.
"""

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache, lru_cache, partial
from math import prod
from struct import Struct, unpack
from threading import get_ident
from time import monotonic, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numbsparse import ops
from numbsparse.device import Arena, DeviceArray, runtime
from numbsparse.device.memory import Unordered
from numbsparse.device.streams import at

METADATA, INTERNAL = 1, 13  # an extension's type, an error's code
ANY_SHAPE = "any-shape"  # the last of the words, where one call was compiled for many
CAPTURABLE = 1  # a trait: calls may become part of command buffers
DTYPES = {  # by XLA's number
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(jnp.bfloat16),
}
HEAD = ("struct_size", c_size_t), ("extension", c_void_p)  # of most structures


class NewError(ctypes.Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


class StreamOf(ctypes.Structure):  # of an execution context: its stream is filled in by XLA
    _fields_ = (*HEAD, ("context", c_void_p), ("stream", c_void_p))


StreamGetter = ctypes.CFUNCTYPE(c_void_p, POINTER(StreamOf))
ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(NewError))


# Others as bytes: fields of a structure by the name of each cost ten times as much to read.
_BUFFER = Struct("@NPiPqP")  # struct_size, extension, dtype, data, rank, dims
_ADDRESS = Struct("@24xP")  # of it
_WORD = Struct("@PN")  # start, size: not ended by a zero byte
_EXTENSION = Struct("@NiPP")  # struct_size, type, next, metadata
_VERSION = Struct("@iiI")  # of metadata, behind three words: major, minor; and traits
# struct_size, extension; its version's struct_size, extension, major, minor; internal,
# error_create, error_message, error_destroy, handler_register, stream_get
_API = Struct("@NP NPii PPPPPP")
# struct_size, extension, api, context, stage; of operands and of results struct_size, extension,
# size, types, items; of attributes struct_size, extension, size, types, names, items
_FRAME = Struct("@NPPPi NPqPP NPqPP NPqPPP")

Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # of a CallFrame; gives an error, or a null pointer
_handlers: dict[tuple[str, str], Any] = {}  # XLA knows their addresses alone
_arenas: dict[int, Arena] = {}  # of calls in command buffers, by where their results are
QUIET = 0.2  # seconds without a call
_under_way: set[int] = set()  # threads in a handler
_last_call = 0.0


def register(name: str, compute: Callable[..., None]) -> None:
    """Let XLA call `compute(*operands, *results, *words)` by this name.

    Operands and results are arrays of XLA's memory, in C order: NumPy's on the CPU, on a GPU
    DeviceArrays, with XLA's stream as the current one. Words are what the call's one attribute
    says, which says dtypes and shapes too, or that these vary. XLA calls from threads of its own,
    several at a time. What `compute` raises becomes XLA's error.

    On a GPU `compute` depends on no more than that, and on the library's choice of kernels: what it
    launched is started again when the same call comes again.
    """
    for platform, work in (("cpu", _on_cpu), ("CUDA", _on_gpu)):
        handler = _handlers[name, platform] = Handler(_guarded(partial(work, compute, {})))
        address = ctypes.cast(handler, c_void_p).value
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=platform)


def _guarded(work: Callable[..., None]) -> Callable[[int], int | None]:
    def handle(address: int) -> int | None:
        global _last_call
        thread = get_ident()
        _under_way.add(thread)
        fields = _FRAME.unpack_from(_window(address, _FRAME.size))
        extension, api, context = fields[1:4]
        try:
            if extension:
                _describe(extension, api)
            else:
                _, _, n, _, inputs, _, _, m, _, outputs, _, _, _, _, _, attributes = fields[5:]
                buffers = _pointers(n, inputs) + _pointers(m, outputs)
                work(api, context, buffers, _said(*_pointers(1, attributes)))
        except BaseException as error:  # C has no exceptions
            said = f"{type(error).__name__}: {error}"
            if runtime.several_devices:  # XLA may tell only when the others end, which wait for it
                print(f"numbsparse.jax: {said}", file=sys.stderr, flush=True)
            return _error(api, said)
        finally:
            _under_way.discard(thread)
            _last_call = monotonic()
        return None

    return handle


# `known` is each function's own; `buffers` are where XLA describes operands, and then results.


def _on_cpu(compute: Any, known: Any, api: int, context: int, buffers: Any, said: bytes) -> None:
    _call(compute, buffers, said, _numpy_array)


def _on_gpu(compute: Any, known: Any, api: int, context: int, buffers: Any, said: bytes) -> None:
    theirs = at(_stream(api, context))
    shown = _described if said.endswith(ANY_SHAPE.encode()) else _address
    what: tuple[Any, ...] = (said, *map(shown, buffers))

    def work() -> None:
        theirs.arena = _arenas.setdefault(what[-1], Arena()) if is_captured else None
        with theirs:
            _call(compute, buffers, said, _device_array)

    with theirs.context():  # XLA's thread may have last worked on another GPU
        is_captured = theirs.is_captured
        ops.repeated(known, (is_captured, what), theirs, work)


def _call(compute: Any, buffers: Any, said: bytes, array: Callable[..., Any]) -> None:
    compute(*(array(*_described(buffer)) for buffer in buffers), *said.decode().split())


def wait_for_calls() -> None:
    """Wait for XLA's work, as far as it can be known.

    Of work whose results nobody kept, nothing tells the end but that no handler is called.
    """
    for platform in {"cpu", jax.default_backend()}:
        jax.block_until_ready(jax.live_arrays(platform))
    started = monotonic()
    while _under_way or monotonic() - max(started, _last_call) < QUIET:
        sleep(QUIET / 10)


def _describe(address: int, api: int) -> None:
    """Answer what XLA asks before the first call: which version of the interface this is."""
    _, kind, _, metadata = _EXTENSION.unpack_from(_window(address, _EXTENSION.size))
    if kind == METADATA:
        # Members are only added from one minor version to the next; another major one XLA refuses.
        # Those that ask without their own version are 0.1.
        minor = _api(api)[5] if api else 1
        _VERSION.pack_into(_window(metadata + 24, _VERSION.size), 0, 0, minor, CAPTURABLE)


def _stream(api: int, context: int) -> int:
    """The number of the stream that XLA names for a call."""
    asked = StreamOf(ctypes.sizeof(StreamOf), None, context)
    if _stream_getter(_api(api)[-1])(ctypes.byref(asked)):
        raise RuntimeError("XLA names no stream for this call")
    return asked.stream or 0


@lru_cache
def _stream_getter(address: int) -> Any:
    return StreamGetter(address)


def _api(address: int) -> tuple[int, ...]:
    return _API.unpack_from(_window(address, _API.size))


@lru_cache(maxsize=4096)
def _window(address: int, nbytes: int) -> Any:
    """Memory of XLA's, as it is whenever it is read; at most addresses it comes back."""
    return (ctypes.c_char * nbytes).from_address(address)


def _pointers(n: int, items: int) -> tuple[int, ...]:
    return _of_pointers(n).unpack_from(_window(items, 8 * n))


@cache
def _of_pointers(n: int) -> Struct:
    return Struct(f"{n}P")


def _address(buffer: int) -> int:
    """Of the memory that a buffer describes."""
    (address,) = _ADDRESS.unpack_from(_window(buffer, _ADDRESS.size))
    return address  # type: ignore[no-any-return]


def _described(buffer: int) -> tuple[int, tuple[int, ...], np.dtype]:
    _, _, dtype, data, rank, dims = _BUFFER.unpack_from(_window(buffer, _BUFFER.size))
    return data, unpack(f"{rank}q", _window(dims, 8 * rank)) if rank else (), DTYPES[dtype]


def _said(attribute: int) -> bytes:
    start, size = _WORD.unpack_from(_window(attribute, _WORD.size))
    return _window(start, size).raw


def _device_array(address: int, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    """It says itself that it is on the GPU in use: of XLA's memory the driver may name another."""
    return DeviceArray(address, shape, dtype, None, Unordered(address, None))


def _numpy_array(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    memory: Any = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory)


def _error(api: int, message: str) -> int:
    how = NewError(ctypes.sizeof(NewError), None, message.encode(), INTERNAL)
    error: int = ErrorCreate(_api(api)[7])(ctypes.byref(how))
    return error
