"""Shortcuts through Numba's compiler, taken only while it compiles kernels of this library.

For each function that it compiles Numba works out again what it worked out for the one before.
Here that is remembered, and what no pass reads is not worked out. The machine code is the same:
`python -m numbsparse machine-code` compares it. A shortcut replaces one function of Numba's, while
`taken()` lasts, of the versions whose text was read: others compile as they do. Without it, 29 GPU
kernels took so much longer of the processor, LLVM's part counted and the linker's not:
`resolved_once` 31 %, `lazy_lifetimes` 19 %, `twins` 5 to 8 %.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from threading import Lock
from types import FunctionType
from typing import Any

from numba import config

READ = {"numba": range(61, 69), "numba_cuda": range(30, 31)}
"""Versions 0.n whose text was read: what is replaced is the same in all of them."""

_lock = Lock()
_depth = 0  # how many contexts are open
_replaced: list[tuple[Any, str, Any]] = []  # (owner, name, Numba's own), while one is

if hasattr(os, "register_at_fork"):  # a thread that held it does not release it in the child
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]

Function = Callable[..., Any]


@contextmanager
def taken() -> Iterator[None]:
    """Within this context, in all threads, Numba takes the shortcuts."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth
    with _lock:
        if _depth == 0:
            compiles = not config.ENABLE_CUDASIM
            on_gpu = compiles and "numba.cuda.core.postproc" in sys.modules
            for owner, name, ours in _shortcuts(on_gpu):
                _replaced.append((owner, name, vars(owner)[name]))
                setattr(owner, name, ours)
        _depth += 1


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        while _depth == 0 and _replaced:
            setattr(*_replaced.pop())


@cache
def _shortcuts(on_gpu: bool) -> list[tuple[Any, str, Any]]:
    """(owner, name, what to put there), of Numba and, `on_gpu`, of numba-cuda."""
    lifetimes, wanted, found = ("PostProcessor", "run", lazy_lifetimes), list[Any](), []
    if _was_read("numba"):
        of_call = "BaseFunction", "get_call_type", resolved_once
        wanted += ("numba.core.postproc", *lifetimes), ("numba.core.types.functions", *of_call)
    if on_gpu and _was_read("numba_cuda"):
        of_device = "CUDADispatcher", "compile_device", twins
        wanted += ("numba.cuda.core.postproc", *lifetimes), ("numba.cuda.dispatcher", *of_device)
    for module, of_class, name, make in wanted:
        owner = getattr(import_module(module), of_class)
        found.append((owner, name, make(vars(owner)[name])))
    return found


def _was_read(package: str) -> bool:
    """Whether the package is of a version whose text was."""
    major, minor, *_ = import_module(package).__version__.split(".")
    return major == "0" and int(minor) in READ[package]


def resolved_once(resolve: Function) -> Function:
    """Which implementation serves a built-in function for these types of arguments.

    It depends on the templates, which are part of the function's type, and on the compiler's flags.
    """
    known: dict[Any, tuple[Any, Any]] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        try:
            key = self, id(context), tuple(args), tuple(dict(kws).items()), _flags()
            found = known.get(key)
        except TypeError:  # not hashable
            return resolve(self, context, args, kws)
        if found is None:
            signature = resolve(self, context, args, kws)
            known[key] = signature, self._impl_keys[signature.args]
            return signature
        signature, self._impl_keys[signature.args] = found
        return signature

    return get_call_type


def _flags() -> Any:
    """Of the function that is compiled, by either compiler."""
    for module in ("numba.cuda.core.targetconfig", "numba.core.targetconfig"):
        stack = module in sys.modules and sys.modules[module].ConfigStack()
        if stack:
            return module, *((k, _hashable(v)) for k, v in stack.top()._values.items())
    return None


def _hashable(flag: Any) -> Any:
    if flag.__hash__:
        return flag
    return tuple(sorted(flag.flags)) if hasattr(flag, "flags") else repr(flag)


def lazy_lifetimes(eager: Function) -> Function:
    """What is alive where, after each of some ten passes: worked out when it is asked for."""
    module = sys.modules[eager.__module__]
    analysis: Any = module.analysis  # type: ignore[attr-defined]

    def run(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        func_ir = self.func_ir
        if func_ir.is_generator:
            eager(self, emit_dels, extend_lifetimes)
            return
        func_ir.blocks = module.transforms.canonicalize_cfg(func_ir.blocks)
        blocks = func_ir.blocks
        lifetime = func_ir.variable_lifetime = module.VariableLifetime(blocks)

        def alive() -> dict[Any, Any]:
            defined, dead = lifetime.usedefs.defmap, lifetime.deadmaps.combined
            at = analysis.compute_live_variables(lifetime.cfg, blocks, defined, dead)
            return {block: at[offset] for offset, block in blocks.items()}

        func_ir.block_entry_vars = _Lazy(alive)
        func_ir.generator_info = None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes=extend_lifetimes)

    return run


class _Lazy(dict[Any, Any]):
    """A dict whose items are worked out when they are asked for."""

    def __init__(self, work: Callable[[], dict[Any, Any]]):
        self._work: Callable[[], dict[Any, Any]] | None = work

    def _worked_out(self) -> None:
        if self._work is not None:
            self.update(self._work())
            self._work = None

    def __contains__(self, key: object) -> bool:
        self._worked_out()
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self._worked_out()
        return super().__getitem__(key)


def twins(compile_own: Function) -> Function:
    """One of several device functions that are the same: closures of one text over the same values.

    Kernels that differ elsewhere have many.
    """
    first: dict[Any, Any] = {}
    others: list[Any] = []  # held: one that is gone would take the code with it

    def compile_device(self: Any, args: Any, return_type: Any = None) -> Any:
        ours = self.py_func.__module__.partition(".")[0] == "numbsparse"
        if ours and return_type is None and args not in self.overloads:
            twin = first.setdefault(_known_by(self, first), self)
            if twin is not self:
                self.overloads[args] = compile_device(twin, args)
                others.append(self)
        return compile_own(self, args, return_type)

    return compile_device


def _known_by(function: Any, first: dict[Any, Any]) -> Any:
    """Equal for functions that are the same; of those that differ, one is in `first`."""
    name = "_numbsparse_known_by"
    if name not in vars(function):
        inner, options = function.py_func, getattr(function, "targetoptions", {})
        cells = [cell.cell_contents for cell in inner.__closure__ or ()]
        values = _value([*cells, *(inner.__defaults__ or ())], first)
        vars(function)[name] = id(inner.__code__), repr(sorted(options.items())), values
    return vars(function)[name]


def _value(value: Any, first: dict[Any, Any]) -> Any:
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)
    if isinstance(value, tuple | list):
        return type(value), *(_value(item, first) for item in value)
    if isinstance(getattr(value, "py_func", None), FunctionType):
        return id(first.setdefault(_known_by(value, first), value))
    return id(value)
