"""The taught ladder: every step computes y = x @ w, refuses the rest in words, and stays short."""

import ast
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device, ops
from numbsparse.bench import measure as measuring
from numbsparse.bench import sections, timing
from numbsparse.bench.contestants import named
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import Problem
from numbsparse.bench.results import save
from numbsparse.bench.sections import CASES, matrices, rows
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import ladder
from numbsparse.kernels.ladder.s12_grouped import plan
from numbsparse.layout import Layout
from numbsparse.pages import committed, lessons, opened
from numbsparse.pages import ladder as shown
from numbsparse.pages.committed import on_gpu
from numbsparse.pages.reads import Roofline, arriving, reads, roofline
from numbsparse.testing import Case, check_rung, in_turns

NAMES = ladder.NAMES
SIZES = (32, 64, 128)
HOPPER = NAMES[NAMES.index("s09_copy_engine") :]
BARRIERS = HOPPER[HOPPER.index("s11_producer") :]

on_device = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def dtype_of(name):
    return "float32" if name < "s08" else "float16"


def served(name, size=32, batch=512):
    """Why a step computes nothing here, if so."""
    return ladder.step(name).unsupported("forward", size, as_dtype(dtype_of(name)), "cuda", batch)


def rows_of(name):
    """The least batch that a step takes."""
    step = ladder.step(name)
    return step.BM * getattr(step, "CLUSTER", 1)


def run(name, case, seed=0):
    if (why := served(name, case.block_size, case.batch)) is not None:
        pytest.skip(why)
    step = ladder.step(name)
    check_rung(step, "forward", case, dtype_of(name), "cuda", seed, contiguous=True)


def drawn(name, size):
    """A shape of a few blocks; of the large ones all are kept, for there are only two or one.

    It has several tiles of rows or more columns, as is drawn.
    """
    rng = np.random.default_rng([NAMES.index(name), size])
    if size > 32:
        inputs = 64 if device.SIMULATED and "s04" < name < "s08" else 128
        columns = 128 if name in HOPPER[1:] else size
        return Case(rows_of(name), inputs, columns, size, 1)
    tall = bool(rng.integers(2))
    columns = (128, 256) if name in HOPPER else (64, 96)
    inputs, density = 32 * int(rng.integers(3, 5)), float(rng.choice([0.6, 0.8]))
    return Case(rows_of(name) * (1 + tall), inputs, columns[not tall], 32, density)


@on_device
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in NAMES
        for size in SIZES
        if (size < 128 or name > "s08") and (size == 128 or name not in BARRIERS)
    ],  # the next test, and `test_recorded`, have those
)
def test_a_step_is_right_for_a_drawn_shape(name, size):
    run(name, drawn(name, size), seed=size)


# Down and across, from s12 on; s14 and s15 have one cluster in the simulator.
TILES = dict(zip(BARRIERS[1:], [(2, 1), (1, 3), (2, 1), (1, 2)], strict=True))


@pytest.fixture
def two_stages(monkeypatch):
    """Makes a step's ring short, for blocks of 32: few inputs go round it several times."""

    def shorten(step):
        if hasattr(step, "STAGES"):
            monkeypatch.setattr(step, "STAGES", 2)
        else:
            monkeypatch.setattr(step, "RING", 2 * 2 * step.TERMS * (step.BM + step.BN))
        step.line_kernel.cache_clear()

    yield shorten
    for name in BARRIERS:
        ladder.step(name).line_kernel.cache_clear()


@on_device
@pytest.mark.parametrize(
    ("name", "order"), [(name, ("falling", 1)[n % 2]) for n, name in enumerate(BARRIERS)]
)
def test_a_step_goes_round_its_ring_and_over_several_tiles(name, order, two_stages):
    """Each stage is filled two or three times, whoever comes first, and there are more tiles than
    multiprocessors."""
    down, across = TILES.get(name, (1, 1)) if device.SIMULATED else (1, 3)
    two_stages(ladder.step(name))
    with in_turns(order) if device.SIMULATED else nullcontext():
        run(name, Case(down * rows_of(name), 6 * 32, across * 128, 32, 0.8))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_refuses_in_words(name):
    unsupported, dtype = ladder.step(name).unsupported, as_dtype(dtype_of(name))
    rows = rows_of(name)
    asked = {
        ("input_grad", 32, dtype, "cuda", rows): "computes only forward",
        ("forward", 32, dtype, "cpu", rows): "runs on a GPU",
        ("forward", 16, dtype, "cuda", rows): "takes block sizes",
        ("forward", 32, as_dtype("float64"), "cuda", rows): f"takes {dtype}, got float64",
        ("forward", 32, dtype, "cuda", rows + 1): f"multiples of {rows}, got {rows + 1}",
        ("forward", 32, dtype, "cuda", 0): f"multiples of {rows}, got 0",
    }
    for case, words in asked.items():
        if words.startswith(("multiples", "computes")) and served(name) is not None:
            continue  # another card is the first reason
        assert words in unsupported(*case), case


def operands(name, rows=512, features=128, outputs=128, blocks=None):
    layout = Layout(np.ones((4, 4), bool) if blocks is None else blocks)
    dtype = dtype_of(name)
    x, y = np.ones((rows, features), dtype), np.full((rows, outputs), np.nan, dtype)
    values = np.ones((layout.n_blocks, 32, 32), dtype)
    x, values, y = map(ns.to_device, (x, values, y))
    return [x, values, ops.index_beside(layout, x), y]


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_a_step_refuses_operands_and_writes_nothing(name):
    if (why := served(name)) is not None:
        pytest.skip(why)
    wide = ns.to_device(np.ones((512, 2, 128), dtype_of(name)))
    odd = ns.to_device(np.ones(512 * 128 + 1, dtype_of(name)))[1:].reshape((512, 128))
    wrong = {
        "x takes C order without gaps": [wide[:, 0], *operands(name)[1:]],
        "x begins at a multiple of 16 bytes": [odd, *operands(name)[1:]],
        "x takes features in multiples of 32, got 120": operands(name, features=120),
        "y takes features in multiples": operands(name, outputs=120),
        "values takes at least one block": operands(name, blocks=np.zeros((4, 4), bool)),
    }
    for words, (x, values, index, y) in wrong.items():
        with pytest.raises(ValueError, match=words):
            ladder.step(name).forward(x, values, index, y)
        assert np.isnan(y.numpy()).all(), words


@pytest.mark.parametrize("name", BARRIERS[1:2])
def test_a_group_is_whole(name):
    index = operands(name)[2]
    x, values, _, y = operands(name, outputs=96)
    with pytest.raises(ValueError, match="y takes features in multiples of 128, got 96"):
        ladder.step(name).forward(x, values, index, y)


@pytest.mark.parametrize(("COLUMNS", "INPUTS"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("density", [0.05, 0.3, 1])
def test_the_plan_loads_each_kept_block_once(COLUMNS, INPUTS, density, rng):
    layout = Layout(rng.random((9, 12)) < density)
    groups, starts, records = plan(layout.index, COLUMNS, INPUTS)
    assert sorted(groups.reshape(-1)) == list(range(12))
    assert len(records) == starts[-1] + 1  # one is read ahead
    pattern, found = layout.pattern, np.full((9, 12), -1)
    for g, columns in enumerate(groups):
        loaded = []
        for count, mask, *rest in records[starts[g] : starts[g + 1]]:
            inputs, blocks = rest[:INPUTS], rest[INPUTS : INPUTS + count]
            bits = [bit for bit in range(INPUTS * COLUMNS) if mask >> bit & 1]
            assert len(bits) == count > 0
            assert not any(rest[INPUTS + count :])
            for bit, block in zip(bits, blocks, strict=True):
                found[inputs[bit // COLUMNS], columns[bit % COLUMNS]] = block
            loaded += sorted(set(inputs))
        assert loaded == np.flatnonzero(pattern[:, columns].any(1)).tolist()
        assert starts[g + 1] - starts[g] == -(-len(loaded) // INPUTS)
    np.testing.assert_array_equal(found[pattern], np.arange(layout.n_blocks))
    assert (found[~pattern] == -1).all()


def test_columns_that_are_alike_stand_in_a_group():
    pattern = np.zeros((16, 16), bool)
    for column in range(16):
        pattern[column % 4 * 4 : column % 4 * 4 + 4, column] = True
    groups, starts, _ = plan(Layout(pattern).index, 4, 1)
    assert all(len(set(group % 4)) == 1 for group in groups)
    assert np.diff(starts).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("size", SIZES)
def test_sharing_is_counted(size):
    layout = Layout(np.ones((8, 8), bool))
    K, groups = 8 * size, 128 // size
    grouped = reads("s12_grouped", layout, size, 8192, "float16")
    assert grouped.from_global == K / (size * groups) + K / 256
    assert reads("s14_cluster", layout, size, 8192, "float16").from_global == K / 128 + K / 512
    assert arriving("s14_cluster", layout, size, 8192, "float16") == grouped.from_global
    assert arriving("s11_producer", layout, size, 8192, "float16") == K / size + K / 128


def forward_row(dtype):
    rows = on_gpu()["ladder"]["rows"]
    return next(row for row in rows if (row["product"], row["dtype"]) == ("forward", dtype))


def test_no_measured_time_is_far_below_its_roofline():
    """A kernel may beat the measured limit of L2, not by much; caches help the first steps."""
    for name in ("k5_tensor_core", "k6_hopper"):
        row = forward_row("float16")
        assert row["seconds"][name] > 0.9 * roofline(name, row).seconds


def test_a_roofline_is_the_longest_of_its_limits():
    assert Roofline(1.0, 3.0, 2.0).bound == "L2"
    assert Roofline(1.0, 3.0, 2.0).seconds == 3.0
    row = forward_row("float16")
    assert roofline("s12_grouped", row).cache < roofline("s11_producer", row).cache
    assert roofline("s07_double_buffer", forward_row("float32")).bound == "arithmetic"
    assert roofline("k0_reference", row) is None


def test_a_roofline_is_of_the_bytes_that_the_profiler_read():
    row = committed.in_section(on_gpu(), "steps", dtype="float16", block_size=32)[0]
    (read,) = committed.in_section(committed.profiled(), "steps", rung="s12_grouped")
    of, rates = read["readings"], committed.limits()
    moved = of["memory bytes read"] + of["memory bytes written"]
    found = roofline("s12_grouped", row)
    assert found.memory == moved / rates[committed.MEMORY] > row["bytes"] / rates[committed.MEMORY]
    assert found.cache == of["L2 to L1 bytes"] / rates[committed.CACHE]
    line = next(text for text in lessons.profiled_steps().splitlines() if "s12_grouped" in text)
    least = f"{found.cache * 1e6:,.0f} / {found.memory * 1e6:,.0f}"
    assert f"| {of['seconds'] * 1e6:,.0f} |" in line
    assert f"| {of['L2 to L1 bytes'] / 1e6:,.0f} / {moved / 1e6:,.0f} | {least} |" in line


LONGEST, MOST_NEW = 200, 60
MORE = {"s12_grouped": 95}  # its plan, which the steps after it import, and reading it ahead


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_one_short_file(name):
    assert shown.source_of(name).count("\n") <= LONGEST
    words = " ".join(ast.get_docstring(ast.parse(shown.source_of(name))).split())
    assert words.startswith(f"Step {NAMES.index(name) + 1}: ")
    for part in ("What changed since the", "Reads per output, for a sum of K", "The limit: "):
        assert part in words


@pytest.mark.parametrize(("before", "after"), list(pairwise(NAMES)), ids=NAMES[1:])
def test_a_step_is_a_small_diff(before, after):
    found = shown.new_lines(before, after)
    assert found <= MORE.get(after, MOST_NEW)
    assert after not in MORE or found > MOST_NEW


@pytest.mark.parametrize("name", NAMES)
def test_steps_share_their_names(name):
    """What a local name means stands in the docstring of `ladder`; each step uses the same ones."""
    kernel = next(
        node
        for node in ast.walk(ast.parse(shown.source_of(name)))
        if isinstance(node, ast.FunctionDef) and node.name in ("kernel", "forward_kernel")
    )
    used = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)}
    wanted = {"t", "top", "B", "acc", "x" if name not in HOPPER else "x_map"}
    assert wanted <= used | {argument.arg for argument in kernel.args.args}


def test_the_steps_are_the_files():
    files = sorted(path.stem for path in Path(ladder.__file__).parent.glob("s[0-9]*.py"))
    assert files == list(NAMES) == list(ladder.STEPS)
    assert ladder.STEPS[NAMES[0]] is ladder.step(NAMES[0])
    with pytest.raises(AttributeError, match="no attribute 'RUNGS'"):
        ladder.RUNGS  # noqa: B018


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Results in which step n of 16 bits takes 1/n seconds at B = 32; nothing else was timed."""
    known = {"limits": on_gpu()["limits"], "ladder": on_gpu()["ladder"]}
    row = forward_row("float16") | {"not_timed": {}}
    halves = {name: 1 / (i + 1) for i, name in enumerate(NAMES) if name > "s08"}
    section = {"machine": "a card", "command": "bench", "took": 1.0}
    section["rows"] = [forward_row("float32") | {"seconds": {}}, row | {"seconds": halves}]
    save(tmp_path / "cuda.json", known | {"steps": section})
    save(tmp_path / "profile.json", {"float16": {"machine": "a card", "command": "", "rows": []}})
    monkeypatch.setattr(committed, "RESULTS", tmp_path)


def test_steps_are_tabulated(timed):
    first, *_, last = shown.figures_of_steps()
    assert (first.new, first.gain, first.speeds) == (None, None, (None, None, None))
    assert last.gain == pytest.approx(15 / 14, rel=1e-4)
    assert last.speeds[0] == pytest.approx(15 * forward_row("float16")["flops"], rel=1e-4)
    lines = lessons.steps().splitlines()
    assert "a card; `bench`" in lines[0]
    assert lines[0].endswith("k6_hopper - / - / -.")  # not timed beside them
    assert len(lines) == 4 + len(NAMES)
    assert lines[-1].startswith(
        "| [s15_store](ladder/s15_store.py) | the copy engine stores y, too |"
    )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_steps_are_printed_below_the_rungs(capsys, dtype):
    command_line.main(["ladder", "--dtype", dtype])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    places = [printed.index(f"\n{name} ") for name in ("k9_dense_tiles", *NAMES)]
    assert places == sorted(places)


def test_a_section_times_each_step_beside_the_rungs():
    cases = list(CASES["steps"](Options()))
    found = [(case.product, case.problem.dtype, case.problem.block_size) for case in cases]
    assert found == [("forward", dtype, B) for dtype in ("float32", "float16") for B in SIZES]
    assert all(case.kernels.startswith(",".join(NAMES)) for case in cases)


@on_device
@pytest.mark.slow
def test_only_steps_that_serve_are_checked_and_named(monkeypatch):
    monkeypatch.setattr(measuring, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(measuring, "seconds_of", lambda graphs, _: dict.fromkeys(graphs, 1.0))
    small = lambda features, size, density, *others: matrices(32, size, 1, *others)  # noqa: E731
    monkeypatch.setattr(sections, "matrices", small)
    how = Options("k1_naive,s01_naive,s03_shared,s08_tensor_core", quick=True)
    for row in rows("steps", how):
        names = ["k1_naive", "s01_naive", "s03_shared", "s08_tensor_core"]
        served = [name for name in names if name[0] == "k" or dtype_of(name) == row["dtype"]]
        assert list(row["seconds"]) == served
        assert max(row["errors"].values()) < 1e-3
    problem = Problem(Layout(np.ones((1, 1))), 32, 128, "float32")
    assert not set(NAMES) & {*named(problem, "forward", "all")}


# Files and lines that a reader opens for one forward product.
CEILINGS = {
    "k1_naive": (1, 120),
    "k3_registers": (1, 290),
    "k5_tensor_core": (2, 350),
    "k6_hopper": (3, 900),
    "k7_small_blocks": (3, 832),
    "k8_small_batch": (4, 910),
    "k9_dense_tiles": (3, 573),
}


@pytest.mark.parametrize("name", CEILINGS)
def test_no_rung_makes_a_reader_open_more(name):
    found = opened.opened_for(name)
    files, lines = CEILINGS[name]
    assert found.files <= files
    assert found.lines <= lines


def test_what_is_opened_is_what_forward_names():
    files = {path.name for path in opened.files_for("numbsparse.kernels.matmul.k3_registers")}
    assert files == {"k3_registers.py"}
    found = opened.files_for(f"{opened.PACKAGE}.k6_hopper")
    names = [path.name for path in found if path.parent.name != "parts"]
    assert {"warps.py", "plan.py"} <= set(names)
    assert not {"weight_grad.py", "ring.py", "store.py", "emitted.py"} & set(names)
    parts = {path.name for path in found if path.parent.name == "parts"}
    assert {"records.py", "ring.py", "store.py"} <= parts
    for name in CEILINGS:
        assert f"| {name} | " in lessons.opened()
        count = opened.opened_for(name)
        assert (count.with_parts > count.lines) == (name > "k4")
