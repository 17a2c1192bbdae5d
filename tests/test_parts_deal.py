"""Work dealt to places: each piece once, each to the place that is free first."""

from heapq import heapreplace
from itertools import pairwise

import numpy as np
import pytest

from numbsparse.kernels.parts.deal import CHOICE, dealt, in_step, in_turn, lines_of_strips


def test_pieces_go_where_it_is_free_first():
    owners, end = dealt([5, 4, 3, 3, 1], 2)
    assert owners.tolist() == [0, 1, 1, 0, 1]
    assert end == 8


def test_longest_first_ends_near_the_fair_share(rng):
    costs = np.sort(rng.integers(1, 50, 300))[::-1]
    owners, end = dealt(costs.tolist(), 7)
    loads = np.bincount(owners, costs, 7)
    assert end == loads.max()
    assert loads.max() - loads.min() <= costs.min() + costs[-7:].max()


def test_places_take_their_pieces_in_order():
    order, starts = in_turn(np.array([2, 0, 2, 0, 0]), 4)
    assert [order[a:b].tolist() for a, b in pairwise(starts)] == [[1, 3, 4], [], [0, 2], []]


def test_no_work_takes_no_time():
    owners, end = dealt([], 3)
    assert owners.size == 0
    assert end == 0


@pytest.mark.parametrize("places", [1, 2, 7, 64])
def test_equal_times_go_to_the_first_place(places, rng):
    costs, free, owners = rng.integers(1, 4, 200) / 4, [(0.0, k) for k in range(places)], []
    for cost in costs:
        owners.append(free[0][1])
        heapreplace(free, (free[0][0] + cost, free[0][1]))
    found, end = dealt(costs, places)
    assert found.tolist() == owners
    assert end == max(free)[0]


@pytest.mark.parametrize("together", [1, 2])
def test_warps_of_a_strip_get_neighbours_and_much_the_same(together, rng):
    lengths, warps, columns = rng.integers(0, 9, 100), 4, 4
    indptr = np.append(0, np.cumsum(lengths))
    lines = lines_of_strips(indptr, warps, columns, 1, together)
    assert sorted(lines.ravel()) == list(range(112))  # 7 strips, the last one not full
    hands = lines.reshape(-1, together)
    assert (hands == hands[:, :1] + np.arange(together)).all()
    assert (hands[:, 0] % together == 0).all()
    of_warp = np.append(lengths, np.zeros(12, int))[lines].reshape(7, warps, columns).sum(2)
    assert (np.ptp(of_warp, axis=1) <= 8 * together).all()
    assert (np.diff(of_warp.sum(1)) <= 0).all()


@pytest.mark.parametrize("warps", [1, 5])
def test_of_a_few_groups_the_one_that_keeps_warps_even_is_next(warps, rng):
    """The first of equals; what is chosen leaves its place to the next one that waits."""
    counts = rng.poisson(0.3, (40, 4 * warps)).astype(np.uint8)
    counts[7] = 0  # not needed
    order = np.full(len(counts), -1)
    needed, loads = np.flatnonzero(counts.any(1)), counts.reshape(40, warps, 4).sum(2).astype(int)
    n, few, expected = len(needed), list(range(CHOICE)), []
    assert in_step(counts, warps, order) == n
    for k in range(1, n + 1):
        due, had = k * loads.sum(0), loads[expected].sum(0)  # n times a warp's, and what it had
        cost = [((n * (had + loads[needed[i]]) - due) ** 2).sum() if i < n else np.inf for i in few]
        best = int(np.argmin(cost))
        expected.append(int(needed[few[best]]))
        few[best] = CHOICE + k - 1
    assert order[:n].tolist() == expected
