"""The memory of simulated kernels: shared memory of a block, and arrays that note each access.

Local arrays are registers, and note nothing.
"""

from functools import cached_property
from operator import index
from typing import Any

import numpy as np

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

_SEVERAL = {slice, type(...), type(None), list, np.ndarray}
"""What names several items, as an index."""


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
    """The array in another block's shared memory at the place of `array` in this one's.

    An array that is `Memory` knows it once it was found: who adds sums of a cluster asks each time.
    """
    if block is other:
        return array
    known: dict[Any, np.ndarray] = vars(array) if isinstance(array, Memory) else {}
    if other.place not in known:
        known[other.place] = _found(array, block, other)
    return known[other.place]


def _found(array: np.ndarray, block: Block, other: Block) -> np.ndarray:
    for name, buffer in _buffers(block).items():
        start = array.ctypes.data - buffer.ctypes.data
        if 0 <= start < buffer.size:
            there = shared_bytes(other, name, buffer.size)[start : start + array.nbytes]
            return there.view(array.dtype).reshape(array.shape).view(Memory)
    raise TypeError("a shared array is taken here, got another one")


def _buffers(block: Block) -> dict[Any, np.ndarray]:
    buffers: dict[Any, np.ndarray] = block.own.setdefault(_buffers, {})
    return buffers


def address_of(array: np.ndarray) -> int:
    return array.address if isinstance(array, Memory) else array.ctypes.data


def extent(array: np.ndarray) -> tuple[int, int, int]:
    """Of an array in C order without gaps: its address, and the bytes of an item and of all."""
    check_gapless(array)
    return address_of(array), array.itemsize, array.nbytes


def check_gapless(array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise ValueError("an array in C order without gaps is taken here")


class Memory(np.ndarray):  # type: ignore[type-arg]
    """An array in memory that threads share."""

    space: str

    @cached_property
    def extent(self) -> tuple[int, int, int, dict[np.dtype, np.ndarray] | None]:
        """`extent` of it, and room for views of other types, where these do not keep it alive."""
        return *extent(self), {} if type(self.base) is np.ndarray else None

    @cached_property
    def address(self) -> int:
        return self.ctypes.data

    @cached_property
    def flat_bytes(self) -> "Memory":
        """The bytes of it, as a view."""
        check_gapless(self)
        return np.asarray(self).reshape(-1).view(np.uint8).view(Memory)

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """Of each axis its length, and the bytes from one item to the next."""
        return [*zip(self.shape, self.strides, strict=True)]


class Shared(Memory):
    """An array in shared memory."""

    space = "shared"


class Global(Memory):
    """An array in global memory."""

    space = "global"


_item, _set_item = np.ndarray.__getitem__, np.ndarray.__setitem__


class Watched(Memory):
    """An array that notes each access."""

    def __getitem__(self, place: Any) -> Any:
        found = _item(self, place)
        if accesses.watcher is not None and not isinstance(found, np.ndarray):
            accesses.note(self.space, False, _address(self, place), self.itemsize)
        return found

    def __setitem__(self, place: Any, value: Any) -> None:
        if accesses.watcher is not None:
            _note_written(self, place)
        _set_item(self, place, value)


WATCHED = {kind: type(f"Watched{kind.__name__}", (Watched, kind), {}) for kind in (Shared, Global)}


def seen(array: np.ndarray, kind: Any) -> Any:
    """What kernels see of memory of that kind; watched, if there is a watcher."""
    return array.view(kind if accesses.watcher is None else WATCHED[kind])


def note_piece(
    array: Any, writes: bool, address: int, nbytes: int, moment: Moment | None = None
) -> None:
    """An access to neighbouring bytes of an array at once, by an instruction of `kernels.ptx`."""
    if nbytes and isinstance(array, Watched):
        accesses.note(array.space, writes, address, nbytes, moment)


def _note_written(array: Memory, place: Any) -> None:
    """One value, or those of a slice, one after the other."""
    places = place if type(place) is tuple else (place,)
    if len(places) == len(array.steps) and _SEVERAL.isdisjoint(map(type, places)):
        accesses.note(array.space, True, _address(array, place), array.itemsize)
        return
    array = np.asarray(array)[place].view(type(array))
    for one in np.ndindex(array.shape):
        accesses.note(array.space, True, _address(array, one), array.itemsize)


def _address(array: Memory, place: Any) -> int:
    """Where the item is; -1 is the last."""
    address = array.address
    if type(place) is not tuple:
        ((length, stride),) = array.steps
        return address + index(place) % length * stride
    if len(place) == 2:  # most are; a loop takes half as long again
        (rows, row), (columns, column) = array.steps
        return address + index(place[0]) % rows * row + index(place[1]) % columns * column
    for i, (length, stride) in zip(place, array.steps, strict=True):
        address += index(i) % length * stride
    return address
