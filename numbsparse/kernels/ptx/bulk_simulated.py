"""The instructions of `bulk_emitted` in the simulator.

A tensor map is 128 bytes that say what the hardware's opaque ones say: `TENSOR_MAP`. A copy is done
at once, so a kernel that never waits fails only on a GPU, and `races` says so; one that waits
for the wrong number of bytes or arrivals waits forever there, and raises here.
"""

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device.tensor_map import SIMULATED_MAP, SWIZZLES
from numbsparse.kernels.ptx import meaning
from numbsparse.kernels.ptx.mbarrier_simulated import barrier_of
from numbsparse.kernels.ptx.mbarrier_simulated import cp_async_arrive as cp_async_arrive
from numbsparse.kernels.ptx.mbarrier_simulated import mbarrier_arrive as mbarrier_arrive
from numbsparse.kernels.ptx.mbarrier_simulated import mbarrier_expect as mbarrier_expect
from numbsparse.kernels.ptx.mbarrier_simulated import mbarrier_init as mbarrier_init
from numbsparse.kernels.ptx.mbarrier_simulated import mbarrier_wait as mbarrier_wait
from numbsparse.kernels.ptx.simulated import _global, _piece, _shared, flat_bytes
from numbsparse.kernels.ptx.tiles import swizzled
from numbsparse.kernels.ptx.warp import together
from numbsparse.simulator.accesses import begin, note, note_unseen, noted, waited_for
from numbsparse.simulator.arrays import PERIOD, address_of, counterpart
from numbsparse.simulator.clocks import COPY_ENGINE, Moment
from numbsparse.simulator.threads import current


def _nothing(*operands):
    """What is needed on a GPU only."""


fence_mbarrier_init = wait_for_earlier_kernels = let_next_kernel_start = _nothing
fence_tensor_map = prefetch_tensor_map = prefetch_parameters = _nothing


def fence_proxy_async():
    if (thread := noted()) is not None:
        thread.fence()


def elect():
    return together(meaning.elect, np.uint32(0))


def _stores() -> list[list[Moment | None]]:
    """The groups of stores that the running thread has begun; the last one is not yet committed."""
    stores: Any = current().own.setdefault(_stores, [[]])
    return stores


def bulk_commit():
    _stores().append([])


def bulk_wait_read():
    groups = _stores()
    waited_for([store for group in groups[:-1] for store in group])
    del groups[:-1]


def bulk_load(shared, i, source, j, nbytes, bars, k):
    if nbytes % 16:
        raise ValueError(f"bulk_load takes a multiple of 16 bytes, got {nbytes}")
    note_unseen(COPY_ENGINE)
    copy = begin(COPY_ENGINE)
    origin = _piece(_global(source), j, nbytes, moment=copy)
    _piece(shared, i, nbytes, writes=True, moment=copy)[:] = origin
    barrier_of(bars, k, copy=copy).deliver(index(nbytes), copy)


def first_multiple(shared, nbytes):
    if PERIOD % nbytes:
        raise ValueError(f"first_multiple takes a power of 2 up to {PERIOD} bytes, got {nbytes}")
    return np.uint32(-address_of(_shared(shared)) % index(nbytes) // shared.itemsize)


def _load(shared, i, tensor_map, corner, bars, j, ranks=None):
    """To this block, or to those of the cluster whose bits are set in `ranks`."""
    note_unseen(COPY_ENGINE)
    info, block = _info(tensor_map, corner), current().block
    place, start = _place_of_box(shared, i, info)
    corner = [*map(index, corner)]
    box = _box(info, corner).view(np.uint8)
    for rank, other in enumerate(block.cluster):
        if other is block if ranks is None else ranks >> rank & 1:
            there = flat_bytes(counterpart(shared, block, other))
            there[place] = box.reshape(-1)
            copy = begin(COPY_ENGINE)
            if copy is not None:
                note("shared", True, there.address + start, box.size, copy, other.place)
                for address, nbytes, _ in _lines(info, corner):
                    note("global", False, address, nbytes, copy)
            barrier_of(bars, j, rank, copy).deliver(box.size, copy)


def tma_store_2d(shared, i, tensor_map, *places):
    note_unseen(COPY_ENGINE)
    corner = places[::-1]
    info = _info(tensor_map, corner)
    place, start = _place_of_box(shared, i, info)
    if min(corner) < 0:
        raise ValueError(f"a box is stored from places of 0 on, got {corner}")
    box = flat_bytes(shared)[place]
    # What it reads is over when the thread has waited; when it is written no thread learns.
    read, written = begin(COPY_ENGINE), begin(COPY_ENGINE)
    note("shared", False, flat_bytes(shared).address + start, box.size, read)
    _stores()[-1].append(read)
    for address, nbytes, at in _lines(info, [*map(index, corner)]):
        ctypes.memmove(address, box[at : at + nbytes].tobytes(), nbytes)
        note("global", True, address, nbytes, written)


tma_store_3d = tma_store_5d = tma_store_2d


def _loading(axes):
    def tma_load(shared, i, tensor_map, *rest):
        bars, j, *ranks = rest[axes:]
        _load(shared, i, tensor_map, rest[axes - 1 :: -1], bars, j, *map(index, ranks))

    return tma_load


tma_load_2d, tma_load_3d, tma_load_5d = map(_loading, (2, 3, 5))
tma_load_2d_multicast, tma_load_3d_multicast = map(_loading, (2, 3))


def _lines(info, corner) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, place in the box) of the lines of a box, as far as they are in the array."""
    own = [info.itemsize * prod(info.box[a + 1 :]) for a in range(len(corner))]
    start, first, counts, strides = _inside(info, corner)
    for at in np.ndindex(*counts[:-1]) if all(counts) else ():
        places = (*at, 0)
        within = sum((f + n) * s for f, n, s in zip(first, places, own, strict=True))
        address = start + sum(n * s for n, s in zip(places, strides, strict=True))
        yield address, counts[-1] * info.itemsize, within


def _inside(info, corner) -> tuple[int, list[int], list[int], list[int]]:
    """The items of a box in the array: address, first in the box, how many, bytes from one on."""
    address, _, shape, strides, box, steps = info
    first = [max(-(c // s), 0) for c, s in zip(corner, steps, strict=True)]
    ends = [-((c - n) // s) for c, n, s in zip(corner, shape, steps, strict=True)]
    counts = [max(min(e, b) - f, 0) for e, b, f in zip(ends, box, first, strict=True)]
    places = zip(corner, first, steps, strides, strict=True)
    address += sum((c + f * step) * s for c, f, step, s in places)
    return address, first, counts, [s * step for s, step in zip(strides, steps, strict=True)]


class Map(NamedTuple):
    """What a tensor map says, of each axis."""

    address: int
    itemsize: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    steps: list[int]


@lru_cache(256)
def _read(said: bytes) -> Map:
    info = np.frombuffer(said, SIMULATED_MAP)[0]
    axes = [info[name][: info["axes"]].tolist() for name in ("shape", "strides", "box", "steps")]
    return Map(int(info["address"]), int(info["itemsize"]), *axes)


def _info(tensor_map, corner):
    """What a map says; lines of a box may begin anywhere in the array, but at 16 bytes."""
    info = _read(np.asarray(tensor_map).tobytes())
    if len(info.shape) != len(corner):
        raise ValueError(f"a map of {len(info.shape)} axes was given {len(corner)} places")
    if index(corner[-1]) * info.itemsize % 16:  # to a GPU an illegal instruction
        raise ValueError(f"item {corner[-1]}, where a box begins, is not at a multiple of 16 bytes")
    return info


def _place_of_box(shared, i, info):
    """Where the bytes of a box are in a shared array, and where the first of them is."""
    start, flat = index(i) * shared.itemsize, flat_bytes(shared)
    address = flat.address + start
    line, size = info.box[-1] * info.itemsize, prod(info.box) * info.itemsize
    if start < 0 or start + size > flat.size:
        raise ValueError(f"a box of {size} bytes does not fit at byte {start}")
    if address % 128:
        raise ValueError(f"byte {start}, where a box begins, is not at a multiple of 128 bytes")
    places = address + np.arange(size)
    return (swizzled(places, line) if line in SWIZZLES else places) - address + start, start


def _box(info, corner):
    """The values of a box, 0 where it reaches beyond the array."""
    box = np.zeros(info.box, f"u{info.itemsize}")
    start, first, counts, strides = _inside(info, corner)
    if 0 not in counts:
        nbytes = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + box.itemsize
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
        values = np.lib.stride_tricks.as_strided(
            memory[: box.itemsize].view(box.dtype), counts, strides
        )
        inside = (slice(f, f + n) for f, n in zip(first, counts, strict=True))
        box[tuple(inside)] = values
    return box
