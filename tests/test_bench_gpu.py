"""What the GPU's benchmark checks before it times, and what it keeps."""

from types import SimpleNamespace

import numpy as np
import pytest

from numbsparse import device, ops, patterns
from numbsparse.bench import contestants, results, sections, timing
from numbsparse.bench import measure as measuring
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import Problem, error_of, fault_in
from numbsparse.kernels import matmul as ladder
from numbsparse.kernels.matmul import PRODUCTS, k0_reference
from numbsparse.layout import Layout
from numbsparse.pages import committed, figure, tables

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


@pytest.fixture
def problem():
    pattern = patterns.random(12, 15, 0.3, seed=0)
    pattern[3], pattern[:, 4] = False, False
    return Problem(Layout(pattern), 8, 37, "float32")


@pytest.fixture
def few():
    """Of which every part is checked, and whose kernels the simulator runs in no time."""
    return Problem(Layout([[1, 0, 1], [1, 1, 0]]), 8, 5, "float32")


@pytest.fixture
def once(monkeypatch):
    """Nothing is timed: each call is one second, and recorded alone."""
    monkeypatch.setattr(measuring, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(measuring, "seconds_of", lambda graphs, _: dict.fromkeys(graphs, 1.0))


def whole(problem, product):
    """The result by the reference, in the dtype of the problem."""
    x, dy, w = (operand.host for operand in (problem.x, problem.dy, problem.values))
    out = np.full(problem.out(product).shape, np.nan)
    operands = {"forward": (x, w), "input_grad": (dy, w), "weight_grad": (x, dy)}[product]
    exact = [operand.astype(np.float64) for operand in operands]
    getattr(k0_reference, product)(*exact, problem.layout.index, out)
    return out.astype(problem.dtype)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_parts_are_those_of_the_reference(problem, product):
    parts, right = problem.parts(product), whole(problem, product)
    picked = right[parts.picked]
    assert parts.exact.size > 500
    assert fault_in(parts, picked, "float32", "highest") is None
    assert error_of(parts, picked) < 1e-7


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fault", [np.nan, 0.01])
def test_one_wrong_value_in_a_part_is_a_fault(problem, product, fault):
    parts = problem.parts(product)
    picked = whole(problem, product)[parts.picked]
    picked[(0, 0, 0) if parts.columns is None else (0, parts.columns[0])] += fault
    assert fault_in(parts, picked, "float32", "highest").startswith("1 of")


def test_a_sum_of_one_product_may_be_as_far_off_as_one_product():
    problem = Problem(Layout(np.ones((4, 4), bool)), 8, 1, "float32")
    parts = problem.parts("weight_grad")
    units = 2.0**-23 * abs(parts.exact)
    assert fault_in(parts, parts.exact + 6 * units, "float32", "highest") is None
    assert fault_in(parts, parts.exact + 1e-5 * abs(parts.exact), "float32", "highest")


@pytest.mark.parametrize("fault", ["doubled", "nothing"])
def test_a_wrong_product_is_not_timed(few, once, monkeypatch, fault):
    right = ladder.rung("k1_naive")

    def broken(x, values, index, y, precision):
        if fault == "doubled":
            right.forward(x, values, index, y)
            y_twice = device.to_device(2 * y.numpy())
            ops.copy_into(y, y_twice)

    fake = SimpleNamespace(unsupported=right.unsupported, forward=broken)
    monkeypatch.setattr(contestants, "function_of", lambda name, product: getattr(fake, product))
    row = measuring.Case(few, "forward").measured()
    assert row["seconds"] == {}
    assert row["not_timed"][row["auto"]].startswith("wrong: ")


def test_both_ways_are_checked_shown_and_tabulated(once, tmp_path, monkeypatch):
    monkeypatch.setattr(contestants, "choose", lambda *_, **how: "k1_naive")
    rows = list(sections.rows("feature_major", Options(quick=True)))
    assert [row["product"] for row in rows] == 2 * list(PRODUCTS)
    for row in rows:
        both = [row["auto"], f"{row['auto']} feature-major"]
        assert list(row["seconds"]) == list(row["errors"]) == both
        assert max(row["errors"].values()) < (1e-6 if row["dtype"] == "float32" else 1e-3)
        row["seconds"] = dict(zip(both, (2e-6, 3e-6), strict=True))
        assert f"{both[0]} 2 us" in results.line(row, rows)
        assert results.line(row, rows).endswith(" (0.67x)")
    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    assert tables.feature_major() == ""
    feature_major = f"{rows[0]['auto']} feature-major"
    del rows[0]["seconds"][feature_major]
    rows[0]["not_timed"][feature_major] = "wrong: all"
    section = {"machine": "a card", "command": "bench", "took": 1.0, "rows": rows}
    results.save(tmp_path / "cuda.json", {"feature_major": section})
    first, second = tables.feature_major().splitlines()[4:]
    assert first == "| float32 | 16, 4 | 0.5 | 8 | 2.0 (wrong: all) | 2.0 (1.50) | 2.0 (1.50) |"
    assert second.count("2.0 (1.50)") == len(PRODUCTS)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_wrong_in_one_way_is_timed_in_the_other(once, monkeypatch, product):
    problem, right = Problem(Layout([[1, 0], [1, 1]]), 8, 5, "float32"), ladder.rung("k1_naive")

    def broken(x, other, index, out, precision):
        getattr(right, product)(x, other, index, out)
        if not x.is_contiguous:
            assert x.strides[0] == (other if product == "weight_grad" else out).strides[0] == 4
            ops.copy_into(out, device.to_device(2 * out.numpy()))

    monkeypatch.setattr(contestants, "function_of", lambda *_: broken)
    row = measuring.Case(problem, product, others=(contestants.FEATURE_MAJOR,)).measured()
    assert row["seconds"] == {row["auto"]: 1.0}
    feature_major = f"{row['auto']} feature-major"
    assert row["not_timed"][feature_major].startswith("wrong: ")
    assert f"{feature_major} wrong: " in results.line(row, [row])


def test_a_value_that_is_never_written_is_a_fault(few, once, monkeypatch):
    monkeypatch.setattr(measuring, "largest", lambda out: np.float32(np.nan))
    row = measuring.Case(few, "weight_grad").measured()
    assert row["not_timed"] == {row["auto"]: "wrong: NaN in the result"}


def test_a_gradient_without_blocks_is_not_wrong(once):
    empty = Problem(Layout([[0, 0]]), 8, 5, "float32")
    row = measuring.Case(empty, "weight_grad").measured()
    assert (row["not_timed"], row["errors"]) == ({}, {row["auto"]: 0.0})


def test_a_failure_costs_only_its_cell(few, once, monkeypatch):
    def fail(problem, product):
        raise ValueError("at 5:1\ntoo small")

    monkeypatch.setattr(measuring, "peers", lambda *_: {"a peer": fail})
    row = measuring.Case(few, "forward", others=("a peer",)).measured()
    assert row["not_timed"] == {"a peer": "failed: ValueError: too small"}
    assert row["seconds"] == {row["auto"]: 1.0}


def test_the_chosen_kernel_some_or_all(few, once):
    chosen = measuring.Case(few, "forward").measured()
    every = measuring.Case(few, "forward", kernels="all").measured()
    two = measuring.Case(few, "forward", kernels="k3_registers,k1_naive,k6_hopper").measured()
    assert list(chosen["seconds"]) == [chosen["auto"]]
    assert chosen["auto"] in every["seconds"]
    assert list(two["seconds"]) == [
        "k1_naive",
        "k3_registers",
    ]  # in reading order, those that serve
    assert {"k1_naive", "k3_registers"} <= every["seconds"].keys()
    kept = 4 * 8 * 8
    assert every["flops"] == 2 * 5 * kept
    assert every["bytes"] == 4 * (5 * 2 * 8 + 5 * 3 * 8 + kept)
    assert all(error < 1e-6 for error in every["errors"].values())


def test_what_no_rung_takes_says_why(once):
    row = measuring.Case(Problem(Layout([[1]]), 5, 3, "float32"), "forward").measured()
    assert row["auto"] is None
    assert "got 5" in row["not_timed"]["numbsparse"]
    assert "got 5" in results.line(row, [row])


def test_bfloat16_problems():
    pytest.importorskip("ml_dtypes")
    problem = Problem(Layout([[1, 0], [1, 1]]), 8, 5, "bfloat16")
    assert problem.x.host.dtype.name == problem.x.device.dtype.name == "bfloat16"
    parts = problem.parts("forward")
    assert fault_in(parts, whole(problem, "forward")[parts.picked], "bfloat16", "highest") is None


def test_a_run_prints_and_keeps_its_rows_and_command(once, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "require_times", lambda: None)
    path, how = tmp_path / "cuda.json", Options("k1_naive,k3_registers", quick=True)
    found = sections.run(("ladder", "limits"), how, json_file=path)
    rungs = found["ladder"]["rows"][0]["seconds"]
    assert list(rungs) == ["k1_naive", "k3_registers"]
    kept = results.load(path)
    assert kept["ladder"]["command"].endswith("--only ladder --kernels k1_naive,k3_registers")
    assert [row["product"] for row in kept["ladder"]["rows"]] == 2 * list(PRODUCTS)
    assert kept["limits"]["rows"][0]["limit"] == "device memory, read"
    printed = capsys.readouterr().out
    assert printed.startswith(kept["ladder"]["machine"])
    assert printed.count("k1_naive 1.00 s") == printed.count("k3_registers 1.00 s") == 6
    pytest.importorskip("matplotlib")
    with pytest.raises(RuntimeError, match="takes the section headline"):
        figure.draw_headline(found, tmp_path / "speed_up.png")
