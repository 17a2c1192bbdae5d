"""Sections of the benchmark: what each times and prints, what is compiled ahead, the figure."""

import json
import sys
from types import SimpleNamespace

import pytest

from numbsparse import device, patterns
from numbsparse.bench import changing, contestants, results, sections, timing
from numbsparse.bench import measure as measuring
from numbsparse.bench.measure import Options
from numbsparse.kernels import matmul as ladder
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.pages import figure

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def fake_measure(problem, product, kernels, others):
    size = {"features": problem.in_features, "batch": problem.batch}
    density = problem.layout.density
    return {
        **size,
        "product": product,
        "dtype": problem.dtype,
        "precision": problem.precision,
        "density": density,
        "block_size": problem.block_size,
        "n_blocks": problem.layout.n_blocks,
        "flops": problem.flops,
        "auto": "k3_registers",
        "seconds": {"k3_registers": problem.flops * 1e-9}
        | ({"cuBLAS dense": 1.0} if density == 1 else {}),
        "not_timed": {"torch BSR": "wrong: all"},
    }


def test_what_changes_is_timed_beside_what_does_not(monkeypatch):
    monkeypatch.setattr(changing, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(changing, "seconds_of", lambda graphs, _: dict.fromkeys(graphs, 1.0))
    monkeypatch.setattr(changing, "NEW", 1)
    rows = list(sections.rows("changing", Options(quick=True)))
    said = [(row["product"], row["layout"], len(row["seconds"])) for row in rows]
    assert said == [
        ("forward", "gates:", 4),
        ("forward", "made on the GPU:", 2),
        ("weight_grad", "gates:", 4),
        ("weight_grad", "made on the GPU:", 2),
        *[(product, "a new layout:", 2) for product in PRODUCTS],
    ]
    assert all(0 < s < 60 for row in rows for s in row["seconds"].values())
    assert "none" in results.line(rows[0], rows)
    assert "(1.00x); half zero" in results.line(rows[0], rows)


def test_an_edit_is_timed_beside_a_step(monkeypatch, cheap_products):
    monkeypatch.setattr(changing, "EDITS", 1)
    monkeypatch.setattr(changing, "STEPS", 1)
    rows = list(sections.rows("edits", Options(quick=True)))
    said = [(row["host"], *row["seconds"]) for row in rows]
    steps = "a step", "an edit", "the step after it"
    assert said == [
        ("a tenth of 32 blocks changed, batch 4", *steps),
        ("a tenth of 128 blocks changed, two CPU cores", *steps),
        ("a step of 128 features, a tenth kept", "made so", "pruned"),
    ]
    assert all(0 < s < 60 for row in rows for s in row["seconds"].values())
    of = changing.Training("cpu", patterns.random(8, 8, 0.5, seed=0), 8, 1)
    layout, (gone, new) = of.layer.weight.data.layout, of.others(1)
    of.step()
    of.edit(gone, new)
    edited = of.layer.weight.data.layout
    assert (edited - layout, layout - edited) == (new, gone)
    assert (gone.n_blocks, new.n_blocks) == (3, 3)
    of.step()


def quick(name):
    cases = sections.CASES[name](Options("auto", quick=True))
    return [fake_measure(*case[:-1]) | case.more for case in cases]


@pytest.mark.parametrize(
    "name", ["headline", "float16", "float32", "ladder", "layouts", "feature_major"]
)
def test_every_section_prints_each_product_with_its_faults(name):
    rows = quick(name)
    assert {row["product"] for row in rows} == set(PRODUCTS)
    for row in rows:
        assert "k3_registers" in results.line(row, rows)
        assert "torch BSR wrong: all" in results.line(row, rows)


def called_ahead(monkeypatch, *names):
    """The calls that other processes would make of these sections, twice over."""
    called = []

    def of_rung(problem, product, kernel, feature_major=False):
        case = product, problem.dtype, kernel, feature_major
        return SimpleNamespace(call=lambda: called.append(case))

    def by_ops(problem, product):
        case = product, problem.taps_along, problem.block_size
        return SimpleNamespace(call=lambda: called.append(case))

    monkeypatch.setattr(contestants, "of_rung", of_rung)
    monkeypatch.setattr(contestants, "by_ops", by_ops)
    how = Options(quick=True)
    measuring._call_each(
        measuring._apart(case for name in 2 * names for case in sections.CASES[name](how))
    )
    return called


def test_each_kernel_is_compiled_once(monkeypatch):
    called = called_ahead(monkeypatch, "ladder")
    assert len(called) == len(set(called))
    rungs = [name for name, place in ladder.RUNGS.items() if place == "cuda"]
    float16 = {name for *case, name, _ in called if case == ["forward", "float16"]}
    assert {"k1_naive", "k5_tensor_core"} <= float16 <= set(rungs)
    assert {product for product, *_ in called} == set(PRODUCTS)
    assert not any(feature_major for *_, feature_major in called)


def test_both_ways_are_compiled(monkeypatch):
    called = called_ahead(monkeypatch, "feature_major")
    assert len(called) == len(set(called)) == 2 * len(PRODUCTS) * 2


def test_the_convolutions_are_compiled(monkeypatch):
    expected = [(product, taps, 16) for product in PRODUCTS for taps in (1, 3)]
    assert sorted(called_ahead(monkeypatch, "conv")) == sorted(expected)


def test_processes_share_what_is_compiled_and_end_in_time(monkeypatch, capsys):
    said, looks = [], []

    class Process:
        def __init__(self, target, args, daemon):
            said.append(args[0])
            self.done = args[1]

        start = kill = lambda self: said.append("started or ended")

        def is_alive(self):
            return len(looks) < 2

        def join(self, seconds):
            assert 0 < seconds <= 5
            looks.append(seconds)
            self.done.value += 2

    def value(kind, number):
        return SimpleNamespace(value=number)

    context = SimpleNamespace(Process=Process, Value=value)
    monkeypatch.setattr(measuring, "get_context", lambda how: context)
    cases = list(sections.CASES["headline"](Options(quick=True)))
    measuring.compile_ahead(cases, 2, 5.0)
    n = len(said[0]) + len(said[1])
    first_line, *lines = capsys.readouterr().out.splitlines()
    assert first_line == f"compiling kernels of {n} calls in 2 processes"
    assert lines == [f"  2 of {n} after 0 s"]  # a process that goes on
    measuring.compile_ahead([], 2, 5.0)
    assert capsys.readouterr().out == ""
    first, second, *rest = said
    assert rest == ["started or ended"] * 4
    assert {case.product for case in first + second} == set(PRODUCTS)
    assert not {id(case) for case in first} & {id(case) for case in second}


def test_headline_compares_with_the_dense_product():
    rows = quick("headline")
    last = rows[-1]
    assert results.speed_up(last, "k3_registers", rows) == pytest.approx(1e9 / last["flops"])


def test_layouts_are_compared_with_as_many_random_blocks():
    rows = quick("layouts")
    for row in rows:
        if not row["layout"].startswith("random"):
            twin = next(r for r in rows if r["layout"] == f"random for {row['layout']}")
            assert twin["n_blocks"] == row["n_blocks"]


def test_what_was_kept_of_other_sections_stays(tmp_path):
    path = tmp_path / "cuda.json"
    row = {"seconds": {"k1": 1.23456789e-5}, "features": 123456789}
    results.save(path, {"a": {"machine": "m", "rows": [row, row]}})
    results.save(path, {"b": {"machine": "n", "rows": []}})
    results.save(path, {"a": {"machine": "o", "rows": [row]}})
    kept = results.load(path)
    rounded = {"seconds": {"k1": 1.2346e-5}, "features": 123456789}
    assert kept == {"a": {"machine": "o", "rows": [rounded]}, "b": {"machine": "n", "rows": []}}
    assert json.loads(path.read_text())["sections"] == kept
    assert [file.name for file in tmp_path.iterdir()] == ["cuda.json"]


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed_up.png"
    section = {"machine": "a card; versions", "rows": quick("headline")}
    figure.draw_headline({"headline": section}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_figure_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'numbsparse\[examples\]'"):
        figure.draw_headline({"headline": {"rows": []}}, "speed_up.png")
