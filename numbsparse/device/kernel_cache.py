"""Compiled kernels kept on disk, so that only the first process of all waits for the compiler.

A file holds a kernel's machine code and is named by its fingerprint. It is written whole or not at
all; one that is damaged is made anew, and a folder that cannot be written costs nothing but time.
The oldest files go when all together pass MOST_BYTES. The folder is `kernels` in
NUMBSPARSE_CACHE_DIR, or else in the user's cache folder under `numbsparse`.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numbsparse.device import compiler, runtime
from numbsparse.device.fingerprint import fingerprint
from numbsparse.files import cache_folder, write_bytes

MOST_BYTES = 2**28
HEAD = b"numbsparse kernel 1\n"  # then the hash of the rest, the kernel's name, the machine code
HASH = hashlib.sha256


def compiled(kernel: Any, signature: tuple[Any, ...]) -> Any:
    """The cuda.core Kernel of a `cuda.jit` function for these Numba types, from disk if it can be.

    Raises what Numba raises where the kernel does not compile.
    """
    file = _file_of(kernel, signature)
    if file is not None and (known := _loaded(file)) is not None:
        return known
    with _no_collection():
        built = compiler.build(kernel, signature)
    if file is not None and built.code is not None:
        _store(file, built.name, built.code)
    return built.kernel


@contextmanager
def _no_collection() -> Iterator[None]:
    """To search the objects of the compiler for garbage, millions, takes a tenth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def pack(name: str, code: bytes) -> bytes:
    """The bytes of a file."""
    rest = name.encode() + b"\n" + code
    return HEAD + HASH(rest).digest() + rest


def unpack(data: bytes) -> tuple[str, bytes] | None:
    """The name and the machine code in the bytes of a file; None where they are no whole file."""
    digest, rest = data[len(HEAD) :][: HASH().digest_size], data[len(HEAD) + HASH().digest_size :]
    if not data.startswith(HEAD) or HASH(rest).digest() != digest:
        return None
    name, _, code = rest.partition(b"\n")
    return name.decode(), code


def _file_of(kernel: Any, signature: tuple[Any, ...]) -> Path | None:
    from cuda.bindings import driver

    machine = runtime.compute_capability(), driver.cuDriverGetVersion()[1]
    name = fingerprint(kernel, signature, *machine)
    return None if name is None else cache_folder() / "kernels" / f"{name}.cubin"


def _loaded(file: Path) -> Any:
    from cuda.core import ObjectCode

    with suppress(Exception):  # absent, damaged, or refused by the driver: compile
        if (known := unpack(file.read_bytes())) is not None:
            name, code = known
            return ObjectCode.from_cubin(code).get_kernel(name)
    return None


def _store(file: Path, name: str, code: bytes) -> None:
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, pack(name, code))
        trim(file.parent, MOST_BYTES)


def trim(folder: Path, most: int) -> None:
    """Remove the oldest kernels until the rest takes at most so many bytes."""
    files = [(file.stat(), file) for file in folder.glob("*.cubin")]
    total = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= stat.st_size
