"""Numba's CUDA simulator, made right and quick enough to learn with.

One block runs after another, its threads as `threads` says. What else it lacks stands here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
from numba import types

from numbsparse.device import accesses

ALL_BANKS = 128  # bytes
NUMBERS = (int, float, np.generic)


@contextmanager
def running() -> Iterator[None]:
    """While kernels run.

    On one core, where the system can: there threads hand over their turn several times as fast.
    Processes side by side take different ones.
    """
    _mend()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores is not None:
        os.sched_setaffinity(0, {sorted(cores)[_number() % len(cores)]})
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _number() -> int:
    """Of this process among those side by side: pytest-xdist counts its own."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw") or os.getpid())


@cache
def _mend() -> None:
    from numba.cuda.simulator.kernel import FakeCUDAKernel
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    import numbsparse.device.threads  # noqa: F401, takes the place of the simulator's own

    FakeCUDAShared.array = _shared_array
    FakeCUDAKernel.__call__ = _calling(FakeCUDAKernel.__call__)
    for kind in (types.Integer, types.Float):
        kind.__call__ = _casting(kind.__call__)


def _calling(plain: Callable[..., None]) -> Callable[..., Any]:
    """A kernel, or a device function in it: its module sees the simulator's `cuda` meanwhile.

    The simulator's own looks through the module in each call of a device function, which takes
    longer than most of these functions; here a module is met once in a launch.
    """
    from numba.cuda.simulator.kernel import _get_kernel_context, swapped_cuda_module

    met: set[int] = set()
    swaps = ExitStack()

    def call(kernel: Any, *args: Any) -> Any:
        cuda = _get_kernel_context()
        if cuda is None:
            with swaps:
                met.clear()
                return plain(kernel, *args)
        if id(kernel.fn.__globals__) not in met:
            met.add(id(kernel.fn.__globals__))
            swaps.enter_context(swapped_cuda_module(kernel.fn, cuda))
        return kernel.fn(*args)

    return call


def _casting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`uint32(x)` of a number; the simulator asks first, and slowly, whether x is a type."""

    def cast(kind: Any, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], NUMBERS):
            return kind.cast_python_value(args[0])
        return plain(kind, *args)

    return cast


def _shared_array(memory: Any, shape: Any, dtype: Any, alignment: None = None) -> Any:
    """`cuda.shared.array`: one array for each line that asks for one, from the first bank on.

    Until a thread writes, all bits are set: a NaN in floating point.
    """
    from numba.np.numpy_support import as_dtype

    kind = np.ndarray if accesses.watcher is None else accesses.Shared
    dtype = np.dtype(as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    if shape == 0:
        count = memory._dynshared_size // dtype.itemsize
        return np.frombuffer(memory._dynshared.data, dtype, count).view(kind)
    frame = sys._getframe(1)
    line = frame.f_code.co_filename, frame.f_lineno
    array = memory._allocations.get(line)
    if array is None:
        array = memory._allocations[line] = _aligned(shape, dtype).view(kind)
    return array


def _aligned(shape: Any, dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    room = np.full(nbytes + ALL_BANKS, 0xFF, np.uint8)
    start = -room.ctypes.data % ALL_BANKS
    return room[start : start + nbytes].view(dtype).reshape(shape)
