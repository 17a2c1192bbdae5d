"""Machine code for compute capability 9.0, compiled without a GPU and held against that committed.

A cubin is an ELF file, read here as far as that takes. NVIDIA documents the file's purpose (CUDA
Binary Utilities), not its sections: of those only what held for every kernel here is read, and
checked.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from numbsparse.bench.compiled_calls import calls
from numbsparse.bench.machine import in_a_list, versions_of
from numbsparse.bench.show import table
from numbsparse.device import SIMULATED, runtime, stand_in

COMMITTED = Path(__file__).parent / "results" / "machine_code.json"
COMPILERS = ("numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
SHOWN = ("instructions", "registers", "stack")

INSTRUCTION = 16  # bytes
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # attributes of a kernel
TO_AND_FROM_THE_STACK = (0x387, 0x983)  # opcodes: store to local memory, load from it
EMPTY = 8  # type of a section without bytes in the file

Kernel = dict[str, Any]
Kernels = dict[str, list[Kernel]]

_found: list[stand_in.Compiled] = []


def run(words: Sequence[str] = (), *, json_file: Path | None = None, jobs: int = 0) -> bool:
    """Compile for compute capability 9.0, which takes no GPU; whether all is as committed.

    `words` choose calls: those whose names hold one of them. `json_file` keeps what it has of other
    calls. A line says what was compiled and with which compilers; then follows a line for each
    kernel that differs, or, where there is nothing to compare with, for each.

    Raises RuntimeError in the simulator and where the compiler libraries are missing, ValueError
    where no call is meant.
    """
    _require()
    names = [name for name in calls() if not words or any(word in name for word in words)]
    if not names:
        raise ValueError(f"no call has {' or '.join(words)} in its name")
    now, used = dict(_compiled(names, jobs or os.cpu_count() or 1)), versions_of(*COMPILERS)
    if json_file is not None:
        _write(json_file, now, used)
    print(
        f"{len(names)} calls, {sum(map(len, now.values()))} kernels; compiled by {in_a_list(used)}"
    )
    return _compared(now, used)


def _compared(now: Kernels, used: dict[str, str]) -> bool:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if used != committed["compilers"]:
        print(f"not compared: those committed were compiled by {in_a_list(committed['compilers'])}")
        print(table(["call", "kernel", *SHOWN, "hash"], rows(now)))
        return True
    found = changes({name: committed["calls"].get(name, []) for name in now}, now)
    print(f"{len(found)} differ from those committed" if found else "all are as committed")
    if found:
        print(table(["call", "kernel", *SHOWN], found))
    return not found


def _require() -> None:
    if SIMULATED:
        raise RuntimeError("the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    runtime.require_numba_cuda("machine-code")
    if (library := runtime.missing_compiler()) is not None:
        raise RuntimeError(f"{library} was not found: pip install 'numbsparse[cu13]'")


def _compiled(names: list[str], jobs: int) -> Iterable[tuple[str, list[Kernel]]]:
    """Each call's kernels, in the order of their launches."""
    context = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(names)), context, _begin) as pool:
        found: Iterable[Any] = pool.map(kernels_of, names)
        with suppress(ImportError):
            from tqdm import tqdm

            found = tqdm(found, total=len(names), desc="compiled", leave=False)
        yield from zip(names, found, strict=True)


def _begin() -> None:
    global _found
    _found = stand_in.install()


def kernels_of(name: str) -> list[Kernel]:
    """In a process whose card is not there."""
    call = calls()[name]()
    _found.clear()
    stand_in.forget()
    call()
    return [{"kernel": each.name, **description(each.cubin)} for each in _found]


def _write(file: Path, now: Kernels, used: dict[str, str]) -> None:
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = (before["calls"] if before.get("compilers") == used else {}) | now
    in_order = {name: found[name] for name in calls() if name in found}
    file.write_text(_as_json(in_order, used), encoding="utf-8")


def _as_json(kernels: Kernels, used: dict[str, str]) -> str:
    """A line for each kernel, so that a diff names those that changed."""
    of_calls = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(k)}" for k in found) + "\n  ]"
        for name, found in kernels.items()
    )
    return f'{{\n "compilers": {json.dumps(used)},\n "calls": {{\n{of_calls}\n }}\n}}\n'


def rows(kernels: Kernels) -> list[list[str]]:
    """A line for each."""
    return [
        [name, each["kernel"], *(f"{each[what]:,}" for what in SHOWN), each["hash"]]
        for name, found in kernels.items()
        for each in found
    ]


def changes(before: Kernels, now: Kernels) -> list[list[str]]:
    """A line for each kernel whose machine code is another; its name may change."""
    return [
        [call, *_change(then, each)]
        for call, found in now.items()
        for then, each in zip_longest(before[call], found)
        if then is None or each is None or then["hash"] != each["hash"]
    ]


def _change(then: Kernel | None, now: Kernel | None) -> list[str]:
    if then is None or now is None:
        there = now or then or {}
        word = "new" if then is None else "gone"
        return [f"{there['kernel']}: {word}", *(f"{there[what]:,}" for what in SHOWN)]
    pairs = [(then[what], now[what]) for what in SHOWN]
    return [now["kernel"], *(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in pairs)]


def description(cubin: bytes) -> dict[str, Any]:
    """Of a cubin with one kernel: what distinguishes it, and what may cost it time.

    `instructions` in the file; `registers` a thread; `stack`, bytes a thread, for spilled registers
    and for arrays that are indexed; `stack_instructions` that use it; `hash` of the instructions.
    """
    found = dict(sections(cubin))
    (text,) = (data for name, data in found.items() if name.startswith(".text."))
    about = dict(attributes(found[".nv.info"]))
    codes = [
        struct.unpack_from("<Q", text, at)[0] & 0xFFF for at in range(0, len(text), INSTRUCTION)
    ]
    constants = b"".join(
        data for name, data in sorted(found.items()) if name.startswith(".nv.constant")
    )
    return {
        "instructions": len(codes),
        "registers": about[REGISTERS],
        "stack": about[FRAME_SIZE],
        "stack_instructions": sum(code in TO_AND_FROM_THE_STACK for code in codes),
        "hash": sha256(text + constants).hexdigest()[:12],
    }


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each."""
    table = struct.unpack_from("<Q", elf, 40)[0]
    size, count, of_names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, offset, nbytes, *_ in headers:
        first = names + name
        data = b"" if kind == EMPTY else elf[offset : offset + nbytes]
        yield elf[first : elf.index(b"\0", first)].decode(), data


def attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of those that say something of a kernel in a word."""
    at = 0
    while at < len(info):
        form, attribute, nbytes = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # so many bytes follow: which kernel, and the value
            if nbytes == 8:
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += nbytes
