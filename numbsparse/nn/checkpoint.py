"""State dicts in files: whole or not at all, and readable by `numpy.load`, or by safetensors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import check_kind, type_name
from numbsparse.nn.safetensors import is_safetensors, open_tensors, write_tensors
from numbsparse.npz import open_npz, write_npz

_PART = "@"  # a BlockSparse named w is stored as w@data, w@indices, ...
_LISTS = {"list": list, "tuple": tuple}  # h@list is how many items h/0, h/1, ... there are
_LEAVES = ("", "none", "int", "str")  # a value as NumPy has it, and what NumPy has no form for
_TAKEN = ("file", "allow_pickle")  # numpy.savez has them for itself
_LONGEST = 65_000  # bytes of a joined name; .npz has two for their number, and adds some of its own


def save(path: Any, state: Any) -> None:
    """Write arrays, BlockSparse matrices, numbers, strings, None, and dicts and lists of them.

    The file is in NumPy's `.npz` format, a nested key, or the number of a list's item, is joined by
    "/". It appears whole or not at all. A model's dict is `model.state_dict()`.

    A name that ends in ".safetensors" gives a file in that format (the package safetensors is then
    needed), which the tools of torch and JAX open: a tensor for each array, for a BlockSparse "w"
    its kept blocks "w", (n_blocks, B, B), and "w_pattern", bool (in_blocks, out_blocks), as in
    state dicts of `numbsparse.torch`; all else is in its metadata.

    Raises
    ------
    TypeError
        If `state` is not a dict, list or tuple, a value is of another kind, or a key is not a
        string, empty, "file" or "allow_pickle", or holds "/", "@", a zero or what UTF-8 lacks, or
        joined keys have more than 65,000 bytes. In a ".safetensors" file also if an array is
        neither of booleans, integers, nor of floats of 16 to 64 bits.
    ImportError
        If the package safetensors is needed and missing.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> w = ns.BlockSparse(np.ones((1, 4, 4)), [[1]])
    >>> ns.save(path, {"model": {"weight": w, "bias": np.zeros(4)}, "losses": [2.5, 1.5]})
    >>> sorted(np.load(path))[:3]
    ['losses/0', 'losses/1', 'losses@list']
    """
    takes = "a dict or a list, such as model.state_dict()"
    check_kind("state", state, Mapping | list | tuple, takes)
    members: dict[str, Any] = {}
    _flatten(state, "", members)
    if is_safetensors(path):
        write_tensors(path, members)
    else:
        write_npz(path, _arrays(members))


def load(path: Any) -> Any:
    """Read what `save` wrote.

    Arrays without axes come back as numbers. Of a ".safetensors" file that others wrote, such as
    `safetensors.torch.save_file(model.state_dict(), path)`, each tensor comes as an array under its
    name, and one with a "_pattern" beside it as a BlockSparse, of whole blocks.

    Raises ValueError if the file is no such file, or damaged, FileNotFoundError if there is none,
    ImportError if a package is missing: safetensors, or ml_dtypes for bfloat16.

    >>> import numpy as np, numbsparse as ns
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
    >>> ns.save(path, {"step": 3, "models": [{"bias": np.zeros(2)}, None]})
    >>> ns.load(path)
    {'step': 3, 'models': [{'bias': array([0., 0.])}, None]}
    """
    if is_safetensors(path):
        with open_tensors(path, "checkpoint") as (members, own):
            return _nested(members) if own else {name: _leaf(m) for name, m in members.items()}
    with open_npz(path, "checkpoint") as members:
        return _nested(members)


def _arrays(members: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The members as arrays alone; those of a matrix have its name before theirs."""
    arrays: dict[str, np.ndarray] = {}
    for name, member in members.items():
        if isinstance(member, BlockSparse):
            arrays |= {f"{name}{_PART}{part}": array for part, array in member.arrays().items()}
        else:
            # One-element arrays keep their axis; plain numbers and strings have none.
            arrays[name] = np.asarray(member)
    return arrays


def _flatten(value: Any, name: str, members: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        if name and not value:
            members[name + "/"] = np.zeros(0)
        for key, inner in value.items():
            _flatten(inner, _joined(name, key), members)
    elif isinstance(value, BlockSparse):
        members[name] = value
    elif isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        members[f"{name}{_PART}{kind}"] = np.array(len(value))
        for i, inner in enumerate(value):
            _flatten(inner, _joined(name, str(i)), members)
    elif value is None:
        members[f"{name}{_PART}none"] = np.zeros(0)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:  # as in a generator's state
        members[f"{name}{_PART}int"] = np.array(str(value))
    elif isinstance(value, str) and value.endswith("\0"):  # which NumPy's strings drop
        members[f"{name}{_PART}str"] = np.array(value + ".")
    elif _is_plain(value):
        members[name] = value
    else:
        hint = ": give it .numpy()" if hasattr(value, "numpy") else ""
        raise TypeError(f"state[{name!r}] cannot be saved: its type is {type_name(value)}{hint}")


def _joined(name: str, key: Any) -> str:
    if not isinstance(key, str) or not key or set(key) & {"/", _PART, "\0"} or not _is_text(key):
        takes = 'strings of UTF-8 without "/", "@" and zeros, not empty'
        raise TypeError(f"state takes {takes}, as keys, got {key!r}")
    if not name and key in _TAKEN:
        raise TypeError(f"state takes other keys than {_TAKEN}, got {key!r}")
    joined = f"{name}/{key}" if name else key
    if len(joined) * 4 > _LONGEST < (length := len(joined.encode())):
        takes = f"keys of {_LONGEST} bytes at most, joined"
        raise TypeError(f"state takes {takes}, got {length}, {joined[:40]!r}...")
    return joined


def _is_text(word: str) -> bool:
    """Whether UTF-8 has it all: of half a surrogate pair, as of a file's odd name, it has none."""
    return word.isascii() or word.encode(errors="ignore").decode() == word


def _is_plain(value: Any) -> bool:
    """Whether a file can hold all of a value: no Python objects, and no mask."""
    kinds = np.ndarray | np.number | np.bool_ | int | float | str
    if not isinstance(value, kinds) or isinstance(value, np.ma.MaskedArray):
        return False
    return not np.asarray(value).dtype.hasobject


def _nested(members: Mapping[str, Any]) -> Any:
    """What `_flatten` made flat; arrays are read once all of it is known to be valid."""
    parts: dict[str, dict[str, Any]] = {}
    for key, member in members.items():
        name, is_part, part = key.partition(_PART)
        parts.setdefault(name, {})[part if is_part else ""] = member
    state: dict[str, Any] = {}
    lists: dict[int, tuple[str, str, int]] = {}  # by the id of the dict with its items
    for name, of in parts.items():
        part, member = next(iter(of.items()))
        if len(of) > 1 and {*_LISTS, *_LEAVES} & of.keys():
            raise ValueError(f"{name!r} is there twice")
        if part in _LISTS:
            if member.shape or member.dtype.kind not in "iu":
                raise ValueError(f"{name!r} has no number of items")
            lists[id(_dict_at(state, name))] = name, part, int(np.asarray(member))
        elif part == "" and name.endswith("/"):
            _set(state, name[:-1], {})
        elif part in _LEAVES:
            _set(state, name, _Leaf(part, member))
        else:
            _set(state, name, BlockSparse.from_arrays(of))
    return _read(state, lists)


class _Leaf(NamedTuple):
    """A member that is one value, and how it is stored."""

    part: str
    member: Any


def _read(value: Any, lists: Mapping[int, tuple[str, str, int]]) -> Any:
    """The values; a dict whose id is in `lists` becomes that list."""
    if isinstance(value, _Leaf):
        if value.part == "none":
            return None
        leaf = _leaf(value.member)
        if value.part == "int":
            return int(leaf)
        return leaf[:-1] if value.part == "str" else leaf
    if not isinstance(value, dict):
        return value
    inside = {key: _read(inner, lists) for key, inner in value.items()}
    if id(value) not in lists:
        return inside
    name, kind, length = lists[id(value)]
    if len(inside) != length or any(str(i) not in inside for i in range(len(inside))):
        raise ValueError(f"{name!r} has other items than its {length}")
    return _LISTS[kind](inside[str(i)] for i in range(length))


def _leaf(member: Any) -> Any:
    """A matrix as it is, an array read, a number if it has no axes."""
    if isinstance(member, BlockSparse):
        return member
    array = np.asarray(member)
    return array if array.ndim else array.item()


def _dict_at(state: Any, name: str) -> Any:
    """The dict with the items of a list, empty where there are none."""
    for key in name.split("/") if name else ():
        inner = state.get(key) if isinstance(state, dict) else None
        if inner is None:
            _set(state, key, inner := {})
        state = inner
    return state


def _set(state: dict[str, Any], name: str, value: Any) -> None:
    *folders, last = name.split("/")
    for folder in folders:
        state = state.setdefault(folder, {}) if isinstance(state, dict) else state
    if not isinstance(state, dict) or last in state or "" in (*folders, last):
        raise ValueError(f"{name!r} is not a name, or is there twice")
    state[last] = value
