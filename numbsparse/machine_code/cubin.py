"""What a cubin says of its kernel.

It is an ELF file, read here as far as that takes. NVIDIA documents the file's purpose (CUDA Binary
Utilities), not its sections: of those only what held for every kernel here is read, and checked.
"""

import struct
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

INSTRUCTION = 16  # bytes
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # attributes of a kernel
TO_AND_FROM_THE_STACK = (0x387, 0x983)  # opcodes: store to local memory, load from it
RESERVED = 1024  # bytes of shared memory, in whose place a section says that they are
EMPTY = 8  # type of a section without bytes in the file


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


def shared_bytes(cubin: bytes) -> int:
    """Of shared memory that its kernel has, beside what a launch asks for. From compute capability
    9.0 on it begins behind what the system keeps, which is no part of what a block may have."""
    own = {name: len(data) for name, data in sections(cubin) if name.startswith(".nv.shared.")}
    kept = RESERVED if own.pop(".nv.shared.reserved.0", None) is not None else 0
    return sum(max(nbytes - kept, 0) for nbytes in own.values())


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each, zeros of those without any in the file."""
    table = struct.unpack_from("<Q", elf, 40)[0]
    size, count, of_names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, offset, nbytes, *_ in headers:
        first = names + name
        data = bytes(nbytes) if kind == EMPTY else elf[offset : offset + nbytes]
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
