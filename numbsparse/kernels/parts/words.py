"""Words of 32 bits: two 16-bit values, and what a warp reads or writes together, each lane 8, 16 or
32 bytes of it."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint16, uint32

from numbsparse.kernels.ptx import (
    load_2xu32,
    load_4xu32,
    pack_bfloat2,
    pack_half2,
    store_2xu32,
    store_4xu32,
    unpack_bfloat2,
    unpack_half2,
)

# Of a dtype, or as PTX calls its values.
PACK = {"float16": pack_half2, "bfloat16": pack_bfloat2, "f16": pack_half2, "bf16": pack_bfloat2}
UNPACK = {
    **{"float16": unpack_half2, "bfloat16": unpack_bfloat2},
    **{"f16": unpack_half2, "bf16": unpack_bfloat2},
}


class Words(NamedTuple):
    """load(words, at) -> those of a lane; store(words, at, own): neighbours, or twice four."""

    load: Any
    store: Any


@cache
def words_of_lane(WORDS: int) -> Words:
    AT_ONCE = min(WORDS, 4)
    load_some = load_2xu32 if AT_ONCE == 2 else load_4xu32

    @cuda.jit(device=True)
    def load(words, at):
        return load_some(words, at + uint32(cuda.threadIdx.x) % 32 * AT_ONCE)

    @cuda.jit(device=True)
    def load_twice(words, at):
        return load(words, at) + load(words, at + 128)

    @cuda.jit(device=True)
    def store(words, at, own):
        first = at + uint32(cuda.threadIdx.x) % 32 * AT_ONCE
        if AT_ONCE == 2:
            store_2xu32(words, first, own[0], own[1])
        else:
            store_4xu32(words, first, own[0], own[1], own[2], own[3])

    @cuda.jit(device=True)
    def store_twice(words, at, own):
        store(words, at, own)
        store(words, at + 128, own[4:])

    return Words(load_twice, store_twice) if WORDS == 8 else Words(load, store)


@cache
def conversions(kind: str) -> tuple[Any, Any]:
    """(widened, rounded): an item of an array as float32, of 16 bits from uint16, and back."""

    @cuda.jit(device=True)
    def as_it_is(value):
        return value

    if not kind:
        return as_it_is, as_it_is
    pack, unpack = PACK[kind], UNPACK[kind]

    @cuda.jit(device=True)
    def widened(bits):
        return unpack(uint32(bits))[0]

    @cuda.jit(device=True)
    def rounded(value):
        return uint16(pack(value, value) & uint32(0xFFFF))

    return widened, rounded
