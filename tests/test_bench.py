"""The benchmark: what it prints, and that a wrong result is not timed. Its times are no tests."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench import contestants, measure, sections, timing
from numbsparse.bench.problem import Problem, random
from numbsparse.bench.results import line, load
from numbsparse.block_sparse import BlockSparse
from numbsparse.kernels import matmul as ladder
from numbsparse.layout import Layout


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A call is timed for a hundredth of a second."""
    monkeypatch.setattr(measure, "ON_CPU", 0)


@pytest.mark.slow
def test_quick_bench(capsys, tmp_path):
    path = tmp_path / "rows.json"
    command_line.main(["bench", "--place", "cpu", "--quick", "--json", str(path)])
    printed = capsys.readouterr().out
    results = json.loads(path.read_text())["sections"]["cpu"]
    assert results["machine"] in printed
    assert [row["product"] for row in results["rows"]] == list(ladder.PRODUCTS) * 2
    for row in results["rows"]:
        said = line(row, results["rows"])
        assert re.search(r"NumPy dense [^;]* \(1\.00x\)", said)  # what the others are beside
        assert row["not_timed"] == {}
        sparse_peer = "NumPy by block" if row["product"] == "weight_grad" else "SciPy BSR"
        assert {"k0_cpu", "NumPy dense", sparse_peer} <= row["seconds"].keys()
        kept = round(row["density"] * (row["features"] // row["block_size"]) ** 2)
        assert row["flops"] == 2 * row["batch"] * kept * row["block_size"] ** 2


def test_a_wrong_result_is_not_timed(capsys, monkeypatch):
    right = ladder.rung("k0_cpu")

    def forward(x, values, index, y, precision="highest"):
        right.forward(x, values, index, y)
        y[0, 0] += 1

    wrong = SimpleNamespace(
        unsupported=right.unsupported,
        forward=forward,
        input_grad=right.input_grad,
        weight_grad=right.weight_grad,
    )
    taken = sys.modules["numbsparse.ops.matmul"]
    monkeypatch.setattr(taken, "function_of", lambda name, product: getattr(wrong, product))
    monkeypatch.setattr(sections, "QUICK_SHAPES", sections.QUICK_SHAPES[:1])
    command_line.main(["bench", "--place", "cpu", "--quick"])
    forwards = [line for line in capsys.readouterr().out.splitlines() if "forward" in line]
    (line,) = forwards
    assert re.search("k0_cpu wrong: 1 of [0-9]+ values, relative error", line)
    assert not re.search("k0_cpu [0-9]", line)


@pytest.mark.parametrize("product", ladder.PRODUCTS)
def test_on_the_cpu_all_is_checked_but_the_rows_of_a_large_batch(product):
    problem = Problem(random(96, 8, 0.4), 8, 300, "float32", place="cpu")
    parts = problem.parts(product)
    if product == "weight_grad":
        assert parts.exact.shape == problem.values.shape
    else:
        np.testing.assert_array_equal(parts.columns, np.arange(96))
        assert {0, 299} < {*parts.picked}
        assert len(parts.picked) > 150


def test_each_is_timed_in_turn_after_a_pause(monkeypatch):
    order, rests = [], []
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    monkeypatch.setattr(timing, "MOST_TURNS", timing.TURNS)
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    graphs = {name: timing.Graph(lambda name=name: order.append(name), 1, None) for name in "ab"}
    taken = timing.seconds_of(graphs, seconds=1.0, pause=0.25)
    turns = ["a"] * (1 + timing.SAMPLES) + ["b"] * (1 + timing.SAMPLES)
    assert order == ["a", "a", "b", "b", *turns * timing.TURNS]
    assert rests == [0.25] * 2 * timing.TURNS
    assert taken.keys() == {"a", "b"}


def test_what_slows_a_turn_is_not_counted(monkeypatch):
    first, slow, other = [1.0] * 2, [3.0] * timing.SAMPLES, [1.0, 2.0, 2.0, 2.0, 9.0]
    again = [2.0 * timing.AGREE] * timing.SAMPLES  # the last turn: two agree
    taken = iter([*first, *slow, *other, *slow * (timing.TURNS - 2), *again])
    monkeypatch.setattr(timing, "WARM", 0.0)
    monkeypatch.setattr(timing, "_time", lambda *_: next(taken))
    assert timing.seconds_of({"a": timing.Graph(list, 4, None)}, seconds=9.0) == {"a": 0.5}
    assert not list(taken)


def test_turns_that_never_agree_end(monkeypatch):
    taken = iter([1.0] * 2 + [float(2**i) for i in range(timing.MOST_TURNS)])
    monkeypatch.setattr(timing, "SAMPLES", 1)
    monkeypatch.setattr(timing, "WARM", 0.0)
    monkeypatch.setattr(timing, "_time", lambda *_: next(taken))
    assert timing.seconds_of({"a": timing.Graph(list, 1, None)}, seconds=1e4) == {"a": 1.0}
    assert not list(taken)


def test_a_gpu_is_warmed_up(monkeypatch):
    order = []
    graphs = {name: timing.Graph(lambda name=name: order.append(name), 1, None) for name in "ab"}
    monkeypatch.setattr(timing, "WARM", 0.02)
    timing.seconds_of(graphs, seconds=1e-9)
    assert order.index("b") > 50  # where it is not, 2


def test_kept_takes_the_blocks_of_a_dense_matrix():
    dense = np.arange(64.0).reshape(8, 8)
    blocks = contestants.kept(dense, Layout([[0, 1], [1, 0]]))
    np.testing.assert_array_equal(blocks, [dense[:4, 4:], dense[4:, :4]])


def test_a_matrix_of_blocks_is_the_same_in_torch(rng):
    torch = pytest.importorskip("torch")
    layout = Layout(np.arange(12).reshape(3, 4) % 5 != 1)
    w = BlockSparse(rng.standard_normal((layout.n_blocks, 8, 8), np.float32), layout)
    blocks = torch.from_numpy(w.values)
    there, across = (
        contestants.bsr_tensor(layout, blocks, transposed) for transposed in (False, True)
    )
    np.testing.assert_array_equal(there.to_dense(), w.toarray())
    np.testing.assert_array_equal(across.to_dense(), w.toarray().T)
    blocks[0] = 7  # a result that is written there is seen here
    assert (there.values()[0] == 7).all()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"sections": 3}'])
def test_a_file_of_something_else_is_refused_before_the_work(tmp_path, content):
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(ValueError, match=r"bench\.json is not a file of the benchmark's results"):
        load(tmp_path / "bench.json")


def test_gpu_bench_refuses_the_simulator():
    if device.SIMULATED or not device.is_available():
        with pytest.raises(SystemExit, match="numbsparse: "):
            command_line.main(["bench", "--place", "cuda"])
    else:
        command_line.main(["bench", "--place", "cuda", "--quick", "--only", "limits,ladder"])


@pytest.mark.parametrize(
    "arguments",
    [
        "other",
        "bench --place moon",
        "bench --only limits,moon",
        "bench --place cpu --only limits",
        "bench --place cpu --png speed_up.png",
        "bench --place cuda --only layouts --png speed_up.png",
        "bench --place cpu --kernels all",
        "bench --place cuda --kernels k1_naive,moon",
        "bench --place cpu --quick --json no-such-folder/rows.json",
        "bench --place cpu --quick --json .",
        "plane --place cpu --minutes 0 --png no-such-folder/map.png",
        "plane --place cpu --minutes 0 --json .",
        "trace s01_naive --svg no-such-folder/s01.svg",
        "machine-code s01_naive --json no-such-folder/code.json",
        "times --json no-such-folder/times.json",
        "profile --json no-such-folder/profile.json",
    ],
)
def test_refuses(arguments):
    with pytest.raises(SystemExit) as refused:
        command_line.main(arguments.split())
    assert refused.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--version"])
    assert capsys.readouterr().out.strip() == "0.1.0"


@pytest.mark.parametrize("content", [None, "no marks"], ids=["missing", "without marks"])
@pytest.mark.simulator
def test_tables_refuses_a_file(tmp_path, content):
    path = tmp_path / "README.md"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=r"numbsparse: .*README\.md"):
        command_line.main(["tables", str(path)])
