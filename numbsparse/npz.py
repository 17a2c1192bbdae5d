"""NumPy's `.npz` files: a zip of arrays, of which nothing is taken before it is checked.

What a member says of itself must agree with the zip's directory, and the directory with the file's
size, so that no damaged or doctored file asks for memory that its content does not fill. Nothing is
ever unpickled.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy

from numbsparse.dtypes import from_file
from numbsparse.files import known_as, write_whole

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MOST_HEADER = 4096  # characters, of 64 axes 1,400: a longer text is dangerous to parse
DEFLATED = 1032  # how much longer what one byte of a deflated member stands for can be
PIECE = 1 << 20
LAST = 22 + 0xFFFF  # bytes of a zip's last record, with the longest comment


def write_npz(path: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an `.npz` file; a failure or a kill leaves the file of before.

    The name is taken as it is given: no ending is added.
    """
    write_whole(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


@contextmanager
def open_npz(path: Any, what: str) -> "Iterator[dict[str, Member]]":
    """The members of an `.npz` file by name, each read when it is asked for.

    Whatever is wrong in the block under `with` is the file's fault: ValueError, "not a " + `what`.
    """
    # By its name: not the number of an open one.
    with open(os.fspath(path), "rb") as file, known_as(what, path):
        yield _members(file, os.fstat(file.fileno()).st_size)


class Member:
    """An array in the file: `shape` and `dtype` are known, `numpy.asarray` reads it."""

    def __init__(self, archive: ZipFile, info: ZipInfo):
        self._archive, self._info = archive, info
        with archive.open(info) as stream:
            length, self.shape, self._stored = _header(stream)
        self.ndim = len(self.shape)
        nbytes = prod(self.shape) * self._stored.itemsize
        if length + nbytes != info.file_size:
            raise ValueError(
                f"{info.filename!r} says {self._stored} {self.shape}, {nbytes} bytes, "
                f"and has {info.file_size - length}"
            )

    @property
    def dtype(self) -> np.dtype:
        return from_file(np.empty(0, self._stored)).dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._info.compress_type == ZIP_DEFLATED:
            with self._archive.open(self._info) as stream:  # the whole of it, in little memory
                while stream.read(PIECE):
                    pass
        with self._archive.open(self._info) as stream:
            array = from_file(np.lib.format.read_array(stream, allow_pickle=False))
            stream.read(1)  # the end, where zipfile compares the checksum
        return array if dtype is None else array.astype(dtype)


def _members(file: BinaryIO, size: int) -> dict[str, Member]:
    archive = ZipFile(file)
    infos = archive.infolist()
    for info in infos:
        name, packed = info.filename, info.compress_size
        if not name.endswith(".npy"):
            raise ValueError(f"{name!r} in it is not an array")
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise ValueError(f"{name!r} is compressed in a way that NumPy does not write")
        least = most = packed
        if info.compress_type == ZIP_DEFLATED:
            least, most = 0, DEFLATED * packed
        if not least <= info.file_size <= most:
            raise ValueError(f"{name!r} cannot hold {info.file_size} bytes in {packed}")
    if sum(info.compress_size for info in infos) > size:
        raise ValueError("its arrays overlap, or are cut off")
    if len({info.filename for info in infos}) < len(infos):
        raise ValueError("it holds an array twice")
    if (count := _count(file, size)) != min(len(infos), 0xFFFF):
        raise ValueError(f"{len(infos)} of its {count} arrays are found")
    return {info.filename.removesuffix(".npy"): Member(archive, info) for info in infos}


def _count(file: BinaryIO, size: int) -> int:
    """Members as the zip's last record counts them; zipfile reads the directory, and no count."""
    file.seek(max(0, size - LAST))
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    return int.from_bytes(tail[at + 10 : at + 12], "little")


def _header(stream: Any) -> tuple[int, tuple[int, ...], np.dtype]:
    """Bytes of the header, shape and dtype, from the beginning of an `.npy` file."""
    try:
        shape, _, dtype = HEADERS[npy.read_magic(stream)](stream, MOST_HEADER)
    except Exception as error:
        raise ValueError(f"{stream.name!r} has a header that cannot be read") from error
    if dtype.hasobject:
        raise ValueError(f"{stream.name!r} holds Python objects, which are never loaded")
    if min(shape, default=0) < 0 or bool in map(type, shape) or not dtype.itemsize:
        raise ValueError(f"{stream.name!r} has a header that makes no sense")
    return stream.tell(), shape, dtype
