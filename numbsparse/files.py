"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_npz(path: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an `.npz` file; a failure or a kill leaves what stood there before.

    The name is taken as it is given: no ending is added.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
