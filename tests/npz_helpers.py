"""`.npz` files built byte by byte, and what loading one may do."""

import io
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np

import numbsparse as ns

MATRIX = {
    "data": np.arange(48, dtype=np.float32).reshape(3, 4, 4),
    "indices": np.array([0, 2, 1], np.int32),
    "indptr": np.array([0, 2, 3], np.int32),
    "shape": np.array([7, 12]),
    "format": np.array(b"bsr"),
}
STATE = {
    "model": {"weight": ns.BlockSparse.from_arrays(MATRIX), "bias": np.arange(9.0)},
    "none": {},
    "step": 3,
    "note": "ä",
    "lists": [1.5, [{"left": np.arange(2), "right": ()}, None], []],
    "large": 2**100,
}
unpickled = []


def trip():
    unpickled.append(1)


class Trap:
    """Unpickled, it is noticed."""

    def __reduce__(self):
        return trip, ()


def npy(array, **header):
    """The bytes of an `.npy` file; `header` changes what it says of itself."""
    says = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    return npy_of(repr(says).encode(), array.tobytes())


def npy_of(header, content, version=b"\1\0"):
    width = "<H" if version == b"\1\0" else "<I"
    return b"\x93NUMPY" + version + struct.pack(width, len(header)) + header + content


def zipped(members, compression=zipfile.ZIP_STORED):
    """A zip of (name, content), pairs or a dict."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of names that stand twice
        for name, content in members.items() if isinstance(members, dict) else members:
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def matrix(prefix="", compression=zipfile.ZIP_STORED, **changes):
    """The matrix's file, with other arrays or without."""
    members = MATRIX | changes
    arrays = {name: npy(np.asarray(array)) for name, array in members.items() if array is not None}
    return zipped({prefix + name: content for name, content in arrays.items()}, compression)


def refused(load, path, content):
    """What loading raises: ValueError alone, without a pickle run or much memory taken."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        loaded, error = load(path), None
    except ValueError as raised:
        loaded, error = None, raised
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 8 * len(content) + (1 << 20)
    assert not unpickled
    if error is not None:
        assert f"{path} is not a " in str(error)
        assert "pickle" not in str(error).replace(str(path), "")
    return loaded, error


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, ns.BlockSparse):
        assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        np.testing.assert_array_equal(a.values, b.values)
    elif isinstance(a, str):  # of which NumPy compares no zeros at the end
        assert a == b
    else:
        np.testing.assert_array_equal(a, b)
