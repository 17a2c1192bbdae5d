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
    assert many_cards.tables.cost() in text


def test_the_cost_of_a_step(many_cards):
    """At two cards what was measured, and every further card adds to it."""
    step_seconds = many_cards.tables.step_seconds
    for nbytes, measured in ((4096, 38e-6), (2**26, 279e-6), (2**30, 3.3e-3)):
        assert step_seconds(0.0, nbytes, 2) == pytest.approx(measured, rel=0.15)
    times = [step_seconds(1e-3, 10**8, ranks) for ranks in (1, 2, 8, 9, 64, 1024)]
    assert times[0] == 1e-3
    assert times == sorted(set(times))
    # Rings between many hosts move twice what a card has of the sum, each way once.
    slow = step_seconds(0.0, 10**9, 2**20, per_host=1, network=1e9, nvlink=1e30)
    assert slow == pytest.approx(2 * 1.0 + 40 * 15e-6, rel=1e-5)
    assert step_seconds(1.0, 10**8, 8, overlapped=1.0) == 1.0
    for bad in ({"compute": -1.0}, {"nbytes": -1}, {"ranks": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            step_seconds(**{"compute": 1.0, "nbytes": 1, "ranks": 1} | bad)
