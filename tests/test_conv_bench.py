"""The benchmark's section of the convolutions: what it checks, shows and tabulates."""

from functools import partial

import numpy as np
import pytest

from numbsparse import device
from numbsparse.bench import contestants, results, sections, timing
from numbsparse.bench import measure as measuring
from numbsparse.bench.contestants import CUDNN, OURS
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import error_of, fault_in, matrices
from numbsparse.kernels.conv import k0_reference
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.pages import committed, tables

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def whole(problem, product):
    """The result by the reference: rows of pixels, or blocks."""
    x, dy = (
        a.host.reshape(a.shape[0], -1, a.shape[-1]).astype(float) for a in (problem.x, problem.dy)
    )
    operands = {
        "forward": (x, problem.values.host),
        "input_grad": (dy, problem.values.host),
        "weight_grad": (x, dy),
    }[product]
    like = {"forward": dy, "input_grad": x, "weight_grad": problem.values.host}[product]
    out = np.full(like.shape, np.nan)
    getattr(k0_reference, product)(*operands, problem.layout.index, problem.window, out)
    return out if product == "weight_grad" else out.reshape(-1, out.shape[-1])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("taps_along", "stride"), [(1, 1), (3, 1), (3, 2), (1, 2)])
def test_the_parts_are_those_of_the_reference(product, taps_along, stride):
    problem = matrices((32, 24), 8, 0.6, 3, "float32", side=5, taps=taps_along, stride=stride)
    assert problem.dy.shape == (3, *(2 * [-(-5 // stride)]), 24)
    parts, right = problem.parts(product), whole(problem, product)
    picked = right[parts.picked]
    assert fault_in(parts, picked, "float32", "highest") is None
    assert error_of(parts, picked) < 1e-6
    wrong = picked.copy()
    wrong[(0, 0, 0) if parts.columns is None else (0, parts.columns[0])] += 0.01
    assert fault_in(parts, wrong, "float32", "highest").startswith("1 of")


def test_rows_are_checked_shown_and_tabulated(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(measuring, "seconds_of", lambda graphs, _: dict.fromkeys(graphs, 1e-3))
    monkeypatch.setattr(contestants, "by_ops", partial(contestants.by_ops, kernel="k1_naive"))
    rows = list(sections.rows("conv", Options(quick=True)))
    own = [row for row in rows if OURS in row["seconds"]]
    assert [row["product"] for row in own] == 2 * list(PRODUCTS)
    assert all(max(row["errors"].values()) < 1e-3 for row in own)
    assert all(row["seconds"].keys() == {OURS} for row in own)
    assert all(row["workspace"] >= 0 for row in own)
    for row in rows:
        if OURS not in row["seconds"]:
            row["seconds"], row["not_timed"] = {CUDNN: 5e-3}, {}
    line = results.line(own[0], rows)
    assert "3 x 3 B 16" in line
    assert "numbsparse 1 ms" in line
    assert "(5.00x)" in line
    assert "of the input" in line
    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    section = {"machine": "a card", "command": "bench", "took": 1.0, "rows": rows}
    results.save(tmp_path / "cuda.json", {"conv": section})
    table = tables.conv().splitlines()
    assert table[2].startswith("| dtype | taps | B | forward ")
    assert len(table) == 4 + 2
    assert table[4].count("(5.0)") == len(PRODUCTS)


def test_without_results_there_is_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    assert tables.conv() == ""
