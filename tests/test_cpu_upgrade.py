"""CPU kernels on disk are named by all that they are compiled from, and so are never old ones."""

import ast
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from numba import types

from numbsparse.device import cpu_cache, fingerprint
from numbsparse.kernels import cores
from numbsparse.kernels.lstm import cpu_steps, on_cpu
from numbsparse.kernels.matmul.k0_cpu import lines

COMPILED = [
    *(f"{of}.k0_cpu.{name}" for of in ("matmul", "conv") for name in ("lines", "weight_grad")),
    "lstm.cpu_steps",
]
PACKAGE = Path(cores.__file__).parents[1]


def files_of_cpu_kernels():
    """Their own, and what they import."""
    modules = (import_module(f"numbsparse.kernels.{name}").__name__ for name in COMPILED)
    names = {name for module in modules for name, _ in fingerprint.texts(module)}
    assert {"simd", "cores", "panels", "on_cpu", "rows"} <= {n.split(".")[-1] for n in names}
    return [Path(find_spec(name).origin) for name in names]


def test_all_cpu_kernels_go_one_way():
    """None is kept by Numba itself, which raises where it cannot write."""
    for file in files_of_cpu_kernels():
        assert "cache=" not in file.read_text()
    for kernel in (cores.wait, on_cpu.activate, on_cpu.update, on_cpu.differentiate):
        assert isinstance(kernel._cache, cpu_cache.CpuCache)


@pytest.mark.parametrize(
    "made",
    [
        lines.product_kernel,
        import_module("numbsparse.kernels.matmul.k0_cpu.weight_grad").weight_grad_kernel,
        cpu_steps.forward_kernel,
        cpu_steps.backward_kernel,
    ],
)
def test_kernels_that_call_others_at_addresses_are_kept(made):
    (found,) = (kernel := made(types.float32)).overloads.values()
    assert kernel._cache._file(found.signature, found.library.codegen)
    assert not found.library.has_dynamic_globals


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A library of a few files, as (write, texts of numbsparse.kernels.a)."""
    monkeypatch.setattr(fingerprint, "FOLDER", tmp_path / "library")
    monkeypatch.setattr(fingerprint, "LOADED", float("inf"))

    def write(name, text):
        file = tmp_path / "library" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("kernels/__init__.py", "")
    write(
        "kernels/a.py", "from numbsparse.kernels.b import (\n    first,\n    second,\n)\nimport os"
    )
    write("kernels/b.py", "from numbsparse.kernels import c, d\n")
    write("kernels/c/__init__.py", "def f():\n    import numbsparse.kernels.e\n")
    write("kernels/d.py", "from numbsparse.kernels.a import later\n")
    write("kernels/e.py", "E = 1\n")
    write("kernels/f.py", "F = 1\n")
    return write


def test_a_kernel_is_made_of_all_that_its_file_imports(library):
    before = dict(fingerprint.texts("numbsparse.kernels.a"))
    names = ["", ".a", ".b", ".c", ".d", ".e"]
    assert list(before) == [f"numbsparse.kernels{name}" for name in names]
    library("kernels/f.py", "F = 2\n")
    assert dict(fingerprint.texts("numbsparse.kernels.a")) == before
    library("kernels/e.py", "E = 2\n")
    after = dict(fingerprint.texts("numbsparse.kernels.a"))
    assert {name for name in before if before[name] != after[name]} == {"numbsparse.kernels.e"}


def test_what_changed_since_it_was_loaded_names_no_kernel(library, monkeypatch, tmp_path):
    with pytest.raises(fingerprint.Unknown):
        fingerprint.texts("numbsparse.kernels.no_such_file")
    monkeypatch.setattr(fingerprint, "LOADED", 0)
    with pytest.raises(fingerprint.Unknown):
        fingerprint.texts("numbsparse.kernels.a")
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path / "cache"))

    def double(n):
        return n + n

    double.__module__ = "numbsparse.kernels.a"
    assert cores.compiled(types.int64(types.int64))(double)(21) == 42
    assert not (tmp_path / "cache").exists()


def test_a_library_without_text_names_no_kernel(monkeypatch, tmp_path):
    """One in a zip file, say."""
    monkeypatch.setattr(fingerprint, "FOLDER", tmp_path / "library.zip" / "numbsparse")
    with pytest.raises(fingerprint.Unknown):
        fingerprint.source_text.__wrapped__()


def imported(file):
    """The modules that a file imports, by its syntax tree, and names beside them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def test_imports_are_found():
    for file in files_of_cpu_kernels():
        found = {name.decode() for name in fingerprint._imports(file.read_bytes())}
        assert {name for name in imported(file) if name.startswith("numbsparse.kernels")} <= found


def test_cpu_kernels_import_only_from_kernels():
    """What they are compiled from is looked for only in that package."""
    for file in files_of_cpu_kernels():
        tree = ast.parse(file.read_text())
        others = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("numbsparse.")
            if not node.module.startswith("numbsparse.kernels")
            for alias in node.names
        }
        for node in ast.walk(tree):
            made = {"njit", "compiled", "intrinsic", "overload"}
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(leaf, ast.Name) and leaf.id in made
                for decorator in node.decorator_list
                for leaf in ast.walk(decorator)
            ):
                used = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
                assert not used & others, f"{file}: {node.name}"


PROBE = """
from numba import types
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.simd import fetch_add

@compiled(types.int64(types.int64[::1]))
def probe(counts):
    fetch_add(counts, 0, 5)
    return counts[0]
"""
RUN = """
import numpy as np
from numbsparse.kernels.probe import probe
print(probe(np.zeros(1, np.int64)), bool(probe.stats.cache_hits))
"""


def test_an_upgrade_never_runs_old_machine_code(tmp_path):
    """A file that the kernel's file imports changes; its size and its time stay."""
    shutil.copytree(PACKAGE, tmp_path / "numbsparse", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "numbsparse" / "__init__.py").write_text("")  # no more is loaded than it imports
    kernels = tmp_path / "numbsparse" / "kernels"
    (kernels / "probe.py").write_text(PROBE)
    simd = kernels / "simd.py"
    times, text = simd.stat(), simd.read_text()
    printed = []
    for operation in ("add", "sub"):
        simd.write_text(text.replace('atomic_rmw("add"', f'atomic_rmw("{operation}"'))
        os.utime(simd, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(kernels / "__pycache__", ignore_errors=True)
        run = subprocess.run(
            [sys.executable, "-B", "-c", RUN],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "NUMBSPARSE_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        printed.append(run.stdout or run.stderr)
    assert printed == ["5 False\n", "-5 False\n"]
