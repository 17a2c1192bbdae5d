"""Machine code on disk, for later processes, in a folder of the user's own.

A file is written whole or not at all. One that is empty, cut or damaged is as if it was not there,
and is written again; a folder that cannot be written costs nothing but time. The oldest files go
when all together pass MOST_BYTES. Because what it loads is run, nothing is loaded from a folder in
which others can write. It is `kernels` in NUMBSPARSE_CACHE_DIR, or else in the user's cache folder
under `numbsparse`.
"""

import hashlib
import os
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from stat import S_IMODE, S_ISDIR

from numbsparse.files import cache_folder, write_bytes

MOST_BYTES = 2**28
HEAD = b"numbsparse kernel 1\n"  # then the hash of the rest, and the rest
HASH = hashlib.sha256
SUFFIXES = (".cubin", ".cpu")


def read(name: str) -> bytes | None:
    """What `write` put there; None where there is no such file, or none of one's own, or a part."""
    with suppress(OSError):
        if (folder := _folder()) is not None:
            return unseal((folder / name).read_bytes())
    return None


def write(name: str, content: bytes) -> None:
    """Keep it, where that is possible; the name ends in one of SUFFIXES."""
    with suppress(OSError):
        if (folder := _folder()) is not None:
            write_bytes(folder / name, seal(content))
            trim(folder, MOST_BYTES)


def seal(content: bytes) -> bytes:
    """The bytes of a file."""
    return HEAD + HASH(content).digest() + content


def unseal(data: bytes) -> bytes | None:
    """The content in the bytes of a file; None where it is cut short."""
    start = len(HEAD) + HASH().digest_size
    if not data.startswith(HEAD):
        return None
    content = data[start:]
    return content if HASH(content).digest() == data[len(HEAD) : start] else None


def trim(folder: Path, most: int) -> None:
    """Remove the oldest files, what a kill left unfinished too, until `most` bytes are left."""
    ours = [file for file in folder.iterdir() if file.suffix in SUFFIXES or file.name[0] == "."]
    files = [(file.stat(), file) for file in ours]
    total = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= stat.st_size


def _folder() -> Path | None:
    """The folder, made if need be; None where others can write in it."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return folder
    stat = folder.lstat()
    mode = S_IMODE(stat.st_mode)
    if not S_ISDIR(stat.st_mode) or stat.st_uid != os.geteuid() or mode & 0o022:
        _say(folder, stat.st_uid, mode)
        return None
    if mode & 0o077:
        folder.chmod(0o700)
    return folder


@cache
def _say(folder: Path, owner: int, mode: int) -> None:
    """Once."""
    warnings.warn(
        f"compiled kernels are not kept: {folder} takes a folder of user {os.geteuid()} with mode "
        f"700, got one of user {owner} with mode {mode:o}",
        RuntimeWarning,
        stacklevel=2,
    )
