"""Which units a thread has of a warp's sums, and how they are loaded and stored.

The sums of a warp are 16 rows of the batch by columns, and a thread has two rows of them, 8 apart.
wgmma gives thread q of four the columns 8 i + 2 q and the next: twos. Forward, where a line has all
four gates of 32 units, i from 0 to 3, these are all gates of a unit, which are all that it takes.
Twos of float32 make whole sectors of memory, 32 bytes by four threads; of 16-bit floats two threads
swap a two each, and then have fours, which do: 2 to 9 % of a training step (H200).

Backward, where a line has the 32 units themselves, four threads exchange their twos for eights:
each has eight neighbours, 16 bytes of 16-bit floats, 32 of float32. In memory and until they are
needed these are words, which no thread has to wait for to widen.

`kind` is "f16", "bf16", or "tf32", which is float32 in memory.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int64, uint64

from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.deal import B
from numbsparse.kernels.parts.store import exchanged, transposed
from numbsparse.kernels.parts.words import PACK, UNPACK
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    load_2xu32,
    load_4xu32,
    store_2xu32,
    store_4xu32,
)

COLUMNS = GATES * B  # of a line
DOWN, TWOS = 2, 4  # rows of a thread, and twos of each row and gate
SUMS = TWOS, 2 * DOWN  # of a thread, of a gate or of units: the twos of its upper row come first


@cuda.jit(device=True)
def row_of(down, rows):
    """Of a tile of so many; of 32 only the lower one of a thread's is there."""
    thread = cuda.threadIdx.x
    return int64(thread // 32 * (rows // 4) + thread % 32 // 4 + 8 * down - (64 - rows) // 4)


@cuda.jit(device=True)
def unit_of(two):
    """The first of a two, among 32."""
    return int64(8 * two + cuda.threadIdx.x % 4 * 2)


@cuda.jit(device=True)
def unit_of_four(two):
    """The first of the four that two threads have of the twos `two` and `two + 1` after a swap."""
    q = cuda.threadIdx.x % 4
    return int64(8 * (two + q % 2) + q // 2 * 4)


@cache
def column_of(block: int, clamped: bool = True) -> Any:
    """(line, unit, width) -> where a row of gates has the input gate of a line's unit, of 32.

    The other gates follow, each `block` further on. Units beyond the last block have its columns,
    or if not `clamped`, columns from the width on.
    """
    LINES, OTHERS = max(block // B, 1), (GATES - 1) * block

    @cuda.jit(device=True)
    def column(line, unit, width):
        if block < B:
            at = line * COLUMNS + unit + unit // block * OTHERS
            return min(at, width - GATES * block + unit % block) if clamped else at
        return line * B + line // LINES * OTHERS + unit

    return column


@cache
def loading_two(kind: str) -> Any:
    """(array, at) -> two float32; of 16-bit floats, the array is of words."""
    FLOAT32, unpack = kind == "tf32", UNPACK.get(kind, UNPACK["f16"])

    @cuda.jit(device=True)
    def load(array, at):
        if FLOAT32:
            a, b = load_2xu32(array, at)
            return as_float32(a), as_float32(b)
        return unpack(array[uint64(at >> 1)])

    return load


@cache
def storing_twos(kind: str, two: int, down: int, block: int = B) -> Any:
    """(array, at, left, values): the twos `two` and `two + 1` of a row of SUMS.

    They belong at item `at` + their units, those under `left`, a multiple of 8; and between those
    of two blocks are the other gates of the first. All threads of a warp call it.
    """
    OTHERS = (GATES - 1) * block if block < B else 0
    pack: Any = PACK.get(kind)
    NEXT, A, C = two + 1, 2 * down, 2 * down + 1

    @cuda.jit(device=True)
    def store(array, at, left, values):
        a, b, c, d = values[two, A], values[two, C], values[NEXT, A], values[NEXT, C]
        if pack is None:
            unit, following = unit_of(two), unit_of(NEXT)
            if unit < left:
                at_unit = at + unit + unit // block * OTHERS
                store_2xu32(array, at_unit, as_uint32(a), as_uint32(b))
            if following < left:
                at_unit = at + following + following // block * OTHERS
                store_2xu32(array, at_unit, as_uint32(c), as_uint32(d))
        else:
            low, high = exchanged(pack(a, b), pack(c, d), cuda.threadIdx.x % 2, 1)
            unit = unit_of_four(two)
            if unit < left:
                store_2xu32(array, (at + unit + unit // block * OTHERS) >> 1, low, high)

    return store


@cuda.jit(device=True)
def exchange(sums):
    """SUMS of a block of columns: what their places mean changes.

    Before, two number i of thread q of four are columns 8 i + 2 q and the next; after, 8 q + 2 i.
    """
    for k in range(4):
        a, b, c, d = transposed(sums[0, k], sums[1, k], sums[2, k], sums[3, k])
        sums[0, k], sums[1, k], sums[2, k], sums[3, k] = a, b, c, d


@cuda.jit(device=True)
def unit_of_eight():
    """The first of the eight units of a thread, among 32."""
    return int64(cuda.threadIdx.x % 4 * 8)


class Eights(NamedTuple):
    """Eight neighbours in memory, and WORDS of registers from `k` on until they are needed.

    load, store : (array, at, words, k), from item `at` on
    take : (words, k, i) -> two number i as float32; put(words, k, i, a, b) the other way
    """

    WORDS: int
    load: Any
    store: Any
    take: Any
    put: Any


@cache
def eights(kind: str) -> Eights:
    FLOAT32, WORDS = kind == "tf32", 8 if kind == "tf32" else 4
    unpack, pack = UNPACK.get(kind, UNPACK["f16"]), PACK.get(kind, PACK["f16"])

    @cuda.jit(device=True)
    def load(array, at, words, k):
        for i in range(0, WORDS, 4):
            a, b, c, d = load_4xu32(array, at + i)
            words[k + i], words[k + i + 1], words[k + i + 2], words[k + i + 3] = a, b, c, d

    @cuda.jit(device=True)
    def store(array, at, words, k):
        for i in range(0, WORDS, 4):
            k += i
            store_4xu32(array, at + i, words[k], words[k + 1], words[k + 2], words[k + 3])

    @cuda.jit(device=True)
    def take(words, k, i):
        if FLOAT32:
            return as_float32(words[k + 2 * i]), as_float32(words[k + 2 * i + 1])
        return unpack(words[k + i])

    @cuda.jit(device=True)
    def put(words, k, i, a, b):
        if FLOAT32:
            words[k + 2 * i], words[k + 2 * i + 1] = as_uint32(a), as_uint32(b)
        else:
            words[k + i] = pack(a, b)

    return Eights(WORDS, load, store, take, put)
