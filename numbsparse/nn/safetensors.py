"""State dicts in `.safetensors` files, which torch, JAX and their tools open too.

Every array is a tensor of the file, under its name. A block-sparse matrix "w" is two: "w", its kept
blocks (n_blocks, B, B), and "w_pattern", bool (in_blocks, out_blocks): what state dicts of
`numbsparse.torch` call them. What no tensor says is JSON in the file's metadata: the nesting, the
numbers and strings, and where a matrix ends within its last blocks; with it a checksum of it all,
which the format itself lacks.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import FLOATS, as_dtype, check_kind
from numbsparse.files import known_as, write_bytes

ENDING = ".safetensors"
PATTERN = "_pattern"  # of the name of a matrix: of its pattern
KEY = "numbsparse"  # of the metadata: one alone, because the package writes several in any order
START = "crc32 "  # of its text; a key that was damaged is known by it
TENSOR, MATRIX, VALUE = "tensor", "matrix", "value"  # what a member is
DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
}  # fmt: skip


def is_safetensors(path: Any) -> bool:
    """Whether a file's name says that it is one."""
    check_kind("path", path, str | os.PathLike, "a string or a Path")
    return Path(path).suffix == ENDING


def write_tensors(path: Any, members: Mapping[str, Any]) -> None:
    """Write arrays, matrices, numbers and strings by name: whole, or not at all.

    Raises TypeError for an array whose dtype the format lacks, and for a name that is another
    matrix's pattern.
    """
    package = _package()
    tensors: dict[str, np.ndarray] = {}
    described: dict[str, Any] = {}
    for name, member in members.items():
        if isinstance(member, BlockSparse):
            given = {name: np.asarray(member.to("cpu").data), name + PATTERN: member.layout.pattern}
            described[name] = {MATRIX: member.shape}
        elif isinstance(member, np.ndarray) and not _is_mark(name):
            given, described[name] = {name: member}, TENSOR
        else:
            given, described[name] = {}, {VALUE: _plain(name, np.asarray(member))}
        if taken := {*given} & {"__metadata__", *tensors}:
            raise TypeError(f"state has two things that a file calls {taken.pop()!r}")
        tensors |= {key: _storable(key, array) for key, array in given.items()}
    text = json.dumps(described)
    metadata = f"{START}{_checksum(text, tensors)} {text}"
    write_bytes(path, package.numpy.save(tensors, {KEY: metadata}))


@contextmanager
def open_tensors(path: Any, what: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """What `write_tensors` wrote, by name, and whether it did.

    Of a file of others every tensor comes as an array, and one with its "_pattern" beside it as a
    matrix. Whatever is wrong in the block under `with` is the file's fault: ValueError.
    """
    package = _package()
    content = Path(path).read_bytes()
    with known_as(what, path):
        tensors = {name: _array(name, stored) for name, stored in package.deserialize(content)}
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        ours = (value for key, value in metadata.items() if key == KEY or value.startswith(START))
        if (own := next(ours, None)) is None:
            yield _of_others(tensors), False
            return
        checksum, _, text = own.removeprefix(START).partition(" ")
        if checksum != _checksum(text, tensors):
            raise ValueError("its checksum is that of other contents")
        members = json.loads(text).items()
        yield {name: _member(name, says, tensors) for name, says in members}, True


def _package() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            f"{ENDING} files need the package safetensors: pip install 'numbsparse[safetensors]'"
        ) from None
    return safetensors


def _is_mark(name: str) -> bool:
    """Whether the name says what stands there, as that of an empty dict or of a list does."""
    return name.endswith("/") or "@" in name


def _storable(name: str, array: np.ndarray) -> np.ndarray:
    """The array as the package takes it, which does not look: C-contiguous, little-endian."""
    if array.dtype.name not in DTYPES.values():
        raise _lacking(name, array.dtype)
    native = array.dtype.newbyteorder("=") if array.dtype.byteorder == ">" else array.dtype
    return np.asarray(array, native, order="C")


def _plain(name: str, value: np.ndarray) -> Any:
    """A number, a string or an empty mark, as JSON has them."""
    plain = value.tolist()
    if not isinstance(plain, bool | int | float | str | list):
        raise _lacking(name, value.dtype)
    return plain


def _lacking(name: str, dtype: np.dtype) -> TypeError:
    where = f"a {ENDING} file, which has no {dtype}"
    return TypeError(f"state[{name!r}] cannot be saved in {where}: use .npz")


def _array(name: str, stored: Any) -> np.ndarray:
    if stored["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} holds {stored['dtype']}, which NumPy lacks")
    dtype = as_dtype(DTYPES[stored["dtype"]])
    items = np.frombuffer(bytearray(stored["data"]), np.uint8)  # writeable, unlike bytes
    if dtype.kind == "b" and items.max(initial=0) > 1:
        raise ValueError(f"{name!r} holds booleans that are neither 0 nor 1")
    return items.view(dtype).reshape(stored["shape"])


def _checksum(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Of the description, and of each tensor's name, dtype, shape and values."""
    crc = crc32(text.encode())
    for name in sorted(tensors):
        array = tensors[name]
        crc = crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = crc32(array.reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def _member(name: str, says: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    if says == TENSOR:
        return tensors[name]
    ((kind, value),) = says.items()
    if kind == VALUE:
        return np.asarray(value)
    return BlockSparse(tensors[name], tensors[name + PATTERN], shape=tuple(value))


def _of_others(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, and matrices that end with their last blocks."""
    patterns = {
        name: tensors[name + PATTERN]
        for name, values in tensors.items()
        if name + PATTERN in tensors and _is_pattern_of(tensors[name + PATTERN], values)
    }
    matrices = {name: BlockSparse(tensors[name], pattern) for name, pattern in patterns.items()}
    within = {name + PATTERN for name in patterns}
    return {name: matrices.get(name, a) for name, a in tensors.items() if name not in within}


def _is_pattern_of(pattern: np.ndarray, values: np.ndarray) -> bool:
    if pattern.dtype.kind != "b" or pattern.ndim != 2 or not pattern.size or values.ndim != 3:
        return False
    size = max(values.shape[2], 1)
    return values.shape == (pattern.sum(), size, size) and str(values.dtype) in FLOATS
