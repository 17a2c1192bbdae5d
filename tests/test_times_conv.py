"""The factors of the times of convolutions: drawn, checked, timed and fitted by a command."""

import json
from itertools import islice
from itertools import product as every

import numpy as np
import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench import held_out, timing
from numbsparse.bench import measure as measuring
from numbsparse.bench import times as factors_of
from numbsparse.bench.problem import Problem, matrices
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import conv
from numbsparse.kernels.conv import costs
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.ops import conv_window

on_device = pytest.mark.skipif(not device.is_available(), reason="of a GPU or its simulator")
RUNGS = [name for name, place in conv.RUNGS.items() if place == "cuda"]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A file in the place of the library's own, in which any rung takes what its number says."""
    kinds = [
        (product, size, of) for product in PRODUCTS for size in (8, 16, 32, 64) for of in (16, 32)
    ]

    def write(microseconds):
        file = tmp_path / "costs.json"
        factors = {
            costs.case_of(name, product, size, f"float{bits}", "highest"): of_launch(
                name, product, us
            )
            for name, us in microseconds.items()
            for product, size, bits in kinds
        }
        file.write_text(json.dumps({"factors": factors}))
        monkeypatch.setattr(costs, "FILE", file)
        forget()
        return file

    def forget():
        for cached in (costs.measured, costs.multipliers, conv.ranked):
            cached.cache_clear()

    yield write
    monkeypatch.undo()
    forget()


def of_launch(name, product, microseconds):
    """Factors of a rung that takes so long, whatever it does."""
    window = conv_window((8, 8), 3, 1, 1, 1)
    how = product, 16, as_dtype("float16"), "highest", 1, window, 16, 16, 9
    return [microseconds] + [0] * (len(costs.counts(name, *how)) - 1)


def fitted(counts, times):
    """Factors of a case alone."""
    (factors,) = fitted_by_case(["rung lines float16 8"] * len(counts), counts, times).values()
    return factors


def fitted_by_case(cases, counts, times):
    timed = zip(cases, counts, np.ravel(times), range(len(cases)), strict=True)
    return factors_of.fitted_to_choose([factors_of.Timed(*of) for of in timed])


@pytest.mark.parametrize("seed", range(5))
def test_factors_are_found_again_in_made_up_times(seed):
    rng = np.random.default_rng(seed)
    factors, counts = 2 ** rng.uniform(-3, 3, 6), 2 ** rng.uniform(-8, 8, (60, 6))
    times = counts @ factors[:, None]
    np.testing.assert_allclose(fitted(counts, times), factors, rtol=0.1)
    noise = 2 ** rng.normal(0, 0.1, times.shape)
    found = fitted(counts, times * noise)
    assert (found > 0).all()
    ratios = counts @ found / times[:, 0]
    assert abs(np.log2(ratios)).max() < 0.25  # no time counts for more than another


def test_points_follow_from_the_seed_and_take_all_kernels_in_turn():
    some, again, others = (
        [str(of) for of in islice(held_out.convolutions(np.random.default_rng(seed)), 72)]
        for seed in (1, 1, 2)
    )
    assert some == again != others
    assert [text.split()[0] for text in some] == [*PRODUCTS] * 24
    kinds = [" ".join(text.split()[1:4]) for text in some[:: len(PRODUCTS)]]
    assert len(set(kinds[:12])) == 12
    assert kinds[12:] == kinds[:12]
    assert len({text.split(", ", 1)[1] for text in some}) > 12  # taps, strides, images
    for of in islice(held_out.convolutions(np.random.default_rng(3)), 180):
        assert of.problem.layout.n_blocks
        assert max(of.problem.x.size, of.problem.dy.size) <= held_out.MOST_OF_IMAGES
        few = of.problem.block_size == 8 or of.problem.in_features * of.problem.out_features < 2**14
        assert few or of.problem.layout.density <= 0.26


@on_device
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fastest", ["k4_wgmma", "k2_unfolded", "k3_tensor_core"])
def test_the_choice_that_is_weighed_is_that_of_a_call(measured, product, fastest):
    """By times of the file; and if the fastest does not serve, of those that do."""
    measured({name: 1.0 if name == fastest else 2.0 + i for i, name in enumerate(RUNGS[1:])})
    problem = matrices(64, 16, 0.5, 2, "float16", side=4, taps=3, stride=2)
    drawn = held_out.Drawn(problem, product)
    rungs = drawn.expected()
    assert "k1_naive" not in rungs
    window = problem.window, problem.in_features, problem.out_features
    case = product, 16, problem.x.dtype, "cuda", 2, "highest", *window
    own = min(rungs, key=rungs.__getitem__)
    assert conv.chosen(RUNGS, problem.layout.n_blocks, *case) is conv.rung(own.partition("/")[0])
    assert own.partition("/")[0] == fastest or not any(name.startswith(fastest) for name in rungs)


def test_sizes_are_those_of_the_product_that_is_made():
    problem = Problem(lambda: None, 16, 2, "float16", side=6, taps_along=3, stride=2)
    problem.__dict__["layout"] = layout = matrices((32, 48), 16, 1, 2, "float16", taps=3).layout
    of = 16, problem.x.dtype, "highest", 2, problem.window, 32, 48, layout.n_blocks
    for product in PRODUCTS:
        assert held_out.sizes_of(problem, product) == (product, *of)
    outputs, n = 2 * 3 * 3, layout.n_blocks
    found = [costs.Sizes(product, 16, 2, *of[3:]).unfolded for product in PRODUCTS]
    assert found == [(outputs, 288, 48, n), (outputs, 192, 128, n), (outputs, 288, 48, n)]


def test_speed_ups_are_told_by_kind():
    """Without cuDNN a product counts nowhere."""
    problems = [matrices(32, 8, density, 2, "float16", side=4, taps=3) for density in (1, 0.05, 1)]
    took = {"a": 2.0, "b": 1.9}
    found = [
        held_out.Found(held_out.Drawn(problem, "forward"), took, "a", peers, np.nan, {})
        for problem, peers in zip(problems, ({"cuDNN": 1.0}, {"cuDNN": 2.8}, {}), strict=True)
    ]
    assert held_out.by_kind(found) == (
        "float16 highest: 2 products, 1 lost, least 0.50, median 0.95, at density 0.1 below 1.5 "
        "1 of 1, choice over 1.05 2"
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_is_drawn_of_one_tap_is_weighed_as_a_call_takes_it(product):
    """A product of the ladder, unless it moves by more than a pixel."""
    taken = [
        held_out.Drawn(
            matrices(64, 16, 0.5, 2, "float16", side=4, taps=taps, stride=stride), product
        ).taken()
        for taps, stride in ((1, 1), (1, 2), (3, 1))
    ]
    assert [name == held_out.OURS for name in taken] == [True, False, False]
    ours = held_out.Drawn(matrices(64, 16, 0.5, 2, "float16", side=4), product)
    assert held_out.OURS in ours.cases()[0].kernels.split(",")
    assert held_out.OURS not in ours.expected()


@on_device
def test_a_command_measures_checks_fits_and_weighs(measured, monkeypatch, capsys):
    """At a tiny size, whose times are made up; a rung that fails is told of, and has no factors."""
    tiny = matrices(16, 8, 0.5, 1, "float32", side=2, taps=3, stride=2)
    points = [held_out.Drawn(tiny, product) for product in PRODUCTS]
    monkeypatch.setattr(held_out, "convolutions", lambda rng: iter(points))
    monkeypatch.setattr(held_out, "KINDS", [(8, ("float32", "highest"))])
    monkeypatch.setattr(factors_of, "FITTED", 1)
    took = {"k1_naive": 3e-6, "k2_unfolded/k8_small_batch": 4e-6}
    monkeypatch.setattr(held_out, "rungs_of_images", lambda *_: [*took, "k9_none"])
    monkeypatch.setattr(conv.rung("k2_unfolded"), "multipliers", None)  # who multiplies is named
    monkeypatch.setattr(factors_of, "require_times", lambda: None)

    def took_by(graphs, _):
        return {
            of: took.get(of, 1e-6) for of in graphs
        }  # on a GPU with torch cuDNN's dense one too

    monkeypatch.setattr(measuring, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(measuring, "seconds_of", took_by)
    file = measured({"k1_naive": 9.0, "k2_unfolded/k8_small_batch": 8.0})
    command_line.main(["times", "--conv", "--json", str(file), "--points", "1"])
    made = json.loads(file.read_text(encoding="utf-8"))
    assert made["command"].startswith("python -m numbsparse times --conv --json")
    assert made["machine"]
    cases = {
        costs.case_of(of, product, 8, "float32", "highest") for of in took for product in PRODUCTS
    }
    assert made["factors"].keys() == cases
    for of, (name, seconds) in every(points, took.items()):
        assert of.expected()[name] == pytest.approx(seconds * 1e6, rel=0.3)
    printed = capsys.readouterr().out
    assert printed.count("not right") == 2 * 3
    assert "k9_none" in printed
    assert "median 1.33, worst 1.33" in printed.split("3 products")[1]  # by the factors before
    assert "median 1.00, worst 1.00" in printed.split("3 products")[2]  # by those that were fitted


def test_the_committed_factors_are_whole():
    content = json.loads(costs.FILE.read_text(encoding="utf-8"))
    assert all(min(factors) > 0 for factors in content["factors"].values())
    window = conv_window((16, 16), 3, 1, 1, 1)
    for (size, numbers), product in every(held_out.KINDS, PRODUCTS):
        of = product, size, *numbers, 4, window, 128, 128, 10
        times = [costs.microseconds(f"k2_unfolded/{by}", *of) for by in costs.MULTIPLIERS]
        assert 0 < min(times) < 1e3


@pytest.mark.skipif(not device.SIMULATED, reason="of the simulator")
def test_a_rung_of_products_is_no_part_of_convolutions():
    with pytest.raises(SystemExit):
        command_line.main(["times", "--conv", "--only", "k6_hopper", "--json", "x.json"])
