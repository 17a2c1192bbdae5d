"""Gates: a number for each block of a weight, and no work where it is 0."""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.requests import picking, reading
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.ptx import as_float32, as_uint32, elect, mbarrier_arrive, redux_or


@cache
def listing(together: int, WARPS: int, whole: bool) -> Any:
    """list_left(plan, unit, last, continued, gates, shift, left, counts): how many units are left.

    All warps of a block come here, each with its run of units of the plan, and leave those of which
    any block has a gate that is not 0 in `left`, in their order, with the numbers of a record and a
    gate for each block; where a gate is 0 there is no block. If `whole`, the first unit of a piece
    of a line is among them in any case, and what `continued` is not begins with one.
    """
    RECORD, ENTRY = 2 * together + 2, listed(together)
    END, read, place_of = RECORD - 1, reading(together), picking(0, together)

    @cuda.jit(device=True)
    def look(plan, unit, first, last, continued, gates, shift, own):
        """Whether a lane's unit is left; its gates."""
        some = False
        if unit < last:
            record = read(plan, unit)
            for k in range(together):
                place = place_of(record, k)
                own[k] = gates[place >> shift] if place >= 0 else float32(0)
                some = some or own[k] != 0
            if whole:
                before = max(unit - 1, 0) * RECORD + END
                same = continued if unit == first else plan[before] == record[END]
                some = some or not same
        return some

    @cuda.jit(device=True)
    def list_left(plan, unit, last, continued, gates, shift, left, counts):
        own, lane = cuda.local.array(together, float32), int32(cuda.threadIdx.x % 32)
        warp, many = int32(cuda.threadIdx.x) // 32, int32(0)
        how = unit, last, continued, gates, shift
        for begin in range(unit, last, 32):
            mine = look(plan, begin + lane, *how, own)
            many += int32(cuda.popc(redux_or(uint32(uint32(1 if mine else 0) << uint32(lane)))))
        if lane == 0:
            counts[warp] = many
        cuda.syncthreads()
        at = many = int32(0)
        for k in range(WARPS):
            at, many = at + (counts[k] if k < warp else int32(0)), many + counts[k]
        for begin in range(unit, last, 32):  # what is read again is near
            mine = look(plan, begin + lane, *how, own)
            votes = redux_or(uint32(uint32(1 if mine else 0) << uint32(lane)))
            if mine:
                to, record = (at + bits_below(votes, lane)) * ENTRY, read(plan, begin + lane)
                for e in range(RECORD):
                    left[to + e] = record[e]
                for k in range(together):
                    left[to + RECORD + k] = int32(as_uint32(own[k]))
                    if own[k] == 0:
                        left[to + 2 * k] = int32(-1)
            at += int32(cuda.popc(votes))
        cuda.syncthreads()
        return many

    return list_left


def listed(together: int) -> int:
    """Numbers of a unit that is left, an even many."""
    return 2 * together + 2 + together + together % 2


@cache
def gates_of(together: int, gated: bool, passes: bool) -> Any:
    """take(left, unit, own): whether a unit that is listed has a block, or none `passes` as such;
    the gates of its blocks."""
    FIRST, ENTRY = 2 * together + 2, listed(together)

    @cuda.jit(device=True)
    def take(left, unit, own):
        if gated:
            for k in range(together):
                own[k] = as_float32(uint32(left[unit * ENTRY + FIRST + k]))
        return not passes or left[unit * ENTRY] >= 0

    return take


@cache
def filling_blocks(fill: Any) -> Any:
    """fill(...) by the copy engine; where a unit has no block the stage is as if filled."""

    @cuda.jit(device=True)
    def request(record, operands, top, shared, start, bars, bar):
        if record[0] >= 0:
            fill(record, operands, top, shared, start, bars, bar)
        elif elect() != 0:
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
