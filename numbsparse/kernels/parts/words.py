"""Words of 32 bits that a warp reads or writes together, each lane 8, 16 or 32 bytes of them."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.kernels.ptx import load_2xu32, load_4xu32, store_2xu32, store_4xu32


class Words(NamedTuple):
    """load(words, at) -> those of a lane; store(words, at, own): neighbours, or twice four."""

    load: Any
    store: Any


@cache
def words_of_lane(WORDS: int) -> Words:
    @cuda.jit(device=True)
    def load_2(words, at):
        return load_2xu32(words, at + uint32(cuda.threadIdx.x) % 32 * 2)

    @cuda.jit(device=True)
    def load_4(words, at):
        return load_4xu32(words, at + uint32(cuda.threadIdx.x) % 32 * 4)

    @cuda.jit(device=True)
    def load_8(words, at):
        return load_4(words, at) + load_4(words, at + 128)

    @cuda.jit(device=True)
    def store_2(words, at, own):
        store_2xu32(words, at + uint32(cuda.threadIdx.x) % 32 * 2, own[0], own[1])

    @cuda.jit(device=True)
    def store_4(words, at, own):
        first = at + uint32(cuda.threadIdx.x) % 32 * 4
        store_4xu32(words, first, own[0], own[1], own[2], own[3])

    @cuda.jit(device=True)
    def store_8(words, at, own):
        store_4(words, at, own)
        store_4(words, at + 128, own[4:])

    return {2: Words(load_2, store_2), 4: Words(load_4, store_4), 8: Words(load_8, store_8)}[WORDS]
