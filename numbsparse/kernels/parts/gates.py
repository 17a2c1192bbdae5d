"""Gates: a number for each block of a weight, read ahead, and no work where all of a unit are 0."""

from functools import cache
from typing import Any

from numba import cuda, float32

from numbsparse.kernels.parts.requests import picking
from numbsparse.kernels.ptx import elect, mbarrier_arrive


@cache
def gating(together: int, gated: bool) -> tuple[Any, Any, Any]:
    """(take, follow, wanted): gates of a unit's blocks, 0 where there is none.

    Where blocks are not `gated` they do nothing, and all is wanted.

    take(record, gates, shift, taken) reads them, follow(own, coming) goes on to the next ones, and
    wanted(own) is whether any is not 0.
    """
    place_of = picking(0, together)

    @cuda.jit(device=True)
    def take(record, gates, shift, taken):
        if gated:
            for k in range(together):
                place = place_of(record, k)
                taken[k] = gates[place >> shift] if place >= 0 else float32(0)

    @cuda.jit(device=True)
    def follow(own, coming):
        if gated:
            for k in range(together):
                own[k] = coming[k]

    @cuda.jit(device=True)
    def wanted(own):
        some = not gated
        if gated:
            for k in range(together):
                some = some or own[k] != 0
        return some

    return take, follow, wanted


@cache
def filling_wanted(fill: Any, wanted: Any, engine: bool) -> Any:
    """fill(...), unless all gates of the unit are 0: then the stage is as if filled."""

    @cuda.jit(device=True)
    def request(own_gates, record, operands, top, shared, start, bars, bar):
        if wanted(own_gates):
            fill(record, operands, top, shared, start, bars, bar)
        elif engine and elect() != 0:
            mbarrier_arrive(bars, bar)

    return request
