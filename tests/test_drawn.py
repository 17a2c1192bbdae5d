"""The tools that draw cases: every pair that can be met is, and memory is as it says."""

from itertools import combinations, permutations, product
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
from conftest import beyond_pairs
from drawn import ORDERS, Operand, Space, assert_within, laid, memory_of

from numbsparse import device

FACTORS = {"a": [0, 1, 2], "b": list("xyz"), "c": [False, True], "d": [0, 1, 2, 3], "e": [0, 1]}


def allowed(case):
    if case.get("a") == 1 and case.get("c", True) is False:
        return False  # a pair that no case has
    return not (case.get("b") == "z" and case.get("d", 0) > 1 and case.get("e") == 1)


@pytest.mark.parametrize(("groups", "most"), [([], 20), ([("a", "b", "d")], 40)])
def test_all_that_some_case_has_is_covered(groups, most):
    space = Space(FACTORS, allowed, groups)
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    possible = set().union(*(space.meetings_of(case) for case in every if allowed(case)))
    cases = space.covering()
    assert set().union(*map(space.meetings_of, cases)) == possible < space.meetings()
    assert all(map(allowed, cases))
    assert len(cases) < most < len(every)
    sizes = {len(meeting) for meeting in possible}
    assert sizes == ({2, 3} if groups else {2})


def no_queen_attacks(case):
    """Of queens of a chess board: {column: row}."""
    return all(
        case[a] != case[b] and abs(case[a] - case[b]) != abs(a - b)
        for a, b in combinations(case, 2)
    )


def boards(n):
    return Space({column: list(range(n)) for column in range(n)}, no_queen_attacks)


def test_of_hard_cases_all_that_some_case_has_is_covered():
    space = boards(6)
    every = [dict(enumerate(rows)) for rows in permutations(range(6))]
    possible = [space.meetings_of(case) for case in every if no_queen_attacks(case)]
    assert len(possible) == 4
    assert set().union(*map(space.meetings_of, space.covering())) == set().union(*possible)


@pytest.mark.parametrize("row", range(8))
def test_cases_that_are_hard_to_find_are_found(row, rng):
    """Each square has a queen on some board."""
    for column in range(8):
        case = boards(8).grown({column: row}, None, rng)
        assert case[column] == row
        assert no_queen_attacks(case)


@pytest.mark.parametrize("order", ORDERS)
def test_a_matrix_is_in_memory_as_its_order_says(order, rng):
    values = rng.standard_normal((4, 5)).astype(np.float32)
    view = laid(values, order)
    row, column, _ = ORDERS[order](4, 5)
    item = 4 + (order == "field")
    assert view.strides == (item * row, item * column)
    assert view.flags.aligned == (order not in ("unaligned", "field"))
    assert view.flags.writeable == (order != "read-only")
    if "repeated" not in order:
        np.testing.assert_array_equal(view, values)
    memory = memory_of(view)[not view.flags.aligned :]
    items = np.ndarray(memory.size // item, np.float32, memory, 0, (item,))
    assert np.isnan(items).sum() == items.size - len({*view.ravel().tolist()})


@pytest.mark.parametrize("order", ["C", "F, gaps", "C, offset", "every second value"])
def test_what_is_written_around_a_matrix_is_seen(order):
    operand = Operand(np.full((3, 4), np.nan, np.float32), order, "numpy", "cpu")
    operand.array[...] = 1
    assert not operand.unchanged()
    assert operand.only_it_changed()
    memory_of(operand.array)[-1] ^= 1
    assert not operand.only_it_changed()


@pytest.mark.parametrize(
    ("got", "right"), [(1.1, 1.0), (np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (-np.inf, np.inf)]
)
def test_what_is_not_within_its_bound_is_wrong(got, right):
    with pytest.raises(AssertionError, match="1 of 2 are wrong; at"):
        assert_within(np.array([got, 2.0]), np.array([right, 2.0]), np.array([0.05, 0.05]))


def test_of_cases_marked_pairs_every_two_values_meet():
    values = {"a": [1, 2], "b": "xyz", "c": [None, True]}
    cases = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
    items = [SimpleNamespace(callspec=SimpleNamespace(params=case)) for case in cases]
    left = beyond_pairs(items)
    kept = [item.callspec.params for item in items if item not in left]
    assert kept[0] == cases[0]
    assert len(kept) == 6 < len(cases)
    for (one, some), (other, others) in combinations(values.items(), 2):
        assert {(case[one], case[other]) for case in kept} == {*product(some, others)}


def test_a_draw_that_takes_the_gpu_from_its_process_is_named_and_the_last_there(monkeypatch):
    """Its worker ends after the report, so another one takes the rest; alone pytest stops."""
    said, failed = [], SimpleNamespace(failed=True, passed=False, when="call", sections=[])
    item = SimpleNamespace(
        nodeid="tests/test_it.py::test_large[7]",
        function=SimpleNamespace(__name__="test_large"),
        callspec=SimpleNamespace(params={"number": 7}),
        session=SimpleNamespace(shouldfail=False),
        ihook=SimpleNamespace(pytest_runtest_logreport=lambda report: said.append(report)),
    )

    def run(*of, **how):
        hook = conftest.pytest_runtest_makereport(item)
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(SimpleNamespace(get_result=lambda: failed))
        return [failed]

    monkeypatch.setattr(conftest, "runtestprotocol", run)
    monkeypatch.setattr(conftest, "ended_by", [])
    monkeypatch.setattr(conftest.os, "_exit", said.append)
    monkeypatch.setitem(conftest.os.environ, "PYTEST_XDIST_WORKER", "gw0")
    conftest.pytest_runtest_protocol(item, None)
    assert (said, item.session.shouldfail) == ([failed], False)
    assert "tests/test_it.py::test_large --seed 7" in failed.sections[0][1]

    def lost():
        raise RuntimeError("work on a stream failed")

    monkeypatch.setattr(device.streams, "synchronize", lost)
    conftest.pytest_runtest_protocol(item, None)
    assert said == [failed, failed, 1]
    assert item.nodeid in item.session.shouldfail
