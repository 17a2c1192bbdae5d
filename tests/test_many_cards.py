"""examples/many_cards.py runs without cards, and the guide has the tables of what it measured."""

import pytest
from examples_helpers import EXAMPLES, imported

from numbsparse.bench import results

SMALL = "--cpu --units 64 --split-units 64 --steps 2 --batch 2 --repeats 1".split()  # noqa: SIM905
TIMED = ["collectives", "data_parallel", "split"]


@pytest.fixture
def many_cards(monkeypatch):
    return imported(monkeypatch, "many_cards")


def test_it_measures_and_writes_the_tables(many_cards, tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "many_cards.json", tmp_path / "page.md"
    found = many_cards.main([*SMALL, "--json", str(file), "--only", *TIMED])
    assert [len(found[name]) for name in TIMED] == [3, 3, 1]
    assert "as good as" in capsys.readouterr().out
    stored = results.load(file)
    assert "--only collectives" in stored["split 1"]["command"]
    monkeypatch.setattr(many_cards.tables, "RESULTS", file)
    page.write_text("before\n<!-- split -->\nold\n<!-- /split -->\nafter\n")
    many_cards.main(["--tables", str(page)])
    assert page.read_text().startswith(
        "before\n<!-- split -->\n\n1 x CPU:\n\n| units | share alone |"
    )
    assert page.read_text().endswith("`\n\n<!-- /split -->\nafter\n")


def test_under_torch(many_cards, capsys):
    pytest.importorskip("torch")
    found = many_cards.main([*SMALL, "--only", "ddp"])
    assert len(found["ddp"]) == 3 + 1 + 3 + 1
    assert "numbsparse.torch alone" in capsys.readouterr().out


def test_the_guide_has_the_tables_of_the_results(many_cards):
    text = (EXAMPLES / "guides" / "many_cards.md").read_text()
    for name in many_cards.SECTIONS:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1
    stored = results.load(many_cards.tables.RESULTS)
    for name in stored:
        assert many_cards.tables.written(name.rpartition(" ")[0], stored[name]) in text
