"""From a `cuda.jit` function to machine code.

Numba compiles a kernel twice, to PTX, of which it only looks at names, and to the form that the
linker optimizes (LTO-IR). Here only the latter is made, by `cuda.compile`: the same machine code in
three quarters of the time. A kernel that this does not take is left to Numba.
"""

from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import runtime, shortcuts

DEFAULTS = {
    "debug": False,
    "device": False,
    "extensions": [],
    "forceinline": False,
    "inline": "never",
    "lineinfo": False,
    "link": (),
    "lto": True,
    "shared_memory_carveout": None,
}
"""What the options of a kernel must be."""

TAKEN = {"fastmath", "launch_bounds", "max_registers", "opt"}
"""Options that may be anything."""


class Built(NamedTuple):
    """A cuda.core Kernel, its name in the machine code, and that code where it can be kept."""

    kernel: Any
    name: str
    code: bytes | None


def build(kernel: Any, signature: tuple[Any, ...]) -> Built:
    """Compile a `cuda.jit` function for these Numba types, for the current GPU.

    Raises what Numba raises where it does not compile.
    """
    built = _optimized_once(kernel, signature) if _is_plain(kernel.targetoptions) else None
    return built or _by_numba(kernel, signature)


def _is_plain(options: dict[str, Any]) -> bool:
    known = DEFAULTS.keys() | TAKEN
    plain = all(options.get(name, default) == default for name, default in DEFAULTS.items())
    return plain and options.keys() <= known


def _optimized_once(kernel: Any, signature: tuple[Any, ...]) -> Built | None:
    """None where the linker wants more than the kernel itself, such as the runtime's library."""
    code = lto_ir(kernel, signature)
    try:
        cubin = linked(kernel, code)
        name = name_of_the_kernel(cubin)
        return Built(cubin.get_kernel(name), name, cubin.code)
    except Exception:
        return None


@cache
def load_numba() -> None:
    """Import what numba-cuda compiles arrays with.

    numba-cuda 0.30 asks NumPy for `row_stack` there, another name of `vstack`, which NumPy 2.5 no
    longer has: it is there during this import, and at no other time.
    """
    names = vars(np)
    lacks = "row_stack" not in names
    if lacks:
        names["row_stack"] = np.vstack
    try:
        import_module("numba.cuda.np.arrayobj")
    finally:
        if lacks:
            del names["row_stack"]


def lto_ir(kernel: Any, signature: tuple[Any, ...]) -> bytes:
    """What the linker optimizes; takes no GPU."""
    load_numba()
    with suppress(Exception), shortcuts.taken():
        return _lto_ir(kernel, signature)
    return _lto_ir(kernel, signature)  # whose error, if any, is Numba's own


def _lto_ir(kernel: Any, signature: tuple[Any, ...]) -> bytes:
    from numba import cuda, types

    options, (major, minor) = kernel.targetoptions, runtime.compute_capability()
    code, _ = cuda.compile(
        kernel.py_func,
        types.void(*signature),
        device=False,
        abi="numba",
        cc=(major, minor, _own()),
        output="ltoir",
        fastmath=options["fastmath"],
        opt=options["opt"],
        launch_bounds=options["launch_bounds"],
    )
    return code


def linked(kernel: Any, code: bytes) -> Any:
    """Its machine code, a cuda.core ObjectCode; takes no GPU."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    major, minor = runtime.compute_capability()
    how = LinkerOptions(
        arch=f"sm_{major}{minor}{_own()}",
        link_time_optimization=True,
        max_register_count=kernel.targetoptions.get("max_registers"),
    )
    return Linker(ObjectCode.from_ltoir(code), options=how).link("cubin")


def _own() -> str:
    """The suffix of an architecture whose own features are used, as wgmma is."""
    return "a" if runtime.compute_capability() >= (9, 0) else ""


def name_of_the_kernel(linked: Any) -> str:
    """Of the only one there; the driver is asked."""
    driver = runtime.driver()
    library = driver.CUlibrary(int(linked.handle))
    _, kernels = driver.cuLibraryEnumerateKernels(1, library)
    _, name = driver.cuKernelGetName(kernels[0])
    return name.decode()


def _by_numba(kernel: Any, signature: tuple[Any, ...]) -> Built:
    from numba import cuda

    load_numba()
    cuda.current_context()
    overload = kernel.compile(signature)
    library = overload._codelibrary
    bare = not (library._setup_functions or library._teardown_functions)
    code = library.get_cubin().code if bare else None
    return Built(library.get_cufunc().kernel, overload.entry_name, code)
