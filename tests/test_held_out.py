"""Points that nobody tuned: drawn by a seed, measured beside peers, the worst of them named."""

from itertools import islice

import numpy as np
import pytest

from numbsparse import Layout, device
from numbsparse.bench import held_out
from numbsparse.bench import measure as measuring
from numbsparse.bench.problem import Problem
from numbsparse.kernels.matmul import PRODUCTS

on_device = pytest.mark.skipif(not device.is_available(), reason="of a GPU or its simulator")
KINDS = ("random", "clustered", "uneven")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layout_keeps_about_its_density(kind):
    pattern = held_out.pattern_of(kind, 200, 120, 0.1, np.random.default_rng(0))
    assert pattern.shape == (200, 120)
    assert 0.06 < pattern.mean() < 0.14
    lines = pattern.sum(1)
    assert (lines == 120).any() == (kind == "uneven")
    squares = pattern.reshape(25, 8, 15, 8).any((1, 3)).mean()
    assert (squares < 0.2) == (kind == "clustered")
    assert (lines == 0).any() or kind == "random"


def test_points_follow_from_the_seed_alone():
    some, again, others = (
        [str(point) for point in islice(held_out.drawn(np.random.default_rng(seed)), 3)]
        for seed in (1, 1, 2)
    )
    assert some == again != others


def test_features_and_rows_are_drawn_from_few_to_many():
    some = [point.problem for point in islice(held_out.drawn(np.random.default_rng(0)), 600)]
    features = [n for of in some for n in (of.in_features, of.out_features)]
    assert min(features) < 128
    assert max(features) > 8192
    assert min(of.batch for of in some) == 1
    assert max(of.batch for of in some) > 8192


def measured(case, seconds):
    """Two microseconds a row of the batch, three of what is feature-major or torch's, dense 7."""
    problem, _, kernels, others, _ = case
    if not kernels:
        return {"seconds": dict.fromkeys(others, 7e-6)}
    names = ["k8_small_batch"] if kernels == "auto" else kernels.split(",")
    took = dict.fromkeys(names, problem.batch * 2e-06)
    if held_out.FEATURE_MAJOR in others:
        took |= {f"{name} {held_out.FEATURE_MAJOR}": problem.batch * 3e-6 for name in names}
    if held_out.TRITON in others:
        took[held_out.TRITON] = problem.batch * 3e-6
    not_timed = {name: "blocks of 8" for name in others if name == held_out.TRITON}
    return {"auto": "k8_small_batch", "seconds": took, "not_timed": not_timed}


@on_device
def test_a_choice_is_weighed_beside_peers_and_one_row_more(monkeypatch):
    layout = Layout(np.array([[True, True], [False, True]]))
    problem = Problem(layout, 16, 2, "float32")
    points = [
        held_out.Drawn(problem, product, "random", across)
        for across in (True, False)
        for product in PRODUCTS
    ]
    monkeypatch.setattr(measuring.Case, "measured", measured)
    monkeypatch.setattr(held_out, "chosen", lambda *_: "k8_small_batch")
    found = list(held_out.found(points, 1e9))
    assert [each.of for each in found] == points
    for each, own in zip(found, [3] * 3 + [2] * 3, strict=True):
        assert not each.faults
        assert each.seconds["k8_small_batch"] == pytest.approx(own * 2e-6)
        assert each.peers == pytest.approx({held_out.CUBLAS: 7e-6, held_out.TRITON: 6e-6})
        assert (each.regret, each.speed_up, each.cliff) == pytest.approx((1.0, 3 / own, 1.5))
    lines = held_out.summary(found, most=1).splitlines()
    assert lines[0].startswith("6 products")
    assert lines[1].startswith("regret")
    assert "above 1.05 at 0.0%" in lines[1]
    assert "below 1.0 at 0.0%" in lines[3]
    assert "feature-major" in lines[4]
    assert "above 1.3 at 100.0%" in lines[5]
    assert "a row more 9.0 us" in lines[6]
    assert list(held_out.found(points, -1.0)) == []


@on_device
def test_one_rung_alone_is_forced_where_it_serves(monkeypatch):
    def of(only):
        return islice(held_out.drawn(np.random.default_rng(1), only), 60)

    points, everywhere = list(of("k5_tensor_core")), {each.problem.block_size for each in of(None)}
    assert everywhere - {each.problem.block_size for each in points} == {8}
    monkeypatch.setattr(measuring.Case, "measured", measured)
    (found,) = held_out.found(points[:1], 1e9)
    batch, own = points[0].problem.batch, 3 if points[0].feature_major else 2
    assert found.seconds == {"k5_tensor_core": pytest.approx(batch * own * 1e-6)}
    assert (found.chosen, found.regret) == ("k5_tensor_core", 1.0)
    assert found.cliff == pytest.approx((batch + 1) / batch)
    assert found.peers.keys() == {held_out.CUBLAS, held_out.TRITON}


@on_device
def test_a_fit_times_and_compiles_nobody_but_our_rungs(monkeypatch):
    (point,) = islice(held_out.drawn(np.random.default_rng(1), alone=True), 1)
    (case,) = point.cases()
    assert held_out.TRITON not in case.others
    monkeypatch.setattr(measuring.Case, "measured", measured)
    (found,) = held_out.found([point], 1e9)
    assert found.seconds.keys() == set(case.kernels.split(","))
    assert not found.peers
    assert np.isnan([found.speed_up, found.cliff]).all()
    assert len(held_out.summary([found]).splitlines()) == 3  # nothing of peers, or of a row more


@on_device
def test_what_is_not_right_is_said_and_not_weighed():
    wrong = held_out.Found("a point", {}, "k1", {"dense": 1.0}, np.nan, {"k1": "wrong: 2"})
    right = held_out.Found("a point", {"k1": 2.0}, "k1", {}, 2.0, {})
    lines = held_out.summary([wrong, right]).splitlines()
    assert "not right: a point: {'k1': 'wrong: 2'}" in lines[1]
    assert "worst 1.00" in lines[2]
    assert not any(line.startswith("speed_up") for line in lines)
