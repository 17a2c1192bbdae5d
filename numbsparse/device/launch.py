"""Start a kernel. Compiled once per combination of argument types; about 4 us a launch after.

numba-cuda compiles, cuda.core loads; the driver launches, at a sixth of the cost of Numba's own
launch. Arguments are packed here as Numba's kernels take them, 8 bytes each: an array is (meminfo,
parent, size, itemsize, data, *shape, *strides), a tuple its items, one after another.
"""

import ctypes
import struct
from collections.abc import Iterable
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
from numba import types

from numbsparse.device import kernel_cache, memory, runtime, streams
from numbsparse.device.array import DeviceArray, owners_of, span_of

_NUMBA_TYPES = {
    np.dtype(name): getattr(types, name)
    for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "uint16", "uint32")
} | {np.dtype(bool): types.boolean}

PERMITTED = 32 * 1024
"""Bytes of dynamic shared memory without permission: 48 KB, static arrays counted, are free."""

FLOATS = (float, np.floating)

_INT, _FLOAT = struct.Struct("q").pack, struct.Struct("f4x").pack

_compiled: dict[tuple[Any, ...], Any] = {}
_compiling = Lock()  # several threads may want a kernel at once
_prepared: "dict[tuple[Any, ...], Prepared]" = {}
_kinds: dict[tuple[Any, ...], int] = {}


def launch(
    kernel: Any,
    grid: Any,
    block: Any,
    *args: Any,
    shared_bytes: int = 0,
    cluster: tuple[int, ...] | None = None,
    overlap: bool = False,
    together: bool = False,
) -> None:
    """Run `kernel` on a grid of blocks of threads.

    Parameters
    ----------
    kernel : a function decorated with `numba.cuda.jit`
    grid, block : int or tuple of int
        Blocks in the grid and threads in a block, along x, y and z. An empty grid does nothing.
    args : DeviceArray, int (taken as int64), float (as float32), tuple of int, NamedTuple of these
    shared_bytes : bytes of dynamic shared memory per block
    cluster : blocks in a cluster, along x, y and z: on compute capability 9.0 and up
        Such blocks run together and read each other's shared memory. The grid is a multiple of it.
    overlap : whether blocks may start while earlier kernels end, on compute capability 9.0 and up
        All threads of the kernel call `ptx.wait_for_earlier_kernels` before they touch its results.
    together : whether blocks wait for each other, so that all must run at once or none
        A grid that does not fit on the GPU at once is refused.
    """
    if type(grid) is not tuple:
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
    if 0 in grid:
        return
    capture = _hold(args)
    if runtime.SIMULATED:
        of = kernel, grid, block, shared_bytes, list(map(_simulated, args)), cluster, together
        if (recording := runtime.recording()) is not None:
            recording.add(partial(_simulate, *of))
        _simulate(*of)
        return
    prepared, values = _prepare(kernel, args, shared_bytes)
    _start(prepared, values, (grid, block, shared_bytes, cluster, overlap, together), capture)


def _hold(args: tuple[Any, ...]) -> Any:
    """Whoever records launches keeps the memory of these; the capture, if one is under way."""
    capture = runtime.capturing()
    if capture is not None:
        capture.hold(args)
    elif streams.several:
        memory.note(owners_of(args))
    if runtime.several_devices:
        _check_devices(args)
    if (recording := runtime.recording()) is not None:
        recording.hold(args)
    return capture


def _check_devices(args: Iterable[Any]) -> None:
    """Refuse arrays of another GPU than the one in use."""
    for arg in args:
        if isinstance(arg, DeviceArray) and arg.device_id != runtime.current_id():
            raise ValueError(
                f"a kernel on cuda:{runtime.current_id()} takes arrays there, got one on "
                f'{arg.device}: move it, or start the kernel within ns.device("{arg.device}")'
            )
        if isinstance(arg, tuple):
            _check_devices(arg)


def _prepare(kernel: Any, args: tuple[Any, ...], shared_bytes: int) -> "tuple[Prepared, bytes]":
    """The compiled kernel, and the arguments as it takes them."""
    device = runtime.current_id() if runtime.several_devices else None
    kinds: list[Any] = [kernel, shared_bytes > PERMITTED and shared_bytes, device]
    parts: list[bytes] = []
    _take(args, kinds, parts)
    values = b"".join(parts)
    prepared = _prepared.get(key := tuple(kinds))
    if prepared is None:
        with streams.aside(), streams.current().context():
            prepared = Prepared(_compile(kernel, args), len(values), shared_bytes)
        _prepared[key] = prepared
    return prepared, values


def _take(args: tuple[Any, ...], kinds: list[Any], parts: list[bytes]) -> None:
    """Add what distinguishes the arguments' types, and what a kernel takes for each."""
    for arg in args:
        if type(arg) is DeviceArray:
            kind, part = arg.packed or _pack(arg)
            kinds.append(kind)
            parts.append(part)
        elif type(arg) is int:
            kinds.append(int)
            parts.append(_INT(arg))
        elif type(arg) is tuple:
            kinds.append(~len(arg))  # below the numbers of the arrays
            parts += map(_INT, arg)
        elif isinstance(arg, FLOATS):
            kinds.append(float)
            parts.append(_FLOAT(arg))
        elif isinstance(arg, tuple):
            kinds.append(type(arg))
            _take(arg, kinds, parts)
        else:
            kinds.append(int)
            parts.append(_INT(int(arg)))


def _start(prepared: "Prepared", values: bytes, how: tuple[Any, ...], capture: Any) -> None:
    start, setting = _launcher()
    stream = streams.current().handle if capture is None else capture.stream_handle
    config = setting(*how, stream)
    with prepared.lock:
        prepared.values[:] = values
        (error,) = start(config, prepared.function, prepared.pointers, 0)
        if error:
            again = partial(start, config, prepared.function, prepared.pointers, 0)
            error = streams.current().retried(again)
    if (recording := runtime.recording()) is not None:
        slots = Slots(values)
        again = partial(start, config, prepared.function, slots.pointers, 0)
        recording.add(again, (slots, prepared))  # the kernel's code lives as long
    if error:
        raise RuntimeError(
            f"a kernel was not launched: {error.name}, grid {how[0]}, block {how[1]}"
        )


class Prepared:
    """A compiled kernel, and where it finds its arguments: 8 bytes each, in one place.

    Attributes
    ----------
    function : the driver's handle
    values : memoryview of the arguments, for one launch at a time: see `lock`
    pointers : address of the addresses of the arguments
    """

    def __init__(self, kernel: Any, nbytes: int, shared_bytes: int):
        if shared_bytes > PERMITTED:
            _permit_shared_memory(kernel, shared_bytes)
        self._kernel = kernel  # holds the machine code
        error, self.function = runtime.driver().cuKernelGetFunction(int(kernel.handle))
        if error:
            raise RuntimeError(f"a kernel was not loaded: {error.name}")
        slots = Slots(bytes(nbytes))
        self.pointers, self.values = slots.pointers, slots.values
        self._slots, self.lock = slots, Lock()


class Slots:
    """Arguments of a kernel, 8 bytes each, and the address of their addresses."""

    __slots__ = ("_pointers", "pointers", "values")

    def __init__(self, values: bytes):
        slots = (ctypes.c_int64 * max(len(values) // 8, 1))()
        first = ctypes.addressof(slots)
        self._pointers = (ctypes.c_void_p * len(slots))(*range(first, first + 8 * len(slots), 8))
        self.pointers = ctypes.addressof(self._pointers)
        self.values = memoryview(slots).cast("B")[: len(values)]  # which keeps them
        self.values[:] = values


@cache
def _launcher() -> tuple[Any, Any]:
    """The driver's launch and its settings; imported with the first launch."""
    driver = runtime.driver()

    @lru_cache(maxsize=4096)
    def setting(
        grid: Any,
        block: Any,
        shared_bytes: int,
        cluster: Any,
        overlap: bool,
        together: bool,
        stream: int,
    ) -> Any:
        config, ones = driver.CUlaunchConfig(), (1, 1, 1)
        block = block if isinstance(block, tuple) else (block,)
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, *ones)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, *ones)[:3]
        config.sharedMemBytes, config.hStream = shared_bytes, driver.CUstream(stream)
        attributes = []

        def attribute(name: str) -> Any:
            """The value of one more."""
            attributes.append(driver.CUlaunchAttribute())
            ids = driver.CUlaunchAttributeID
            attributes[-1].id = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")
            return attributes[-1].value

        if cluster is not None:
            if any(n % c for n, c in zip(grid, cluster, strict=True)):
                raise ValueError(f"grid takes a multiple of the cluster {cluster}, got {grid}")
            along = attribute("CLUSTER_DIMENSION").clusterDim
            along.x, along.y, along.z = (*cluster, *ones)[:3]
        if overlap:
            early = attribute("PROGRAMMATIC_STREAM_SERIALIZATION")
            early.programmaticStreamSerializationAllowed = 1
        if together:
            attribute("COOPERATIVE").cooperative = 1
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    return driver.cuLaunchKernelEx, setting


@cache
def _array(n: int) -> Any:
    return struct.Struct(f"{n}q").pack


def _pack(array: DeviceArray) -> tuple[int, bytes]:
    """A number for its type, and what a kernel takes for it; kept with the array."""
    kind = _kinds.setdefault((array.dtype, array.ndim, array.is_contiguous), len(_kinds))
    items = (0, 0, array.size, array.itemsize, array.address, *array.shape, *array.strides)
    array.packed = kind, _array(len(items))(*items)
    return array.packed


def _numba_type(arg: Any) -> types.Type:
    if isinstance(arg, DeviceArray):
        layout = "C" if arg.is_contiguous else "A"
        # Kernels see bfloat16, which Numba does not know everywhere, as its 16 bits.
        of = types.uint16 if arg.dtype.name == "bfloat16" else _NUMBA_TYPES[arg.dtype]
        return types.Array(of, arg.ndim, layout)
    if type(arg) is tuple:
        return types.UniTuple(types.int64, len(arg))
    if isinstance(arg, tuple):
        return types.NamedTuple(list(map(_numba_type, arg)), type(arg))
    return types.float32 if isinstance(arg, FLOATS) else types.int64


def _compile(kernel: Any, args: tuple[Any, ...]) -> Any:
    """The cuda.core kernel for these argument types; one serves all GPUs of its capability."""
    key = kernel, tuple(map(_numba_type, args)), runtime.compute_capability()
    if key not in _compiled:
        with _compiling:
            if key not in _compiled:
                _compiled[key] = kernel_cache.compiled(*key[:2])
    return _compiled[key]


def _permit_shared_memory(compiled: Any, nbytes: int) -> None:
    """The driver keeps one number a kernel, the largest of all launches that are prepared."""
    driver = runtime.driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle, device = int(compiled.handle), runtime.current_device().device_id
    error, permitted = driver.cuKernelGetAttribute(attribute, handle, device)
    if int(error) == 0 and permitted < nbytes:
        (error,) = driver.cuKernelSetAttribute(attribute, nbytes, handle, device)
    if int(error) != 0:
        raise RuntimeError(f"a block of {nbytes} bytes of shared memory was refused: {error.name}")


def _simulate(*of: Any) -> tuple[int]:
    from numbsparse.simulator.launch import run  # which changes Numba's simulator

    run(*of)
    return (0,)


def _simulated(arg: Any) -> Any:
    """What the simulator's kernels take: simulated device memory as NumPy arrays."""
    if isinstance(arg, tuple) and type(arg) is not tuple:
        return type(arg)(*map(_simulated, arg))
    if not isinstance(arg, DeviceArray):
        return np.float32(arg) if isinstance(arg, FLOATS) else arg
    dtype = np.dtype(np.uint16) if arg.dtype.name == "bfloat16" else arg.dtype
    if arg.size == 0:
        return np.empty(arg.shape, dtype)
    span = memory.view(arg.address, span_of(arg) * arg.itemsize).view(dtype)
    return np.lib.stride_tricks.as_strided(span, arg.shape, arg.strides)
