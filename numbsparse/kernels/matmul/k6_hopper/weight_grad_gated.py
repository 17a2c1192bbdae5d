"""Gates of a weight-gradient, as only the GPU knows them: blocks whose gate is zero are left out.

Each warp finds out what is left of its item: panels that no block needs are not copied, products of
no block are not computed, and nothing is written where the gate is zero.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import MAPS, RUNS, Tile
from numbsparse.kernels.ptx import redux_or, sync_warp


class Gates(NamedTuple):
    """As one argument of a kernel."""

    of_blocks: Any
    cut: (
        Any  # the blocks, of float32 parts of these, that items name by numbers, if they leave sums
    )


@cache
def remaining(tile: Tile) -> Any:
    """left(outs, item, group, k, is_cut, gates): a number of `outs`, or -1 where its gate is 0."""
    PARTS = (tile.B // tile.PART) ** 2  # of a block

    @cuda.jit(device=True)
    def left(outs, item, group, k, is_cut, gates):
        out = outs[item, group, k]
        if out >= 0:
            part = gates.cut[out % gates.cut.size] if is_cut else out
            if gates.of_blocks[part // PARTS] == 0:
                out = int32(-1)
        return out

    return left


@cache
def thinning(tile: Tile) -> Any:
    """thin(warp, places, outs, item, is_cut, gates, own_places, own_outs): which units are left.

    What is left to the warpgroup of a warp is in line `warp % 4` of the warp's own tables. Of 16
    bits its products come first; of float32 they are where they were.
    """
    PER, UNITS, left = tile.OUTS // tile.UNITS, tile.UNITS, remaining(tile)
    if tile.ITEM == 4:
        return thinning_float32(tile)
    if tile.UNITS == 1:
        return thinning_columns(tile)
    # The first of each unit's bits.
    FIRSTS = sum(1 << u * PER for u in range(UNITS))

    @cuda.jit(device=True)
    def thin(warp, places, outs, item, is_cut, gates, own_places, own_outs):
        lane, group, line = uint32(cuda.threadIdx.x) % 32, warp // 4, warp % 4
        sync_warp()  # all have read what is of the item before
        unit, out = lane // PER, int32(-1)
        if lane < PER * UNITS:
            own_outs[line, group, lane] = int32(-1)
            out = left(outs, item, group, lane, is_cut, gates)
        there = redux_or(uint32(uint32(1 if out >= 0 else 0) << lane))
        there = uint32((there | there >> uint32(PER - 1)) & uint32(FIRSTS))
        below = uint32(there & uint32((uint32(1) << unit * PER) - uint32(1)))
        at = int32(cuda.popc(below))
        sync_warp()
        if lane == 0:
            own_places[line, group, 0] = int32(cuda.popc(there))
        if lane < PER * UNITS and there >> uint32(unit * PER) & uint32(1):
            own_outs[line, group, at * PER + lane % PER] = out
            if lane % PER == 0:
                own_places[line, group, 1 + 2 * at] = places[item, group, 1 + 2 * unit]
                own_places[line, group, 2 + 2 * at] = places[item, group, 2 + 2 * unit]
        sync_warp()
        return there

    return thin


@cache
def thinning_columns(tile: Tile) -> Any:
    """Of a unit whose blocks are side by side: two at most, one of which may be left."""
    OUTS, ACROSS, left = tile.OUTS, tile.B // tile.PANEL * (tile.PANEL_BYTES >> 4), remaining(tile)

    @cuda.jit(device=True)
    def thin(warp, places, outs, item, is_cut, gates, own_places, own_outs):
        lane, group, line = uint32(cuda.threadIdx.x) % 32, warp // 4, warp % 4
        sync_warp()  # all have read what is of the item before
        out = int32(-1)
        if lane < OUTS:
            own_outs[line, group, lane] = int32(-1)
            out = left(outs, item, group, lane, is_cut, gates)
        there = redux_or(uint32(uint32(1 if out >= 0 else 0) << lane))
        sync_warp()
        if lane == 0:
            own_places[line, group, 0] = int32(cuda.popc(there))
            own_places[line, group, 1] = places[item, group, 1]
            first = int32(0) if there & uint32(1) else int32(ACROSS)
            own_places[line, group, 2] = places[item, group, 2] + first
        if out >= 0:
            own_outs[line, group, lane if there & uint32(1) else 0] = out
        sync_warp()
        return there

    return thin


@cache
def thinning_float32(tile: Tile) -> Any:
    """Where one of two products is left it has a strip of its own: they are not taken together."""
    PER, OUTS, UNITS, left = tile.OUTS // tile.UNITS, tile.OUTS, tile.UNITS, remaining(tile)

    @cuda.jit(device=True)
    def thin(warp, places, outs, item, is_cut, gates, own_places, own_outs):
        lane, group, line = uint32(cuda.threadIdx.x) % 32, warp // 4, warp % 4
        sync_warp()  # all have read what is of the item before
        out = int32(-1)
        if lane < OUTS:
            out = left(outs, item, group, lane, is_cut, gates)
            own_outs[line, group, lane] = out
        there = redux_or(uint32(uint32(1 if out >= 0 else 0) << uint32(lane // PER)))
        if lane < UNITS:
            is_left = there >> uint32(lane) & uint32(1)
            own_places[line, group, lane] = places[item, group, lane] if is_left else int32(-1)
        sync_warp()
        return there

    return thin


@cache
def needing(tile: Tile) -> Any:
    """slots(places, outs, item, is_cut, gates): bits of the slots whose panels blocks that are left
    need, in two words."""
    GROUPS, OUTS, PANELS, left = tile.GROUPS, tile.OUTS, tile.B // tile.PANEL, remaining(tile)
    UNITS, PER, STEP = tile.UNITS, tile.OUTS // tile.UNITS, tile.PANEL_BYTES >> 4
    FLOAT32, X_PANELS, ACROSS = tile.ITEM == 4, tile.X_PANELS, tile.N // tile.PANEL
    X_STAYS = (1 << PANELS) - 1 if tile.UNITS == 1 else 0  # another block of threads may need it

    @cuda.jit(device=True)
    def slots_of(places, item, group, k):
        """(slot, and how many from there on) of x, and of dy."""
        unit = k // PER
        if FLOAT32:
            x, dy = 2 * (group * UNITS + unit) + k // ACROSS % 2, places[item, group, unit]
            return x, 1, X_PANELS + dy * ACROSS, ACROSS
        if UNITS == 1:
            return 0, PANELS, PANELS * (1 + k), PANELS
        one, other = places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit]
        if PER == 2:  # of dy, and how far the second one is
            return other // STEP, 1, ((one & 0xFFFF) + (one >> 16) * (k % 2)) // STEP, 1
        return one // STEP, 1, other // STEP, 1

    @cuda.jit(device=True)
    def bits(first, count, word):
        """Of 32 slots."""
        found = uint32(0)
        for i in range(count):
            if (first + i) // 32 == word:
                found = uint32(found | uint32(1) << uint32((first + i) % 32))
        return found

    @cuda.jit(device=True)
    def slots(places, outs, item, is_cut, gates):
        lane = int32(cuda.threadIdx.x % 32)
        low, high = uint32(X_STAYS), uint32(0)
        if lane < GROUPS * OUTS:
            group, k = lane // OUTS, lane % OUTS
            if left(outs, item, group, k, is_cut, gates) >= 0:
                x, n_x, dy, n_dy = slots_of(places, item, group, k)
                low = uint32(low | bits(x, n_x, 0) | bits(dy, n_dy, 0))
                high = uint32(bits(x, n_x, 1) | bits(dy, n_dy, 1))
        return redux_or(low), redux_or(high)

    return slots


@cache
def keeping(tile: Tile) -> Any:
    """keep(heads, loads, places, outs, item, gates, code, mine): (whether a lane's copy, if it has
    one, is needed, how many panels of the item are)."""
    needed, EDGE = needing(tile), len(RUNS)

    @cuda.jit(device=True)
    def run_of(code):
        number = code >> uint32(8) & uint32(0xFF)
        number = number % uint32(MAPS)
        return uint32(1) if number == EDGE else uint32(1) << number

    @cuda.jit(device=True)
    def is_needed(code, low, high):
        slot, run = code & uint32(0xFF), run_of(code)
        found = uint32(0)
        for i in range(1 << EDGE - 1):
            if i < run:
                at = uint32(slot + i)
                found = uint32(found | (high if at >= 32 else low) >> uint32(at % 32))
        return found & uint32(1) != 0

    @cuda.jit(device=True)
    def keep(heads, loads, places, outs, item, gates, code, mine):
        low, high = needed(places, outs, item, heads[item, 4] != 0, gates)
        arriving, lane = heads[item, 3], int32(cuda.threadIdx.x % 32)
        for first in range(0, heads[item, 2], 32):
            gone = uint32(0)
            if first + lane < heads[item, 2]:
                other = uint32(loads[item, first + lane, 1])
                if not is_needed(other, low, high):
                    gone = run_of(other)
            for bit in range(EDGE):  # RUNS are powers of 2
                some = uint32(uint32(gone >> uint32(bit) & uint32(1)) << uint32(lane))
                arriving -= int32(cuda.popc(redux_or(some))) << bit
        return mine and is_needed(code, low, high), arriving

    return keep
