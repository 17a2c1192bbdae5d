"""examples/char_lm.py learns, leaves its results, and refuses what it cannot use."""

import runpy

import numpy as np
import pytest
from examples_helpers import EXAMPLES, SMALL, imported, write_text


@pytest.fixture
def drawing(monkeypatch):
    return imported(monkeypatch, "char_lm")


@pytest.fixture
def char_lm(drawing, monkeypatch):
    """Without pictures, which take longer than such a training."""
    monkeypatch.setattr(drawing, "write_pictures", lambda *of: None)
    return drawing


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


def test_block_sparse_matmul(capsys):
    runpy.run_path(str(EXAMPLES / "block_sparse_matmul.py"))
    assert "BlockSparse(4096 x 4096" in capsys.readouterr().out


def test_char_lm_learns_and_leaves_its_results(drawing, text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--text", text, "--steps", "60", "--out", str(out), "--prompt", "block"]
    bits = drawing.main([*SMALL, *arguments])
    assert sorted(bits) == ["dense", "sparse"]
    assert max(bits.values()) < 3  # 16 characters are 4 bits; the words are far fewer
    pictures = {"layout.png", "learning_curve.png"}
    models = {"sparse.npz", "dense.npz", "sparse.txt", "dense.txt"}
    assert {path.name for path in out.iterdir()} == pictures | models
    written = (out / "sparse.txt").read_text()
    assert len(written) == 5 + 20
    assert written.startswith("block")
    printed = capsys.readouterr().out
    assert "sample of the sparse model" in printed
    assert "bits per character held out" in printed


@pytest.mark.parametrize(
    "cell", [["--layers", "2"], ["--cell", "mlstm", "--internal-steps", "2"]], ids=" ".join
)
def test_other_cells_learn(char_lm, text, tmp_path, cell):
    arguments = ["--text", text, "--steps", "70", *cell, "--out", str(tmp_path / "out")]
    assert max(char_lm.main([*SMALL, *arguments]).values()) < 3


def test_held_out_text_is_read_at_every_mark(char_lm, text, tmp_path):
    import numbsparse as ns

    arguments = ["--text", text, "--steps", "25", "--mark-every", "8", "--no-compare"]
    char_lm.main([*SMALL, *arguments, "--out", str(tmp_path)])
    steps, training, held_out = ns.load(tmp_path / "sparse.npz")["curve"].T
    assert steps.tolist() == [8, 10, 16, 20, 24, 25]
    assert np.isfinite(training).all()
    assert np.isfinite(held_out).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    ("cell", "n_layouts"), [("--layers 1", 1), ("--layers 2", 2), ("--cell mlstm", 5)]
)
@pytest.mark.parametrize(("hidden", "density"), [(2048, 0.08), (3072, 0.05)])
def test_the_dense_model_has_as_many_parameters(char_lm, hidden, density, cell, n_layouts):
    import char_model

    import numbsparse as ns

    options = char_lm.parse([*cell.split(), "--hidden", str(hidden), "--density", str(density)])
    sparse, wiring = char_model.sparse_model(100, options)
    dense = char_model.dense_twin(sparse, 100, options)
    assert len(wiring) == n_layouts
    assert len({pattern.tobytes() for pattern in wiring}) == n_layouts
    half_a_block = options.block_size / dense.hidden_size  # of the width: as a share of its square
    assert dense.n_parameters() == pytest.approx(sparse.n_parameters(), rel=half_a_block)
    weights = [p.data for p in dense.parameters() if isinstance(p.data, ns.BlockSparse)]
    assert min(weight.density for weight in weights) == 1


@pytest.mark.parametrize("pattern", ["watts_strogatz", "barabasi_albert", "random", "dense"])
def test_patterns_have_about_the_density_that_was_asked_for(char_lm, pattern):
    from char_model import make_pattern

    options = char_lm.parse(["--hidden", "2048", "--density", "0.2", "--pattern", pattern])
    expected = 1.0 if pattern == "dense" else 0.2
    assert make_pattern(options, 0).mean() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "it is empty"), (b"a\0b" * 999, "zero bytes"), (b"short", "characters"), (None, "none")],
    ids=["empty", "binary", "short", "missing"],
)
def test_char_lm_refuses_a_text(char_lm, tmp_path, content, says):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=f"char_lm: .*{says}"):
        char_lm.main([*SMALL, "--text", str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_char_lm_refuses_a_prompt_outside_of_the_vocabulary(char_lm, text, tmp_path):
    arguments = ["--text", text, "--prompt", "block 7?", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"char_lm: 'block 7\?' holds b'7\?', outside the voc"):
        char_lm.main([*SMALL, *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--hidden", "0"], ["--density", "0"], ["--density", "1.5"], ["--steps", "x"]),
        *(["--lr", "0"], ["--clip", "-1"], ["--temperature", "0"], ["--layers", "0"]),
        *(["--dtype", "float16"], ["--cell", "mlstm", "--layers", "2"]),
        *(["--lr", "inf"], ["--hidden", "16"], ["--prompt", "\udcff"]),
    ],
    ids=" ".join,
)
def test_char_lm_refuses_arguments(char_lm, text, tmp_path, arguments):
    with pytest.raises(SystemExit):
        char_lm.main([*SMALL, "--text", text, "--out", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file", "file/folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(char_lm, text, tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--out takes a folder to write to, got .*file"):
        char_lm.main([*SMALL, "--text", text, "--out", str(tmp_path / out)])


def test_resuming_says_where_nothing_is_to_resume(char_lm, text, tmp_path, capsys):
    arguments = ["--text", text, "--steps", "1", "--no-compare", "--resume"]
    char_lm.main([*SMALL, *arguments, "--out", str(tmp_path)])
    assert f"there is no {tmp_path / 'sparse.npz'}" in capsys.readouterr().out
