"""examples/char_lm.py, killed at any moment, resumes bit for bit; nothing harms its checkpoint."""

import os
import signal
import sys
import time

import numpy as np
import pytest
from examples_helpers import SMALL, imported, run_python, same_arrays, write_text

import numbsparse as ns
from numbsparse import device

KILLED_IN_A_STEP = """
import os, signal, sys, char_lm, char_training
train_step = char_training.Training.train_step
def killed(training):
    loss = train_step(training)
    if training.step == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
char_training.Training.train_step = killed
char_lm.main(sys.argv[1:])
"""
KILLED_IN_WRITING = """
import os, signal, sys, char_lm, numpy as np
savez, calls = np.savez, []
def killed(file, **arrays):
    calls.append(1)
    if len(calls) < 3:
        return savez(file, **arrays)
    savez(file, **dict(list(arrays.items())[: len(arrays) // 2]))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
np.savez = killed
char_lm.main(sys.argv[1:])
"""


def without_pictures(monkeypatch):
    """The program; to draw takes longer than such a training. `test_examples` has the pictures."""
    program = imported(monkeypatch, "char_lm")
    monkeypatch.setattr(program, "write_pictures", lambda *of: None)
    return program


@pytest.fixture
def char_lm(monkeypatch):
    return without_pictures(monkeypatch)


HOMES = [["--device", "cpu"]]  # the simulator would take minutes
if device.is_available() and not device.SIMULATED:
    HOMES += [["--device", "cuda", "--dtype", dtype] for dtype in ("float32", "float16")]


def training_in(folder):
    """Arguments of a training of 20 steps, which is saved at steps 5, 10, 15 and 20."""
    arguments = ["--text", write_text(folder), "--steps", "20", "--mark-every", "5"]
    return [*SMALL, *arguments, "--no-compare"]


@pytest.fixture
def training(tmp_path):
    return training_in(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    "program", [KILLED_IN_A_STEP, KILLED_IN_WRITING], ids=["in a step", "in writing"]
)
@pytest.mark.parametrize("home", HOMES, ids=" ".join)
def test_a_killed_training_goes_on_as_if_it_had_not_been(
    char_lm, training, tmp_path, program, home
):
    """Bit for bit: the weights, the optimizer's moments, the carried state and the curve."""
    out, training = tmp_path / "killed", [*training, *home]
    process = run_python(program, *training, "--out", str(out))
    assert process.returncode == -signal.SIGKILL, process.stderr
    unfinished = list(out.glob(".sparse.npz.*"))
    assert bool(unfinished) == (program is KILLED_IN_WRITING)
    assert ns.load(out / "sparse.npz")["step"] == 10
    for file in unfinished:  # an hour ago
        os.utime(file, (time.time() - 3601,) * 2)
    being_written = out / ".sparse.npz.of_another_process"
    being_written.touch()
    char_lm.main([*training, "--resume", "--out", str(out)])
    assert list(out.glob(".sparse.npz.*")) == [being_written]

    char_lm.main([*training, "--out", str(tmp_path / "whole")])
    same_arrays(tmp_path / "whole" / "sparse.npz", out / "sparse.npz")
    samples = [(folder / "sparse.txt").read_text() for folder in (tmp_path / "whole", out)]
    assert samples[0] == samples[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bytes of one, of a training that is done."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch).main([*training_in(folder), "--out", str(folder)])
    return (folder / "sparse.npz").read_bytes()


@pytest.fixture
def finished(checkpoint, tmp_path):
    """The folder where it is found, and its bytes."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "sparse.npz").write_bytes(checkpoint)
    return out, checkpoint


OTHERS = [("hidden", "32"), ("layers", "2"), ("density", "0.4"), ("batch", "2"), ("seed", "1")]


@pytest.mark.parametrize(("name", "value"), OTHERS, ids=[name for name, _ in OTHERS])
def test_a_checkpoint_of_another_shape_is_refused(char_lm, training, finished, name, value):
    out, before = finished
    with pytest.raises(SystemExit, match=rf"sparse\.npz was made with --{name} .*has {value}"):
        char_lm.main([*training, "--out", str(out), f"--{name}", value, "--resume"])
    assert (out / "sparse.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("block ", "sparse ", "weights?\n", "\xe9"), r"holds b'\?\\xa9\\xc3', outside the voc"),
        (("block ", "sparse\n"), "has read text.txt: .* this run has text.txt: "),
    ],
    ids=["other bytes", "other words"],
)
def test_a_checkpoint_of_another_text_is_refused(
    char_lm, training, finished, tmp_path, words, says
):
    out, before = finished
    write_text(tmp_path, words=words)
    with pytest.raises(SystemExit, match=f"char_lm: .*{says}"):
        char_lm.main([*training, "--out", str(out), "--resume"])
    assert (out / "sparse.npz").read_bytes() == before


def test_a_file_that_is_no_checkpoint_is_refused(char_lm, training, tmp_path):
    ns.save(tmp_path / "sparse.npz", {"a": 1})
    with pytest.raises(SystemExit, match="is not a checkpoint of this program: it lacks"):
        char_lm.main([*training, "--out", str(tmp_path), "--resume"])
    (tmp_path / "sparse.npz").write_bytes(b"half of a check")
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        char_lm.main([*training, "--out", str(tmp_path), "--resume"])


def test_a_resumed_training_may_go_further(char_lm, training, finished, capsys):
    out, _ = finished
    char_lm.main([*training, "--out", str(out), "--resume", "--steps", "25"])
    assert ns.load(out / "sparse.npz")["step"] == 25
    assert "was made with --steps 20; it goes on with 25" in capsys.readouterr().out


def test_a_new_training_keeps_the_checkpoint_of_an_earlier_one(char_lm, training, finished, capsys):
    out, before = finished
    char_lm.main([*training, "--out", str(out), "--seed", "1"])
    assert (out / "sparse.earlier.npz").read_bytes() == before != (out / "sparse.npz").read_bytes()
    assert "kept as" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lr", "says"),
    [("1e38", "not finite"), ("1e3", "bits, where guessing takes")],
    ids=["NaN", "finite"],
)
def test_a_diverging_training_stops_and_keeps_its_checkpoint(char_lm, training, finished, lr, says):
    """From the last mark on, at a rate that spoils the weights in one update."""
    out, before = finished
    arguments = [*training, "--out", str(out), "--resume", "--steps", "40", "--lr", lr]
    with np.errstate(all="ignore"), pytest.raises(SystemExit, match=f"loss is .*{says}") as stop:
        char_lm.main(arguments)
    assert "take a lower --lr" in str(stop.value)
    assert f"{out / 'sparse.npz'} is as it was" in str(stop.value)
    assert (out / "sparse.npz").read_bytes() == before


def test_an_interrupted_training_says_how_to_go_on(char_lm, training, tmp_path, monkeypatch):
    import char_training

    train_step = char_training.Training.train_step

    def interrupted(training):
        if training.step == 13:
            raise KeyboardInterrupt
        return train_step(training)

    monkeypatch.setattr(char_training.Training, "train_step", interrupted)
    with pytest.raises(SystemExit, match="stopped; --resume goes on from the last mark"):
        char_lm.main([*training, "--out", str(tmp_path)])
    assert ns.load(tmp_path / "sparse.npz")["step"] == 10
