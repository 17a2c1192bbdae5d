"""The ladder as it is shown: the printed table, the lessons and their numbers, the solutions."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench.problem import matrices
from numbsparse.device.launch import launch
from numbsparse.kernels.ladder import NAMES, step
from numbsparse.kernels.matmul import LADDER
from numbsparse.kernels.matmul.k6_hopper.plan import TILES
from numbsparse.kernels.parts.banks import place, swap_for_rows
from numbsparse.layout import Layout
from numbsparse.pages import ladder, lessons, profile, tables
from numbsparse.pages.committed import gain_of, on_gpu, profiled, rows_of, seconds_of
from numbsparse.pages.profile import SECTIONS
from numbsparse.pages.reads import reads

ROOT = Path(__file__).parents[1]
LESSONS = ROOT / "numbsparse" / "kernels" / "README.md"
EXAMPLE = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 1]]  # what they begin with
WORDS = "Schedule", "Source", "Ring", "Product", "Sink"
SOLUTIONS = sorted((ROOT / "examples" / "solutions").glob("*.py"))

simulator = pytest.mark.skipif(not device.SIMULATED, reason="counting takes the simulator")


def read_lessons():
    return LESSONS.read_text(encoding="utf-8")


def test_the_parts_are_told_by_the_five_words_of_a_kernel():
    folder = ROOT / "numbsparse" / "kernels" / "parts"
    told = (folder / "__init__.py").read_text(encoding="utf-8")
    places = [told.index(f"\n{word}, ") for word in WORDS]
    assert places == sorted(places)
    named = re.findall(r"`(\w+)`", told)
    files = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(files)
    *_, rest = read_lessons().partition(f"| forward | {' | '.join(WORDS).lower()} |\n")
    kernels = [*folder.parent.rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in kernels)
    known = set(re.findall(r"^def (\w+)", code, re.MULTILINE)) | {path.stem for path in kernels}
    table = rest.partition("\n\n")[0].splitlines()[1:]
    assert len(table) == 7
    for line in table:
        _, first, *cells, _ = line.split("|")
        assert not set(re.findall(r"`(\w+)`", " ".join(cells))) - known, first


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_ladder_is_printed(capsys, dtype):
    command_line.main(["ladder", "--dtype", dtype])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    begins = {line.split()[0]: line for line in lines if line and not line.startswith(" ")}
    assert set(LADDER) <= begins.keys()
    for name in ("k3_registers", "k5_tensor_core"):
        numbers = begins[name].split()[1:]
        assert len(numbers) == 7
        gain = gain_of(name, rows_of(name), dtype)
        assert numbers[-1] == f"{gain:.1f}"
    assert "NVIDIA H200" in printed
    assert "8192 x 8192, B = 32, batch 8192" in " ".join(printed.split())


def test_the_ladder_says_why_a_rung_does_not_run_here(monkeypatch):
    monkeypatch.setattr(device, "why_unavailable", lambda: "no GPU was found")
    takes, why = ladder.reach_of("k6_hopper")
    assert takes == "takes B = 32, 64, 128 in float16, bfloat16, float32"
    assert why == "no GPU was found"
    assert "[1] no GPU was found" in ladder.table()
    assert ladder.table().count("not here: [1]") == 7
    assert ladder.reach_of("k0_cpu").why_not == ""


def test_the_ladder_says_what_is_left_of_a_rung_here(monkeypatch):
    def unsupported(product, block_size, dtype, place, batch=1, precision="highest"):
        return "needs compute capability 9.0" if dtype == "float32" else None

    monkeypatch.setattr(device, "why_unavailable", lambda: None)
    monkeypatch.setattr(LADDER["k7_small_blocks"], "unsupported", unsupported)
    takes, why = ladder.reach_of("k7_small_blocks")
    assert takes == "here: B = 8, 16 in float16, bfloat16"
    assert why == "needs compute capability 9.0"


def test_the_lessons_show_what_the_code_and_the_results_say(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(read_lessons(), encoding="utf-8")
    tables.fill(copy)
    assert copy.read_text(encoding="utf-8") == read_lessons()


def test_the_drawn_arrays_and_sums_are_those_of_the_layout():
    (drawn,) = re.findall(r"^the number of each kept.*?^```", read_lessons(), re.M | re.S)
    grid = [line.split("│")[1].split() for line in drawn.splitlines() if "│" in line]
    index = Layout(EXAMPLE).index
    places = list(zip(index.block_rows.tolist(), index.block_columns.tolist(), strict=True))
    cells = [[str(places.index((r, c))) if kept else "·" for c, kept in enumerate(row)]
             for r, row in enumerate(EXAMPLE)]  # fmt: skip
    assert grid == cells
    for name, walk in (("rows", index.rows), ("columns", index.columns)):
        for array in ("indptr", "indices", "blocks"):
            shown = re.search(rf"{name}\.{array} +\[(.*)\]", drawn)[1]
            assert list(map(int, re.findall(r"\d+", shown))) == getattr(walk, array).tolist()
            bars = [len(re.findall(r"\d+", part)) for part in shown.split("|")]
            assert (
                bars == [len(getattr(walk, array))]
                if array == "indptr"
                else bars == [int(n) for n in np.diff(walk.indptr)]
            )
    for name in ("block_rows", "block_columns"):
        shown = re.search(rf"{name} +\[(.*)\]", drawn)[1]
        assert list(map(int, shown.split())) == getattr(index, name).tolist()
    for output, sums, walk in (
        (r"y\[:, (\d)\] = (.*)", r"x\[:, (\d)\] @ w\[(\d)\](?!\.T)", index.columns),
        (r"dx\[:, (\d)\] = (.*)", r"dy\[:, (\d)\] @ w\[(\d)\]\.T", index.rows),
    ):
        lines = re.findall(rf"^    {output}", drawn, re.M)
        assert [int(line) for line, _ in lines] == list(range(4))
        for line, terms in lines:
            own = slice(*walk.indptr[int(line) :][:2])
            expected = zip(walk.indices[own].tolist(), walk.blocks[own].tolist(), strict=True)
            assert [tuple(map(int, t)) for t in re.findall(sums, terms)] == list(expected)
    products = re.findall(r"dw\[(\d)\] = x\[:, (\d)\]\.T @ dy\[:, (\d)\]", drawn)
    assert [tuple(map(int, each)) for each in products] == [(b, *of) for b, of in enumerate(places)]


@simulator
def test_the_drawn_swizzle_is_that_of_the_tensor_core_rung():
    LINES, PIECES = 8, 4
    place_in, _ = place(PIECES, 1, swap_for_rows(PIECES))

    @cuda.jit
    def kernel(out):
        line, piece = cuda.threadIdx.y, cuda.threadIdx.x
        out[place_in(line, piece), 0] = line
        out[place_in(line, piece), 1] = piece

    out = ns.to_device(np.full((LINES * PIECES, 2), -1, np.int32))
    launch(kernel, 1, (PIECES, LINES), out)
    (picture,) = re.findall(r"^  line\.piece.*?^```", read_lessons(), re.MULTILINE | re.DOTALL)
    drawn = [[int(line), int(piece)] for line, piece in re.findall(r"(\d)\.(\d)", picture)]
    np.testing.assert_array_equal(out.numpy(), drawn)


def test_the_example_of_a_plan_is_what_the_step_plans():
    *found, records = step("s12_grouped").plan(Layout(EXAMPLE).index, 2, 1)
    for name, array in zip(("groups", "starts"), found, strict=True):
        (drawn,) = re.findall(rf"^    {name} +(\[.*?\](?:\])?)  ", read_lessons(), re.MULTILINE)
        assert [int(number) for number in re.findall(r"\d+", drawn)] == array.ravel().tolist(), name
    (drawn,) = re.findall(r"^    records +(\[.*?\]\])", read_lessons(), re.MULTILINE | re.DOTALL)
    lines = [re.findall(r"\d+", line.partition("]")[0]) for line in drawn.split("\n")]
    numbers = [list(map(int, line)) for line in lines]
    assert numbers == [record[: 3 + record[0]].tolist() for record in records[:-1]]


@simulator
def test_the_tools_work(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tools,) = re.findall(r"^```python\n(.*?)^```", read_lessons(), re.MULTILINE | re.DOTALL)
    assert tools.index("NUMBA_ENABLE_CUDASIM") < tools.index("numba import")
    columns = ("np.ones((2, 3))", "np.ones((2, 1))"), ("(64, 96)", "(64, 32)")  # counted alike
    step = "forward(x, w.data, index, y)", "forward(x[:32], w.data, index, y[:32])"
    for shown, quicker in (*columns, step):
        assert shown in tools
        tools = tools.replace(shown, quicker)
    exec(compile(tools, "README.md", "exec"), {"__name__": "tools"})
    assert (tmp_path / "trace.svg").read_text().startswith("<svg")
    counted = rows_by_rung("counted")["k3_registers"]["readings"]
    requests = f"{counted['global read requests'] // 3:,}"
    printed = capsys.readouterr().out
    assert re.search(rf"^global reads +{requests} ", printed, re.MULTILINE)
    written = re.findall(r"^global writes +[\d,]+ +([\d,]+)", printed, re.MULTILINE)
    assert written == ["0", "1,024", "2,048"]  # values: of no kernel, of a step, of a rung


def rows_by_rung(section):
    return {row["rung"]: row for row in profiled()[section]["rows"]}


@simulator
@pytest.mark.parametrize("name", ["k3_registers", "k5_tensor_core"])
def test_the_committed_counts_are_those_of_the_code(name, monkeypatch):
    """Of one of the three equal columns of blocks: the others request as much."""
    (of,) = (problem for rungs, problem in SECTIONS["small"] if name in rungs)
    column = matrices((of.in_features, 32), of.block_size, 1, of.batch, of.dtype)
    monkeypatch.setitem(SECTIONS, "small", (((name,), column),))
    (counted,) = profile.count("small")
    readings = {key: 3 * value for key, value in counted["readings"].items()}
    readings["barriers"] //= 3  # which each block of threads passes
    committed = rows_by_rung("counted")[name]
    assert counted | {"readings": readings, "out_features": 96} == committed


@pytest.mark.parametrize("name", rows_by_rung("counted"))
def test_the_formulas_are_what_is_counted(name):
    """From shared memory to the value; from global memory the index arrays come in addition."""
    row = rows_by_rung("counted")[name]
    layout = ns.Layout(np.ones((row["in_features"] // 32, row["out_features"] // 32)))
    found = reads(name, layout, row["block_size"], row["batch"], row["dtype"])
    values = row["batch"] * row["out_features"] * np.dtype(row["dtype"]).itemsize
    counted = row["readings"]
    assert counted["shared read bytes"] == found.from_shared * values
    threads = counted["global write requests"] * 32
    index_reads = (counted["global read bytes"] - found.from_global * values) / 4
    assert 0 <= index_reads <= 26 * threads


@pytest.mark.parametrize("name", rows_by_rung("counted"))
def test_the_counts_are_the_profilers(name):
    counted, read = (rows_by_rung(section)[name]["readings"] for section in ("counted", "small"))
    exact = ["global write requests", "global write sectors"]
    exact += ["global read requests", "global read sectors"]
    if name != "k3_registers":  # whose shared loads the compiler joins
        exact += ["shared read requests", "shared read wavefronts"]
    assert {key: counted[key] for key in exact} == {key: read[key] for key in exact}


def test_the_microseconds_of_small_batches_are_those_of_the_results():
    name = "k8_small_batch"
    rows = rows_of(name)
    (limit,) = (row for row in on_gpu()["limits"]["rows"] if row["limit"] == "device memory, read")
    nbytes = 0.1 * rows[0]["features"] ** 2 * 4
    read = rows_by_rung("float32")[name]["readings"]["seconds"]
    times = read, seconds_of(name, rows, "forward", "float32"), nbytes / limit["rate"]
    shown = re.search(
        r"run, of (\d+) microseconds.* product takes (\d+)\. .* are (\d+) MB, .* in (\d+)\.",
        " ".join(read_lessons().split()),
    )
    expected = [1e6 * times[0], 1e6 * times[1], nbytes / 1e6, 1e6 * times[2]]
    assert [int(number) for number in shown.groups()] == [round(number) for number in expected]


@simulator
def test_the_counts_of_the_text_are_those_of_the_tools():
    """Those of the tensor-core rung: in float16 as committed, and for the operands of the tools."""
    x = ns.to_device(np.ones((64, 64), np.float32))
    w = ns.nn.init.uniform(ns.Layout(np.ones((2, 1))), 32, seed=0).to("cuda")
    (column,) = ns.testing.count(lambda: ns.matmul(x, w, kernel="k5_tensor_core"))
    requests, wavefronts = 3 * column.shared_reads.requests, 3 * column.shared_reads.units
    halves = rows_by_rung("counted")["k5_tensor_core"]["readings"]
    text = " ".join(read_lessons().split())
    assert f"{halves['shared read requests']} ldmatrix, " in text
    assert f"{halves['shared read wavefronts']} wavefronts, 4 each" in text
    assert f"it is {requests} and {wavefronts:,}." in text


def test_what_rungs_gain_over_steps_is_as_measured():
    text = " ".join(read_lessons().split())
    for rung, step_before, words in (
        ("k5_tensor_core", "s08_tensor_core", r"step 8, at B = 32: (\S+) times the time"),
        ("k6_hopper", "s15_store", r"is (\S+) times as fast at B = 32, (\S+) at 64 and (\S+) at"),
    ):
        speeds = (ladder.speeds_in_steps(name, "float16") for name in (rung, step_before))
        gains = [f"{own / before:.1f}" for own, before in zip(*speeds, strict=True)]
        said = re.search(words, text).groups()
        assert list(said) == gains[: len(said)]


def test_the_files_and_lines_of_the_text_are_those_of_the_source():
    new = {figures.name: figures.new for figures in ladder.figures_of_steps()}
    text = " ".join(read_lessons().split())
    assert f"step 12 has {new['s12_grouped']}, about half" in text
    files = len([*(LESSONS.parent / "matmul" / "k6_hopper").glob("weight_grad*.py")])
    assert f"({['no', 'one', 'two', 'three', 'four'][files]} files `weight_grad*.py`)" in text


def test_every_rung_on_a_gpu_is_profiled():
    read = {kernel for of in SECTIONS.values() for rungs, _ in of for kernel in rungs}
    assert lessons.BEFORE.keys() == {name for name in LADDER if name[:2] != "k0"}
    assert read == {*lessons.BEFORE, *NAMES}


def test_the_lessons_name_all_that_steps_import():
    said, known = set(re.findall(r"`(\w+)`", read_lessons())), {"launch", "plan"}
    for name in NAMES:
        text = (LESSONS.parent / "ladder" / f"{name}.py").read_text(encoding="utf-8")
        imports = re.findall(r"^from numbsparse\S* import (\([^)]*\)|.*)$", text, re.MULTILINE)
        missing = set(re.findall(r"\w+", " ".join(imports))) - said - known
        assert not missing, f"{name}: {missing}"


def test_links_of_the_lessons_lead_somewhere():
    text = read_lessons()
    targets = set(re.findall(r"\]\(([^)#:\s]+)\)", text))
    assert not {target for target in targets if not (LESSONS.parent / target).exists()}
    assert {path.name for path in SOLUTIONS} <= {Path(target).name for target in targets}


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_with_kernels_choose_the_simulator_before_numba_loads(path):
    text = path.read_text(encoding="utf-8")
    before = text.partition("import numbsparse")[0].partition("from numba import")[0]
    needs_a_device = "to_device" in text or "from numba import cuda" in text
    assert not needs_a_device or re.search("import gpu_or_simulator|environ.*CUDASIM", before)


def test_a_solution_runs_as_the_lessons_say():
    """Where there is no GPU, and nothing was set."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    name = "k5_swizzle.py"
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "solutions" / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "lines of 128 bytes: 32 wavefronts, swapped 4" in run.stdout, run.stderr


@simulator
@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    if path.stem == "weight_grad_reads":
        assert "k3_registers    2.25  16.00 counted" in capsys.readouterr().out


def test_the_sum_in_float16_of_a_solution_is_one():
    """Where the last sum alone was rounded, it would hold all ones; added one by one they stop."""
    found = runpy.run_path(str(ROOT / "examples" / "solutions" / "k0_what_a_test_sees.py"))
    w = ns.BlockSparse(np.ones((32, 128, 128), np.float32), np.ones((32, 1)))
    y = np.full((1, 128), np.nan, np.float32)
    found["adds_up_in_float16"](np.ones((1, 4096), np.float32), w.data, w.layout.index, y)
    assert (y == 2048).all()


def test_reads_of_hopper_are_those_of_its_plan():
    """Where all is kept, a group of columns takes each input once, and a cluster each weight."""
    tile, layout, batch = TILES[32], Layout(np.ones((8, 16))), 8192
    found = reads("k6_hopper", layout, 32, batch, "float16")
    K = 8 * 32
    assert found.from_global == K / (tile.COLUMNS * 32) + K / (tile.ROWS * tile.CLUSTER)
    assert found.from_shared == K / 32 + K / 64
