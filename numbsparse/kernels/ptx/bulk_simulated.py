"""The instructions of `bulk_emitted` in the simulator.

A tensor map is 128 bytes that say what the hardware's opaque ones say: `TENSOR_MAP`. A copy is done
at once, so a kernel that never waits goes wrong on a GPU alone; one that waits for the wrong number
of bytes or arrivals waits for ever there, and raises here.
"""

from __future__ import annotations

import ctypes

import numpy as np

from numbsparse.device.accesses import note_unseen
from numbsparse.device.simulator import PERIOD, counterpart
from numbsparse.device.tensor_map import SIMULATED_MAP
from numbsparse.device.threads import Worker, current
from numbsparse.kernels.ptx import meaning
from numbsparse.kernels.ptx.simulated import _global, _piece, _shared, flat_bytes
from numbsparse.kernels.ptx.tiles import swizzled
from numbsparse.kernels.ptx.warp import together

COPY_ENGINE = "the copy engine"


class _Barrier:
    """A phase ends when all arrivals came and all bytes that were told of; then the next begins."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.missing_bytes = self.phase = 0
        self.waiting: list[Worker] = []

    def change(self, arrivals: int, nbytes: int) -> None:
        self.pending -= arrivals
        self.missing_bytes += nbytes
        if self.pending < 0:
            raise RuntimeError(f"more than {self.count} arrivals at an mbarrier in one phase")
        if self.pending == self.missing_bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1
            current().wake(self.waiting)


def mbarrier_init(bars, i, count):
    barriers, place = _place(bars, i, current().block)
    barriers[place] = _Barrier(int(count))


def mbarrier_expect(bars, i, nbytes):
    barrier_of(bars, i).change(1, int(nbytes))


def mbarrier_arrive(bars, i):
    barrier_of(bars, i).change(1, 0)


def mbarrier_wait(bars, i, parity):
    barrier, thread = barrier_of(bars, i), current()
    while barrier.phase == parity:
        barrier.waiting.append(thread)
        thread.wait(
            lambda: (
                f"{barrier.pending} arrivals and {barrier.missing_bytes} bytes at mbarrier {int(i)}"
            )
        )


def fence_mbarrier_init():
    pass


def fence_proxy_async():
    pass


def elect():
    return together(meaning.elect, np.uint32(0))


def wait_for_earlier_kernels():
    pass


def let_next_kernel_start():
    pass


def fence_tensor_map(tensor_map):
    pass


def prefetch_tensor_map(tensor_map):
    pass


def tma_load_2d(shared, i, tensor_map, column, row, bars, j):
    _load(shared, i, tensor_map, (row, column), bars, j)


def tma_load_3d(shared, i, tensor_map, column, row, layer, bars, j):
    _load(shared, i, tensor_map, (layer, row, column), bars, j)


def tma_load_2d_multicast(shared, i, tensor_map, column, row, bars, j, ranks):
    _load(shared, i, tensor_map, (row, column), bars, j, int(ranks))


def tma_load_5d(shared, i, tensor_map, column, row, layer, block, image, bars, j):
    _load(shared, i, tensor_map, (image, block, layer, row, column), bars, j)


def tma_load_3d_multicast(shared, i, tensor_map, column, row, layer, bars, j, ranks):
    _load(shared, i, tensor_map, (layer, row, column), bars, j, int(ranks))


def tma_store_2d(shared, i, tensor_map, column, row):
    _store(shared, i, tensor_map, (row, column))


def tma_store_5d(shared, i, tensor_map, column, row, layer, block, image):
    _store(shared, i, tensor_map, (image, block, layer, row, column))


def bulk_commit():
    pass


def bulk_wait_read():
    pass


def bulk_load(shared, i, source, j, nbytes, bars, k):
    if nbytes % 16:
        raise ValueError(f"bulk_load takes a multiple of 16 bytes, got {nbytes}")
    note_unseen(COPY_ENGINE)
    target, origin = np.asarray(shared), np.asarray(_global(source))  # no thread's accesses
    _piece(target, i, nbytes)[:] = _piece(origin, j, nbytes)
    barrier_of(bars, k).change(0, -int(nbytes))


def first_multiple(shared, nbytes):
    if PERIOD % nbytes:
        raise ValueError(f"first_multiple takes a power of 2 up to {PERIOD} bytes, got {nbytes}")
    array = np.asarray(_shared(shared))
    return np.uint32(-array.ctypes.data % int(nbytes) // array.itemsize)


def _load(shared, i, tensor_map, corner, bars, j, ranks=None):
    """To this block, or to those of the cluster whose bits are set in `ranks`."""
    note_unseen(COPY_ENGINE)
    info, block = _info(tensor_map, len(corner)), current().block
    place, _ = _place_of_box(shared, i, info)
    box = _box(info, [int(n) for n in corner]).view(np.uint8)
    for rank, other in enumerate(block.cluster):
        if other is block if ranks is None else ranks >> rank & 1:
            flat_bytes(counterpart(np.asarray(shared), block, other))[place] = box.reshape(-1)
            barrier_of(bars, j, rank).change(0, -box.size)


def _store(shared, i, tensor_map, corner):
    note_unseen(COPY_ENGINE)
    info = _info(tensor_map, len(corner))
    place, _ = _place_of_box(shared, i, info)
    if min(corner) < 0:
        raise ValueError(f"a box is stored from places of 0 on, got {corner}")
    axes, itemsize = range(len(corner)), int(info["itemsize"])
    box = [int(info["box"][a]) for a in axes]
    inside = [max(min(int(info["shape"][a]) - int(corner[a]), box[a]), 0) for a in axes]
    lines = flat_bytes(shared)[place].reshape(*box[:-1], box[-1] * itemsize)
    strides = [int(info["strides"][a]) for a in axes]
    for at in np.ndindex(*inside[:-1]):
        start = sum((int(c) + k) * s for c, k, s in zip(corner, (*at, 0), strides, strict=True))
        line = lines[at][: inside[-1] * itemsize]
        ctypes.memmove(int(info["address"]) + start, line.tobytes(), line.size)


def _info(tensor_map, places):
    info = np.asarray(tensor_map).view(np.uint8).view(SIMULATED_MAP)[0]
    if info["axes"] != places:
        raise ValueError(f"a map of {info['axes']} axes was given {places} places")
    return info


def _place_of_box(shared, i, info):
    """Where the bytes of a box lie in a shared array, and how many a line has."""
    axes, start, flat = int(info["axes"]), int(i) * shared.itemsize, flat_bytes(shared)
    address = flat.ctypes.data + start
    line = int(info["box"][axes - 1]) * int(info["itemsize"])
    size = int(np.prod(info["box"][:axes])) * int(info["itemsize"])
    if start < 0 or start + size > flat.size:
        raise ValueError(f"a box of {size} bytes does not fit at byte {start}")
    if address % 128:
        raise ValueError(f"byte {start}, where a box begins, is not at a multiple of 128 bytes")
    if line != int(info["swizzle"]):
        raise ValueError(f"a line of {line} bytes is not swizzled over {info['swizzle']}")
    return swizzled(address + np.arange(size), line) - address + start, line


def _box(info, corner):
    """The values of a box, 0 where it reaches beyond the array."""
    axes = range(len(corner))
    box = np.zeros([int(info["box"][a]) for a in axes], f"u{int(info['itemsize'])}")
    first = [max(corner[a], 0) for a in axes]
    counts = [max(min(corner[a] + box.shape[a], int(info["shape"][a])) - first[a], 0) for a in axes]
    if 0 not in counts:
        strides = [int(info["strides"][a]) for a in axes]
        start = int(info["address"]) + sum(f * s for f, s in zip(first, strides, strict=True))
        nbytes = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + box.itemsize
        memory = np.frombuffer((ctypes.c_char * nbytes).from_address(start), np.uint8)
        values = np.lib.stride_tricks.as_strided(
            memory[: box.itemsize].view(box.dtype), counts, strides
        )
        inside = (slice(first[a] - corner[a], first[a] - corner[a] + counts[a]) for a in axes)
        box[tuple(inside)] = values
    return box


def barrier_of(bars, i, rank=None):
    """This block's, or that of a block of the cluster."""
    block = current().block
    barriers, place = _place(bars, i, block if rank is None else block.cluster[rank])
    if place not in barriers:
        raise RuntimeError(f"mbarrier {int(i)} was not initialized")
    return barriers[place]


def _place(bars, i, block):
    if bars.dtype != np.uint64:
        raise TypeError(f"an mbarrier lies in an array of uint64, got {bars.dtype}")
    barriers: dict[int, _Barrier] = block.own.setdefault(_Barrier, {})
    there = counterpart(np.asarray(bars), current().block, block)
    return barriers, flat_bytes(there)[8 * int(i) :].ctypes.data
