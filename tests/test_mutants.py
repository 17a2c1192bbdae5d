"""What `mutants.py` breaks, that it sees which test fails, and that what it runs has an end."""

import ast
import os
import sys
import time

import mutants_code
import pytest
from mutants_code import ROOT, Mutant, Tree, kernel_files, mutants_of, one_of_each, sample
from mutants_forked import SILENT, enter, forked, outcome, run_pytest
from mutants_lines import Lines, Monitor, Tracer, around, is_compiled_once
from mutants_mistakes import MISTAKES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def changes(mistake: str, line: str) -> list[str]:
    """The line after each mistake of that name."""
    (of,) = (m for m in MISTAKES if m.__name__ == mistake)
    source = f"def f():\n    for _ in n:\n        {line}\n"
    return [new.splitlines()[2].strip() for _, _, new in of(source)]


@pytest.mark.parametrize(
    ("mistake", "line", "expected"),
    [
        ("index_off_by_one", "x[i, j] = 1", ["x[i, j + 1] = 1"]),
        ("index_off_by_one", "x[0] = 1", []),
        ("guard_dropped", "if i < n: g()", ["if True: g()"]),
        ("guard_dropped", "y = a if b else c", ["y = (a)"]),
        ("guard_dropped", "y = min(i, n)", ["y = (i)", "y = (n)"]),
        ("guard_dropped", "y = a and b", ["y = (b)", "y = (a)"]),
        ("barrier_dropped", "cuda.syncthreads()", ["pass"]),
        ("barrier_dropped", "cp_async_wait(0)", ["pass"]),
        ("barrier_dropped", "if not wait_or_part(a): return", ["if not True: return"]),
        ("phase_flipped", "mbarrier_wait(b, i, p)", ["mbarrier_wait(b, i, (p) ^ 1)"]),
        ("phase_flipped", "p = p ^ 1", ["p = p"]),
        ("stride_swapped", "n = x.shape[0]", ["n = x.shape[1]"]),
        ("stride_swapped", "y = i * n + j", ["y = (i + (j) * n)"]),
        ("operands_swapped", "g(a, b)", ["g(b, a)"]),
        ("operands_swapped", "y = a - 1", ["y = (1) - (a)"]),
        ("accumulator_kept", "acc[i] = 0", ["pass"]),
        ("accumulator_kept", "acc = float32(0)", ["acc = float32(1)"]),
        ("accumulator_kept", "acc += a * b", ["acc = (a * b)"]),
        ("accumulator_kept", "i += 1", []),
        ("comparison_moved", "y = i < n", ["y = i <= n"]),
        ("constant_wrong", "g(8, 3, 1)", ["g(16, 3, 1)", "g(8, 4, 1)"]),
        ("sign_flipped", "y = a + b", ["y = (a) - (b)"]),
        ("loop_shortened", "y = range(n)", ["y = range(n - 1)"]),
        ("loop_shortened", "y = range(a, n)", ["y = range(a + 1, n)"]),
    ],
)
def test_a_mistake(mistake, line, expected):
    assert changes(mistake, line) == expected


UNTOUCHED = '''
N = 8 + 8
def f(a: int = 2 + 2):
    """8 + 8"""
    signature = types.void(types.int64[::1], 8 + 8)
    g = 8 if SIMULATED else 16
    if not SIMULATED:
        h(2 + 2)
    raise ValueError(f"{8 + 8}")
'''


def test_what_is_no_code_of_a_kernel_stays():
    assert not mutants_of("a.py", UNTOUCHED)


def test_mutants_of_the_kernels_are_python_and_have_names():
    files = [kernel_files()[i] for i in range(0, len(kernel_files()), 20)]
    sources = {file: (ROOT / file).read_text() for file in files}
    found = {m: new for file in files for m, new in mutants_of(file, sources[file]).items()}
    assert len({mutant.name for mutant in found}) == len(found) > 20 * len(files)
    drawn = one_of_each(list(found), 3)
    assert drawn == one_of_each(list(found), 3) != one_of_each(list(found), 4)
    assert sample(drawn, 20, 3) == sample(drawn, 20, 3)
    for mutant in drawn:
        ast.parse(found[mutant])
        assert found[mutant] != sources[mutant.file]


KERNEL = """
from functools import cache
def double(x, out, n):
    for i in range(len(x)):
        if i < n:
            out[i] = 2 * x[i]

@cache
def factory():
    two = 2
    def inner(x):
        return two * x
    return inner
"""
TESTS = """
import sys, threading
sys.path.insert(0, "numbsparse/kernels")
from tiny_kernel import double, factory
def test_double():
    out = [0, 0, 0]
    thread = threading.Thread(target=double, args=([1, 2, 3], out, 2))
    thread.start()
    thread.join()
    assert out == [2, 4, 0]
def test_inner(): assert factory()(3) == 6
def test_inner_again(): assert factory()(4) == 8
def test_nothing(): pass
"""
FILE = "numbsparse/kernels/tiny_kernel.py"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of a repository of one kernel and its tests."""
    root = tmp_path / "root"
    for name, text in ((FILE, KERNEL), ("tests/test_tiny.py", TESTS), ("pytest.ini", "[pytest]\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(mutants_code, "ROOT", root)
    monkeypatch.setattr("mutants_lines.ROOT", root)
    return Tree(tmp_path / "tree")


def result(tree, old, new, patience=20):
    """What comes of the tests with the first `old` in the kernel's file replaced."""
    tests = [(f"tests/test_tiny.py::test_{name}", 0.1) for name in ("nothing", "double", "inner")]
    with tree.broken(FILE, KERNEL.replace(old, new, 1)):
        return outcome(tests, tree.root, tree.root / "cache", patience)


def test_a_mutant_is_caught_by_the_test_that_fails(tree):
    found = result(tree, "i < n", "i <= n")
    assert (found["caught"], found["by"]) == (True, "tests/test_tiny.py::test_double")
    assert (tree.root / FILE).read_text() == KERNEL


@pytest.mark.parametrize(("old", "new"), [("", ""), ("i < n", "not i >= n")], ids=["null", "same"])
def test_what_computes_the_same_is_not_caught(tree, old, new):
    found = result(tree, old, new)
    assert (found["caught"], found["run"]) == (False, 3)


def test_a_mutant_without_an_end_is_caught(tree):
    found = result(tree, "if i < n:", "while True:", patience=0.3)
    assert (found["caught"], found["why"]) == (True, "no end")


def test_a_mutant_that_cannot_be_imported_is_caught(tree):
    assert result(tree, "def double", "def doubel")["caught"]


def test_mutants_of_one_length_and_one_second_are_distinguished(tree):
    for _ in range(2):
        assert result(tree, "i < n", "i > n")["caught"]
        assert not result(tree, "i < n", "n > i")["caught"]


def test_a_process_says_what_it_finds_and_is_ended():
    def work(say):
        say({"pid": os.getpid()})
        time.sleep(60)

    start = time.monotonic()
    (first, last) = forked(work, 0.2)
    assert last == SILENT
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)
    assert list(forked(lambda say: os._exit(1), 20)) == []


@pytest.fixture(params=[Tracer, *[Monitor] * hasattr(sys, "monitoring")])
def lines(tree, tmp_path, request):
    """Which lines the tests of the tiny kernel execute."""

    def work(say):
        enter(tree.root, tmp_path / "cache")
        recorder = request.param(tree.root)
        run_pytest(["tests/test_tiny.py"], recorder)
        Lines(tmp_path / "lines").keep("tests/test_tiny.py", recorder.tests)

    assert list(forked(work, 60)) == []
    found = Lines(tmp_path / "lines")
    assert not found.missing(["tests/test_tiny.py"])
    found.read(["tests/test_tiny.py"])
    return found


def names_at(lines, line):
    found = lines.tests_of(Mutant(FILE, line, "", "", ""), KERNEL)
    return {test.rpartition("::test_")[2] for test, _ in found}


def test_the_tests_of_a_line_are_those_that_execute_it(lines):
    assert len(lines.tests) == 4
    assert names_at(lines, 6) == {"double"}  # in another thread
    assert names_at(lines, 12) == {"inner", "inner_again"}
    assert names_at(lines, 10) >= {"inner", "inner_again"}  # run once, as it is cached


def test_a_changed_kernel_is_run_by_all_tests_of_its_file(lines, tree, tmp_path):
    (mutants_code.ROOT / FILE).write_text(KERNEL + "\n")
    again = Lines(tmp_path / "lines")
    again.read(["tests/test_tiny.py"])
    assert names_at(again, 6) == {"double", "inner", "inner_again"}
    (mutants_code.ROOT / "tests/test_tiny.py").write_text(TESTS + "\n")
    assert again.missing(["tests/test_tiny.py"]) == ["tests/test_tiny.py"]


def test_functions_around_a_line():
    assert around(KERNEL, 5) == 0b1111000
    assert [is_compiled_once(KERNEL, line) for line in (5, 10, 12)] == [False, True, False]
