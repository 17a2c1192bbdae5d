"""The mean of what two GPUs of a host have, by a kernel on each and memory that both write.

An array is gone through in chunks, of which each GPU computes one half. It writes its values of the
other half to the other's mailbox, takes the mean of its own and of those that came, and writes that
to its result and to the mailbox; what came as a mean goes to its result. So the link carries half
of the array twice in each direction, and both have the same bits: each is computed once.

Block number b of a GPU waits for block b of the other one and for no further: a few blocks, beside
all that the GPU computes meanwhile, keep the link busy. A block has two slots of a mailbox for
values and two for means, in turns: it writes to one again when what the other sent since then says
that it was read. Rounds are counted on, from launch to launch, so that no flag is ever set back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.fragments import PACK, UNPACK
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    load_4xu32,
    load_acquire_system,
    store_4xu32,
    store_release_system,
)

BYTES = 16  # that a thread moves at a time: what an array has is a multiple of it
BLOCKS, THREADS = (2, 2) if SIMULATED else (128, 128)
LIMIT = {} if SIMULATED else {"max_registers": 32}
SLOT = 40 if SIMULATED else 8192  # words of half a chunk
SLOTS, FLAGS = 4, 2  # of each block: two slots of each kind, and a flag
VALUES, MEANS = 0, 1  # kinds of slots, and of flags
HALF = np.float32(0.5)


class Ends(NamedTuple):
    """Of a GPU, number `rank` of two: where it reads, and where it writes.

    mine, theirs : uint32 (SLOTS * blocks * words,), its mailbox and that of the other one
    my_flags, their_flags : int32 (FLAGS * blocks,), how many rounds each block has sent
    rounds : int32 (blocks,), of each block so far
    """

    rank: int
    mine: DeviceArray
    theirs: DeviceArray
    my_flags: DeviceArray
    their_flags: DeviceArray
    rounds: DeviceArray


def mean(values: DeviceArray, out: DeviceArray, ends: Ends) -> None:
    """out[:] = the mean of both GPUs' values, C-contiguous; `out` may be `values`."""
    blocks = ends.rounds.size
    kernel = mean_kernel(values.dtype.name, blocks, THREADS, ends.mine.size // (SLOTS * blocks))
    launch(kernel, blocks, THREADS, _words(values), _words(out), ends)


def _words(a: DeviceArray) -> DeviceArray:
    return DeviceArray(a.address, (a.nbytes // 4,), np.uint32, None, a.owner)


@cache
def mean_kernel(dtype: str, BLOCKS: int, THREADS: int, SLOT: int) -> Any:
    unpack: Any = UNPACK.get(dtype)
    pack: Any = PACK.get(dtype)
    STEP = 4 * THREADS  # words

    @cuda.jit(device=True)
    def of_floats(x, y):
        return as_uint32((as_float32(x) + as_float32(y)) * HALF)

    @cuda.jit(device=True)
    def of_pairs(x, y):
        (a, b), (c, d) = unpack(x), unpack(y)
        return pack((a + c) * HALF, (b + d) * HALF)

    of_words = of_floats if unpack is None else of_pairs

    @cuda.jit(device=True)
    def means(v, w):
        return (
            of_words(v[0], w[0]),
            of_words(v[1], w[1]),
            of_words(v[2], w[2]),
            of_words(v[3], w[3]),
        )

    @cuda.jit(device=True)
    def store(array, at, v):
        store_4xu32(array, at, v[0], v[1], v[2], v[3])

    @cuda.jit(device=True)
    def copy(source, first, to, start, length):
        """Four loads are under way at a time, as in `average`."""
        k = 4 * cuda.threadIdx.x
        while k + 3 * STEP < length:
            v, w = load_4xu32(source, first + k), load_4xu32(source, first + k + STEP)
            x = load_4xu32(source, first + k + 2 * STEP)
            y = load_4xu32(source, first + k + 3 * STEP)
            store(to, start + k, v)
            store(to, start + k + STEP, w)
            store(to, start + k + 2 * STEP, x)
            store(to, start + k + 3 * STEP, y)
            k += 4 * STEP
        while k < length:
            store(to, start + k, load_4xu32(source, first + k))
            k += STEP

    @cuda.jit(device=True)
    def average(values, first, mine, place, out, theirs, there, length):
        """Of own values and those in the slot, to the result and to the other's slot."""
        k = 4 * cuda.threadIdx.x
        while k + STEP < length:
            v, w = load_4xu32(values, first + k), load_4xu32(values, first + k + STEP)
            x, y = load_4xu32(mine, place + k), load_4xu32(mine, place + k + STEP)
            v, w = means(v, x), means(w, y)
            store(theirs, there + k, v)
            store(theirs, there + k + STEP, w)
            store(out, first + k, v)
            store(out, first + k + STEP, w)
            k += 2 * STEP
        if k < length:
            v = means(load_4xu32(values, first + k), load_4xu32(mine, place + k))
            store(theirs, there + k, v)
            store(out, first + k, v)

    @cuda.jit(device=True)
    def tell(flags, kind, count):
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            store_release_system(flags, kind * BLOCKS + cuda.blockIdx.x, count)

    @cuda.jit(device=True)
    def await_round(flags, kind, count):
        if cuda.threadIdx.x == 0:
            while load_acquire_system(flags, kind * BLOCKS + cuda.blockIdx.x) < count:
                pass
        cuda.syncthreads()

    @cuda.jit(device=True)
    def place_of(kind, count):
        """The slot of round number `count`."""
        return ((kind * 2 + (count & 1)) * BLOCKS + cuda.blockIdx.x) * SLOT

    @cuda.jit(**LIMIT)
    def kernel(values, out, ends):
        block, before, size = cuda.blockIdx.x, ends.rounds[cuda.blockIdx.x], values.size
        own, other = ends.rank * SLOT, (1 - ends.rank) * SLOT
        chunks = (size + 2 * SLOT - 1) // (2 * SLOT)
        rounds = (chunks + BLOCKS - 1 - block) // BLOCKS
        for i in range(rounds + 1):
            first, count = (block + i * BLOCKS) * 2 * SLOT, before + i
            if i < rounds:
                place, length = place_of(VALUES, count), min(SLOT, size - first - other)
                copy(values, first + other, ends.theirs, place, length)
                tell(ends.their_flags, VALUES, count + 1)
            if i > 0:  # of the round before, while this one's values are under way
                first, count = first - BLOCKS * 2 * SLOT, count - 1
                await_round(ends.my_flags, VALUES, count + 1)
                at, length = first + own, min(SLOT, size - first - own)
                given, made = place_of(VALUES, count), place_of(MEANS, count)
                average(values, at, ends.mine, given, out, ends.theirs, made, length)
                tell(ends.their_flags, MEANS, count + 1)
                await_round(ends.my_flags, MEANS, count + 1)
                copy(ends.mine, made, out, first + other, min(SLOT, size - first - other))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            ends.rounds[block] = before + rounds

    return kernel
