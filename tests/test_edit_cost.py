"""What an edit of a layout costs: no Python loop over blocks, and no array that is not needed."""

import sys

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import optim
from numbsparse.nn.utils.drawn import changed
from numbsparse.nn.utils.weights import largest


def lines_of(call):
    """How many lines of Python a call runs, in any file."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def edit_of(kind, n):
    """An edit of a layer of some n * n blocks, its optimizer and average, ready to be called."""
    layer = nn.Linear(8 * n, 8 * n, layout=ns.patterns.random(n, n, 0.3, seed=0), block_size=8)
    optimizer = optim.Adam(layer.parameters())
    average = optim.ExponentialMovingAverage(layer.parameters(), 0.5)
    for p in layer.parameters():
        p.grad = ns.Tensor(0.1 * p.data)
    optimizer.step()
    average.step()
    how = {"remap": [optimizer, average]}
    if kind == "prune":
        return lambda: nn.utils.prune(layer, 0.2, **how)
    if kind == "by hand":
        weight, other = layer.weight, ns.Layout(ns.patterns.random(n, n, 0.3, seed=1))

        def by_hand():
            weight.data = weight.data.remap(weight.data.layout - other | other)
            optimizer.remap()
            average.remap()

        return by_hand
    if kind == "lasso":
        return nn.utils.GroupLasso(layer, 0.2).step
    make = nn.utils.PruneAndGrow if kind == "grow" else nn.utils.Rewiring
    rule = {"density": 0.2, "stop": 9} if kind == "grow" else {"grow": kind}
    schedule = make(layer, every=2, seed=0, **rule, **how)
    schedule.step()
    layer.weight.grad = ns.Tensor(0.1 * layer.weight.data)
    return schedule.step


KINDS = ("prune", "by hand", "random", "degrees", "gradient", "grow", "lasso")


@pytest.mark.parametrize("kind", KINDS)
def test_no_python_runs_over_blocks(kind):
    few, many = (lines_of(edit_of(kind, n)) for n in (16, 96))
    assert many < 1.5 * few + 200, f"36 times the blocks, {many} lines in place of {few}"


def test_all_that_follows_is_found_once(monkeypatch):
    """A weight, its gradient, two moments and an average: where a block was is looked up once."""
    searched = []
    among = ns.layout.positions_among

    def noted(rising, wanted):
        searched.append(wanted.size)
        return among(rising, wanted)

    call = edit_of("prune", 16)
    monkeypatch.setattr(ns.layout, "positions_among", noted)
    call()
    assert len(searched) == 1


def test_the_largest_are_those_that_a_stable_sort_has_first(rng):
    for size in (1, 2, 9, 40):
        norms = rng.integers(5, size=size).astype(np.float32)
        norms[rng.random(size) < 0.1] = np.nan
        for n in range(-1, size + 2):
            right = np.zeros(size, bool)
            right[np.argsort(-norms, kind="stable")[: max(n, 0)]] = True
            np.testing.assert_array_equal(largest(norms, n), right)


def test_an_edited_layout_is_that_of_its_pattern(rng):
    for _ in range(60):
        pattern = rng.random(rng.integers(1, 9, 2)) < rng.random()
        layout, others = ns.Layout(pattern), (rng.random(pattern.shape) < 0.4) & ~pattern
        stay = rng.random(layout.n_blocks) < rng.random()
        edited = changed(layout, stay, np.flatnonzero(others))
        left = np.zeros_like(pattern)
        left.flat[layout.flat_indices[stay]] = True
        made = ns.Layout(left | others)
        for name in ("indptr", "indices", "flat_indices"):
            np.testing.assert_array_equal(getattr(edited, name), getattr(made, name))
        np.testing.assert_array_equal(edited.positions_in(layout), made.positions_in(layout))
        assert edited.pattern.shape == made.pattern.shape
        assert (edited.pattern == made.pattern).all()


def test_what_was_met_is_forgotten_with_another(rng):
    """Positions are kept with a layout for the last other one only, and none outlives it."""
    layouts = [ns.Layout(rng.random((6, 7)) < 0.5) for _ in range(3)]
    for _ in range(2):
        for other in layouts[1:]:
            found = layouts[0].positions_in(other)
            right = [
                np.flatnonzero(other.flat_indices == flat)[0] if flat in other.flat_indices else -1
                for flat in layouts[0].flat_indices
            ]
            np.testing.assert_array_equal(found, right)
            with pytest.raises(ValueError, match="read-only"):
                found[0] = 0
    del other, layouts[1:]
    assert layouts[0]._met[0]() is None


@pytest.mark.parametrize("fresh", [False, True], ids=["zeros", "fresh"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_blocks_are_taken_in_one_launch(place, put, rng, fresh, dtype, block_size):
    if place == "cuda" and dtype == "float64":
        pytest.skip("GPUs compute in float32")
    old, new = (ns.Layout(rng.random((3, 4)) < 0.5) for _ in range(2))
    shape = block_size, block_size
    w, other = (
        ns.BlockSparse(rng.standard_normal((layout.n_blocks, *shape)).astype(dtype), layout)
        for layout in (old, new)
    )
    found = ns.ops.remap(put(w), new, put(other) if fresh else None).to("cpu")
    both = np.kron(old.pattern & new.pattern, np.ones(shape, bool))
    right = np.where(both, w.toarray(), other.toarray() if fresh else 0)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.toarray(), right)
    assert found.layout == new
