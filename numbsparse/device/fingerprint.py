"""A kernel's fingerprint: equal for equal machine code, in another process too.

Numba's own `cache=True` cannot tell apart kernels that are closures over other kernels' functions,
and keeps the machine code of a kernel whose file is as it was, whatever changed in the files that
it imports from. Here a function is represented by its code and, recursively, the values that it
closes over; all else by the text of this library: all of it on a GPU, on the CPU the files that the
function's file imports, and those that they import. What cannot be followed gets no fingerprint.
"""

import hashlib
import os
import platform
import re
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

LIBRARIES = ("numbsparse", "numba", "numba_cuda", "llvmlite", "numpy", "math", "operator", "cuda")
"""Modules whose versions, or source text, are part of every fingerprint."""

FROM = re.compile(rb"^ *from (numbsparse\.kernels[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
IMPORT = re.compile(rb"^ *import (numbsparse\.kernels[\w.]*)", re.MULTILINE)

FOLDER = Path(__file__).parents[1]
LOADED = time.time()
"""A file that was changed after this is no longer the text of what runs here."""


class Unknown(Exception):
    """A value that no fingerprint can be taken of."""


def fingerprint(
    kernel: Any, signature: tuple[Any, ...], *machine: Any, module: str | None = None
) -> str | None:
    """A string that identifies the machine code of a kernel; None where it is unknown.

    Parameters
    ----------
    kernel : a function decorated with `numba.cuda.jit`, or one for the CPU
    signature : Numba types of its arguments
    machine : what else it depends on, such as the GPU's compute capability
    module : the name of its own, of one for the CPU
    """
    try:
        text = source_text() if module is None else made_of(module)
        parts = (text, machine, tuple(map(str, signature)), _described(kernel, {}))
    except Unknown:
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def source_text() -> tuple[str, ...]:
    """The source text of kernels and device, hashed, and the versions of what compiles them.

    Raises Unknown where the text is not to be had, or changed since the library was loaded.
    """
    text = hashlib.sha256()
    files = sorted(file for part in ("device", "kernels") for file in (FOLDER / part).rglob("*.py"))
    if not files:
        raise Unknown(str(FOLDER))
    for file in files:
        text.update(file.relative_to(FOLDER).as_posix().encode() + b"\0" + _text(file))
    versions = map(version, ("numba", "numba-cuda", "llvmlite", "numpy", "cuda-bindings"))
    return (text.hexdigest(), platform.python_version(), *versions)


@cache
def made_of(module: str) -> tuple[str, ...]:
    """As `source_text`, for a kernel of the CPU, and so quicker: see `texts`."""
    import llvmlite
    import numba

    if _root(module) != "numbsparse":
        return source_text()  # a function of the user's
    versions = numba.__version__, llvmlite.__version__, np.__version__
    return (str(texts(module)), platform.python_version(), *versions)


def texts(module: str) -> list[tuple[str, str]]:
    """(name, hash of the text) of a module and of all that it imports from `kernels`.

    All that is compiled is there: what kernels take from other packages is around them.
    """
    found, ahead = {}, [module]
    while ahead:
        name = ahead.pop()
        path = os.path.join(FOLDER, *name.split(".")[1:])
        file = next(filter(os.path.isfile, (f"{path}.py", f"{path}/__init__.py")), None)
        if file is not None and name not in found:
            text = _text(Path(file))
            found[name] = hashlib.sha256(text).hexdigest()
            ahead += (other.decode() for other in _imports(text))
    if module not in found:
        raise Unknown(module)
    return sorted(found.items())


def _imports(text: bytes) -> Iterator[bytes]:
    """The modules of `kernels` that a file imports, and other names too."""
    yield from IMPORT.findall(text)
    for module, names in FROM.findall(text):
        yield module
        yield from (module + b"." + name for name in re.findall(rb"\w+", names))


def _text(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            changed = os.fstat(opened.fileno()).st_ctime
            text = opened.read()
    except OSError as error:  # a library in a zip file, say
        raise Unknown(str(file)) from error
    if changed > LOADED:
        raise Unknown(str(file))
    return text


def _described(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """A value as nested tuples of texts, the same in every process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__, repr(value)
    if id(value) in seen:
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # held, so that no other value takes its id
    if isinstance(value, tuple | list):
        return type(value).__qualname__, *(_described(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return "set", *sorted(str(_described(item, seen)) for item in value)
    if isinstance(value, dict):
        return "dict", *((str(k), _described(v, seen)) for k, v in sorted(value.items(), key=str))
    if isinstance(value, np.dtype):
        return "dtype", str(value)
    if isinstance(value, np.generic | np.ndarray) and value.dtype != object:
        return "array", str(value.dtype), np.shape(value), value.tobytes()
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(value, ModuleType | type | BuiltinFunctionType):
        return _of_a_library(value)
    if hasattr(value, "py_func") and hasattr(value, "targetoptions"):  # what cuda.jit makes
        return "jit", _described(value.targetoptions, seen), _described(value.py_func, seen)
    if hasattr(value, "_defn"):  # what intrinsic makes
        return "intrinsic", _described(value._defn, seen)
    of_numba = type(value).__module__.startswith("numba.")
    if of_numba and (hasattr(value, "mangling_args") or hasattr(value, "return_type")):
        return "numba type", str(value)  # or a signature
    raise Unknown(repr(value))


def _function(function: FunctionType, seen: dict[int, tuple[int, Any]]) -> Any:
    inside = tuple(cell.cell_contents for cell in function.__closure__ or ())
    names = sorted(_names(function.__code__))
    around = [(n, function.__globals__[n]) for n in names if n in function.__globals__]
    if _root(function.__module__) == "numbsparse":  # whose text stands for all but set numbers
        around = [(n, value) for n, value in around if isinstance(value, bool | int | float)]
    return (
        "function",
        function.__module__,
        function.__qualname__,
        _code(function.__code__),
        *(_described(value, seen) for value in (inside, function.__defaults__, around)),
    )


def _code(code: CodeType) -> Any:
    constants = (_code(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(constants)


def _constant(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _of_a_library(value: Any) -> tuple[str, str]:
    """A module, a class or a built-in function, by name."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if _root(module) not in (*LIBRARIES, "builtins"):
        raise Unknown(repr(value))
    return "named", f"{module}.{getattr(value, '__qualname__', '')}"


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]
