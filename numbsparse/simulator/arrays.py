"""The memory of simulated kernels: shared memory of a block, and arrays that note each access.

Local arrays are registers, and note nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from numbsparse.simulator import accesses
from numbsparse.simulator.clocks import Moment
from numbsparse.simulator.threads import Block

PERIOD = 1024  # bytes after which a swizzle repeats: an array's alignment, as on a GPU

# Where dynamic memory begins: on a GPU after the static arrays, at a multiple of 16 bytes, and
# kernels can rely on no more. The next multiple of 1024 is 752 = 0b1011110000 bytes on: all bits of
# a piece's place in a line are set, and some of the line's, so that swapped bits of an index are
# not those of the address here either.
DYNAMIC_START = 272

NANS = 0x7FFF  # in a float of 16 bits, and twice in one of 32; as an integer it may grow
DYNAMIC = "dynamic"


def shared_bytes(block: Block, name: Any, nbytes: int) -> np.ndarray:
    """A block's shared memory of that name, allocated at its first use: full of NaN."""
    buffers = _buffers(block)
    if name not in buffers:
        buffer = np.full(-(-(nbytes + PERIOD) // 2), NANS, np.uint16).view(np.uint8)
        address = DYNAMIC_START if name == DYNAMIC else 0
        start = (address - buffer.ctypes.data) % PERIOD
        buffers[name] = buffer[start : start + nbytes]
    return buffers[name][:nbytes]


def counterpart(array: np.ndarray, block: Block, other: Block) -> np.ndarray:
    """The array in another block's shared memory at the place of `array` in this one's."""
    if block is other:
        return array
    for name, buffer in _buffers(block).items():
        start = array.ctypes.data - buffer.ctypes.data
        if 0 <= start < buffer.size:
            there = shared_bytes(other, name, buffer.size)[start : start + array.nbytes]
            return there.view(array.dtype).reshape(array.shape)
    raise TypeError("a shared array is taken here, got another one")


def _buffers(block: Block) -> dict[Any, np.ndarray]:
    buffers: dict[Any, np.ndarray] = block.own.setdefault(_buffers, {})
    return buffers


class Shared(np.ndarray):  # type: ignore[type-arg]
    """An array in shared memory that is watched."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if not isinstance(found, np.ndarray):
            _note(self, "shared", False, place)
        return found

    def __setitem__(self, place: Any, value: Any) -> None:
        _note(self, "shared", True, place)
        super().__setitem__(place, value)


class Global(FakeCUDAArray):  # type: ignore[misc]
    """An array in global memory that is watched."""

    def __getitem__(self, place: Any) -> Any:
        found = self._ary[place]
        if isinstance(found, np.ndarray):
            return Global(found)
        _note(self._ary, "global", False, place)
        return found

    def __setitem__(self, place: Any, value: Any) -> None:
        _note(self._ary, "global", True, place)
        self._ary[place] = value


def in_global_memory(array: np.ndarray) -> Any:
    """What the simulator's kernels take; watched, if there is a watcher."""
    return FakeCUDAArray(array) if accesses.watcher is None else Global(array)


def note_piece(array: Any, writes: bool, piece: np.ndarray, moment: Moment | None = None) -> None:
    """An access to neighbouring bytes of an array at once, by an instruction of `kernels.ptx`."""
    if accesses.watcher is not None and piece.nbytes and type(array) is not np.ndarray:
        space = "shared" if isinstance(array, Shared) else "global"
        accesses.note(space, writes, piece.ctypes.data, piece.nbytes, moment)


def _note(array: np.ndarray, space: str, writes: bool, place: Any) -> None:
    """An access to one value, or to those of a slice, one after the other."""
    if accesses.watcher is None:
        return
    named = np.asarray(array)[place]
    if isinstance(named, np.ndarray):
        array = named
        every: Iterable[tuple[Any, ...]] = np.ndindex(named.shape)
    else:
        every = [place if isinstance(place, tuple) else (place,)]
    for places in every:
        axes = zip(places, array.shape, array.strides, strict=True)
        offset = sum(int(i) % length * stride for i, length, stride in axes)  # -1 is the last
        accesses.note(space, writes, array.ctypes.data + offset, array.itemsize)
