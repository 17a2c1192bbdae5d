"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


def write_npz(path: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an `.npz` file; a failure or a kill leaves what stood there before.

    The name is taken as it is given: no ending is added.
    """
    _write_whole(Path(path), lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


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
