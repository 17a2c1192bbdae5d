"""State dicts in files: whole or not at all, and readable by `numpy.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.npz import open_npz, write_npz

_SPARSE = "@"  # a BlockSparse named w is stored as w@data, w@indices, ...
_TAKEN = ("file", "allow_pickle")  # numpy.savez has them for itself


def save(path: Any, state: Mapping[str, Any]) -> None:
    """Write a dict of arrays, BlockSparse matrices, numbers, strings and such dicts to a file.

    The file is in NumPy's `.npz` format, a nested key is its keys joined by "/". It appears whole
    or not at all. A model's dict is `model.state_dict()`.

    Raises
    ------
    TypeError
        If `state` is no dict, a value is of another kind, or a key is no string, empty, "file" or
        "allow_pickle", or holds "/", "@" or a zero.

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
    if not isinstance(state, Mapping):
        got = type(state).__name__
        raise TypeError(f"state takes a dict, such as model.state_dict(), got {got}")
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
    with open_npz(path, "checkpoint") as members:
        return _nested(members)


def _nested(members: Mapping[str, Any]) -> dict[str, Any]:
    """What `_flatten` made flat; arrays are read when all of it is known to make sense."""
    stored: dict[str, Any] = {}
    for key, member in members.items():
        name, is_sparse, part = key.partition(_SPARSE)
        if stored.setdefault(name, {} if is_sparse else member) is member:
            continue
        if not is_sparse or not isinstance(stored[name], dict):
            raise ValueError(f"{name!r} is two things")
        stored[name][part] = member
    state: dict[str, Any] = {}
    for name, member in stored.items():
        if isinstance(member, dict):
            _set(state, name, BlockSparse.from_arrays(member))
        elif name.endswith("/"):
            _set(state, name[:-1], {})
        else:
            _set(state, name, member)
    return _read(state)


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read(inner) for key, inner in value.items()}
    if isinstance(value, BlockSparse):
        return value
    return np.asarray(value) if value.ndim else np.asarray(value).item()


def _flatten(state: Mapping[str, Any], prefix: str, arrays: dict[str, np.ndarray]) -> None:
    if prefix and not state:
        arrays[prefix] = np.zeros(0)
    for key, value in state.items():
        if not isinstance(key, str) or not key or set(key) & {"/", _SPARSE, "\0"}:
            raise TypeError(
                f'state takes strings without "/", "@" and zeros, not empty, as keys, got {key!r}'
            )
        name = prefix + key
        if name in _TAKEN:
            raise TypeError(f"state takes other keys than {_TAKEN}, got {name!r}")
        if isinstance(value, Mapping):
            _flatten(value, name + "/", arrays)
        elif isinstance(value, BlockSparse):
            arrays |= {f"{name}{_SPARSE}{part}": a for part, a in value.arrays().items()}
        elif _is_plain(value):
            # One-element arrays keep their axis; plain numbers and strings have none.
            arrays[name] = np.asarray(value)
        else:
            raise TypeError(f"state[{name!r}] cannot be saved: it is a {type(value).__name__}")


def _is_plain(value: Any) -> bool:
    """Whether a file can hold all of a value: no Python objects, and no mask."""
    if not isinstance(value, np.ndarray | int | float | str) or isinstance(
        value, np.ma.MaskedArray
    ):
        return False
    return not np.asarray(value).dtype.hasobject


def _set(state: dict[str, Any], name: str, value: Any) -> None:
    *folders, last = name.split("/")
    for folder in folders:
        state = state.setdefault(folder, {}) if isinstance(state, dict) else state
    if not isinstance(state, dict) or last in state or "" in (*folders, last):
        raise ValueError(f"{name!r} is no name, or two things")
    state[last] = value
