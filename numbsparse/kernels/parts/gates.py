"""Gates: a number for each block of a weight, and no work where it is 0."""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.plans_on_gpu import lanes_where
from numbsparse.kernels.parts.requests import picking, reading
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    elect,
    mbarrier_arrive,
    shfl_idx,
    sync_warp,
    wait_for_earlier_kernels,
)

RUN = 32  # units of a warp that are listed, one a lane


@cache
def dealing(together: int, whole: bool, prepare: Any, overlap: bool) -> Any:
    """deal(plan, run, each, ring, gates, shift, left, ends): what gates that are not 0 leave of the
    units of a block of threads, dealt to its warps anew.

    All warps come here, each with a run of up to `each` units, (first, end, whether another warp
    has begun its first piece of a line). The blocks that are left follow each other in units anew,
    `together` in one as long as a line goes on in a run, and these in `left`, with the numbers of a
    record and a gate for each block. If `whole`, a piece that begins has a unit in any case, maybe
    without a block. It returns a warp's run of what is left; `ends` has the ends of the pieces that
    warps go on with. The plan is read, and the ring prepared, while earlier kernels run.

    Lanes have a unit each. A longer run is walked twice: what is left is counted, then listed.
    """
    RECORD, ENTRY = 2 * together + 2, listed(together)
    NAME, END, read = RECORD - 2, RECORD - 1, reading(together)
    LINE, place_of, other_of = END if whole else NAME, picking(0, together), picking(1, together)

    @cuda.jit(device=True)
    def record_of(plan, unit, last):
        """A lane's record, and the line of the one before it."""
        own = min(unit, last)
        return read(plan, own), plan[uint32(max(own - 1, 0) * RECORD + LINE)]

    @cuda.jit(device=True)
    def look(lane, record, there, goes_on, so_far, gates, shift, own):
        """A lane's gates, and ((how many blocks of its line are left of lanes before, the first
        with a unit of its own, whether there is one), `so_far` for the next lanes).

        so_far : blocks that are left of the line that goes on here, and whether it has a unit
        """
        begun = lanes_where(there and not goes_on)
        line = uint32(begun & ~uint32(uint32(0xFFFFFFFE) << uint32(lane)))  # up to here
        start = 31 - int32(cuda.clz(int32(line)))  # or -1
        from_line, opened = max(start, 0), whole and (start >= 0 or so_far[1])
        # Blocks of the line that are left: of lanes before; of this one.
        before, here = int32(0 if start >= 0 else so_far[0]), int32(0)
        for k in range(together):
            place = place_of(record, k)
            own[k] = gates[uint32(place >> shift)] if there and place >= 0 else float32(0)
            bits = lanes_where(own[k] != 0)
            before += bits_below(uint32(bits >> uint32(from_line)), lane - from_line)
            here += int32(1 if own[k] != 0 else 0)
        # Blocks before it are in the unit of the lane before.
        next_unit = (before + together - 1) // together * together
        if opened and before == 0:
            next_unit = 0 if lane == start else together
        mine = there and (next_unit < before + here or (opened and lane == start))
        so_far = shfl_idx(int32(before + here), 31), so_far[1] or (whole and begun != 0)
        return (int32(before), int32(next_unit), mine), so_far

    @cuda.jit(device=True)
    def enter(left, to, record, found, own):
        """A lane's unit, if it has one, and its blocks there or in the one before."""
        before, next_unit, mine = found
        if mine:
            for k in range(together):
                left[uint32(to + 2 * k)] = int32(-1)
                left[uint32(to + 2 * k + 1)] = int32(0)
                left[uint32(to + RECORD + k)] = int32(0)
            left[uint32(to + NAME)], left[uint32(to + END)] = record[NAME], record[END]
        sync_warp()
        for k in range(together):
            if own[k] != 0:
                begin = to if before >= next_unit else uint32(to - ENTRY)
                slot = before % together
                left[uint32(begin + 2 * slot)] = place_of(record, k)
                left[uint32(begin + 2 * slot + 1)] = other_of(record, k)
                left[uint32(begin + RECORD + slot)] = int32(as_uint32(own[k]))
                before += 1

    @cuda.jit(device=True)
    def deal(plan, run, each, ring, gates, shift, left, ends):
        own, (first, end, continued) = cuda.local.array(together, float32), run
        warp, lane = uint32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x % 32)
        warps, last = uint32(cuda.blockDim.x) // 32, max(end - 1, first)
        record, line_before = record_of(plan, first + lane, last)
        prepare(*ring)
        if overlap:
            wait_for_earlier_kernels()
        at, many, is_long = int32(0), int32(0), int32(each) > RUN
        found, bits = (int32(0), int32(0), False), uint32(0)
        for lists in range(2):
            so_far, here_from = (int32(0), False), at
            for top in range(first, max(end, first + 1), RUN):
                unit = top + lane
                if is_long and (lists == 1 or top > first):
                    record, line_before = record_of(plan, unit, last)
                if is_long or lists == 0:
                    goes_on = continued if unit == first else line_before == record[LINE]
                    found, so_far = look(
                        lane, record, unit < end, goes_on, so_far, gates, shift, own
                    )
                    bits = lanes_where(found[2])
                if lists == 1:
                    to = uint32((here_from + bits_below(bits, lane)) * ENTRY)
                    enter(left, to, record, found, own)
                here_from += int32(cuda.popc(bits))
            if lists == 0:
                if lane == 0:
                    ends[warp] = here_from
                cuda.syncthreads()
                for k in range(warps):
                    count = ends[k]
                    at, many = at + (count if k < warp else int32(0)), many + count
        cuda.syncthreads()
        first, end = int32(many * warp // warps), int32(many * (warp + 1) // warps)
        earlier, now = uint32(max(first - 1, 0) * ENTRY + LINE), uint32(first * ENTRY + LINE)
        continued = 0 < first < end and left[earlier] == left[now]
        if lane == 0:
            ends[warp] = left[now] if continued else int32(-1)
        return first, end, continued

    return deal


def listed(together: int) -> int:
    """Numbers of a unit that is left, an even many."""
    return 2 * together + 2 + together + together % 2


def shift_of(size: int) -> int:
    """By which the place of what a block has, its first value / 32, is shifted to its number."""
    return (size * size // WIDTH).bit_length() - 1


def listed_bytes(together: int, warps: int, each: int) -> int:
    """Shared memory for what is listed, and what a warp looks at behind its last unit."""
    return 4 * listed(together) * (warps * each + RUN)


@cache
def gates_of(together: int, gated: bool, lists: bool) -> tuple[Any, Any]:
    """(ask, take): the gates of a unit's blocks.

    ask(record, gates, shift, own) asks for them where its record says. take(left, unit, own) takes
    them where they are listed; it is whether any is not 0.
    """
    FIRST, ENTRY, place_of = 2 * together + 2, listed(together), picking(0, together)

    @cuda.jit(device=True)
    def ask(record, gates, shift, own):
        for k in range(together):
            place = place_of(record, k)
            own[k] = gates[uint32(place >> shift)] if place >= 0 else float32(0)

    @cuda.jit(device=True)
    def take(left, unit, own):
        some = not gated
        if gated:
            for k in range(together):
                if lists:
                    own[k] = as_float32(uint32(left[uint32(unit * ENTRY + FIRST + k)]))
                some = some or own[k] != 0
        return some

    return ask, take


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
