"""Doctored files: ValueError, which names the file, and no more memory than they fill."""

import pickle
import struct
import zipfile

import numpy as np
import pytest
from npz_helpers import MATRIX, Trap, matrix, npy, npy_of, refused, same, zipped

import numbsparse as ns


def state(*members):
    return zipped([(name, npy(np.zeros(2))) for name in members])


def sized(name, size):
    """The matrix's file, whose directory says another size of a member."""
    content = bytearray(matrix(compression=zipfile.ZIP_DEFLATED))
    entry = content.index(b"PK\1\2", content.index(b"PK\1\2") - 1)
    while not content[entry + 46 :].startswith(name.encode()):
        entry = content.index(b"PK\1\2", entry + 1)
    content[entry + 24 : entry + 28] = struct.pack("<I", size)
    return bytes(content)


def swallowed():
    """The matrix's file, whose last directory entry is the comment of the one before."""
    content = bytearray(matrix())
    last = content.rindex(b"PK\1\2")
    before = content.rindex(b"PK\1\2", 0, last)
    content[before + 32 : before + 34] = struct.pack("<H", content.rindex(b"PK\5\6") - last)
    return bytes(content)


def overlapping():
    """Many members, all of them the first one's bytes."""
    content = matrix()
    start = content.index(b"PK\1\2")
    entry = content[start : start + 46 + len("data.npy")]
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 30, 30, 30 * len(entry), start, 0)
    return content[:start] + 30 * entry + end


ZEROS = np.zeros(1 << 20)  # 8 MiB, deflated to 8 KiB
BLOCKS = ZEROS.reshape(-1, 4, 4)
OBJECTS = pickle.dumps(Trap())

# What is changed, and what the error names.
MATRICES = {
    "more columns than int32 counts": ({"shape": [8, 1 << 50]}, "shape takes"),
    "a negative shape": ({"shape": [-7, 12]}, "shape"),
    "no features": ({"shape": [0, 0]}, "shape"),
    "a shape beyond int64": ({"shape": np.array([7, 2**64 - 1], np.uint64)}, "shape"),
    "a shape of floats": ({"shape": [7.0, 12.0]}, "shape"),
    "three features": ({"shape": [7, 12, 1]}, "shape"),
    "a shape of more blocks": ({"shape": [70, 12]}, "indptr"),
    "indptr falls": ({"indptr": np.array([0, 4, 3], np.uint32)}, "indptr"),
    "indptr falls far": ({"indptr": np.array([0, 2_000_000_000, 3], np.uint32)}, "indptr"),
    "indptr starts late": ({"indptr": [1, 2, 3]}, "indptr"),
    "indptr of floats": ({"indptr": [0, 1.5, 3]}, "indptr"),
    "indptr of booleans": ({"indptr": [False, True, True]}, "indptr"),
    "indptr beyond int64": ({"indptr": np.array([0, 2, 2**64 - 1], np.uint64)}, "indptr"),
    "indices of floats": ({"indices": [0.5, 2, 1]}, "indices"),
    "indices outside": ({"indices": [0, 3, 1]}, "indices"),
    "negative indices": ({"indices": [-1, 2, 1]}, "indices"),
    "indices fall": ({"indices": np.array([2, 0, 1], np.uint32)}, "indices"),
    "indices in rows": ({"indices": [[0, 2, 1]]}, "indices"),
    "more indices": ({"indices": [0, 2, 1, 0]}, "indices"),
    "blocks of nothing": ({"data": np.zeros((3, 0, 0))}, "data"),
    "one block less": ({"data": MATRIX["data"][:2]}, "indices"),
    "blocks not square": ({"data": np.zeros((3, 4, 2))}, "data"),
    "data of integers": ({"data": np.zeros((3, 4, 4), np.int32)}, "data takes float16"),
    "data of another byte order": ({"data": MATRIX["data"].astype(">f4")}, "data takes float16"),
    "no indptr": ({"indptr": None}, "indptr"),
    "csr": ({"format": np.array(b"csr")}, "format takes bsr"),
    "two formats": ({"format": [b"bsr", b"bsr"]}, "format takes bsr"),
    "a bomb of blocks": ({"data": BLOCKS}, "indices"),
    "blocks in one place": ({"data": BLOCKS, "indices": np.zeros(len(BLOCKS), "u1")}, "indptr"),
    "a bomb of lines": ({"indptr": ZEROS.astype(np.int64)}, "indptr"),
    "a bomb of formats": ({"format": ZEROS}, "format"),
}
ZIPS = {
    "a directory that says far more": (sized("data.npy", 1 << 30), "data.npy"),
    "a little more": (sized("data.npy", 1 << 12), "data.npy"),
    "less": (sized("data.npy", 100), "data.npy"),
    "members in one place": (overlapping(), "overlap"),
    "a member left out": (swallowed(), "4 of its 5 arrays"),
}
HEADERS = {
    "more than there is": npy(np.zeros(3), shape=(2_000_000_000,)),
    "less than there is": npy(np.zeros(3), shape=(2,)),
    "a negative shape": npy(np.zeros(3), shape=(-3, -1)),
    "nothing of much": npy(np.zeros(0), shape=(0, 1 << 62, 1 << 62)),
    "a shape of floats": npy(np.zeros(3), shape=(3.0,)),
    "a shape of truths": npy(np.zeros(1), shape=(True,)),
    "a list": npy(np.zeros(3), shape=[3]),
    "another order": npy(np.zeros(3), fortran_order=2),
    "something more": npy(np.zeros(3), more=1),
    "objects": npy_of(
        repr({"descr": "|O", "fortran_order": False, "shape": (1,)}).encode(), OBJECTS
    ),
    "objects within": npy(np.zeros(1), descr=[("a", "|O")]),
    "no dtype": npy(np.zeros(3), descr="no dtype"),
    "dtypes without end": npy(np.zeros(3), descr=3),
    "no bytes": npy(np.zeros(0), descr="|V0", shape=(1 << 40,)),
    "no letters": npy(np.zeros(0), descr="<U0", shape=(1 << 40,)),
    "no header": npy_of(b"", bytes(24)),
    "not a dict": npy_of(b"[1, 2, 3]", bytes(24)),
    "half a dict": npy_of(b"{'descr': '<f8', ", bytes(24)),
    "code": npy_of(b"__import__('os')", bytes(24)),
    "brackets": npy_of(b"[" * 9000, b""),
    "signs": npy_of(b"-" * 9000 + b"1", b""),
    "a long header": npy_of(b" " * 60000, b""),
    "a longer header": npy_of(b" " * 20000, b"", b"\2\0"),
    "a header without end": b"\x93NUMPY\2\0\xff\xff\xff\xff{",
    "another version": npy_of(b"{}", b"", b"\4\0"),
    "letters that are none": npy(np.full((), 0x110000, np.uint32).view("<U1"), shape=()),
    "no array": b"text",
    "nothing": b"",
}
STATES = {
    "a name twice": state("a", "a"),
    "a value and a dict": state("a", "a/b"),
    "a dict and a value": state("a/b", "a"),
    "an empty dict and a value": state("a", "a/"),
    "a matrix and a value": state("a", "a@data"),
    "a value and a matrix": state("a@data", "a"),
    "a matrix and a dict": zipped(
        [*((f"a@{name}", npy(a)) for name, a in MATRIX.items()), ("a/b", npy(np.zeros(2)))]
    ),
    "half a matrix": state("a@data"),
    "a list and a value": zipped({"a": npy(np.zeros(2)), "a@list": npy(np.array(0))}),
    "a value and a list": zipped({"a@list": npy(np.array(0)), "a": npy(np.zeros(2))}),
    "a list in a value": zipped({"a": npy(np.zeros(2)), "a/b@list": npy(np.array(0))}),
    "a list of too many": zipped({"a/0": npy(np.zeros(2)), "a@list": npy(np.array(2))}),
    "a list of too few": zipped({"a/0": npy(np.zeros(2)), "a@list": npy(np.array(0))}),
    "a list of others": zipped({"a/1": npy(np.zeros(2)), "a@list": npy(np.array(1))}),
    "a list of very many": zipped({"a@list": npy(np.array(2**40))}),
    "a list of halves": zipped({"a/0": npy(np.zeros(2)), "a@list": npy(np.array(1.0))}),
    "a list without number": zipped({"a@list": npy(np.zeros(0, int))}),
    "a list that is a tuple": zipped({"a@list": npy(np.array(0)), "a@tuple": npy(np.array(0))}),
    "a list and a matrix": state("a@list", "a@data"),
    "no whole number": zipped({"a@int": npy(np.array("ten"))}),
    "numbers": zipped({"a@int": npy(np.array(["1", "2"]))}),
    "none and a value": state("a@none", "a"),
    "no name": state(""),
    "no name within": state("a//b"),
    "deep": state("a/" * 1500 + "a"),
    "pickles": pickle.dumps(Trap()),
    "an array alone": npy(np.zeros(3)),
    "text": b"PK is no zip",
    "a zip of text": zipped({"a": "text"}).replace(b"a.npy", b"a.txt"),
    "bz2": zipped({"a": npy(np.zeros(3))}, zipfile.ZIP_BZIP2),
    "lzma": zipped({"a": npy(np.zeros(3))}, zipfile.ZIP_LZMA),
    "a password": zipped({"a": npy(np.zeros(3))}).replace(
        b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"
    ),
    **{f"header: {name}": zipped({"a": content}) for name, content in HEADERS.items()},
    **{
        f"deflated header: {name}": zipped({"a": content}, zipfile.ZIP_DEFLATED)
        for name, content in HEADERS.items()
    },
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=str)
@pytest.mark.parametrize("case", MATRICES)
def test_no_matrix(tmp_path, case, compression):
    changes, says = MATRICES[case]
    for prefix, load in (("", ns.BlockSparse.load), ("model/w@", ns.load)):
        content = matrix(prefix, compression, **changes)
        _, error = refused(load, tmp_path / "w.npz", content)
        assert error is not None
        assert says in str(error)


@pytest.mark.parametrize("case", ZIPS)
def test_no_zip(tmp_path, case):
    content, says = ZIPS[case]
    _, error = refused(ns.BlockSparse.load, tmp_path / "w.npz", content)
    assert error is not None
    assert says in str(error)


@pytest.mark.parametrize("case", STATES)
def test_no_state(tmp_path, case):
    _, error = refused(ns.load, tmp_path / "state.npz", STATES[case])
    assert error is not None


def test_many_empty_columns_take_no_memory(tmp_path):
    content = matrix(shape=np.array([7, 2_000_000_000]))
    w, error = refused(ns.BlockSparse.load, tmp_path / "w.npz", content)
    assert error is None
    assert repr(w).startswith("BlockSparse(7 x 2000000000, float32, 3 blocks of 4 x 4")


def test_files_of_others_are_read(tmp_path):
    w = ns.BlockSparse.from_arrays(MATRIX)
    (tmp_path / "deflated.npz").write_bytes(matrix(compression=zipfile.ZIP_DEFLATED))
    np.savez_compressed(tmp_path / "numpy.npz", **MATRIX)
    np.savez(tmp_path / "older.npz", **{k: a for k, a in MATRIX.items() if k != "format"})
    for path in tmp_path.iterdir():
        same(ns.BlockSparse.load(path), w)
