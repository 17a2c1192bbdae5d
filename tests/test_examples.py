"""The examples run, resume bit for bit, and refuse what they cannot use."""

import importlib
import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--device", "cpu", "--hidden", "64", "--batch", "4", "--length", "8", "--sample", "20"]
SMALL += ["--block-size", "8", "--embedding", "16", "--held-out-batches", "2"]


@pytest.fixture
def char_lm(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("char_lm")


@pytest.fixture
def text(tmp_path):
    """A small text with something to learn."""
    words = np.random.default_rng(0).choice(["block ", "sparse ", "weights\n"], 4000)
    path = tmp_path / "text.txt"
    path.write_text("".join(words))
    return str(path)


def test_block_sparse_matmul(capsys):
    runpy.run_path(str(EXAMPLES / "block_sparse_matmul.py"))
    assert "BlockSparse(4096 x 4096" in capsys.readouterr().out


def test_char_lm_learns_and_leaves_its_results(char_lm, text, tmp_path, capsys):
    out = tmp_path / "out"
    bits = char_lm.main([*SMALL, "--text", text, "--steps", "60", "--out", str(out)])
    assert sorted(bits) == ["dense", "sparse"]
    assert max(bits.values()) < 3  # 16 characters are 4 bits; the words are far fewer
    names = {
        "sparse.npz",
        "dense.npz",
        "sparse.txt",
        "dense.txt",
        "layout.png",
        "learning_curve.png",
    }
    assert {path.name for path in out.iterdir()} == names
    printed = capsys.readouterr().out
    assert "sample of the sparse model" in printed
    assert "bits per character held out" in printed


def test_the_dense_model_has_as_many_parameters(char_lm):
    from char_model import CharModel

    options = char_lm.parse(["--hidden", "2048", "--density", "0.05"])
    pattern = char_lm.make_pattern(options)
    sparse = CharModel(100, 2048, layout=pattern).n_parameters()
    dense = CharModel(100, char_lm.dense_twin(sparse, 100, options), layout=None).n_parameters()
    assert dense == pytest.approx(sparse, rel=0.05)


@pytest.mark.parametrize("pattern", ["watts_strogatz", "barabasi_albert", "random", "dense"])
def test_patterns_have_about_the_density_that_was_asked_for(char_lm, pattern):
    options = char_lm.parse(["--hidden", "2048", "--density", "0.2", "--pattern", pattern])
    expected = 1.0 if pattern == "dense" else 0.2
    assert char_lm.make_pattern(options).mean() == pytest.approx(expected, rel=0.1)


def test_a_resumed_training_is_the_uninterrupted_one(char_lm, text, tmp_path, monkeypatch):
    """Bit for bit: the weights, the optimiser's moments and the curve."""
    import char_model

    import numbsparse as ns

    arguments = [*SMALL, "--text", text, "--steps", "20", "--no-compare"]
    char_lm.main([*arguments, "--out", str(tmp_path / "whole")])

    train_step = char_model.Training.train_step

    def interrupted(training):
        if training.step == 13:
            raise KeyboardInterrupt
        return train_step(training)

    with monkeypatch.context() as patch:
        patch.setattr(char_model.Training, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            char_lm.main([*arguments, "--out", str(tmp_path / "parts")])
    assert ns.load(tmp_path / "parts" / "sparse.npz")["step"] < 13
    char_lm.main([*arguments, "--resume", "--out", str(tmp_path / "parts")])

    with (
        np.load(tmp_path / "whole" / "sparse.npz") as whole,
        np.load(tmp_path / "parts" / "sparse.npz") as parts,
    ):
        assert whole.files == parts.files
        for name in whole.files:
            np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)


def write(tmp_path, content):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "it is empty"), (b"a\0b" * 999, "zero bytes"), (b"short", "characters"), (None, "none")],
    ids=["empty", "binary", "short", "missing"],
)
def test_char_lm_refuses_a_text(char_lm, tmp_path, content, says):
    path = str(tmp_path / "missing") if content is None else write(tmp_path, content)
    with pytest.raises(SystemExit, match=f"char_lm: .*{says}"):
        char_lm.main([*SMALL, "--text", path, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_char_lm_refuses_a_checkpoint_of_another_model(char_lm, text, tmp_path):
    arguments = ["--text", text, "--steps", "2", "--no-compare", "--out", str(tmp_path / "out")]
    char_lm.main([*SMALL, *arguments])
    before = (tmp_path / "out" / "sparse.npz").read_bytes()
    with pytest.raises(SystemExit, match=r"char_lm: .*sparse\.npz was made with"):
        char_lm.main([*SMALL, *arguments, "--hidden", "32", "--resume"])
    assert (tmp_path / "out" / "sparse.npz").read_bytes() == before


def test_char_lm_stops_where_the_loss_is_no_number(char_lm, text, tmp_path):
    out = tmp_path / "out"
    arguments = [*SMALL, "--text", text, "--steps", "20", "--no-compare", "--out", str(out)]
    with np.errstate(all="ignore"), pytest.raises(SystemExit, match="lower --lr"):
        char_lm.main([*arguments, "--lr", "1e38"])


@pytest.mark.parametrize(
    "arguments", [["--hidden", "0"], ["--density", "0"], ["--density", "1.5"], ["--steps", "x"]]
)
def test_char_lm_refuses_arguments(char_lm, text, tmp_path, arguments):
    with pytest.raises(SystemExit):
        char_lm.main([*SMALL, "--text", text, "--out", str(tmp_path / "out"), *arguments])


def test_the_standard_library_is_text(char_lm):
    from char_text import standard_library

    text, again = standard_library(), standard_library()
    assert text.train.size > 10 * text.held_out.size > 1e6
    assert (text.train == again.train).all()
    assert "import " in text.decode(text.train[:5000].tolist())
