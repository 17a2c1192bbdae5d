"""Gates: a number for each block of a weight, read ahead, and no work where it is 0."""

from functools import cache
from typing import Any

from numba import cuda, float32

from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.requests import picking, reading
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.ptx import elect, mbarrier_arrive


@cache
def gating(together: int, gated: bool) -> tuple[Any, Any, Any, Any]:
    """(take, follow, wanted, go_on): gates of a unit's blocks, 0 where there is none.

    Where blocks are not `gated` they do nothing, and all is wanted.

    take(record, gates, shift, taken) reads them, follow(own, coming) goes on to the next ones, and
    wanted(own) is whether any is not 0. go_on(plan, unit, record, gates, shift, asked) gives the
    records of a unit and of the next one: the first is there before its gates are asked for, these
    before they are looked at. Where a warp waited for its record in between, small batches with all
    gates one took up to 1.1 times as long (H200).
    """
    place_of, read = picking(0, together), reading(together)

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

    @cuda.jit(device=True)
    def go_on(plan, unit, record, gates, shift, asked):
        if gated:
            take(record, gates, shift, asked)
            return record, read(plan, unit + 1)
        return read(plan, unit), record

    return take, follow, wanted, go_on


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
