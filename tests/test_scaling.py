"""examples/scaling.py: a plan that any sitting adds to, each run once, resumed, and told."""

import json
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from examples_helpers import imported, write_text


@pytest.fixture
def scaling(monkeypatch):
    return imported(monkeypatch, "scaling")


@pytest.fixture
def models(monkeypatch):
    return imported(monkeypatch, "scaling_models")


@pytest.fixture
def plans(monkeypatch):
    """The plan of texts, and what all plans share."""
    modules = [imported(monkeypatch, name) for name in ("runs_plan", "scaling_plan")]
    return SimpleNamespace(**vars(modules[0]) | vars(modules[1]))


@pytest.fixture
def texts(monkeypatch):
    return imported(monkeypatch, "scaling_text")


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


def small_plan(plans, **changes):
    groups = (plans.Group(64, plans.MAIN[:2], 4000), plans.Group(32, plans.MAIN[:1], 4000))
    return replace(plans.Plan(groups=groups, rates=(1e-3, 2e-3), seeds=2), **changes)


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


def passage(number, of="word"):
    """A passage that no other is like, longer than those that may come again."""
    letters = "".join(chr(97 + number // 26**i % 26) for i in range(3))
    return f"def {letters}(x):\n    return '{of * 20} {letters * 5}'  # {number}"


def write_files(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for i, content in enumerate(contents):
        (folder / f"{i}.py").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )


def test_the_text_is_all_files_by_their_hash(texts, tmp_path):
    write_files(tmp_path / "one" / "inner", [passage(i) for i in range(300)])
    write_files(tmp_path / "two", [passage(i) for i in range(300, 500)])
    text, manifest = texts.gather([str(tmp_path)])
    parts = dict(zip(texts.PARTS, (text.train, text.held_out, text.test), strict=True))
    found = {name: part.tobytes().decode().split("\n\n")[:-1] for name, part in parts.items()}
    assert sorted(chain(*found.values())) == sorted(passage(i) for i in range(500))
    assert manifest["files"] == {n: len(part) for n, part in found.items()} | {"found": 500}
    assert manifest["characters"] == {name: part.size for name, part in parts.items()}
    assert manifest["packages"].keys() == {"one", "two"}
    assert sum(manifest["packages"].values()) == sum(part.size for part in parts.values())
    assert len(found["train"]) > 440
    (tmp_path / "one").rename(tmp_path / "zoo")
    again, named = texts.gather([str(tmp_path)])
    assert (again.train == text.train).all()
    assert named["sha256"] == manifest["sha256"]
    (tmp_path / "two" / "0.py").write_text(passage(600))
    assert texts.gather([str(tmp_path)])[1]["sha256"] != manifest["sha256"]


def test_nothing_long_comes_twice(texts, tmp_path):
    many = [passage(i) for i in range(300)]
    short = "import numpy"
    changed = passage(7).replace("# 7", "# 2024").replace("    ", "\t\t")
    write_files(tmp_path / "a", many)
    write_files(tmp_path / "b", [
        f"{short}\n\n{passage(901)}\n\n{passage(902)}\n\n{changed}\n",  # a part of it is old
        f"{short}\n\n{passage(903)}\n\n{passage(904)}\n\n{passage(904)}",
        f"{passage(905)}\n\n{passage(3)}\n\n{passage(4)}",  # most of it
        passage(5) + "\r\n",
        passage(906) + "\N{SNOWMAN}",
        passage(907) + "\0",
        passage(908) + " " * texts.LARGEST,
        "",
    ])  # fmt: skip
    text, manifest = texts.gather([str(tmp_path)])
    everything = b"".join(part.tobytes() for part in (text.train, text.held_out, text.test))
    for number in [*range(300), 901, 902, 903, 904]:
        told = [everything.count(form.encode()) for form in (passage(number), changed)]
        assert told[0] + (number == 7) * told[1] == 1, number
    assert everything.count(b"import numpy") == 2
    for number in (906, 907, 908):
        assert passage(number).encode() not in everything
    left_out = manifest["left_out"]
    assert (left_out["other than ASCII"], left_out["larger than a megabyte"]) == (2, 1)
    assert left_out["mostly repeated"] >= 1  # passage 5 comes with two kinds of line ends
    assert manifest["symbols"] == len(set(everything)) == len(text.alphabet)


def test_a_file_is_split_at_its_end(texts, tmp_path):
    text, manifest = texts.gather([write_text(tmp_path)])
    whole = np.concatenate([text.train, text.held_out, text.test]).tobytes()
    assert whole == (tmp_path / "text.txt").read_bytes()
    assert abs(text.held_out.size - text.test.size) <= 1
    assert manifest["characters"]["train"] == text.train.size


def test_the_installed_packages_are_a_text(texts, monkeypatch, tmp_path):
    folders = texts.installed()
    assert folders[-1].name.startswith("python3")
    guest = tmp_path / "site-packages"
    monkeypatch.setattr("sys.path", ["/elsewhere", str(guest)])
    assert texts.installed()[:-1] == [guest]
    monkeypatch.setenv("PYTHONPATH", f"/other:{guest}")
    assert texts.installed()[:-1] == []


@pytest.mark.parametrize("what", ["missing", "empty", "one"])
def test_texts_are_refused(texts, tmp_path, what):
    folder = tmp_path / "folder"
    if what != "missing":
        write_files(folder, [passage(1)] * (what == "one"))
    with pytest.raises(ValueError, match="--text takes"):
        texts.gather([str(folder)] * (1 + (what == "missing")))


@pytest.fixture
def small(scaling, plans, tmp_path, monkeypatch):
    """Arguments, and tiny groups in the place of the plan's: blocks of 8, eight runs."""
    models = plans.DENSE, replace(plans.WATTS, block_size=8, density=0.5)
    monkeypatch.setattr(scaling, "GROUPS", (plans.Group(40, models, 640),))
    runs = imported(monkeypatch, "scaling_run")
    monkeypatch.setattr(runs, "MARKS", {"search": 1, "final": 5})
    monkeypatch.setattr(runs, "HELD_OUT_BATCHES", 2)
    text = write_text(tmp_path, n=2500)
    words = ["--device", "cpu", "--dtype", "float32", "--batch", "4", "--length", "8"]
    words += ["--search-characters", "160", "--seeds", "2", "--rates", "0.0004", "0.05"]
    runs, results = tmp_path / "runs", tmp_path / "all.json"
    return [*words, "--text", text, "--runs", str(runs), "--results", str(results)]


def results_in(tmp_path):
    return {f.name: json.loads(f.read_text()) for f in (tmp_path / "runs").glob("run-*.json")}


def test_runs_are_done_once_by_any_number_of_sittings(scaling, small, tmp_path, capsys):
    scaling.main([*small, "--list"])
    assert "0 of 8 runs are done" in capsys.readouterr().out
    scaling.main(small)
    first = results_in(tmp_path)
    purposes = [run["config"]["purpose"] for run in first.values()]
    assert purposes.count("final") == 4
    searches = [run for run in first.values() if run["config"]["purpose"] == "search"]
    assert all(run["test"] is None and run["validation"] > 0 for run in searches)
    finals = [run for run in first.values() if run["config"]["purpose"] == "final"]
    symbols = len(set("block sparse weights\n"))
    for run in finals:
        alike = [s for s in searches if s["config"]["model"] == run["config"]["model"]]
        best = min(alike, key=lambda s: s["validation"])
        assert run["config"]["lr"] == best["config"]["lr"]
        assert run["steps"] == 20
        assert [mark[0] for mark in run["curve"]] == [32 * n for n in (4, 8, 12, 16, 20)]
        assert abs(run["test"] - run["validation"]) < 0.5
        assert run["setup_seconds"] < run["wall_seconds"]
        assert run["flop_per_character"] == 6 * (run["parameters"] - 64 * symbols)
    assert len({run["test"] for run in finals}) == 4
    one, other = {run["parameters"] for run in finals}
    assert one == pytest.approx(other, rel=0.05)
    capsys.readouterr()
    scaling.main([*small, "--collect", str(tmp_path / "all.json")])
    said = capsys.readouterr().out
    assert "2 of 2" in said
    assert f"4 long runs and {len(searches)} short ones; 0 diverged" in said
    assert (tmp_path / "all.png").stat().st_size > 10000
    for file in (tmp_path / "runs").iterdir():
        file.unlink()
    scaling.main(small)
    assert "all is done" in capsys.readouterr().out
    assert results_in(tmp_path) == {}
    stored = json.loads((tmp_path / "all.json").read_text())
    assert {run["name"]: run for run in stored["runs"]} == {r["name"]: r for r in first.values()}
    assert [*stored["manifests"]] == [finals[0]["config"]["text"]]


def test_a_run_that_fails_stops_no_other_and_is_told(scaling, small, tmp_path, monkeypatch, capsys):
    def failing(run, *_):
        if run.model.wiring == "dense":
            raise RuntimeError("no such kernel")
        return {"name": run.name(_[0]), "config": run.config(_[0]), "validation": 1.0, "test": None,
                "parameters": 1, "train_seconds": 1.0, "wall_seconds": 1.0,
                "setup_seconds": 1.0}  # fmt: skip

    monkeypatch.setattr(scaling, "train", failing)
    with pytest.raises(SystemExit, match="2 runs failed"):
        scaling.main(small)
    captured = capsys.readouterr()
    assert captured.out.count("RuntimeError: no such kernel") == 2
    assert "2 runs can be begun, 2 wait for others" in captured.out
    names = [run["config"]["model"]["wiring"] for run in results_in(tmp_path).values()]
    assert names == ["watts_strogatz"] * 4


def test_a_run_of_another_process_is_left_to_it(scaling, small, tmp_path, monkeypatch):
    begun, runs = [], imported(monkeypatch, "runs")
    (tmp_path / "runs").mkdir()
    options = scaling.parse([*small, "--minutes", "1e-9"])
    plan = scaling.plan_of(options, {"sha256": "0" * 64})
    work = runs.Work(plan, options, lambda run, _: begun.append(run))  # out of time
    run = next(iter(imported(monkeypatch, "runs_plan").missing(plan, {})))
    with runs.claimed(tmp_path / "runs" / f"run-{run.name(plan)}.lock") as ours:
        assert ours
        assert runs.others_at_work(tmp_path / "runs")
        assert not work.do(run, set())
    assert not runs.others_at_work(tmp_path / "runs")
    assert not begun


def test_no_run_is_begun_that_takes_too_long(scaling, small, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "train", lambda *_: pytest.fail("begun"))
    scaling.main([*small, "--minutes", "0.1"])  # shorter than the guess of ten seconds
    assert "4 runs can be begun, 4 wait for others" in capsys.readouterr().out


def test_some_runs_are_done_before_others(scaling, small, monkeypatch):
    done, runs = [], imported(monkeypatch, "runs")
    monkeypatch.setattr(runs.Work, "do", lambda _, run, failed: done.append(run))
    scaling.main([*small, "--first", "watts", "lr-0.05-"])
    assert [(run.model.wiring, run.lr) for run in done] == [
        ("watts_strogatz", 0.05), ("dense", 0.0004), ("dense", 0.05), ("watts_strogatz", 0.0004)
    ]  # fmt: skip


def test_a_run_goes_on_where_the_clock_stopped_it(scaling, plans, small, tmp_path, monkeypatch):
    """Bit for bit: as if it had not been stopped."""
    runs = imported(monkeypatch, "scaling_run")
    options = scaling.parse(small)
    text, _ = scaling.gather(options.text)
    plan = replace(small_plan(plans), batch=4, length=8, dtype="float32")
    run = plans.Run("final", 40, plans.DENSE, 640, 4e-3, 0)
    file = tmp_path / "checkpoint.npz"
    assert runs.train(run, plan, text, "cpu", file, until=0.0) is None
    assert file.exists()
    resumed = runs.train(run, plan, text, "cpu", file, until=1e9)
    whole = runs.train(run, plan, text, "cpu", tmp_path / "other.npz", until=1e9)
    assert resumed["test"] == whole["test"]
    assert [mark[2:] for mark in resumed["curve"]] == [mark[2:] for mark in whole["curve"]]
    assert len(whole["curve"]) == 5


def test_what_diverges_is_a_result(scaling, plans, small, tmp_path, monkeypatch):
    runs = imported(monkeypatch, "scaling_run")
    text, _ = scaling.gather(scaling.parse(small).text)
    plan = replace(small_plan(plans), batch=4, length=8, dtype="float32")
    run = plans.Run("final", 40, plans.DENSE, 640, 1e4, 0)
    result = runs.train(run, plan, text, "cpu", tmp_path / "no.npz", until=1e9)
    assert result["validation"] is result["test"] is None
    assert "the final model's loss" in result["diverged"]
    assert json.loads(json.dumps(result)) == result
    report = imported(monkeypatch, "scaling_report")
    assert any("| diverged | 0 of 1 |" in line for line in report.table([result]))
    assert report.table([result])[-1] == "1 long runs and 0 short ones; 1 diverged"


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": []}'])
def test_a_file_of_another_program_is_refused(scaling, small, tmp_path, content):
    (tmp_path / "all.json").write_text(content)
    with pytest.raises(SystemExit, match="holds no results of this program"):
        scaling.main(small)


@pytest.mark.parametrize("word", ["64", "x:1", "64:0", "64:x"])
def test_groups_are_refused(scaling, word, capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--groups", word])
    assert "argument --groups: takes " in capsys.readouterr().err


def test_names_are_those_of_earlier_sittings(plans):
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
