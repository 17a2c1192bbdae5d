"""examples/prune.py and grow.py: what they leave, and that they go on where they were stopped."""

import json

import numpy as np
import pytest
from examples_helpers import imported, write_text

import numbsparse as ns

SMALL = ["--device", "cpu", "--window", "4", "--features", "16", "--block-size", "8"]
SMALL += ["--batch", "8", "--seeds", "1", "--steps", "30", "--mark-every", "5", "--lr", "1e-2"]


@pytest.fixture(params=["prune", "grow"])
def program(request, monkeypatch):
    monkeypatch.setattr(imported(monkeypatch, "letter_model"), "N_HELD_OUT", 64)
    monkeypatch.setattr(imported(monkeypatch, "letter_training"), "ROUNDS", 1)
    return imported(monkeypatch, request.param)


@pytest.fixture
def plain(program, monkeypatch):
    """Without times and pictures, which take longer than the training."""
    times = lambda windows, options, networks: dict.fromkeys(networks, 1.0)  # noqa: E731
    monkeypatch.setattr(program, "step_times", times)
    monkeypatch.setattr(program, "draw", lambda file: None)


@pytest.fixture
def arguments(program, tmp_path):
    every = ["--every", "4"] if program.__name__ == "grow" else []
    return [*SMALL, *every, "--text", write_text(tmp_path), "--out", str(tmp_path / "out")]


def results_of(program, folder):
    return json.loads((folder / f"{program.__name__}.json").read_text())


def of_layouts(run):
    """What of a run is the same each time."""
    return {key: value for key, value in run.items() if key != "seconds"}


def test_what_is_left(program, arguments, tmp_path, capsys):
    runs = program.main(arguments)
    content = results_of(program, tmp_path / "out")
    assert content["runs"] == runs
    assert (tmp_path / "out" / f"{program.__name__}.png").stat().st_size > 10000
    by_kind = {run["kind"]: run for run in runs}
    ends = {kind: run["stages"][-1] for kind, run in by_kind.items()}
    for run in runs:
        assert run["curve"][-1][0] == 30
        assert run["curve"][-1][1] < run["curve"][0][1] < 6  # 16 letters are 4 bits
    layout_runs = program.done.__globals__
    for stage in by_kind["pruned" if program.__name__ == "prune" else "grown"]["stages"]:
        patterns = [layout_runs["unpacked"](one) for one in stage["layouts"]]
        assert np.mean(patterns) == pytest.approx(stage["density"])
    assert ends["dense"]["density"] == 1
    if program.__name__ == "prune":
        densities = [stage["density"] for stage in by_kind["pruned"]["stages"]]
        assert densities == [1, *(round(d * 64) / 64 for d in (0.5, 0.2, 0.1, 0.05))]
        assert {f"{how} {d}" for how in ("pruned", "made") for d in program.DENSITIES} | {
            "dense"
        } == content["times"].keys()
        assert by_kind["dense"]["curve"][0] == by_kind["pruned"]["curve"][0]  # begin as one
        assert "a step, of dense" in capsys.readouterr().out
    else:
        assert content["times"].keys() == ends.keys() == set(program.KINDS)
        same = [ends[kind]["density"] for kind in ("grown", "random", "small world")]
        assert same == [0.375] * 3  # three blocks of eight: one neighbour on each side
        assert by_kind["grown"]["stages"][0]["density"] == pytest.approx(0.05, abs=1 / 64)
        costs = {kind: program.cost(run) for kind, run in by_kind.items()}
        assert costs["dense"][-1] == 30
        assert costs["random"][-1] == pytest.approx(0.375 * 30)
        assert costs["grown"][-1] < costs["random"][-1]


def test_a_stopped_run_goes_on_bit_for_bit(program, plain, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(
        program, "step_times", lambda windows, options, names: dict.fromkeys(names, 1)
    )
    monkeypatch.setattr(program, "draw", lambda file: None)
    whole = [of_layouts(run) for run in program.main(arguments)]
    out = tmp_path / "again"
    arguments = [*arguments, "--out", str(out)]
    training = program.Training
    step, left = training.train_step, iter([12, 7, 6, 9, 9, 9, 1000])

    def stopped(self):
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(training, "train_step", stopped)
    for budget in left:  # each call gets that far, from the mark before
        if budget == 1000:
            runs = program.main(arguments)
            break
        with pytest.raises(SystemExit, match="stopped; a second call goes on"):
            program.main(arguments)
    assert [of_layouts(run) for run in runs] == whole
    assert program.main(arguments) == runs  # nothing is left to do


def test_other_settings_and_other_files_are_refused(program, arguments, tmp_path, capsys):
    file = tmp_path / "out" / f"{program.__name__}.json"
    file.parent.mkdir()
    file.write_text('{"runs": []}')
    for given in (arguments, ["--draw", str(file)]):
        with pytest.raises(SystemExit, match="holds no results of this program"):
            program.main(given)
    assert file.read_text() == '{"runs": []}'
    settings = {"settings": {}, "times": {}, "runs": [], "place": "CPU"}
    file.write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match="runs with other settings: take another --out"):
        program.main(arguments)
    with pytest.raises(SystemExit, match="takes a GPU, got --device cpu"):
        program.main([*arguments, "--dtype", "bfloat16"])


def test_too_few_steps_are_refused_before_anything_is_trained(program, arguments, tmp_path):
    with pytest.raises(SystemExit, match="--steps takes enough for 5 stages, got ones that end at"):
        program.main([*arguments, "--steps", "4"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program", ["grow"], indirect=True)
def test_a_density_that_leaves_no_small_world_is_refused(program, arguments):
    with pytest.raises(SystemExit, match=r"grow: --density takes less, .* got 1"):
        program.main([*arguments, "--density", "1"])
    with pytest.raises(SystemExit, match="2"):
        program.main([*arguments, "--every", "0"])


def test_without_checkpoints_the_numbers_are_the_same(program, plain, arguments, tmp_path):
    runs = program.main(arguments)
    other = program.main([*arguments, "--no-checkpoints", "--out", str(tmp_path / "other")])
    assert [of_layouts(run) for run in other] == [of_layouts(run) for run in runs]
    assert not list((tmp_path / "other").glob("*.npz"))


def test_windows_are_of_the_text(monkeypatch, tmp_path):
    letter_model = imported(monkeypatch, "letter_model")
    monkeypatch.setattr(letter_model, "N_HELD_OUT", 50)
    text = imported(monkeypatch, "char_text").open_text(write_text(tmp_path))
    windows = letter_model.Windows(text, 6)
    for part, (letters, after) in (
        (text.train, windows.drawn(20, 3, 4)),
        (text.held_out, windows.held_out()),
    ):
        whole = text.code_of[part].tobytes()
        for row, last in zip(letters, after, strict=True):
            assert np.append(row, last).tobytes() in whole
    one, two, other = (windows.drawn(20, 3, step)[0] for step in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_a_layout_is_packed_and_unpacked(monkeypatch, rng):
    packed = imported(monkeypatch, "letter_training").packed
    unpacked = imported(monkeypatch, "layout_runs").unpacked
    pattern = rng.random((5, 7)) < 0.4
    np.testing.assert_array_equal(
        unpacked(json.loads(json.dumps(packed(ns.Layout(pattern))))), pattern
    )
