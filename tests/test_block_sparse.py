"""BlockSparse: values with a layout, in and out of SciPy."""

import errno
import gc
import io
import pickle
import re

import numpy as np
import pytest
import scipy.sparse
from conftest import HALVES, host, needs_bfloat16

import numbsparse as ns
from numbsparse import files
from numbsparse.dtypes import as_dtype


@pytest.fixture
def w(rng):
    layout = ns.Layout(rng.random((5, 7)) < 0.4)
    return ns.BlockSparse(rng.standard_normal((layout.n_blocks, 4, 4)), layout)


def edged(rng, shape=(18, 27), dtype=np.float64):
    """A matrix whose last blocks reach over the edge."""
    layout = ns.Layout(rng.random((5, 7)) < 0.6)
    values = rng.standard_normal((layout.n_blocks, 4, 4)).astype(dtype)
    return ns.BlockSparse(values, layout, shape=shape)


def test_speaks_scipy(w):
    a = w.to_scipy()
    assert isinstance(a, scipy.sparse.bsr_array)
    assert (a.shape, a.dtype, a.nnz) == (w.shape, w.dtype, w.nnz)
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(a, name), getattr(w, name))
    np.testing.assert_array_equal(a.toarray(), w.toarray())
    assert np.shares_memory(a.data, w.data)


def test_from_scipy_shares_canonical_values(w):
    a = w.to_scipy()
    again = ns.BlockSparse.from_scipy(a)
    assert again.data is a.data
    assert again.layout == w.layout


@pytest.mark.parametrize("fault", ["unsorted", "duplicates", "both", "stale flag", "spare room"])
def test_from_scipy_makes_canonical(rng, fault):
    indptr = np.array([0, 3, 4])
    indices = {"duplicates": [0, 0, 2, 1], "unsorted": [2, 0, 1, 1], "stale flag": [2, 0, 1, 1]}
    indices = np.array(indices.get(fault, [2, 0, 2, 1]))
    data = rng.standard_normal((4, 4, 4))
    if fault == "spare room":
        indices, data = np.append([0, 1, 2, 1], 0), rng.standard_normal((5, 4, 4))
    a = scipy.sparse.bsr_array((data, indices, indptr), shape=(8, 12))
    if fault == "stale flag":
        a.has_sorted_indices = True
    dense = np.zeros((2, 4, 3, 4))
    for b, (row, column) in enumerate(zip([0, 0, 0, 1], indices, strict=False)):
        dense[row, :, column] += data[b]
    before = a.indices.copy()
    w = ns.BlockSparse.from_scipy(a)
    np.testing.assert_allclose(w.toarray(), dense.reshape(8, 12), rtol=1e-15)
    np.testing.assert_array_equal(a.indices, before)


@pytest.mark.parametrize(
    ("a", "error", "says"),
    [
        (scipy.sparse.csr_array(np.eye(4)), TypeError, "tobsr"),
        (np.eye(4), TypeError, "BSR"),
        (scipy.sparse.bsr_array(np.eye(4), blocksize=(2, 4)), ValueError, "square"),
        (scipy.sparse.bsr_array(np.eye(4, dtype=int), blocksize=(2, 2)), TypeError, "int64"),
    ],
    ids=["csr", "dense", "oblong", "integers"],
)
def test_from_scipy_refuses(a, error, says):
    with pytest.raises(error, match=says):
        ns.BlockSparse.from_scipy(a)


@pytest.mark.parametrize("indptr", [[0, 3, 2], [0, 2, 9], [1, 2, 3]], ids=str)
def test_from_scipy_refuses_a_broken_indptr(indptr):
    a = scipy.sparse.bsr_array((np.ones((3, 4, 4)), [1, 0, 0], [0, 2, 3]), shape=(8, 8))
    a.indptr = np.array(indptr, np.int32)
    with pytest.raises(ValueError, match="indptr takes rising numbers from 0 to the 3 blocks"):
        ns.BlockSparse.from_scipy(a)


def test_to_scipy_refuses(rng):
    for dtype in HALVES:
        with pytest.raises(TypeError, match=f'SciPy takes no {dtype}: .*astype\\("float32"\\)'):
            edged(rng, (20, 28), as_dtype(dtype)).to_scipy()
    with pytest.raises(ValueError, match=r"multiples of 4.*18, 27"):
        edged(rng).to_scipy()


@pytest.mark.parametrize("shape", [(20, 28), (18, 27), (17, 25)], ids=str)
def test_dense_round_trip(rng, shape):
    w = edged(rng, shape)
    dense = w.toarray()
    assert dense.shape == shape
    again = ns.BlockSparse.from_dense(dense, w.layout, block_size=4)
    np.testing.assert_array_equal(again.toarray(), dense)


@pytest.mark.parametrize("shape", [(20, 28), (18, 27)], ids=str)
def test_transposed_is_a_view(rng, shape):
    w = edged(rng, shape)
    np.testing.assert_array_equal(w.T.toarray(), w.toarray().T)
    assert w.T.shape == shape[::-1]
    assert w.T.values is w.values
    assert w.T.T.data is w.data
    copied = ns.BlockSparse(w.T.data, w.T.layout, shape=w.T.shape)
    np.testing.assert_array_equal(copied.toarray(), w.T.toarray())


def test_transposed_data_on_device(w, put):
    np.testing.assert_array_equal(host(put(w).T.data), w.T.data)


def test_a_matrix_keeps_its_shape(w):
    """Of another one a product would read beyond x."""
    with pytest.raises(AttributeError, match="shape"):  # in Python's words, which vary
        w.shape = (4, 4)


@pytest.mark.parametrize("shape", [(2, 4, 4), (4, 4, 4), (3, 8, 8), (3, 4), (48,)])
def test_values_of_another_shape_are_refused(shape, put):
    """A product would read beyond them."""
    old, new = np.ones((3, 4, 4), np.float32), np.full((3, 4, 4), 2, np.float32)
    w = put(ns.BlockSparse(old, [[1, 1], [0, 1]]))
    other = put(ns.BlockSparse(new, w.layout)).values
    takes = "(3, 4, 4) here" if len(shape) == 3 else "the shape (n_blocks, B, B)"
    with pytest.raises(ValueError, match=re.escape(f"values takes {takes}, got {shape}")):
        w.values = np.ones(shape, np.float32)
    for bad, got in (("int64", "int64"), ("complex64", "complex64"), ("U1", "one of <U1")):
        with pytest.raises(TypeError, match=f"^values takes .*, got {got}$"):
            w.values = np.ones((3, 4, 4), bad)
    with pytest.raises(TypeError, match=r"^values takes an array of numbers, got list"):
        w.values = [[1], [1, 2]]
    np.testing.assert_array_equal(host(w.values), old)
    w.values = other
    np.testing.assert_array_equal(host(w.values), new)


def test_place(w, put, place):
    moved = put(w.astype("float32"))
    assert moved.place == place
    assert moved.to(place) is moved
    assert (moved.shape, moved.dtype, moved.n_blocks) == (w.shape, np.float32, w.n_blocks)
    np.testing.assert_array_equal(moved.toarray(), w.toarray().astype("float32"))
    copied = moved.copy()
    assert copied.place == place
    assert copied.values is not moved.values


@pytest.mark.parametrize("shape", [(20, 28), (18, 27)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_save_and_pickle(rng, tmp_path, shape, transposed):
    w = edged(rng, shape, np.float32)
    w = w.T if transposed else w
    w.save(tmp_path / "w.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["w.npz"]
    for again in (ns.BlockSparse.load(tmp_path / "w.npz"), pickle.loads(pickle.dumps(w))):
        assert (again.shape, again.dtype, again.layout) == (w.shape, w.dtype, w.layout)
        np.testing.assert_array_equal(again.toarray(), w.toarray())
    assert again.is_transposed == transposed  # the order of its values, as they were
    np.testing.assert_array_equal(again.values, w.values)
    with np.load(tmp_path / "w.npz") as file:
        np.testing.assert_array_equal(file["indices"], w.indices)


@needs_bfloat16
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_bfloat16_everywhere(rng, tmp_path, put, place, transposed):
    exact = edged(rng, dtype=np.float32)
    w = put(exact).astype("bfloat16")
    assert (w.dtype, w.place) == (as_dtype("bfloat16"), place)
    assert repr(w).startswith("BlockSparse(18 x 27, bfloat16, ")
    w, exact = (w.T, exact.T) if transposed else (w, exact)
    rounded = exact.toarray().astype(as_dtype("bfloat16"))
    w.save(tmp_path / "w.npz")
    ns.save(tmp_path / "state.npz", {"w": w.to("cpu"), "bias": rounded[0], "step": 3})
    state = ns.load(tmp_path / "state.npz")
    assert state["bias"].dtype == w.dtype
    np.testing.assert_array_equal(state["bias"], rounded[0])
    copies = (w.copy(), w.to("cpu").to(place), pickle.loads(pickle.dumps(w)))
    for again in (w, *copies, ns.BlockSparse.load(tmp_path / "w.npz"), state["w"]):
        assert (again.shape, again.dtype, again.layout) == (w.shape, w.dtype, w.layout)
        np.testing.assert_array_equal(again.toarray(), rounded)
    wide = w.astype("float32")
    np.testing.assert_array_equal(wide.toarray(), rounded.astype(np.float32))
    dense = ns.BlockSparse.from_dense(rounded, w.layout, block_size=4)
    np.testing.assert_array_equal(dense.toarray(), rounded)
    with np.load(tmp_path / "w.npz") as file:  # two bytes a value, for those without ml_dtypes
        assert file["data"].dtype == "V2"


def test_files_are_scipys(w, tmp_path):
    w.save(tmp_path / "ours.npz")
    theirs = scipy.sparse.load_npz(tmp_path / "ours.npz")
    np.testing.assert_array_equal(theirs.toarray(), w.toarray())
    scipy.sparse.save_npz(tmp_path / "theirs.npz", w.to_scipy())
    again = ns.BlockSparse.load(tmp_path / "theirs.npz")
    np.testing.assert_array_equal(again.toarray(), w.toarray())


def test_a_failed_save_leaves_the_old_file(w, tmp_path, monkeypatch):
    path = tmp_path / "w.npz"
    w.save(path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        w.copy().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["w.npz"]
    np.testing.assert_array_equal(ns.BlockSparse.load(path).toarray(), w.toarray())


def test_load_refuses_another_file(tmp_path):
    np.savez(tmp_path / "a.npz", data=np.zeros(3))
    with pytest.raises(ValueError, match="indices"):
        ns.BlockSparse.load(tmp_path / "a.npz")
    with open(tmp_path / "a.npz") as file, pytest.raises(TypeError, match="PathLike"):
        ns.BlockSparse.load(file.fileno())  # which it would close


@pytest.mark.parametrize("whole", [0.0, 0.5, 0.99])
def test_load_refuses_what_is_cut_short(w, tmp_path, whole):
    file = tmp_path / "w.npz"
    w.save(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(whole * len(content))])
    with pytest.raises(ValueError, match=r"w\.npz is not a block-sparse matrix"):
        ns.BlockSparse.load(file)
    file.write_bytes(content.replace(content[200:210], bytes(10), 1))
    with pytest.raises(ValueError, match=r"w\.npz is not a block-sparse matrix"):
        ns.BlockSparse.load(file)


def test_load_refuses_a_shape_that_is_none(tmp_path):
    file = tmp_path / "w.npz"
    np.savez(file, data=np.ones((1, 4, 4)), indices=[0], indptr=[0, 1], shape=4)
    with pytest.raises(ValueError, match="shape two numbers, got"):
        ns.BlockSparse.load(file)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <function ZipFile")  # by Python 3.10
def test_a_full_disk_is_named(w, tmp_path, monkeypatch):
    """Writing fails after the first bytes, as on a full disk, while zipfile has the file open."""
    (tmp_path / "w.npz").write_bytes(b"as it was")

    class Full(io.FileIO):
        def write(self, data):
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(files, "open", lambda path, mode: Full(path, "w"), raising=False)
    for save in (w.save, lambda path: ns.save(path, {"w": w})):
        with pytest.raises(OSError, match=r"No space left.*w\.npz'$"):
            save(tmp_path / "w.npz")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"as it was"]
    gc.collect()  # an open ZipFile, of which that warns


def test_repr_shows_shape_blocks_and_density(w):
    assert repr(w) == (
        f"BlockSparse(20 x 28, float64, {w.n_blocks} blocks of 4 x 4, density {w.density:.3g})"
    )


LAYOUT = ns.Layout([[1, 0], [1, 1]])


@pytest.mark.parametrize(
    ("data", "layout", "shape", "error", "says"),
    [
        (np.zeros((2, 4, 4)), LAYOUT, None, ValueError, "2 blocks.*3 blocks"),
        (np.zeros((3, 4, 8)), LAYOUT, None, ValueError, r"\(3, 4, 8\)"),
        (np.zeros((3, 4)), LAYOUT, None, ValueError, r"\(3, 4\)"),
        (np.zeros((3, 4, 4), int), LAYOUT, None, TypeError, "int64"),
        (np.zeros((3, 4, 4)), LAYOUT, (9, 8), ValueError, r"\(9, 8\)"),
        (np.zeros((3, 4, 4)), LAYOUT, (8, 4), ValueError, r"\(8, 4\)"),
        (np.zeros((3, 4, 4)), [[np.nan, 1]], None, ValueError, "layout"),
        ("text", LAYOUT, None, TypeError, "data"),
    ],
    ids=["blocks", "oblong", "axes", "integers", "too wide", "a block less", "NaN", "text"],
)
def test_refuses(data, layout, shape, error, says):
    with pytest.raises(error, match=says):
        ns.BlockSparse(data, layout, shape=shape)


def test_to_refuses_another_place(w):
    with pytest.raises(ValueError, match="gpu"):
        w.to("gpu")


def test_a_file_is_not_named_after_another_format(tmp_path):
    w = ns.BlockSparse(np.ones((1, 4, 4)), [[1]])
    with pytest.raises(
        ValueError, match=r"w.safetensors takes numbsparse\.save\(path, {\"w\": w}\)"
    ):
        w.save(tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
