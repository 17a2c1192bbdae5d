"""Start a kernel. Compiled once per combination of argument types; about 5 us a launch after.

numba-cuda compiles; `cuda.core` launches, at a fifth of the cost of Numba's own launch. Arguments
are flattened here as Numba's kernels take them: an array is (meminfo, parent, size, itemsize,
data, *shape, *strides), a tuple of integers its items.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import cuda, types

from numbsparse.device import memory, runtime
from numbsparse.device.array import DeviceArray, span_of

_NUMBA_TYPES = {
    np.dtype(name): getattr(types, name)
    for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "uint16", "uint32")
} | {np.dtype(bool): types.boolean}

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that every kernel may have; more must be asked for."""

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Run `kernel` on a grid of blocks of threads.

    Parameters
    ----------
    kernel : a function decorated with `numba.cuda.jit`
    grid, block : int or tuple of int
        Blocks in the grid and threads in a block, along x, y and z. An empty grid is no work.
    args : DeviceArray, int (taken as int64), float (as float32), tuple of int
    shared_bytes : bytes of dynamic shared memory per block
    """
    grid, block = _dimensions(grid), _dimensions(block)
    if 0 in grid:
        return
    if runtime.SIMULATED:
        kernel[grid, block, 0, shared_bytes](*(_simulated(arg) for arg in args))
        return
    key = (kernel, shared_bytes > STATIC_SHARED and shared_bytes, *map(_type_key, args))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(kernel, args)
        if shared_bytes > STATIC_SHARED:
            _permit_shared_memory(compiled, shared_bytes)
    start, config, stream = _launcher()
    flat: list[Any] = []
    for arg in args:
        _flatten(arg, flat)
    start(stream, config(grid, block, shared_bytes), compiled, *flat)


@cache
def _launcher() -> tuple[Any, Any, Any]:
    """cuda.core's launch, its configurations, and the stream; imported with the first launch."""
    from cuda.core import LaunchConfig
    from cuda.core import launch as start

    @lru_cache(maxsize=1024)
    def config(grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int) -> LaunchConfig:
        return LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)

    return start, config, runtime.current_stream()


def _dimensions(n: Any) -> tuple[int, ...]:
    return (n,) if isinstance(n, int) else tuple(n)


def _type_key(arg: Any) -> Any:
    if isinstance(arg, DeviceArray):
        return arg.dtype, len(arg.shape), arg.is_contiguous
    return len(arg) if isinstance(arg, tuple) else type(arg)


def _numba_type(arg: Any) -> types.Type:
    if isinstance(arg, DeviceArray):
        layout = "C" if arg.is_contiguous else "A"
        return types.Array(_numba_dtype(arg.dtype), arg.ndim, layout)
    if isinstance(arg, tuple):
        return types.UniTuple(types.int64, len(arg))
    return types.float32 if isinstance(arg, float | np.floating) else types.int64


def _numba_dtype(dtype: np.dtype) -> types.Type:
    """Kernels see bfloat16, which Numba does not know everywhere, as its 16 bits."""
    return types.uint16 if dtype.name == "bfloat16" else _NUMBA_TYPES[dtype]


def _compile(kernel: Any, args: tuple[Any, ...]) -> Any:
    """The cuda.core kernel for these argument types."""
    runtime.current_device()
    cuda.current_context()
    overload = kernel.compile(tuple(_numba_type(arg) for arg in args))
    return overload._codelibrary.get_cufunc().kernel


def _permit_shared_memory(compiled: Any, nbytes: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = runtime.current_device().device_id
    (error,) = driver.cuKernelSetAttribute(attribute, nbytes, int(compiled.handle), device)
    if int(error) != 0:
        raise RuntimeError(f"a block of {nbytes} bytes of shared memory was refused: {error.name}")


def _flatten(arg: Any, flat: list[Any]) -> None:
    if isinstance(arg, DeviceArray):
        flat += (0, 0, arg.size, arg.dtype.itemsize, arg.address, *arg.shape, *arg.strides)
    elif isinstance(arg, tuple):
        flat += arg
    else:
        flat.append(np.float32(arg) if isinstance(arg, float | np.floating) else int(arg))


def _simulated(arg: Any) -> Any:
    """What the simulator's kernels take: simulated device memory as NumPy arrays."""
    if not isinstance(arg, DeviceArray):
        return np.float32(arg) if isinstance(arg, float | np.floating) else arg
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    dtype = np.dtype(np.uint16) if arg.dtype.name == "bfloat16" else arg.dtype
    if arg.size == 0:
        return FakeCUDAArray(np.empty(arg.shape, dtype))
    span = memory.view(arg.address, span_of(arg) * arg.itemsize).view(dtype)
    return FakeCUDAArray(np.lib.stride_tricks.as_strided(span, arg.shape, arg.strides))
