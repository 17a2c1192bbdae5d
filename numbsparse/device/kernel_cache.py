"""Compiled kernels kept on disk, so that only the first process of all waits for the compiler.

A file holds a kernel's name in its machine code for a GPU, a line, and that code; and is named by
its fingerprint, see `kept`.
"""

from contextlib import suppress
from typing import Any

from numbsparse.device import compiler, kept, runtime, waits
from numbsparse.device.fingerprint import fingerprint


def compiled(kernel: Any, signature: tuple[Any, ...]) -> Any:
    """The cuda.core Kernel of a `cuda.jit` function for these Numba types, from disk if it can be.

    Raises what Numba raises where the kernel does not compile.
    """
    file = file_of(kernel, signature)
    if file is not None and (known := _loaded(file)) is not None:
        return known
    # To search the objects of the compiler for garbage, millions, takes a tenth of its time.
    with waits.no_collection(), waits.said(kernel):
        built = compiler.build(kernel, signature)
    if file is not None and built.code is not None:
        kept.write(file, pack(built.name, built.code))
    return built.kernel


def pack(name: str, code: bytes) -> bytes:
    """What a file holds: the kernel's name in the machine code, if it is known, and that code."""
    return name.encode() + b"\n" + code


def file_of(kernel: Any, signature: tuple[Any, ...]) -> str | None:
    """The name of its file; None for a kernel that cannot be kept."""
    machine = runtime.compute_capability(), runtime.driver_version()
    name = fingerprint(kernel, signature, *machine)
    return None if name is None else f"{name}.cubin"


def _loaded(file: str) -> Any:
    from cuda.core import ObjectCode

    with suppress(Exception):  # absent, damaged, or refused by the driver: compile
        if (content := kept.read(file)) is not None:
            name, _, code = content.partition(b"\n")
            cubin = ObjectCode.from_cubin(code)
            return cubin.get_kernel(name.decode() or compiler.name_of_the_kernel(cubin))
    return None
