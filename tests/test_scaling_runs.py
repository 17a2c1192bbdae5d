"""examples/scaling.py: its runs, each done once by any number of processes, resumed, or refused."""

import json
from dataclasses import replace

import pytest
from examples_helpers import imported, imported_plans, small_plan, write_text


@pytest.fixture
def scaling(monkeypatch):
    return imported(monkeypatch, "scaling")


@pytest.fixture
def plans(monkeypatch):
    return imported_plans(monkeypatch)


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


def test_runs_are_done_once_by_any_number_of_processes(scaling, small, tmp_path, capsys):
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
