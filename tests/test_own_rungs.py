"""A rung of one's own computes, is checked and is timed beside the library's."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse.bench.contestants import named
from numbsparse.bench.problem import Problem
from numbsparse.kernels import matmul as ladder
from numbsparse.kernels.matmul import add_rung, rung
from numbsparse.kernels.matmul.reach import reach
from numbsparse.layout import Layout
from numbsparse.ops import choice

FILE = """
from numbsparse.kernels.matmul import k0_reference
from numbsparse.kernels.matmul.reach import reach

unsupported = reach("mine", "cpu", (32,), ("float32",))
forward = k0_reference.forward
input_grad = k0_reference.input_grad
weight_grad = k0_reference.weight_grad
"""


@pytest.fixture(autouse=True)
def forget():
    yield
    ladder.OWN.clear()


def doubled(place):
    """A rung whose results are twice as large as they should be, so that it is known by them."""
    naive = rung("k1_naive" if place == "cuda" else "k0_cpu")

    def forward(x, values, index, y, precision="highest"):
        naive.forward(
            x, ns.to_device(2 * values.numpy()) if place == "cuda" else 2 * values, index, y
        )

    return SimpleNamespace(unsupported=naive.unsupported, forward=forward)


def test_it_computes_only_where_it_is_named(place, put):
    w = ns.nn.init.uniform(Layout([[1, 0], [1, 1]]), 8, seed=0).to(place)
    x = put(np.ones((3, 16), np.float32))
    plain = ns.matmul(x, w)
    add_rung("mine", doubled(place))
    for kernel, factor in (("mine", 2), ("auto", 1)):
        y = ns.matmul(x, w, kernel=kernel)
        np.testing.assert_allclose(host(y), factor * host(plain), rtol=1e-5)


def test_tune_and_auto_keep_to_the_library():
    before = choice.serving("forward", 32, np.dtype("float32"), "cuda", 4, "highest")
    add_rung("mine", doubled("cuda"))
    assert choice.serving("forward", 32, np.dtype("float32"), "cuda", 4, "highest") == before


def test_the_gpus_benchmark_takes_it_last(put, place):
    if place != "cuda":
        pytest.skip("of the GPU's benchmark")
    add_rung("mine", doubled("cuda"))
    problem = Problem(Layout([[1]]), 8, 4, "float32")
    assert named(problem, "forward", "all")[-2:] == ["k8_small_batch", "mine"]


def test_the_command_line_times_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("numbsparse.bench.measure.ON_CPU", 0)
    (tmp_path / "mine.py").write_text(FILE)
    command_line.main(["bench", "--place", "cpu", "--quick", "--rung", str(tmp_path / "mine.py")])
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("  float32")]
    assert len(shown) == 6
    assert sum("; mine " in line for line in shown) == 3  # of the two block sizes it takes one


def test_a_file_that_nothing_times_is_named(tmp_path, capsys, monkeypatch):
    """As the example's, of a GPU, where only the CPU is measured."""
    mine = {"cpu": {"rows": [{"seconds": {"k0_cpu": 1.0, "mine": 2.0}}, {"launches": 3}]}}
    monkeypatch.setattr("numbsparse.__main__.run", lambda *_, **__: mine)
    words = ["bench", "--place", "cpu"]
    for name in ("mine", "other"):
        (tmp_path / f"{name}.py").write_text(FILE)
        words += ["--rung", str(tmp_path / f"{name}.py")]
    command_line.main(words)
    assert capsys.readouterr().out.startswith("other was not timed: it serves none of these")


def test_a_file_takes_no_modules_place(tmp_path, monkeypatch):
    monkeypatch.setattr("numbsparse.__main__.run", lambda *_, **__: {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("numpy", "fractions_of_mine", "this"):
        (tmp_path / f"{name}.py").write_text(f"{FILE}\nimport neighbour")
    (tmp_path / "neighbour.py").write_text("")
    files = [word for file in tmp_path.glob("[!n]*.py") for word in ("--rung", str(file))]
    command_line.main(["bench", "--place", "cpu", *files, "--rung", str(tmp_path / "numpy.py")])
    assert sys.modules["numpy"] is np
    assert find_spec("this").origin != str(tmp_path / "this.py")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("k3_registers.py", FILE),
        ("mine.py", "x = 1"),
        ("mine.txt", FILE),
        ("mine.py", "import not_here"),
        ("no.py", None),
    ],
    ids=["taken", "no rung", "no python", "a module missing", "missing"],
)
def test_refuses(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=f"numbsparse: .*{name}"):  # of several, which one
        command_line.main(["bench", "--place", "cpu", "--quick", "--rung", str(tmp_path / name)])


@pytest.mark.parametrize("name", ["auto", "all", "k1_naive", "a/b"])
def test_refuses_a_name_that_means_something_else(name):
    with pytest.raises(ValueError, match="name takes a new one without '/'"):
        add_rung(name, doubled("cpu"))


def test_an_unknown_kernel_names_the_own_ones_too():
    add_rung("mine", doubled("cpu"))
    w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
    with pytest.raises(ValueError, match=r"'k9_dense_tiles', 'mine'\], got 'mime'"):
        ns.matmul(np.ones((1, 4), np.float32), w, kernel="mime")


@pytest.mark.parametrize(
    ("below", "says"), [("", "got 4"), ("k7 takes them", "got 4; k7 takes them")]
)
def test_a_rung_says_which_blocks_it_takes(below, says):
    unsupported = reach("mine", "cpu", (8, 16), ("float32",), below=below)
    reason = unsupported("forward", 4, np.dtype("float32"), "cpu")
    assert reason == f"mine takes block sizes (8, 16), {says}"
    assert unsupported("forward", 8, np.dtype("float32"), "cpu") is None
