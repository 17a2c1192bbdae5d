"""Compiled kernels on disk: named by all that their code depends on, and never trusted blindly."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, types

import numbsparse as ns
from numbsparse import files
from numbsparse.device import compiler, fingerprint, kept, kernel_cache, launch
from numbsparse.device.fingerprint import Unknown, _described
from numbsparse.kernels.ladder import s11_producer

on_a_gpu = pytest.mark.gpu(reason="nothing is compiled without a GPU")


def describe(value):
    return _described(value, {})


def closure(number, inner=None):
    def function(x):
        return x + number if inner is None else inner(x)

    return function


def jitted(function, **options):
    """Stands for what cuda.jit gives where there is a GPU."""
    return SimpleNamespace(py_func=function, targetoptions=options)


SAME = [
    (closure(1), closure(1)),
    (closure(0, jitted(closure(2))), closure(0, jitted(closure(2)))),
    (jitted(closure(1), fastmath=True), jitted(closure(1), fastmath=True)),
    ((np.float32(1), types.float32, np.dtype("int8")), (np.float32(1), types.float32, "int8")),
]

DIFFERENT = [
    (closure(1), closure(2)),
    (closure(1), closure(1.0)),
    (closure(0, jitted(closure(1))), closure(0, jitted(closure(2)))),
    (jitted(closure(1), fastmath=True), jitted(closure(1), fastmath=False)),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x: x.real, lambda x: x.imag),
    (np.float32(1), np.float64(1)),
    (np.arange(3), np.arange(3) + 1),
    (types.float32, types.float64),
    ((1, 2), (1, 3)),
    (len, max),
]


@pytest.mark.parametrize(("a", "b"), SAME[:3])
def test_equal_code_is_described_alike(a, b):
    assert describe(a) == describe(b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_other_code_is_described_otherwise(a, b):
    assert describe(a) != describe(b)


def test_functions_outside_of_the_library_stand_for_what_they_use():
    first = describe(uses_a_global)
    globals()["NUMBER"] += 1
    assert describe(uses_a_global) != first


NUMBER = 3


def uses_a_global(x):
    return x + NUMBER


def test_a_number_that_was_set_in_the_library_makes_another_kernel(monkeypatch):
    """Else a ring of two stages would meet the kernel of four, and the next process that of two."""
    function = s11_producer.line_kernel.__wrapped__
    before = describe(function)
    assert describe(function) == before
    monkeypatch.setattr(s11_producer, "STAGES", 2)
    assert describe(function) != before


def test_a_recursive_function_is_described():
    def recursive(n):
        return recursive(n - 1) if n else 0

    assert describe(recursive) == describe(recursive)


@pytest.mark.parametrize("value", [object(), partial(print), {1, 2}.union, os])
def test_what_cannot_be_followed_has_no_fingerprint(value):
    with pytest.raises(Unknown):
        describe(closure(value))
    assert fingerprint.fingerprint(closure(value), ()) is None


def test_a_fingerprint_depends_on_types_and_machine():
    letters = {
        fingerprint.fingerprint(closure(1), signature, *machine)
        for signature in [(types.float32,), (types.float64,), ()]
        for machine in [((9, 0), 13000), ((8, 0), 13000), ((9, 0), 12090)]
    }
    assert len(letters) == 9


def test_a_fingerprint_is_the_same_in_another_process(capsys):
    program = (
        "from numbsparse.device.fingerprint import fingerprint\n"
        "from numbsparse.kernels.elementwise import FUNCTIONS, gelu_grad\n"
        "print([fingerprint(f, (), 9) for f in (*FUNCTIONS.values(), gelu_grad)])"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    exec(program, {})
    assert capsys.readouterr().out == there
    assert "None" not in there


def test_a_file_is_whole_or_nothing():
    data = kept.seal(b"kernel\n\x7fELF\n\x00code")
    assert kept.unseal(data) == b"kernel\n\x7fELF\n\x00code"
    damaged = bytearray(data)
    damaged[-3] ^= 1
    for bad in (b"", data[:-1], data[:10], data + b"x", b"numbsparse kernel 0\n", bytes(damaged)):
        assert kept.unseal(bad) is None


def test_the_oldest_files_go_first(tmp_path):
    for i in range(5):
        file = tmp_path / f"{i}.cubin"
        file.write_bytes(bytes(100))
        os.utime(file, (i, i))
    (tmp_path / "other.txt").write_bytes(bytes(1000))
    kept.trim(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.cubin", "4.cubin", "other.txt"]


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    assert files.cache_folder() == tmp_path
    monkeypatch.delenv("NUMBSPARSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert files.cache_folder() == tmp_path / "numbsparse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder().name == "numbsparse"


def make_kernel(number):
    @cuda.jit
    def kernel(a):
        i = cuda.grid(1)
        if i < a.size:
            a[i] = number

    return kernel


def run(kernel):
    a = ns.to_device(np.zeros(3, np.float32))
    from numbsparse.device.launch import launch

    launch(kernel, 1, 32, a)
    return a.numpy().tolist()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def test_machine_code_is_loaded_only_from_a_folder_of_ones_own(folder, monkeypatch):
    """What is loaded runs on the GPU: here it only says what it is."""

    class Code(str):
        def get_kernel(self, name):
            return f"{name} of {self}"

    built = compiler.Built("built", "kernel", b"code\nmore")
    monkeypatch.setattr(compiler, "build", lambda kernel, signature: built)
    monkeypatch.setattr(kernel_cache, "file_of", lambda kernel, signature: "letters.cubin")
    code = SimpleNamespace(from_cubin=lambda data: Code(data.decode()))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(ObjectCode=code))
    kernels = [kernel_cache.compiled(None, ()) for _ in range(2)]
    assert kernels == ["built", "kernel of code\nmore"]
    (folder / "letters.cubin").write_bytes(b"cut")
    kernels = [kernel_cache.compiled(None, ()) for _ in range(2)]
    assert kernels == ["built", "kernel of code\nmore"]
    if hasattr(os, "geteuid"):
        folder.chmod(0o777)
        with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
            assert kernel_cache.compiled(None, ()) == "built"


@on_a_gpu
def test_a_kernel_is_compiled_once(folder, monkeypatch):
    assert run(make_kernel(1)) == [1, 1, 1]
    assert run(make_kernel(2)) == [2, 2, 2]
    assert len(list(folder.iterdir())) == 2

    def refuse(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel_cache.compiler, "build", refuse)
    for number in (1, 2):
        assert run(make_kernel(number)) == [number] * 3


def test_threads_that_want_a_kernel_at_once_compile_it_once(monkeypatch):
    compiled = []

    def build(*of):
        sleep(0.05)
        compiled.append(of)
        return object()

    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(kernel_cache, "compiled", build)
    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(launch._compile, 3 * ["a kernel"], 3 * [(1, 2.0)]))
    assert len(compiled) == len(found) == 1


@on_a_gpu
@pytest.mark.parametrize("content", [b"", b"junk", kept.seal(b"kernel\nno code")])
def test_a_damaged_file_is_made_anew(folder, content):
    run(make_kernel(5))
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert run(make_kernel(5)) == [5, 5, 5]
    assert file.read_bytes() != content
    assert kept.unseal(file.read_bytes()) is not None


@on_a_gpu
def test_a_folder_that_cannot_be_written_costs_nothing_but_time(folder):
    folder.write_text("a file, where a folder is expected")
    assert run(make_kernel(6)) == [6, 6, 6]
