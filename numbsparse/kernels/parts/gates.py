"""Gates: a number for each block of a weight, and no work where it is 0."""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.requests import picking, reading
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.ptx import as_float32, as_uint32, elect, mbarrier_arrive, redux_or

RUN = 32  # units of a warp that are listed, one a lane


@cache
def listing(together: int, whole: bool) -> tuple[Any, Any]:
    """(look, list_left): units of which any block has a gate that is not 0.

    list_left(run, looked, gates, shift, left, counts): all warps of a block come here, each with a
    run of units, (first, end, whether another warp has begun its first piece of a line), and leave
    those units in `left`, in their order, with the numbers of a record and a gate for each block;
    where a gate is 0 there is no block. If `whole`, the first unit of a piece is among them in any
    case. It returns how many they are.

    look(plan, first, each) is what a lane needs to know of one of `each` units before: no gates, so
    that earlier kernels may still run.
    """
    RECORD, ENTRY = 2 * together + 2, listed(together)
    END, read, place_of = RECORD - 1, reading(together), picking(0, together)

    @cuda.jit(device=True)
    def look(plan, first, each):
        unit = first + min(int32(cuda.threadIdx.x % 32), max(int32(each) - 1, 0))
        record = read(plan, unit)
        begins = whole and plan[uint32(max(unit - 1, 0) * RECORD + END)] != record[END]
        return record, begins

    @cuda.jit(device=True)
    def list_left(run, looked, gates, shift, left, counts):
        own = cuda.local.array(together, float32)
        (record, begins), (first, end, continued) = looked, run
        warp, lane = uint32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x % 32)
        there = first + lane < end
        some = not continued if whole and lane == 0 else begins
        for k in range(together):
            place = place_of(record, k)
            own[k] = float32(0)
            if there and place >= 0:
                own[k] = gates[uint32(place >> shift)]
            some = some or own[k] != 0
        mine = uint32(1 if some and there else 0)
        bits = redux_or(uint32(mine << uint32(lane)))
        if lane == 0:
            counts[warp] = int32(cuda.popc(bits))
        cuda.syncthreads()
        at, many = bits_below(bits, lane), int32(0)
        for k in range(uint32(cuda.blockDim.x) // 32):
            count = counts[k]
            at, many = at + (count if k < warp else int32(0)), many + count
        if mine != 0:
            to = uint32(at * ENTRY)
            for e in range(RECORD):
                left[uint32(to + e)] = record[e]
            for k in range(together):
                left[uint32(to + RECORD + k)] = int32(as_uint32(own[k]))
                if own[k] == 0:
                    left[uint32(to + 2 * k)] = int32(-1)
        cuda.syncthreads()
        return many

    return look, list_left


def listed(together: int) -> int:
    """Numbers of a unit that is left, an even many."""
    return 2 * together + 2 + together + together % 2


def listed_bytes(together: int, warps: int) -> int:
    """Shared memory for what is listed, and what a warp looks at behind its last unit."""
    return 4 * listed(together) * (warps * RUN + RUN)


@cache
def gates_of(together: int, gated: bool, passes: bool) -> Any:
    """take(left, unit, own): whether a unit that is listed has a block, or none `passes` as such;
    the gates of its blocks."""
    FIRST, ENTRY = 2 * together + 2, listed(together)

    @cuda.jit(device=True)
    def take(left, unit, own):
        if gated:
            for k in range(together):
                own[k] = as_float32(uint32(left[uint32(unit * ENTRY + FIRST + k)]))
        return not passes or left[uint32(unit * ENTRY)] >= 0

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
