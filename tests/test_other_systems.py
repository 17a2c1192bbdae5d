"""What macOS and Windows lack is not needed: the suite runs on Linux, and takes it away there."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT_CALLS = {"open", "read_text", "write_text"}

# What a system lacks; the packages below numbsparse are loaded first, as they are made for it.
WITHOUT = """
import os, sys
import numba, numpy as np, scipy.sparse, concurrent.futures.process, subprocess
from numba import njit
njit(lambda x: x + 1)(1)
for name in ("numba_cuda", "cuda", "numba.cuda"):
    sys.modules[name] = None
"""
WINDOWS = """
for name in ("fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios"):
    sys.modules[name] = None
for name in ("chown", "fchmod", "fork", "forkpty", "geteuid", "getuid", "getgid", "mkfifo",
             "register_at_fork", "sched_getaffinity", "sysconf", "uname", "O_NOFOLLOW"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"
"""
MACOS = """
del os.sched_getaffinity
sys.platform = "darwin"
"""
WORKS = """
import numbsparse as ns
from numbsparse import nn
from numbsparse.__main__ import main
rng = np.random.default_rng(0)
dense = rng.standard_normal((64, 64), dtype=np.float32)
w = ns.BlockSparse.from_dense(dense, np.ones((8, 8), bool), block_size=8)
x = rng.standard_normal((4, 64), dtype=np.float32)
np.testing.assert_allclose(x @ w, x @ dense, rtol=1e-4, atol=1e-4)
model = nn.Sequential(nn.Linear(64, 64, layout=np.eye(8, dtype=bool), block_size=8), nn.ReLU())
optimizer = nn.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    ns.save("model.npz", {"model": model.state_dict(), "at": [1, 2]})  # the second replaces it
    model(x).sum().backward()
    optimizer.step()
model.load_state_dict(ns.load("model.npz")["model"])
print(ns.draw(w))
main(["info"])
"""


def run(system: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + system + code],
        env={name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ} | {
            "NUMBA_ENABLE_CUDASIM": "0", "LOCALAPPDATA": str(folder), "PYTHONUTF8": "0",
            "PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT), "HOME": str(folder),
        },
        cwd=folder, capture_output=True, text=True, encoding="cp1252", timeout=300,
    )  # fmt: skip


KEPT = {"windows": "numbsparse/kernels", "macos": ".cache/numbsparse/kernels"}


@pytest.fixture(scope="module")
def kept_by_windows(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("windows")
    return run(WINDOWS, WORKS, folder), folder


def check(ended: subprocess.CompletedProcess[str], says: str, folder: Path) -> None:
    assert ended.returncode == 0, ended.stderr
    assert "|################|" in ended.stdout
    assert "\nGPU        nothing runs there: " in ended.stdout
    assert says in " ".join(ended.stdout.split())  # lines are as wide as a terminal
    assert sorted(path.name for path in folder.glob("*.npz")) == ["model.npz"]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")


@on_linux
def test_on_windows_the_cpu_needs_nothing_of_linux(kept_by_windows):
    ended, folder = kept_by_windows
    check(ended, "pip install 'numbsparse[cu13]'", folder)
    assert list((folder / KEPT["windows"]).glob("*.cpu"))


@on_linux
def test_on_macos_it_needs_nothing_either(kept_by_windows, tmp_path):
    """The kernels are those of Windows; the smallest one is not there, and compiled again."""
    there, here = kept_by_windows[1] / KEPT["windows"], tmp_path / KEPT["macos"]
    shutil.copytree(there, here)
    before = {file.name: file.stat().st_size for file in here.iterdir()}
    (here / min(before, key=before.__getitem__)).unlink()
    check(run(MACOS, WORKS, tmp_path), "on macOS everything else runs", tmp_path)
    assert {file.name for file in here.iterdir()} == set(before)


def sources(words: set[str]) -> dict[str, ast.Module]:
    """The files in which one of the words is."""
    folders = "numbsparse", "examples", ".site", ".ci"
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    some = re.compile(rf"\b({'|'.join(words)})\b")
    return {name: ast.parse(text) for name, text in texts.items() if some.search(text)}


def test_texts_are_read_and_written_in_an_encoding_that_is_named():
    """Windows has another one for files that name none."""
    assert not [
        f"{name}:{node.lineno}"
        for name, tree in sources({*TEXT_CALLS, "text"}).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and leaves_it_open(node)
    ]


def test_no_file_imports_what_one_system_has():
    """At its top, that is: a function may, where it asks which system it is."""
    of_one = {"fcntl", "grp", "msvcrt", "posix", "pwd", "resource", "syslog", "termios", "winreg"}
    imported = {
        f"{name}: {module}"
        for name, tree in sources(of_one).items()
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        if module in of_one
    }
    assert not imported


def leaves_it_open(call: ast.Call) -> bool:
    named = {word.arg for word in call.keywords}
    values = [value.value for value in call.args if isinstance(value, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if "text" in named:
        return "encoding" not in named
    if name not in TEXT_CALLS or "encoding" in named:
        return False
    if name == "open":  # the built-in one; those of modules open no text here
        return isinstance(call.func, ast.Name) and not any("b" in text for text in texts[-1:])
    place = 0 if name == "read_text" else 1
    return len(call.args) <= place


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open(a)", True), ("open(a, 'w')", True), ("open(a, 'rb')", False),
        ("open(a, encoding='utf-8')", False), ("os.open(a, 0)", False), ("a.read_text()", True),
        ("a.read_text('utf-8')", False), ("a.write_text(b)", True),
        ("a.write_text(b, 'utf-8')", False), ("run(a, text=True)", True),
        ("run(a, text=True, encoding='utf-8')", False),
    ],
)  # fmt: skip
def test_a_call_without_an_encoding_is_found(code, found):
    assert leaves_it_open(ast.parse(code, mode="eval").body) == found
