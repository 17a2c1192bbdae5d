"""The arrays of simulated kernels that note each access. Local ones are registers, and do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from numbsparse.device import accesses
from numbsparse.device.clocks import Moment


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


def in_global_memory(array: np.ndarray) -> Any:
    """What the simulator's kernels take; watched, if anybody watches."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    if accesses.watcher is None:
        return FakeCUDAArray(array)

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

    return Global(array)


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
