"""examples/torch_gpt.py learns, dense and sparse, and tells both in a table."""

import pytest
from examples_helpers import imported, write_text
from torch_helpers import nst, torch

from numbsparse.bench import results

SMALL = "--width 128 --layers 1 --batch 4 --length 16 --steps 20 --lr 1e-2 --held-out-batches 2"


@pytest.mark.parametrize("more", [[], ["--amp"]], ids=["float32", "amp"])
def test_it_learns(monkeypatch, tmp_path, capsys, more):
    torch_gpt, kept = imported(monkeypatch, "torch_gpt"), tmp_path / "kept.json"
    given = ["--text", write_text(tmp_path), *SMALL.split(), "--json", str(kept), *more]
    rows = torch_gpt.main(given)
    ((name, saved),) = results.load(kept).items()
    assert name == "ranks 1, seed 0"
    assert [row["parameters"] for row in saved["rows"]] == [row["parameters"] for row in rows]
    assert SMALL in saved["command"]
    assert [row["model"] for row in rows] == ["dense", "sparse", "wide"]
    assert max(row["bits"] for row in rows) < 3  # 16 characters are 4 bits; the words far fewer
    dense, sparse, wide = (row["parameters"] for row in rows)
    assert sparse < 0.6 * dense
    assert dense < wide < 1.02 * dense  # more biases
    assert "bits per character, held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--text", "no-such-file"], "torch_gpt: --text takes .* got no-such-file"),
        (["--text", __file__, "--length", "9999"], "torch_gpt: the training text has .* at least"),
        (["--json", "no/such/folder.json"], "2"),
    ],
)
def test_the_program_refuses_before_it_trains(monkeypatch, capsys, wrong, said):
    torch_gpt = imported(monkeypatch, "torch_gpt")
    with pytest.raises(SystemExit, match=said):
        torch_gpt.main([*SMALL.split(), *wrong])
    assert "--json" not in wrong or "--json takes a file in a folder" in capsys.readouterr().err


def test_only_mlps_are_made_sparse(monkeypatch):
    torch_gpt = imported(monkeypatch, "torch_gpt")
    model = torch_gpt.make("sparse", 16, torch_gpt.parse([*SMALL.split(), "--layers", "2"]))
    sparse = [name for name, module in model.named_modules() if isinstance(module, nst.Linear)]
    assert sparse == [f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)]
    assert isinstance(model.head, torch.nn.Linear)


def test_ranks_of_torchrun_are_left_again(monkeypatch):
    torch_gpt, called = imported(monkeypatch, "torch_gpt"), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a test")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda name=name: called.append(name))
    with pytest.raises(ValueError, match="--text"), torch_gpt.all_ranks():
        raise ValueError("--text")
    assert called == ["init_process_group", "destroy_process_group"]
