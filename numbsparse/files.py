"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np

# What NumPy and zipfile raise, and an array from `numpy.load` that is no file of arrays.
_DAMAGED = (BadZipFile, EOFError, ValueError, AttributeError, TypeError, NotImplementedError)


def write_npz(path: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an `.npz` file; a failure or a kill leaves what stood there before.

    The name is taken as it is given: no ending is added.
    """
    _write_whole(Path(path), lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def read_npz(path: Any, what: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; ValueError where it is none, or cut short: "no " + `what`."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as npz:
            return dict(npz)
    except _DAMAGED as error:
        raise ValueError(f"{path} is no {what}: {error}") from error


def write_bytes(path: Any, data: bytes) -> None:
    """Write a file; a failure or a kill leaves what stood there before."""
    _write_whole(Path(path), lambda file: file.write(data))


def _write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        # Of a full disk zipfile says that its file is open still, and nobody names the file.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where what can be made again is kept: NUMBSPARSE_CACHE_DIR, else the user's cache folder."""
    if own := os.environ.get("NUMBSPARSE_CACHE_DIR"):
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "numbsparse"
