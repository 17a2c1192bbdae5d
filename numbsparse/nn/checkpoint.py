"""State dicts in files: whole or not at all, and readable by `numpy.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import from_file
from numbsparse.files import read_npz, write_npz

_SPARSE = "@"  # a BlockSparse named w is stored as w@data, w@indices, ...


def save(path: Any, state: Mapping[str, Any]) -> None:
    """Write a dict of arrays, BlockSparse matrices, numbers, strings and such dicts to a file.

    The file is in NumPy's `.npz` format, a nested key is its keys joined by "/". It appears whole
    or not at all.

    Raises
    ------
    TypeError
        If a value is of another kind, or a key is no string, empty, or holds "/" or "@".

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> w = ns.BlockSparse(np.ones((1, 4, 4)), [[1]])
    >>> ns.save(path, {"model": {"weight": w, "bias": np.zeros(4)}, "step": 3})
    >>> sorted(np.load(path))[:2]
    ['model/bias', 'model/weight@data']
    """
    arrays: dict[str, np.ndarray] = {}
    _flatten(state, "", arrays)
    write_npz(path, arrays)


def load(path: Any) -> dict[str, Any]:
    """Read what `save` wrote.

    Raises ValueError if the file is no such file, FileNotFoundError if there is none.

    >>> import numpy as np, numbsparse as ns
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> ns.save(path, {"step": 3, "model": {"bias": np.zeros(2)}})
    >>> ns.load(path)
    {'step': 3, 'model': {'bias': array([0., 0.])}}
    """
    arrays = read_npz(path, "checkpoint")
    state: dict[str, Any] = {}
    sparse: dict[str, dict[str, np.ndarray]] = {}
    for key, stored in arrays.items():
        array = from_file(stored)
        name, is_sparse, part = key.partition(_SPARSE)
        if is_sparse:
            sparse.setdefault(name, {})[part] = array
            _set(state, name, None)  # keeps the order of the names
        elif key.endswith("/"):  # an empty dict
            _set(state, key[:-1], {})
        else:
            _set(state, key, array.item() if _is_scalar(array) else array)
    for name, parts in sparse.items():
        _set(state, name, BlockSparse.from_arrays(parts))
    return state


def _flatten(state: Mapping[str, Any], prefix: str, arrays: dict[str, np.ndarray]) -> None:
    if prefix and not state:
        arrays[prefix] = np.zeros(0)
    for key, value in state.items():
        if not isinstance(key, str) or not key or "/" in key or _SPARSE in key:
            raise TypeError(
                f'state takes strings without "/" and "@", not empty, as keys, got {key!r}'
            )
        name = prefix + key
        if isinstance(value, Mapping):
            _flatten(value, name + "/", arrays)
        elif isinstance(value, BlockSparse):
            arrays |= {f"{name}{_SPARSE}{part}": a for part, a in value.arrays().items()}
        elif (
            isinstance(value, np.ndarray | int | float | str) and np.asarray(value).dtype != object
        ):
            # One-element arrays keep their axis; plain numbers and strings have none.
            arrays[name] = np.asarray(value)
        else:
            raise TypeError(f"state[{name!r}] cannot be saved: it is a {type(value).__name__}")


def _is_scalar(array: np.ndarray) -> bool:
    return array.ndim == 0


def _set(state: dict[str, Any], name: str, value: Any) -> None:
    *folders, last = name.split("/")
    for folder in folders:
        state = state.setdefault(folder, {})
    state[last] = value
