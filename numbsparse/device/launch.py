"""Start a kernel. Compiled once per combination of argument types; about 5 us a launch after.

numba-cuda compiles; `cuda.core` launches, at a fifth of the cost of Numba's own launch. Arguments
are flattened here as Numba's kernels take them: an array is (meminfo, parent, size, itemsize,
data, *shape, *strides), a tuple of integers its items.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numba import types

from numbsparse.device import kernel_cache, memory, runtime
from numbsparse.device.array import DeviceArray, span_of

_NUMBA_TYPES = {
    np.dtype(name): getattr(types, name)
    for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "uint16", "uint32")
} | {np.dtype(bool): types.boolean}

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that every kernel may have; more must be asked for."""

_compiled: dict[tuple[Any, ...], Any] = {}
_kinds: dict[tuple[Any, ...], int] = {}


def launch(
    kernel: Any,
    grid: Any,
    block: Any,
    *args: Any,
    shared_bytes: int = 0,
    cluster: tuple[int, ...] | None = None,
) -> None:
    """Run `kernel` on a grid of blocks of threads.

    Parameters
    ----------
    kernel : a function decorated with `numba.cuda.jit`
    grid, block : int or tuple of int
        Blocks in the grid and threads in a block, along x, y and z. An empty grid is no work.
    args : DeviceArray, int (taken as int64), float (as float32), tuple of int
    shared_bytes : bytes of dynamic shared memory per block
    cluster : blocks in a cluster, along x, y and z: on compute capability 9.0 and up
        Such blocks run together and read each other's shared memory. The grid is a multiple of it.
    """
    if type(grid) is not tuple:
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
    if 0 in grid:
        return
    capture = runtime.capturing()
    if capture is not None:
        capture.hold(args)
    if runtime.SIMULATED:
        kernel[grid, block, 0, shared_bytes](*(_simulated(arg) for arg in args))
        return
    kinds: list[Any] = [kernel, shared_bytes > STATIC_SHARED and shared_bytes]
    flat: list[Any] = []
    for arg in args:
        if type(arg) is DeviceArray:
            kind, items = arg.packed or _pack(arg)
            kinds.append(kind)
            flat += items
        elif type(arg) is int:
            kinds.append(int)
            flat.append(arg)
        elif type(arg) is tuple:
            kinds.append(~len(arg))  # below the numbers of the arrays
            flat += arg
        elif type(arg) is float:
            kinds.append(np.float32)
            flat.append(np.float32(arg))
        else:
            number = np.float32(arg) if isinstance(arg, float | np.floating) else int(arg)
            kinds.append(type(number))
            flat.append(number)
    compiled = _compiled.get(key := tuple(kinds))
    if compiled is None:
        compiled = _compiled[key] = _compile(kernel, args)
        if shared_bytes > STATIC_SHARED:
            _permit_shared_memory(compiled, shared_bytes)
    start, config, stream = _launcher()
    setting = config(grid, block, shared_bytes, cluster)
    start(stream if capture is None else capture.stream, setting, compiled, *flat)


@cache
def _launcher() -> tuple[Any, Any, Any]:
    """cuda.core's launch, its configurations, and the stream; imported with the first launch."""
    from cuda.core import LaunchConfig
    from cuda.core import launch as start

    @lru_cache(maxsize=1024)
    def config(grid: Any, block: Any, shared_bytes: int, cluster: Any) -> LaunchConfig:
        if cluster is not None:
            if any(n % c for n, c in zip(grid, cluster, strict=True)):
                raise ValueError(f"grid takes a multiple of the cluster {cluster}, got {grid}")
            # cuda.core counts such a grid in clusters.
            grid = tuple(n // c for n, c in zip(grid, cluster, strict=True))
        return LaunchConfig(grid=grid, cluster=cluster, block=block, shmem_size=shared_bytes)

    return start, config, runtime.current_stream()


def _pack(array: DeviceArray) -> tuple[int, tuple[int, ...]]:
    """A number for its type, and what a kernel takes for it; kept with the array."""
    kind = _kinds.setdefault((array.dtype, array.ndim, array.is_contiguous), len(_kinds))
    items = (0, 0, array.size, array.itemsize, array.address, *array.shape, *array.strides)
    array.packed = kind, items
    return array.packed


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
    return kernel_cache.compiled(kernel, tuple(map(_numba_type, args)))


def _permit_shared_memory(compiled: Any, nbytes: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = runtime.current_device().device_id
    (error,) = driver.cuKernelSetAttribute(attribute, nbytes, int(compiled.handle), device)
    if int(error) != 0:
        raise RuntimeError(f"a block of {nbytes} bytes of shared memory was refused: {error.name}")


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
