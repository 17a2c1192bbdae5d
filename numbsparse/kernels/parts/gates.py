"""Gates: a number for each block of a weight, read ahead, and no work where it is 0."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.requests import picking, reading
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.parts.walk_on_gpu import lanes_where, lowest
from numbsparse.kernels.ptx import as_float32, as_uint32, shfl_idx


class Walking(NamedTuple):
    """How a warp goes through the units of its run any of whose blocks has a gate that is not 0.

    A lane knows one of 32 units, the first of which is `begin`. A walk is (begin, bits of those
    that are still to come).

    look_up(plan, begin, most, places) : which blocks a lane's unit has; up to the unit `most`
    weigh(places, gates, shift, begin, last, held) : asks for their gates
    wanted(held) : bits of the lanes any of whose gates is not 0
    follow(walk, plan, gates, shift, last, places, held) : (the next unit or `last`, the walk)
    pick(held, k, taken) : the gates of the unit that lane k knows
    """

    look_up: Any
    weigh: Any
    wanted: Any
    follow: Any
    pick: Any


@cache
def walking(together: int) -> Walking:
    read, place_of = reading(together), picking(0, together)

    @cuda.jit(device=True)
    def look_up(plan, begin, most, places):
        record = read(plan, min(int32(begin + cuda.threadIdx.x % 32), int32(most)))
        for k in range(together):
            places[k] = place_of(record, k)

    @cuda.jit(device=True)
    def weigh(places, gates, shift, begin, last, held):
        for k in range(together):
            there = places[k] >= 0 and begin + int32(cuda.threadIdx.x % 32) < last
            held[k] = gates[places[k] >> shift] if there else float32(0)

    @cuda.jit(device=True)
    def wanted(held):
        some = False
        for k in range(together):
            some = some or held[k] != 0
        return uint32(lanes_where(some))

    @cuda.jit(device=True)
    def follow(walk, plan, gates, shift, last, places, held):
        begin, bits = walk
        while bits == 0 and begin + 32 < last:
            begin = int32(begin + 32)
            look_up(plan, begin, last, places)
            weigh(places, gates, shift, begin, last, held)
            bits = wanted(held)
        there = bits != 0
        unit = int32(begin + lowest(bits)) if there else int32(last)
        return unit, (begin, uint32(bits & uint32(bits - uint32(1))) if there else uint32(0))

    @cuda.jit(device=True)
    def pick(held, k, taken):
        for i in range(together):
            taken[i] = as_float32(shfl_idx(as_uint32(held[i]), uint32(k)))

    return Walking(look_up, weigh, wanted, follow, pick)


@cache
def adding_gated(strip: Strip, add_step: Any, pass_over: Any) -> Any:
    """add(shared, lines, place, b, gate, x, acc): add_step of b times its gate, or pass_over.

    b are words of a block; where a strip's stages have no gates it is as it is.
    """
    scaled = scaling(strip.GATED or "float32", ragged=strip.RAGGED)

    @cuda.jit(device=True)
    def add(shared, lines, place, b, gate, x, acc):
        add_step(shared, lines, place, b, x, acc)

    @cuda.jit(device=True)
    def add_wanted(shared, lines, place, b, gate, x, acc):
        if gate != 0:
            if gate != 1:
                b = times(b, gate)
            add_step(shared, lines, place, b, x, acc)
        else:
            pass_over(shared, lines, place, x)

    def times_of(words: int) -> Any:
        HALF, half = words // 2, times_of(words // 2) if words > 1 else scaled

        @cuda.jit(device=True)
        def of_word(b, gate):
            return (scaled(b[0], gate),)

        @cuda.jit(device=True)
        def of_words(b, gate):
            return half(b[:HALF], gate) + half(b[HALF:], gate)

        return of_words if words > 1 else of_word

    times = times_of(strip.STEP_BYTES // 128)
    return add_wanted if strip.GATES else add
