"""CPU kernels kept on disk: what Numba compiled, in files named by its fingerprint; see `kept`."""

import pickle
from contextlib import ExitStack, suppress
from typing import Any

from numba.core import event
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from numbsparse.device import kept, shortcuts, waits
from numbsparse.device.fingerprint import fingerprint


class CpuCache(NullCache):  # type: ignore[misc]
    """Takes the place of Numba's cache in a function of `numba.njit`, and never raises."""

    def __init__(self, dispatcher: Any):
        self._kernel = dispatcher.py_func, dict(dispatcher.targetoptions)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function for a signature; None where it is to be compiled."""
        target.refresh()
        with suppress(Exception):  # absent, damaged, or of no use to this Numba: compile
            if (file := self._file(signature, target.codegen())) is not None:
                content = kept.read(file)
                return content and CompileResult._rebuild(target, *pickle.loads(content))
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep it, unless it holds addresses valid only in this process."""
        with suppress(Exception):
            file = self._file(signature, compiled.codegen)
            if file is not None and not compiled.library.has_dynamic_globals:
                kept.write(file, dumps(compiled._reduce()))

    def _file(self, signature: Any, codegen: Any) -> str | None:
        machine, module = codegen.magic_tuple(), self._kernel[0].__module__
        name = fingerprint(self._kernel, (signature,), machine, module=module)
        return None if name is None else f"{name}.cpu"


class _Watch(event.Listener):  # type: ignore[misc]
    """Notified by Numba when it compiles: kernels with a CpuCache, reported and by shortcuts."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []

    def on_start(self, happens: Any) -> None:
        dispatcher, stack = happens.data["dispatcher"], ExitStack()
        if isinstance(getattr(dispatcher, "_cache", None), CpuCache):
            stack.enter_context(waits.said(dispatcher))
            stack.enter_context(shortcuts.taken())
        self._open.append(stack)

    def on_end(self, happens: Any) -> None:
        self._open.pop().close()


event.register("numba:compile", _Watch())
