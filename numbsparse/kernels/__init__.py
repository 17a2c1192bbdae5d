"""Kernels: for each operation its NumPy meaning first, then what runs it fast.

A file is loaded when it is first named, as in `kernels.softmax`: those for GPUs load numba.cuda.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name.startswith("__") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
