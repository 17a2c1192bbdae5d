"""Device memory: take it, fill it, copy it. In the simulator it is host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from numbsparse.device import runtime


def allocate(nbytes: int) -> tuple[int, Any]:
    """(address, owner): the memory lives until the owner is collected."""
    runtime.require()
    if runtime.SIMULATED:
        # Fresh memory holds no numbers, so that a kernel that leaves a hole is seen.
        owner = np.full(max(nbytes, 1), 0xFF, dtype=np.uint8)
        return owner.ctypes.data, owner
    pool = runtime.current_device().memory_resource
    try:
        buffer = pool.allocate(max(nbytes, 1), stream=runtime.current_stream())
    except Exception as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        from cuda.bindings import driver

        _, free, total = driver.cuMemGetInfo()
        raise MemoryError(
            f"{nbytes / 2**20:.1f} MiB of device memory were asked for; "
            f"{free / 2**20:.1f} of {total / 2**20:.1f} MiB are free"
        ) from error
    return int(buffer.handle), buffer


def copy_in(address: int, host: np.ndarray) -> None:
    """Copy a C-contiguous NumPy array to the device."""
    if runtime.SIMULATED:
        ctypes.memmove(address, host.ctypes.data, host.nbytes)
    elif host.nbytes:
        from cuda.bindings import driver

        _check(driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, _stream_handle()))


def copy_out(host: np.ndarray, address: int) -> None:
    """Copy from the device into a C-contiguous NumPy array, and wait for it."""
    if runtime.SIMULATED:
        ctypes.memmove(host.ctypes.data, address, host.nbytes)
    elif host.nbytes:
        from cuda.bindings import driver

        _check(driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, _stream_handle()))
        runtime.synchronize()


def view(address: int, nbytes: int) -> np.ndarray:
    """Simulated device memory as bytes that NumPy can read and write."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=np.uint8)  # type: ignore[call-overload]


def _stream_handle() -> int:
    return int(runtime.current_stream().handle)


def _check(result: tuple[Any, ...]) -> None:
    (error,) = result
    if int(error) != 0:
        raise RuntimeError(f"copying between host and device failed: {error.name}")
