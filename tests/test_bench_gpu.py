"""The GPU's benchmark: what it checks before it times, what it keeps, what it draws."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numbsparse import device, ops, patterns
from numbsparse.bench import changing, contestants, results, run, sections, show, timing
from numbsparse.bench import measure as measuring
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import Problem, error_of, fault_in
from numbsparse.kernels import limits, poison
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
    row = measuring.measure(few, "forward")
    assert row["seconds"] == {}
    assert row["not_timed"][row["auto"]].startswith("wrong: ")


def test_both_ways_are_checked_shown_and_tabulated(once, tmp_path, monkeypatch):
    monkeypatch.setattr(contestants, "choose", lambda *_: "k1_naive")
    rows = list(sections.rows("feature_major", Options(quick=True)))
    assert [row["product"] for row in rows] == 2 * list(PRODUCTS)
    for row in rows:
        both = [row["auto"], f"{row['auto']} feature-major"]
        assert list(row["seconds"]) == list(row["errors"]) == both
        assert max(row["errors"].values()) < (1e-6 if row["dtype"] == "float32" else 1e-3)
        row["seconds"] = dict(zip(both, (2e-6, 3e-6), strict=True))
        assert f"{both[0]} 2 us" in show.line("feature_major", row, rows)
        assert show.line("feature_major", row, rows).endswith(" (1.50)")
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
    row = measuring.measure(problem, product, others=(contestants.FEATURE_MAJOR,))
    assert row["seconds"] == {row["auto"]: 1.0}
    feature_major = f"{row['auto']} feature-major"
    assert row["not_timed"][feature_major].startswith("wrong: ")
    assert f"{feature_major} wrong: " in show.line("feature_major", row, [row])


def test_a_value_that_is_never_written_is_a_fault(few, once, monkeypatch):
    monkeypatch.setattr(poison, "holds_nan", lambda out: True)
    row = measuring.measure(few, "weight_grad")
    assert row["not_timed"] == {row["auto"]: "wrong: NaN in the result"}


def test_a_failure_costs_only_its_cell(few, once, monkeypatch):
    def fail(problem, product):
        raise ValueError("at 5:1\ntoo small")

    monkeypatch.setattr(measuring, "peers", lambda *_: {"a peer": fail})
    row = measuring.measure(few, "forward", others=("a peer",))
    assert row["not_timed"] == {"a peer": "failed: ValueError: too small"}
    assert row["seconds"] == {row["auto"]: 1.0}


def test_the_chosen_kernel_some_or_all(few, once):
    chosen = measuring.measure(few, "forward")
    every = measuring.measure(few, "forward", kernels="all")
    two = measuring.measure(few, "forward", kernels="k3_registers,k1_naive,k6_hopper")
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
    row = measuring.measure(Problem(Layout([[1]]), 5, 3, "float32"), "forward")
    assert row["auto"] is None
    assert "got 5" in row["not_timed"]["numbsparse"]
    assert "got 5" in show.line("float32", row, [row])


def test_bfloat16_problems():
    pytest.importorskip("ml_dtypes")
    problem = Problem(Layout([[1, 0], [1, 1]]), 8, 5, "bfloat16")
    assert problem.x.host.dtype.name == problem.x.device.dtype.name == "bfloat16"
    parts = problem.parts("forward")
    assert fault_in(parts, whole(problem, "forward")[parts.picked], "bfloat16", "highest") is None


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
    rows = list(sections.rows("changing", Options(quick=True)))
    said = [(row["product"], row["layout"], len(row["seconds"])) for row in rows]
    assert said == [
        ("forward", "gates:", 4),
        ("forward", "made on the GPU:", 2),
        ("forward", "a new layout:", 2),
        ("weight_grad", "made on the GPU:", 2),
        ("weight_grad", "a new layout:", 2),
    ]
    assert all(0 < s < 60 for row in rows for s in row["seconds"].values())
    assert "none" in show.line("changing", rows[0], rows)
    assert "(1.00); all one" in show.line("changing", rows[0], rows)


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
        assert "k3_registers" in show.line(name, row, rows)
        assert "torch BSR wrong: all" in show.line(name, row, rows)


def called_ahead(monkeypatch, *names):
    """The calls that other processes would make of these sections, twice over."""
    called = []

    def of_rung(problem, product, kernel, feature_major=False):
        case = product, problem.dtype, kernel, feature_major
        return SimpleNamespace(call=lambda: called.append(case))

    def of_images(problem, product):
        case = product, problem.taps_along, problem.block_size
        return SimpleNamespace(call=lambda: called.append(case))

    monkeypatch.setattr(contestants, "of_rung", of_rung)
    monkeypatch.setattr(contestants, "of_images", of_images)
    monkeypatch.setattr(contestants, "by_ops", of_images)
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
    alone = [(product, 3, 16) for product in PRODUCTS]
    beside = [(product, 1, 16) for product in PRODUCTS]  # the matmul
    assert sorted(called_ahead(monkeypatch, "conv")) == sorted(alone + 2 * beside)


def test_processes_share_what_is_compiled_and_end_in_time(monkeypatch):
    said = []

    class Process:
        def __init__(self, target, args, daemon):
            said.append(args[0])

        start = kill = lambda self: said.append("started or ended")

        def join(self, seconds):
            assert 0 <= seconds <= 5

    monkeypatch.setattr(measuring, "get_context", lambda how: SimpleNamespace(Process=Process))
    cases = list(sections.CASES["headline"](Options(quick=True)))
    measuring.compile_ahead(cases, 2, 5.0)
    first, second, *rest = said
    assert rest == ["started or ended"] * 4
    assert {case.product for case in first + second} == set(PRODUCTS)
    assert not {id(case) for case in first} & {id(case) for case in second}


def test_headline_compares_with_the_dense_product():
    rows = quick("headline")
    last = rows[-1]
    assert show.speed_up(last, "k3_registers", rows) == pytest.approx(1e9 / last["flops"])


def test_layouts_are_compared_with_as_many_random_blocks():
    rows = quick("layouts")
    for row in rows:
        if not row["layout"].startswith("random"):
            twin = next(r for r in rows if r["layout"] == f"random for {row['layout']}")
            assert twin["n_blocks"] == row["n_blocks"]
            assert show.relative(row, rows) == pytest.approx(1)


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


def test_a_run_prints_and_keeps_its_rows_and_command(once, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "require_times", lambda: None)
    path, how = tmp_path / "cuda.json", Options("k1_naive,k3_registers", quick=True)
    found = run.run(("ladder", "limits"), how, json_file=path)
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


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed_up.png"
    figure.draw_speed_up({"machine": "a card; versions", "rows": quick("headline")}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_figure_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'numbsparse\[examples\]'"):
        figure.matplotlib_figure()


def test_the_clock_runs_from_idle_to_idle(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "synchronize", lambda: order.append("idle"))
    timing._time(lambda: order.append("call"), 2)
    assert order == ["idle", "call", "call", "idle"]


def test_replays_take_turns():
    order = []
    graphs = {name: timing.Graph(lambda name=name: order.append(name), 10, None) for name in "ab"}
    assert timing.seconds_of(graphs, seconds=0.0).keys() == {"a", "b"}
    turns = [a for a, b in zip(order, [*order[1:], None], strict=True) if a != b]
    assert turns == ["a", "b"] * (1 + timing.TURNS)


@pytest.mark.parametrize(("call", "calls"), [(2e-3, 1), (1e-4, 10), (1e-7, timing.MOST)])
def test_a_graph_holds_about_a_millisecond(monkeypatch, call, calls):
    monkeypatch.setattr(timing, "_time", lambda work, count: work())
    recorded = timing.graph_of(lambda call, count: lambda: count * call(), lambda: call)
    assert recorded.calls == pytest.approx(calls, abs=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_is_put_in_and_found(dtype):
    values = np.array([0, 1, -np.inf, np.inf, -2], np.float32)
    if dtype == "bfloat16":
        values = values.astype(pytest.importorskip("ml_dtypes").bfloat16)
    array = device.to_device(values.astype(dtype))
    assert not poison.holds_nan(array)
    assert poison.holds_nan(device.to_device(np.r_[array.numpy(), np.float32(np.nan)]))
    poison.fill_with_nan(array)
    assert np.isnan(array.numpy().astype(np.float32)).all()


def test_the_reading_kernel_reads_everything(rng):
    grid = 2
    x = rng.standard_normal(2 * 4 * limits.AT_ONCE * limits.THREADS * grid, dtype=np.float32)
    out = device.empty((limits.THREADS * grid,), np.float32)
    assert limits.read(device.to_device(x), grid, 3, out) == 3 * x.nbytes
    np.testing.assert_allclose(out.numpy().sum(), 3 * x.sum(dtype=np.float64), rtol=1e-4)


def test_operations_are_counted():
    out = device.empty((limits.THREADS,), np.float32)
    assert limits.multiply_add(1, 3, out) == 2 * 3 * limits.CHAINS * limits.THREADS
    t = np.arange(limits.THREADS)[:, None] + np.arange(limits.CHAINS)
    for _ in range(3):
        t = t * (1 + limits.FACTOR)
    np.testing.assert_allclose(out.numpy(), t.sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("dtype", limits.TENSOR_CORES)
def test_tensor_cores_multiply(dtype):
    out = device.empty((limits.THREADS,), np.float32)
    poison.fill_with_nan(out)
    warps, products = limits.THREADS // 32, limits.TENSOR_CORES[dtype][1]
    assert limits.tensor_core(dtype, 1, 1, out) == 2 * warps * limits.SQUARES * products
    assert np.isfinite(out.numpy()).all()
    assert np.ptp(out.numpy()) > 0


@pytest.mark.parametrize("dtype", limits.KINDS)
def test_warpgroups_multiply(dtype):
    if not device.SIMULATED and device.compute_capability() != (9, 0):
        pytest.skip("wgmma takes compute capability 9.0")
    out = device.empty((128 * limits.WARPGROUPS,), np.float32)
    poison.fill_with_nan(out)
    products = limits.SIDE**2 * limits.DEPTH * limits.TIMES
    assert limits.warpgroup(dtype, 1, 2, out) == 2 * 2 * limits.WARPGROUPS * products
    assert np.isfinite(out.numpy()).all()
    assert np.ptp(out.numpy()) > 0
