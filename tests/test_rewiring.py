"""Rewiring and growth: which blocks go and come, when, and what follows them."""

from math import cos, pi

import numpy as np
import pytest
from conftest import host
from rewiring_helpers import (
    batch,
    begun,
    block_norms,
    dense_gradients,
    descend,
    flats,
    model_of,
    norms_by_block,
    train,
    weights_of,
)

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn.utils import PruneAndGrow, Rewiring
from numbsparse.nn.utils import drawn as drawn_blocks

pytestmark = pytest.mark.usefixtures("cheap_products")


@pytest.mark.parametrize("candidates", [None, 10_000])
def test_the_blocks_of_smallest_norm_go_and_those_of_largest_gradient_come(place, candidates):
    parts = begun(place, every=3, candidates=candidates, fraction=0.25, stop=12)
    model, rewiring = parts["model"], parts["rewiring"]
    first = [flats(w) for w in weights_of(model)]
    train(parts, range(1), place)
    assert [flats(w) for w in weights_of(model)] == first
    train(parts, range(1, 2), place)  # the next backward gives the gradients of candidates
    probed = [flats(w) - own for w, own in zip(weights_of(model), first, strict=True)]
    for weight, own, more in zip(weights_of(model), first, probed, strict=True):
        rows, columns = weight.data.layout.shape
        most = min(len(own) if candidates is None else candidates, rows * columns - len(own))
        assert len(more) == most
        norms = norms_by_block(weight)
        assert all(norms[flat] == 0 for flat in more)
    slopes = dense_gradients(model, batch(2, "cpu", model[0].weight.shape[0]).astype(np.float64))
    before = [(norms_by_block(w), host(w.data)) for w in weights_of(model)]
    moments = parts["optimizer"].state_dict()
    descend(model, 2, place)
    generation = device.generation()
    rewiring.step()
    assert device.generation() > generation  # captured steps are stale
    share = 0.25 / 2 * (1 + cos(pi * 3 / 12))
    states = parts["optimizer"].state_dict(), parts["average"].state_dict()
    for nth, weight in enumerate(weights_of(model)):
        norms, values = before[nth]
        ordered = sorted(first[nth], key=norms.get)
        n = round(share * len(ordered))
        assert n > 0
        slope = block_norms(slopes[nth], weight.data.layout.shape)
        grown = sorted(probed[nth], key=lambda flat: -slope[flat])[:n]
        assert flats(weight) == set(ordered[n:]) | set(grown)
        stayed = ns.BlockSparse.from_dense(values, weight.data.layout, block_size=4)
        for flat, block in zip(stayed.layout.flat_indices.tolist(), stayed.data, strict=True):
            assert (np.abs(block).max() > 0) == (flat not in grown)
        np.testing.assert_array_equal(host(weight.data), stayed.toarray())
        key = f"{2 * nth}.m"
        moved = ns.BlockSparse.from_dense(moments[key].toarray(), weight.data.layout, block_size=4)
        np.testing.assert_array_equal(states[0][key].toarray(), moved.toarray())
        assert states[1][str(2 * nth)].layout == weight.data.layout
        assert weight.grad.data.layout == weight.data.layout
    parts["optimizer"].step()
    train(parts, range(3, 14 if place == "cpu" else 4), place)
    assert [w.data.n_blocks for w in weights_of(model)] == [len(own) for own in first]


def test_candidates_change_no_result():
    model, twin = model_of(), model_of()
    Rewiring(model, every=2, seed=0).step()
    assert model[0].weight.data.n_blocks > twin[0].weight.data.n_blocks
    x = batch(0)
    np.testing.assert_allclose(model(x).numpy(), twin(x).numpy(), rtol=1e-6, atol=1e-7)


def test_what_was_learned_by_candidates_is_forgotten():
    """The optimizer's step before ours: new blocks begin with zeros nevertheless."""
    parts = begun(every=2, fraction=0.5)
    model, rewiring, optimizer = (parts[name] for name in ("model", "rewiring", "optimizer"))
    before = [flats(w) for w in weights_of(model)]
    for step in range(2):
        descend(model, step)
        optimizer.step()
        rewiring.step()
    state = optimizer.state_dict()
    for nth, weight in enumerate(weights_of(model)):
        new = [flat not in before[nth] for flat in weight.data.layout.flat_indices]
        assert sum(new) == round(0.5 * len(before[nth]))
        assert (weight.data.data[new] == 0).all()
        assert (state[f"{2 * nth}.m"].data[new] == 0).all()
        assert (state[f"{2 * nth}.v"].data[new] == 0).all()


@pytest.mark.parametrize("density", [0.1, 0.4, 0.8, 1.0])
def test_others_come_at_random(density):
    seen = []
    for seed in (0, 0, 1):
        model = model_of(density)
        rewiring = Rewiring(model, 0.3, grow="random", every=1, seed=seed)
        for _ in range(2):
            before = [(flats(w), norms_by_block(w)) for w in weights_of(model)]
            rewiring.step()
            for weight, (own, norms) in zip(weights_of(model), before, strict=True):
                rows, columns = weight.data.layout.shape
                n = min(round(0.3 * len(own)), rows * columns - len(own))
                gone = sorted(own, key=norms.get)[:n]
                now = flats(weight)
                assert len(now) == len(own)
                assert own - now == set(gone)
                new = [flat in now - own for flat in weight.data.layout.flat_indices.tolist()]
                assert (weight.data.data[new] == 0).all()
        seen.append([flats(w) for w in weights_of(model)])
    assert seen[0] == seen[1]
    assert (seen[0] != seen[2]) == (density < 0.5)  # else all that are not there come


@pytest.mark.slow
def test_all_absent_blocks_come_equally_often():
    own = np.roll(np.eye(8, dtype=bool), 1, axis=0)  # the first and the last block are absent
    layer = nn.Linear(64, 64, layout=own, block_size=8)
    counts = np.zeros(64)
    for seed in range(800):
        layer.weight.data = layer.weight.data.remap(own)
        Rewiring(layer, 1.0, grow="random", every=1, seed=seed).step()
        counts += layer.weight.data.layout.pattern.reshape(-1)
    absent = ~own.reshape(-1)
    assert (counts[~absent] == 0).all()
    expected = 800 * 8 / 56
    assert (abs(counts[absent] - expected) < 6 * np.sqrt(expected)).all()


def test_what_is_drawn_does_not_depend_on_how_it_is_found(rng, monkeypatch):
    layout = ns.Layout(rng.random((30, 40)) < 0.2)
    by_table = drawn_blocks.absent_blocks(layout, 300, np.random.default_rng(5))
    monkeypatch.setattr(drawn_blocks, "SPREAD", 0)
    by_sort = drawn_blocks.absent_blocks(layout, 300, np.random.default_rng(5))
    np.testing.assert_array_equal(by_table, by_sort)
    assert by_table.size == 300
    assert (np.diff(by_table) > 0).all()
    assert not np.isin(by_table, layout.flat_indices).any()


def test_swaps_keep_the_degrees_of_rows_and_columns():
    parts = begun(grow="degrees", every=1, fraction=0.5)
    model, rewiring = parts["model"], parts["rewiring"]
    for _ in range(3):
        before = [(w.data.layout.pattern, flats(w), norms_by_block(w)) for w in weights_of(model)]
        rewiring.step()
        for weight, (pattern, own, norms) in zip(weights_of(model), before, strict=True):
            now = weight.data.layout.pattern
            for axis in (0, 1):
                np.testing.assert_array_equal(now.sum(axis), pattern.sum(axis))
            n = round(0.5 * len(own))
            smallest = set(sorted(own, key=norms.get)[:n])
            gone = own - flats(weight)
            assert gone <= smallest
            assert len(gone) >= 0.4 * n  # the others found no partner
    ring = nn.Linear(256, 256, block_size=4, layout=ns.patterns.watts_strogatz(64, 2, 0, seed=0))
    Rewiring(ring, 0.2, grow="degrees", every=1, seed=0).step()
    shorter = ns.patterns.mean_path_length(ring.weight.data.layout.pattern)
    assert shorter < ns.patterns.mean_path_length(ns.patterns.watts_strogatz(64, 2, 0, seed=0)) / 2


def test_an_odd_block_without_a_partner_stays():
    layer = nn.Linear(64, 64, layout=np.eye(16, dtype=bool), block_size=4, seed=0)
    rewiring = Rewiring(layer, 3 / 16, grow="degrees", every=1, seed=0)
    for _ in range(6):
        before = flats(layer.weight)
        rewiring.step()
        pattern = layer.weight.data.layout.pattern
        assert (pattern.sum(0) == 1).all()
        assert (pattern.sum(1) == 1).all()
        assert len(before - flats(layer.weight)) == 2


def test_no_swap_makes_a_block_that_is_there():
    """Where most partners would: each of two blocks with every other."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        flat = np.sort(rng.permutation(12)[: rng.integers(2, 9)])  # of 4 x 3
        chosen = rng.random(flat.size) < 0.8
        stay, new = drawn_blocks.swapped(flat, chosen, 3, rng)
        after = np.concatenate([flat[stay], new])
        assert np.unique(after).size == flat.size
        assert stay[~chosen].all()
        assert not set(new) & set(flat)
        for of in (lambda a: a // 3, lambda a: a % 3):
            np.testing.assert_array_equal(np.sort(of(after)), np.sort(of(flat)))


def test_without_gradients_of_candidates_nothing_goes():
    layer = nn.Linear(64, 64, layout=np.eye(16, dtype=bool), block_size=4, seed=0)
    before, rewiring = flats(layer.weight), Rewiring(layer, every=1, candidates=8, seed=0)
    nn.functional.sum(layer(np.ones((2, 64), np.float32))).backward()
    rewiring.step()
    assert before < flats(layer.weight)
    assert len(flats(layer.weight) - before) == 8


def test_when_and_how_much():
    model = model_of()
    rewiring = Rewiring(model, 0.4, grow="random", every=4, stop=10, seed=0)
    for step in (0, 4, 10, 99):
        assert rewiring.share_at(step) == 0.4 / 2 * (1 + cos(pi * min(step, 10) / 10))
    assert Rewiring(model, 0.4, grow="random").share_at(10**6) == 0.4
    changed = []
    for step in range(1, 16):
        before = model[0].weight.data
        rewiring.step()
        if model[0].weight.data is not before:
            changed.append(step)
    assert changed == [4, 8]  # at 10 the share is 0


@pytest.mark.parametrize("grow", ["gradient", "random"])
@pytest.mark.parametrize("density", [0.7, 0.2, 1.0])
def test_a_network_grows_or_shrinks_along_a_line(grow, density):
    parts = begun(grow=grow, every=3, stop=12, density=density, fraction=0.1)
    model = parts["model"]
    first = [w.data.density for w in weights_of(model)]
    for start in range(0, 12, 3):
        before = [flats(w) for w in weights_of(model)]
        train(parts, range(start, start + 3))
        for weight, own, old in zip(weights_of(model), first, before, strict=True):
            assert len(flats(weight) - old) <= max(weight.data.n_blocks - len(old), 0) + round(
                0.1 * len(old)
            )
            grid = weight.data.layout.pattern.size
            wanted = round((own + (density - own) * (start + 3) / 12) * grid)
            assert weight.data.n_blocks == wanted


def test_the_last_step_changes_what_is_left():
    layer = nn.Linear(64, 64, layout=np.eye(8, dtype=bool), block_size=8)
    rewiring = Rewiring(layer, grow="random", every=5, stop=7, density=0.5, seed=0)
    for _ in range(8):
        rewiring.step()
    assert layer.weight.data.density == 0.5


@pytest.mark.parametrize("grow", ["gradient", "random"])
def test_a_density_is_reached_in_few_steps(grow, rng):
    """More than double of the blocks come at once."""
    for _ in range(20):
        rows, columns = (int(n) for n in rng.integers(2, 8, 2))
        n, most = rows * columns, rng.integers(2, 9)
        stop, every = int(rng.integers(2, most + 1)), int(rng.integers(1, most + 1))
        layout = ns.patterns.random(rows, columns, rng.uniform(1, n) / n, seed=rng)
        layer = nn.Linear(4 * rows, 4 * columns, layout=layout, block_size=4, seed=rng)
        model = nn.Sequential(layer)
        wanted = rng.uniform(1, n) / n
        rewiring = Rewiring(model, grow=grow, every=every, stop=stop, density=wanted, seed=0)
        for step in range(stop):
            descend(model, step)
            rewiring.step()
        assert layer.weight.data.n_blocks == round(wanted * n), (layout, wanted, stop, every)


@pytest.mark.parametrize("density", [None, 1.0])
def test_no_more_come_than_there_are_candidates(density):
    stop = None if density is None else 9
    parts = begun(every=3, fraction=0.5, candidates=2, density=density, stop=stop)
    model = parts["model"]
    before = [flats(w) for w in weights_of(model)]
    train(parts, range(3))
    for weight, own in zip(weights_of(model), before, strict=True):
        assert len(flats(weight) - own) == 2
        assert len(own - flats(weight)) == (2 if density is None else 0)


def test_layers_and_steps_draw_apart():
    eye = np.eye(8, dtype=bool)
    model = nn.Sequential(*(nn.Linear(64, 64, layout=eye, block_size=8) for _ in range(2)))
    rewiring, seen = Rewiring(model, 1.0, grow="random", every=1, seed=0), []
    for _ in range(2):
        for layer in model:
            layer.weight.data = layer.weight.data.remap(eye)
        rewiring.step()
        seen += [frozenset(flats(layer.weight)) for layer in model]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("candidates", [5, 1000])
def test_the_largest_weights_and_the_largest_gradients_stay(candidates):
    """Which blocks after each change, from the gradient of the dense weights in float64."""
    how = {"density": 0.2, "every": 2, "stop": 8, "candidates": candidates}
    parts = begun(first=0.6, kind=PruneAndGrow, **how)
    model, blast, came = parts["model"], parts["rewiring"], 0
    first = [w.data.density for w in weights_of(model)]
    for step in range(1, 12):
        kept = [flats(w) for w in weights_of(model)]  # without candidates where none are held
        if step % 2:
            own = kept
        slopes = dense_gradients(model, batch(step).astype(np.float64))
        norms = [norms_by_block(w) for w in weights_of(model)]
        descend(model, step)
        blast.step()
        if step in (2, 4, 6, 8):
            for nth, weight in enumerate(weights_of(model)):
                grid = weight.data.layout.shape
                density = 0.2 + (first[nth] - 0.2) * (1 - step / 8) ** 3
                n = round(density * grid[0] * grid[1])
                heavy = sorted(own[nth], key=lambda flat: -norms[nth][flat])[:n]
                slope = block_norms(slopes[nth], grid)
                steep = sorted(kept[nth], key=lambda flat: -slope[flat])[: n if step < 8 else 0]
                assert flats(weight) == set(heavy) | set(steep)
                new = [f in set(steep) - own[nth] for f in weight.data.layout.flat_indices.tolist()]
                assert (weight.data.data[new] == 0).all()
                came += sum(new)
        parts["optimizer"].step()
        parts["average"].step()
    assert came > 0
    assert [w.data.n_blocks for w in weights_of(model)] == [24, 12]


def test_from_dense_what_was_there_keeps_its_values():
    model = model_of(1.0)
    values = [host(w.data) for w in weights_of(model)]
    blast = PruneAndGrow(model, 0.1, stop=4, every=2, seed=0)
    for step in range(2):
        descend(model, step)
        blast.step()
    for weight, dense in zip(weights_of(model), values, strict=True):
        kept = ns.BlockSparse.from_dense(dense, weight.data.layout, block_size=4)
        np.testing.assert_array_equal(weight.data.data, kept.data)
    with pytest.raises(ValueError, match="stop takes an integer of at least 2, got 1"):
        PruneAndGrow(model, 0.1, stop=1)
    with pytest.raises(ValueError, match="stop takes an integer of at least 2, got 1"):
        Rewiring(model, stop=1)  # the first step has no gradient of candidates
    with pytest.raises(ValueError, match=r"density 0\.001 leaves 0\.weight none of its 120 blocks"):
        PruneAndGrow(model, 0.001, stop=9)
