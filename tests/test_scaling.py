"""examples/scaling.py: a plan that any process adds to, and the table of its results."""

from dataclasses import replace

import numpy as np
import pytest
from examples_helpers import imported, imported_plans, small_plan


@pytest.fixture
def models(monkeypatch):
    return imported(monkeypatch, "scaling_models")


@pytest.fixture
def plans(monkeypatch):
    return imported_plans(monkeypatch)


SPARSE = ("watts_strogatz", "barabasi_albert", "random", "balanced", "block_diagonal")


@pytest.mark.parametrize("cell", ["lstm", "mlstm"])
@pytest.mark.parametrize("wiring", ["dense", *SPARSE])
def test_parameters_are_counted_as_the_model_counts_them(models, wiring, cell):
    model = models.Model(wiring, 0.3, block_size=8, cell=cell, internal_steps=2)
    width = models.width_of(model, 120_000, symbols=37)
    built, patterns = models.build(model, width, 37, dtype="float32", seed=1)
    assert built.n_parameters() == models.n_parameters(model, width, 37)
    assert built.n_parameters() == pytest.approx(120_000, rel=0.05)
    assert len(patterns) == (1 if cell == "lstm" else 3)
    if wiring == "dense":
        assert patterns[0] is None
    else:
        n = width.hidden // 8
        assert all(p.sum() == models.kept_blocks(model, n, width.degree) for p in patterns)
        assert patterns[0].mean() == pytest.approx(0.3, abs=0.12)


def test_a_size_too_small_for_blocks_is_refused(models):
    with pytest.raises(ValueError, match=r"watts_strogatz 10% has .* where 20,000 are wanted"):
        models.width_of(models.Model("watts_strogatz", 0.1), 20_000, symbols=37)


def test_names_of_models_differ(plans):
    named = [model for group in plans.GROUPS for model in group.models]
    assert len({model.name for model in named}) == len(set(named)) > 15


def result_of(run, plan, validation):
    return {run.name(plan): {"config": run.config(plan), "validation": validation}}


def done(plans, plan, bits):
    """All runs, with bits by learning rate; and how many runs there were to do at each time."""
    results, steps = {}, []
    while True:
        runs = list(plans.missing(plan, results))
        if not runs:
            return results, steps
        steps.append(len(runs))
        for run in runs:
            assert run.lr is not None
            results |= result_of(run, plan, bits(run))


@pytest.mark.parametrize(("best", "rates"), [
    (1e-3, 3), (2e-3, 3), (2.5e-4, 4), (6.4e-2, 7), (1e-5, 4)])  # fmt: skip
def test_the_search_ends_between_worse_rates(plans, best, rates):
    plan = small_plan(plans)
    results, _ = done(plans, plan, lambda run: abs(np.log(run.lr / best)))
    tried, chosen = plans.choose(plan, plan.groups[0], plans.DENSE, results)
    assert chosen == max(best, plan.LEAST_RATE)
    assert len(tried) == rates
    finals = [r["config"] for r in results.values() if r["config"]["purpose"] == "final"]
    assert len(finals) == 6
    assert {config["lr"] for config in finals} == {chosen}
    assert plans.SEARCH_SEED not in {config["seed"] for config in finals}


def test_what_diverged_is_not_chosen_and_not_done_again(plans):
    plan = small_plan(plans)
    results, _ = done(plans, plan, lambda run: None if run.lr > 1e-3 else 1 / run.lr)
    assert plans.choose(plan, plan.groups[0], plans.DENSE, results)[1] == 1e-3
    assert not list(plans.missing(plan, results))


def test_long_runs_wait_for_their_own_search_alone(plans):
    plan = small_plan(plans)
    first = [run for run in plans.missing(plan, {}) if run.model == plans.DENSE and run.size == 64]
    results = {}
    for run in first:
        assert run.purpose == "search"
        results |= result_of(run, plan, run.lr)
    results |= result_of(replace(first[0], lr=5e-4), plan, 1.0)
    runs = plans.runs_of(plan, results)
    open_runs = [run for run in runs if run.lr is not None and run.name(plan) not in results]
    assert open_runs == list(plans.missing(plan, results))
    finals = [(run.size, run.model.name, run.seed) for run in open_runs if run.purpose == "final"]
    assert finals == [(64, "dense", 0), (64, "dense", 1)]
    assert sum(run.lr is None for run in runs) == 4


@pytest.mark.parametrize(("best", "chosen", "lengths"), [
    (5e-3, 2e-3, 2), (1e-3, 1e-3, 3), (3e-4, 2.5e-4, 4), (None, 2.5e-4, 4)])  # fmt: skip
@pytest.mark.parametrize("doubled", [False, True])
def test_long_runs_choose_among_halves_of_the_rate(plans, best, chosen, lengths, doubled):
    """By validation, in long runs of the first seed: the others have the best one's rate."""

    def bits(run):
        if run.purpose == "final" and best is None:
            return None  # they all diverge
        return abs(np.log(run.lr / (2e-3 if run.purpose == "search" else best)))

    group = plans.Group(64, plans.MAIN[:1], 4000, seeds=1, halved=True, doubled=doubled)
    longer = replace(group, amount=9000, seeds=None, like=4000)
    plan = small_plan(plans, groups=(group, longer), seeds=3)
    results, steps = done(plans, plan, bits)
    finals = [r["config"] for r in results.values() if r["config"]["purpose"] == "final"]
    tried = [c["lr"] for c in finals if c["characters"] == 4000]
    rates = {2e-3 / 2**i for i in range(lengths)}
    if doubled and best == 5e-3:
        rates, chosen = rates | {4e-3, 8e-3}, 4e-3
    assert sorted(tried) == sorted(rates)
    assert steps[2] == 2  # side by side
    longest = {(c["lr"], c["seed"]) for c in finals if c["characters"] == 9000}
    halves = {(chosen / 2, 0)} if chosen > 2.5e-4 else set()  # longer runs may want less yet
    assert longest == halves | {(chosen, seed) for seed in range(3)}


def test_longer_runs_try_less_than_shorter_ones_found_best(plans):
    group = plans.Group(64, plans.MAIN[:1], 9000, halved=True, doubled=True, like=4000)
    plan = small_plan(plans, groups=(group,), seeds=2)
    best = {4000: 4e-3, 9000: 1e-3}
    results, _ = done(plans, plan, lambda run: abs(np.log(run.lr / best.get(run.amount, 2e-3))))
    finals = [r["config"] for r in results.values() if r["config"]["purpose"] == "final"]
    assert sorted(c["lr"] for c in finals if c["characters"] == 4000) == [1e-3, 2e-3, 4e-3, 8e-3]
    longest = sorted((c["seed"], c["lr"]) for c in finals if c["characters"] == 9000)
    assert longest == [(0, 5e-4), (0, 1e-3), (0, 2e-3), (0, 4e-3), (1, 1e-3)]


@pytest.mark.parametrize("like", [None, 2000])
@pytest.mark.parametrize(("holds", "rates"), [
    (2e-3, [2e-3]), (1e-3, [2e-3, 1e-3]), (6e-4, [2e-3, 1e-3, 5e-4]),
    (0.0, [2e-3, 1e-3, 5e-4, 2.5e-4])])  # fmt: skip
def test_a_rate_at_which_long_runs_diverge_is_halved(plans, holds, rates, like):
    """Once the first seed's run has; also where shorter long runs held it."""

    def bits(run):
        diverges = run.amount == 9000 and run.lr > holds
        return None if diverges else abs(np.log(run.lr / 2e-3))

    group = plans.Group(64, plans.MAIN[:1], 9000, halved=like is not None, like=like)
    plan = small_plan(plans, groups=(group,), seeds=3)
    results, _ = done(plans, plan, bits)
    every = [r["config"] for r in results.values() if r["config"]["characters"] == 9000]
    long = every
    if like and rates[-1] > 2.5e-4:  # and a worse neighbour, as of any choice by long runs
        assert rates[-1] / 2 in {c["lr"] for c in long}
        long = [c for c in long if c["lr"] != rates[-1] / 2]
    assert {c["lr"] for c in long if c["seed"] == 0} == set(rates)
    assert plans.choose(plan, group, plans.MAIN[0], results)[1] == rates[-1]
    needed = {(run.lr, run.seed) for run in plans.runs_of(plan, results) if run.amount == 9000}
    tried = {(c["lr"], 0) for c in every}
    assert needed == tried | {(rates[-1], seed) for seed in range(3)}


@pytest.mark.parametrize("change", [
    {"text": "other"}, {"batch": 64}, {"length": 32}, {"dtype": "float32"}, {"clip": 2.0},
])  # fmt: skip
def test_runs_of_another_kind_do_not_count(plans, change):
    plan = small_plan(plans)
    results, _ = done(plans, plan, lambda run: abs(np.log(run.lr / 1e-3)))
    other = replace(plan, **change)
    assert len(list(plans.missing(other, results))) == len(list(plans.missing(other, {}))) > 0


def test_times_are_estimated_from_the_longest_run_alike(plans):
    plan = small_plan(plans)
    runs = plans.runs_of(plan, {})
    assert plans.seconds_for(runs[0], plan, {}) == pytest.approx(10 + 20 / 0.6)
    times = {"setup_seconds": 2.0, "wall_seconds": 12.0, "validation": 1.0}
    results = {"a": {"config": replace(runs[0], lr=1.0, amount=1000).config(plan)} | times}
    later = times | {"setup_seconds": 0.5, "wall_seconds": 5.5}
    results["b"] = {"config": replace(runs[0], lr=1.0, amount=500).config(plan)} | later
    run = replace(runs[0], amount=2000)
    assert plans.seconds_for(run, plan, results) == pytest.approx(0.5 + 22)
    assert plans.seconds_for(run, plan, results, first=True) == pytest.approx(2 + 22)
    assert plans.seconds_for(replace(runs[0], size=32, amount=0), plan, results) == 10


def test_names_are_those_of_earlier_results(plans):
    """Results count by name: what changes one has every run done again."""
    run = plans.Run("final", 832, plans.WATTS, 100_000_000, 4e-3, 2)
    name = "final-832-watts_strogatz-10_-1e+08-lr-0.004-seed-2-9c10332e37"
    assert run.name(plans.Plan(text="0123456789abcdef")) == name


@pytest.fixture
def report(monkeypatch):
    return imported(monkeypatch, "scaling_report")


def told(
    plans, model, bits, text="one", purpose="final", lr=4e-3, size=64, seed=0, characters=4000
):
    plan = small_plan(plans, text=text)
    run = plans.Run(purpose, size, model, characters, lr, seed)
    return {
        "config": run.config(plan), "hidden": size, "density": 0.25, "mean_path": 2.5,
        "parameters": 1_500_000, "flop_per_character": 100, "train_seconds": 2.0 - 0.2 * seed,
        "peak_bytes": 2**29, "test": bits if purpose == "final" else None, "validation": bits,
        "diverged": None if bits else "far off", "curve": [[2000, 0.001, 3.0, 3.0]],
    }  # fmt: skip


def test_the_table_has_mean_and_spread_by_model_and_text(plans, report):
    runs = [told(plans, plans.DENSE, bits, seed=seed)
            for seed, bits in enumerate((1.6, 1.5, None))]  # fmt: skip
    runs += [told(plans, plans.DENSE, 3.0, text="other")]
    runs += [told(plans, plans.WATTS, 1.25, size=32)]
    runs += [told(plans, plans.DENSE, bits, purpose="search", lr=lr)
             for lr, bits in ((8e-3, None), (2e-3, 2.5))]  # fmt: skip
    lines = report.table(runs)
    said = "| one | 1.50 million | {} | {} | 25.0% | 2.50 | 0.004 million | 0.004 | {} | {} |"
    said += " 2 | 0.50 |"
    assert lines[2:5] == [
        said.format("watts_strogatz 10%", 32, "1.2500", "1 of 1"),
        said.format("dense", 64, "1.5500 ± 0.0707", "2 of 3"),
        said.format("dense", 64, "3.0000", "1 of 1").replace("one", "other"),
    ]
    assert lines[-3] == "| one | 64 | dense | 0.002: 2.5000, 0.008: diverged |"
    assert lines[-1] == "5 long runs and 2 short ones; 2 diverged"
    late = told(plans, plans.DENSE, 20.0, text="other") | {
        "curve": [[2000, 0.001, 3.0, 3.0], [4000, 0.002, 20.0, 20.0]]
    }
    lines = report.table([*runs, late])
    assert lines[4].endswith("| 3.0000 | 1 of 2 | 2 | 0.50 |")
    assert lines[-1] == "6 long runs and 2 short ones; 3 diverged"
    short = "| 1.50 million | {} | 25.0% | 2.50 | 0.004 | 0.004 million | {} | 2 |"
    assert report.report([*runs, late])[2:-2] == [
        short.format("dense | 64", "1.5500 ± 0.0707 | 2 of 3"),
        short.format("watts_strogatz 10% | 32", "1.2500 | 1 of 1"),
    ]
    several = [*runs, told(plans, plans.DENSE, 1.7, lr=2e-3)]
    longer = told(plans, plans.DENSE, 1.1, lr=2e-3, characters=9000)  # by itself
    for some in (several, [*several, longer]):
        assert report.report(some)[-3] == "64 dense: 0.002: 1.7000, 0.004: 1.6000"
    drawn = report.of_one_text([*runs, late])
    assert [(kind.text, len(some)) for kind, some in drawn.items()] == [("one", 1), ("one", 2)]
    assert report.of_one_text([]) == {}
    worse = told(plans, plans.DENSE, 1.7, lr=8e-3)
    assert report.table([*runs, worse])[:5] == report.table(runs)[:5]
    assert report.report([*runs, worse])[-3] == "64 dense: 0.004: 1.6000, 0.008: 1.7000"
