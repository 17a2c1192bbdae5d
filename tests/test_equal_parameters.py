"""examples/equal_parameters.py: each run once, a table over the seeds, and a picture."""

import json
from pathlib import Path

import pytest
from examples_helpers import imported, write_text


@pytest.fixture
def equal_parameters(monkeypatch):
    return imported(monkeypatch, "equal_parameters")


@pytest.fixture
def arguments(tmp_path):
    small = ["--device", "cpu", "--block-size", "8", "--embedding", "16", "--batch", "4"]
    small += ["--length", "8", "--held-out-batches", "2", "--steps", "10", "--mark-every", "4"]
    return [*small, "--text", write_text(tmp_path), "--out", str(tmp_path / "out")]


def test_runs_are_done_once_and_listed_in_a_table(equal_parameters, arguments, tmp_path, capsys):
    sizes = ["--sizes", "64:0.2", "96:0.1"]
    equal_parameters.main([*arguments, *sizes, "--seeds", "1"])
    file = tmp_path / "out" / "equal_parameters.json"
    first = json.loads(file.read_text())["runs"]
    rows = equal_parameters.main([*arguments, *sizes, "--seeds", "2"])
    content = json.loads(file.read_text())
    assert content["runs"][:4] == first
    assert len(content["runs"]) == 8
    assert len({(run["size"], run["kind"], run["seed"]) for run in content["runs"]}) == 8
    assert [(row["size"], row["kind"], row["seeds"]) for row in rows] == [
        *(("64:0.2", "sparse", 2), ("64:0.2", "dense", 2)),
        *(("96:0.1", "sparse", 2), ("96:0.1", "dense", 2)),
    ]
    for row in rows:
        bits = [r["bits"] for r in content["runs"] if r["size"] == row["size"]
                and r["kind"] == row["kind"]]  # fmt: skip
        assert row["mean"] == pytest.approx(sum(bits) / 2)
        assert row["spread"] == pytest.approx(abs(bits[0] - bits[1]) / 2**0.5)
        assert bits[0] != bits[1]
    assert [step for step, _, held_out in first[0]["curve"] if held_out] == [4, 8, 10]
    assert (tmp_path / "out" / "equal_parameters.png").stat().st_size > 10000
    assert "2 seeds" in capsys.readouterr().out


def test_runs_of_another_length_are_not_mixed(equal_parameters, arguments):
    one = ["--sizes", "64:0.2", "--seeds", "1"]
    equal_parameters.main([*arguments, *one])
    with pytest.raises(SystemExit, match="has runs with steps 10; these would have 11"):
        equal_parameters.main([*arguments, *one, "--steps", "11"])


@pytest.mark.parametrize("size", ["64", "64:0", "64:2", "0:0.5", "x:0.1"])
def test_sizes_are_refused(equal_parameters, arguments, size, capsys):
    with pytest.raises(SystemExit):
        equal_parameters.main([*arguments, "--sizes", size])
    assert "argument --sizes: takes " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"settings": {}, "runs": []}'])
def test_a_file_of_another_program_is_refused_and_kept(equal_parameters, arguments, content):
    file = Path(arguments[arguments.index("--out") + 1]) / "equal_parameters.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(SystemExit, match="holds no runs of this program"):
        equal_parameters.main([*arguments, "--sizes", "64:0.2", "--seeds", "1"])
    assert file.read_text() == content


def test_an_interrupted_call_says_how_to_go_on(equal_parameters, arguments, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(equal_parameters, "train", interrupted)
    with pytest.raises(SystemExit, match="stopped; a second call"):
        equal_parameters.main(arguments)
