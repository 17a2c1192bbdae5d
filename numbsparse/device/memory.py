"""Device memory: take it, fill it, copy it. In the simulator it is host memory.

All work is ordered by one stream, so memory may be used again as soon as the host lets go of it,
while kernels that read it still wait: they come first. Small blocks are kept for that, by size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import numpy as np

from numbsparse.device import runtime

GRAIN = 512  # sizes are rounded up to it: the alignment that CUDA gives
LARGEST_KEPT = 2**20  # bytes of a block that is kept
MOST_KEPT = 2**28  # bytes of all of them
HOLES = (0xFF, 0x42)
"""Bytes of simulated memory that were never written: NaN; 48.6 in float32, 3.13 in float16."""

Shelf = list[tuple[int, Any]]

_shelves: dict[int, Shelf] = {}
_kept = 0
_hole = HOLES[0]


class Block:
    """A piece of device memory; back on its shelf when nothing refers to it any more."""

    __slots__ = ("__weakref__", "address", "buffer", "nbytes", "shelf")

    def __init__(self, address: int, buffer: Any, nbytes: int = 0, shelf: Shelf | None = None):
        self.address, self.buffer, self.nbytes, self.shelf = address, buffer, nbytes, shelf

    def __del__(self) -> None:
        global _kept
        if self.shelf is not None and _kept + self.nbytes <= MOST_KEPT:
            _kept += self.nbytes
            self.shelf.append((self.address, self.buffer))


class Simulated(Block):
    """Host memory; is a hole when let go, so that a kernel that still reads it is seen."""

    __slots__ = ()

    def __del__(self) -> None:
        if _hole is not None:  # as it is when Python ends
            self.buffer.fill(_hole)


def allocate(nbytes: int) -> Block:
    """A block of at least so many bytes, held until the Block is collected."""
    global _kept
    if (capture := runtime.capturing()) is not None:
        return capture.arena.allocate(nbytes)
    size = rounded(nbytes)
    shelf = _shelves.get(size)
    if shelf:
        address, buffer = shelf.pop()
        _kept -= size
        return Block(address, buffer, size, shelf)
    return _fresh(nbytes, size)


def rounded(nbytes: int) -> int:
    """The bytes of the block that serves a request of `nbytes`."""
    return max(-(-nbytes // GRAIN), 1) * GRAIN


def _fresh(nbytes: int, size: int) -> Block:
    runtime.require()
    if runtime.SIMULATED:
        return simulated(nbytes)
    buffer = take(size)
    shelf = _shelves.setdefault(size, []) if size <= LARGEST_KEPT else None
    return Block(int(buffer.handle), buffer, size, shelf)


def simulated(nbytes: int) -> Block:
    """Fresh memory is a hole, so that a kernel that leaves one is seen."""
    owner = np.full(nbytes + GRAIN, _hole, dtype=np.uint8)
    return Simulated(-(-owner.ctypes.data // GRAIN) * GRAIN, owner)


def hole(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array of the host, for results."""
    dtype = np.dtype(dtype)
    return np.full(prod(shape) * dtype.itemsize, _hole, np.uint8).view(dtype).reshape(shape)


@contextmanager
def holes_of(byte: int) -> Iterator[None]:
    """Fill uninitialised simulated memory with this byte: see HOLES."""
    global _hole
    before, _hole = _hole, byte
    try:
        yield
    finally:
        _hole = before


def take(nbytes: int) -> Any:
    """A buffer of CUDA's own pool; what is kept here is given up before memory runs out."""
    try:
        return _from_pool(nbytes)
    except MemoryError:
        if not _kept:
            raise
        give_up_kept()
        return _from_pool(nbytes)


def _from_pool(nbytes: int) -> Any:
    pool = runtime.current_device().memory_resource
    try:
        return pool.allocate(nbytes, stream=runtime.current_stream())
    except Exception as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        from cuda.bindings import driver

        _, free, total = driver.cuMemGetInfo()
        raise MemoryError(
            f"{nbytes / 2**20:.1f} MiB of device memory were asked for; "
            f"{free / 2**20:.1f} of {total / 2**20:.1f} MiB are free"
        ) from error


def give_up_kept() -> None:
    """Give all blocks that are kept for later back to CUDA's pool."""
    global _kept
    for shelf in _shelves.values():
        shelf.clear()
    _kept = 0


def forget_peak() -> None:
    """Let the pool's `used_mem_high` restart from what is in use now."""
    if not runtime.SIMULATED:
        driver, _ = _driver()
        peak = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        pool = runtime.current_device().memory_resource.handle
        error = driver.cuMemPoolSetAttribute(pool, peak, driver.cuuint64_t(0))
        _check(error, "forgetting the peak of the pool's memory")


def copy_in(address: int, host: np.ndarray) -> None:
    """Copy a C-contiguous NumPy array to the device."""
    runtime.refuse_in_capture(
        "a copy to the GPU",
        "each replay would copy the same values; make the array an argument of the step",
    )
    if runtime.SIMULATED:
        ctypes.memmove(address, host.ctypes.data, host.nbytes)
    elif host.nbytes:
        driver, stream = _driver()
        error = driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, stream)
        _check(error, "copying to the GPU")


def copy_out(host: np.ndarray, address: int) -> None:
    """Copy from the device into a C-contiguous NumPy array, and wait for it."""
    runtime.refuse_in_capture(
        "a copy to the host (.numpy(), .item(), float())",
        "its values do not exist yet; return the array and read it outside",
    )
    if runtime.SIMULATED:
        ctypes.memmove(host.ctypes.data, address, host.nbytes)
    elif host.nbytes:
        driver, stream = _driver()
        error = driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream)
        _check(error, "copying to the host")
        runtime.synchronize()


def copy_within(target: int, source: int, nbytes: int) -> None:
    """Copy from one place on the device to another."""
    if runtime.SIMULATED:
        ctypes.memmove(target, source, nbytes)
    elif nbytes:
        driver, stream = _driver()
        _check(driver.cuMemcpyDtoDAsync(target, source, nbytes, stream), "copying on the GPU")


def view(address: int, nbytes: int) -> np.ndarray:
    """Simulated device memory as bytes that NumPy can read and write."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=np.uint8)  # type: ignore[call-overload]


@cache
def _driver() -> tuple[Any, int]:
    from cuda.bindings import driver

    return driver, int(runtime.current_stream().handle)


def _check(result: tuple[Any, ...], what: str) -> None:
    (error,) = result
    if int(error) != 0:
        raise RuntimeError(f"{what} failed: {error.name}")
