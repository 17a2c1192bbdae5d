"""What gates leave of the units of a block of threads, as `deal` lists it, beside plain Python."""

from itertools import groupby, pairwise

import numpy as np
import pytest
from numba import cuda, int32
from ptx_helpers import needs_ampere

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.gates import dealing, listed

pytestmark = needs_ampere
WARPS = 3


@cuda.jit(device=True)
def prepare(ring):
    pass


def dealt(together, whole, plan, runs, each, gates):
    """Of each warp (first, end, whether it goes on, its `ends`), and all that is listed."""
    deal = dealing(together, whole, prepare, False)

    @cuda.jit
    def kernel(plan, runs, gates, left, ends, found):
        warp = cuda.threadIdx.x // 32
        run = int32(runs[warp, 0]), int32(runs[warp, 1]), runs[warp, 2] != 0
        first, end, continued = deal(plan, run, each, (warp,), gates, 0, left, ends)
        found[warp, 0], found[warp, 1], found[warp, 2] = first, end, int32(1 if continued else 0)

    left = ns.to_device(np.full((WARPS * each + 32) * listed(together), -7, np.int32))
    ends, found = (ns.to_device(np.zeros(shape, np.int32)) for shape in (WARPS, (WARPS, 3)))
    given = map(ns.to_device, (plan, runs, gates))
    launch(kernel, 1, 32 * WARPS, *given, left, ends, found)
    return [*map(tuple, np.column_stack([found.numpy(), ends.numpy()]).tolist())], left.numpy()


def units_left(together, whole, records, runs, gates):
    """The units in turn: (name, end, [(place, other, gate)])."""
    units = []
    for first, end, continued in runs.tolist():
        pieces = groupby(records[first:end].tolist(), key=lambda record: record[-1 - (not whole)])
        for number, (_, piece) in enumerate(pieces):
            piece = list(piece)
            blocks = [
                (place, other, gates[place])
                for *pairs, _, _ in piece
                for place, other in zip(pairs[::2], pairs[1::2], strict=True)
                if place >= 0 and gates[place] != 0
            ]
            empty = whole and not (continued and number == 0) and not blocks
            starts = range(0, len(blocks) + empty, together)
            units += [(*piece[0][-2:], blocks[k : k + together]) for k in starts]
    return units


LINES = {  # units of each line, of three warps with so many units each: one goes on from the second
    70: [12, 3, 1, 50, 4, 110, 3, 27],
    20: [4, 1, 1, 12, 2, 31, 3, 6],
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("together", "each"), [(1, 70), (2, 70), (4, 70), (2, 20)])
def test_what_is_left_is_listed_in_as_few_units_as_hold_it(together, each, whole, rng):
    """Of 70 units a warp looks at 32 at a time. The unit in which a line begins takes the first
    block that is left, be that one or two looks later; where a line goes on there is no such unit.
    """
    line = np.repeat(np.arange(len(LINES[each])), LINES[each])
    runs = np.array(
        [[each * warp, each * (warp + 1), warp == 2] for warp in range(WARPS)], np.int32
    )
    blocks = np.full((len(line), together, 2), -1, np.int32)
    there = rng.random((len(line), together)) < 0.8
    blocks[there] = np.arange(there.sum())[:, None] + [0, 1000]
    gates = rng.choice(np.float32([0, 0, 0.5, -2]), int(there.sum()))
    place = np.arange(len(line))
    empty = (line == 1) | (line == 6) | (line == 3) & (place < each // 2 + 5)
    empty |= (line == 5) & (place < 2 * each - 4)
    empty |= (line == 5) & (place >= 2 * each) & (place < np.flatnonzero(line == 5)[-5])
    gates[blocks[empty][..., 0][there[empty]]] = 0
    names = 10 + line if whole else 100 + line
    records = np.column_stack([blocks.reshape(len(line), -1), names, 100 + line]).astype(np.int32)
    padded = np.concatenate([records, records[-1:]]).ravel()
    found, left = dealt(together, whole, padded, runs, each, gates)
    units, entry = units_left(together, whole, records, runs, gates), listed(together)
    for number, (name, end, kept) in enumerate(units):
        own, missing = left[entry * number :][:entry], together - len(kept)
        pairs = [n for place, other, _ in kept for n in (place, other)] + [-1, 0] * missing
        assert own[: 2 * together + 2].tolist() == [*pairs, name, end]
        got = own[2 * together + 2 :][:together].view(np.float32).tolist()
        assert got == [gate for *_, gate in kept] + [0] * missing
    assert (left[entry * len(units) :] == -7).all()
    cuts = [len(units) * warp // WARPS for warp in range(WARPS + 1)]
    lines = [unit[1 if whole else 0] for unit in units]
    for warp, (first, end) in enumerate(pairwise(cuts)):
        goes_on = 0 < first < end and lines[first - 1] == lines[first]
        assert found[warp] == (first, end, goes_on, lines[first] if goes_on else -1)
