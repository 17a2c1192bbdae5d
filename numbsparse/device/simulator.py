"""Numba's CUDA simulator, made right and quick enough to learn with.

It runs the threads of a block as Python's threads, one block after another. What it lacks stands
here; `accesses` and `turns` reach into it too, and nobody else.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numba import types

from numbsparse.device import accesses

ALL_BANKS = 128  # bytes
SWITCH = 1e-4  # seconds

_making = threading.Lock()


@contextmanager
def running() -> Iterator[None]:
    """While kernels run.

    On one core, where the system can: the threads hold Python's lock by turns, and on one core they
    hand it over several times as fast; processes side by side take different ones. The simulator
    polls them: where they hand over sooner, barriers take a tenth.
    """
    _mend()
    interval = sys.getswitchinterval()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    sys.setswitchinterval(min(SWITCH, interval))
    if cores is not None:
        os.sched_setaffinity(0, {sorted(cores)[_number() % len(cores)]})
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _number() -> int:
    """Of this process among those side by side: pytest-xdist counts its own."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw") or os.getpid())


@cache
def _mend() -> None:
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    FakeCUDAShared.array = _shared_array


def _shared_array(memory: Any, shape: Any, dtype: Any, alignment: None = None) -> Any:
    """`cuda.shared.array`: one array for each line that asks for one, from the first bank on.

    The simulator's own lets two threads that ask at the same moment make an array each. Until a
    thread writes, all bits are set: a NaN in floating point.
    """
    from numba.np.numpy_support import as_dtype

    kind = np.ndarray if accesses.watcher is None else accesses.Shared
    dtype = np.dtype(as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    if shape == 0:
        count = memory._dynshared_size // dtype.itemsize
        return np.frombuffer(memory._dynshared.data, dtype, count).view(kind)
    frame = sys._getframe(1)
    line = frame.f_code.co_filename, frame.f_lineno
    with _making:
        array = memory._allocations.get(line)
        if array is None:
            array = memory._allocations[line] = _aligned(shape, dtype).view(kind)
    return array


def _aligned(shape: Any, dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    room = np.full(nbytes + ALL_BANKS, 0xFF, np.uint8)
    start = -room.ctypes.data % ALL_BANKS
    return room[start : start + nbytes].view(dtype).reshape(shape)
