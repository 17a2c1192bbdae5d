"""Numba's CUDA simulator, made right and quick enough to learn with.

Which blocks run at once says `grid`, and how their threads do, `threads`. What else Numba's lacks
stands here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from numbsparse.device import accesses
from numbsparse.device.watched_arrays import Shared

if TYPE_CHECKING:
    from numbsparse.device.threads import Block

PERIOD = 1024  # bytes until swizzled lines begin anew: by it an array's address is as on a GPU

# Where dynamic memory begins: on a GPU after the static arrays, at a multiple of 16 bytes, and no
# kernel can count on more. The next multiple of 1024 is 752 = 0b1011110000 bytes on: all bits of a
# piece's place in a line are set, and some of the line's, so that swapped bits of an index are not
# those of the address here either.
DYNAMIC_START = 272

NANS = 0x7FFF  # in a float of 16 bits, and twice in one of 32; as an integer it may grow
NUMBERS = (int, float, np.generic)
DYNAMIC = "dynamic"


@contextmanager
def running(
    grid: tuple[int, ...], cluster: tuple[int, ...] | None = None, together: bool = False
) -> Iterator[None]:
    """While a kernel runs on a grid, whose blocks wait for others of their cluster, or for all.

    On one core, where the system can: there threads hand over their turn several times as fast.
    Processes side by side take different ones.
    """
    _mend()
    from numbsparse.device.grid import at_once  # where threads begin to take turns

    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores is not None:
        os.sched_setaffinity(0, {sorted(cores)[_number() % len(cores)]})
    try:
        with at_once(grid, cluster, together):
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
    from numba.cuda.simulator.kernelapi import FakeCUDALocal, FakeCUDAShared

    FakeCUDAShared.array = _shared_array
    FakeCUDALocal.array = _noting(FakeCUDALocal.array)
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
            return getattr(np, kind.name)(args[0])
        return plain(kind, *args)

    return cast


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`cuda.local.array`, whose size is noted."""

    def array(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        accesses.note_local(made.nbytes)
        return made

    return array


def _shared_array(memory: Any, shape: Any, dtype: Any, alignment: None = None) -> Any:
    """`cuda.shared.array`: a block has one for each call in the compiled text, and the dynamic one.

    The latter lies at an address that is a multiple of 16 and of no more, each other one at 0.
    """
    from numba.np.numpy_support import as_dtype

    from numbsparse.device.threads import current

    kind = np.ndarray if accesses.watcher is None else Shared
    dtype = np.dtype(as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    name = (_compiled_place(sys._getframe(1)), dtype, shape) if shape else DYNAMIC
    shape = shape or memory._dynshared_size // dtype.itemsize
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return shared_bytes(current().block, name, nbytes).view(dtype).reshape(shape).view(kind)


def _compiled_place(frame: Any) -> Any:
    """Where a call stands in the compiled text, be it reached once or often.

    Numba compiles a function once for the types of its arguments, wherever it is called from; two
    functions of the same text, as a factory makes them, are two. Of the types those of arrays are
    looked at here. Numba also compiles anew for another number in the text (`part(x, 0)`,
    `part(x, 1)`), which cannot be seen here: the calls share an array where they may have two.
    """
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    function: Any = frame.f_code
    kinds: tuple[Any, ...] = ()
    if frame.f_back.f_code is FakeCUDAKernel.__call__.__code__:  # `call` of `_calling`
        calling = frame.f_back.f_locals
        function = calling["kernel"]
        kinds = tuple((a.dtype, a.ndim) for a in calling["args"] if getattr(a, "ndim", 0))
    return function, kinds, accesses.place_in(frame)


def shared_bytes(block: Block, name: Any, nbytes: int) -> np.ndarray:
    """A block's shared memory of that name, made when it is asked for first: full of NaN."""
    rooms = _rooms(block)
    if name not in rooms:
        room = np.full(-(-(nbytes + PERIOD) // 2), NANS, np.uint16).view(np.uint8)
        address = DYNAMIC_START if name == DYNAMIC else 0
        start = (address - room.ctypes.data) % PERIOD
        rooms[name] = room[start : start + nbytes]
    return rooms[name][:nbytes]


def counterpart(array: np.ndarray, block: Block, other: Block) -> np.ndarray:
    """What lies in another block's shared memory where `array` lies in this one's."""
    if block is other:
        return array
    for name, room in _rooms(block).items():
        start = array.ctypes.data - room.ctypes.data
        if 0 <= start < room.size:
            there = shared_bytes(other, name, room.size)[start : start + array.nbytes]
            return there.view(array.dtype).reshape(array.shape)
    raise TypeError("a shared array is taken here, got another one")


def _rooms(block: Block) -> dict[Any, np.ndarray]:
    rooms: dict[Any, np.ndarray] = block.own.setdefault(_rooms, {})
    return rooms
