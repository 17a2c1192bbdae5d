"""BlockSparse: a matrix that is zero outside its kept blocks, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import scipy.sparse

from numbsparse.blocks import Blocks, check_data, checked_shape
from numbsparse.device import DeviceArray, as_device_array, is_device_operand, moved, to_device
from numbsparse.dtypes import as_array, float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.npz import open_npz, write_npz
from numbsparse.patterns.checks import integer


class Array(Protocol):
    """A dense array of any library, to type checkers; our Tensor is not one."""

    @property
    def shape(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


A = TypeVar("A", bound=Array)


class BlockSparse(Blocks):
    """A block-sparse matrix `w` of shape (in_features, out_features).

    Parameters
    ----------
    data : array of float16, bfloat16, float32 or float64, (n_blocks, B, B)
        The values of the kept blocks, in the order of SciPy's BSR format: block row by block row.
        A NumPy array, or a GPU array of numbsparse, torch, CuPy, JAX or Numba. Never copied, but
        for a NumPy array that is not C-contiguous.
    layout : Layout, or a pattern (array of bool, (in_blocks, out_blocks))
        Which blocks are kept.
    shape : (in_features, out_features), optional
        If the features are not multiples of B: the last block row and block column extend over the
        edge, and their values there are never read. Default: (in_blocks * B, out_blocks * B).

    Attributes
    ----------
    data, indices, indptr, shape, dtype, nnz, ndim : as in `scipy.sparse.bsr_array`
    layout, n_blocks, density, block_size : what is kept
    place : "cpu" or "cuda"; `device` says which GPU, "cuda:0"
    T : the transposed matrix, a view

    Raises
    ------
    TypeError
        If the dtype is none of these.
    ValueError
        If `data`, `layout` and `shape` disagree.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layout = ns.Layout([[1, 0], [1, 1]])
    >>> w = ns.BlockSparse(np.ones((3, 4, 4), np.float32), layout)
    >>> w
    BlockSparse(8 x 8, float32, 3 blocks of 4 x 4, density 0.75)
    >>> x = np.ones((1, 8), np.float32)
    >>> x @ w
    array([[8., 8., 8., 8., 4., 4., 4., 4.]], dtype=float32)

    Arithmetic is SciPy's: `w + v`, `w - v`, `w * v` value by value, `2 * w`, `w / 2`, `-w`,
    `abs(w)`, `w.sum(axis)`, `w.diagonal(k)`. `w[rows, columns]` takes slices of whole blocks;
    `w.remap(layout)` is w in another layout, `w.block_norms("l2")` a number a block.

    >>> (w - 3 * w).sum(axis=1), w.block_norms("l1")
    (array([ -8.,  -8.,  -8.,  -8., -16., -16., -16., -16.], dtype=float32), array([16., 16., 16.]))

    `w == v` and `w != v`, of a number too, are SciPy's sparse matrices of booleans, on the host.
    Where both are zero `==` is true, so nearly everywhere: SciPy warns, and `!=` is what to ask.

    >>> v = w.copy()
    >>> v.data[0, 0, 0] = 2
    >>> (w != v).nnz, (w != w.copy()).nnz
    (1, 0)
    """

    if TYPE_CHECKING:
        values: Any  # the blocks as they are stored; the property below

        # added by numbsparse.ops.matmul, the package that multiplies
        def __matmul__(self, x: A) -> A: ...
        def __rmatmul__(self, x: A) -> A: ...

        # added by numbsparse.ops.algebra
        def __add__(self, other: BlockSparse | float) -> BlockSparse: ...
        def __radd__(self, other: float) -> BlockSparse: ...
        def __sub__(self, other: BlockSparse | float) -> BlockSparse: ...
        def __rsub__(self, other: float) -> BlockSparse: ...
        def __mul__(self, other: BlockSparse | float) -> BlockSparse: ...
        def __rmul__(self, other: float) -> BlockSparse: ...
        def __truediv__(self, other: float) -> BlockSparse: ...
        def __neg__(self) -> BlockSparse: ...
        def __abs__(self) -> BlockSparse: ...
        def __getitem__(self, key: slice | tuple[slice, slice]) -> BlockSparse: ...
        def block_norms(self, by: str = "l2", tap_features: int | None = None) -> Any: ...
        def diagonal(self, k: int = 0) -> Any: ...
        def remap(self, layout: Any, fresh: BlockSparse | None = None) -> BlockSparse: ...
        def sum(self, axis: int | None = None, *, out: None = None) -> Any: ...

    def __init__(self, data: Any, layout: Any, *, shape: tuple[int, int] | None = None):
        layout = as_layout(layout)
        self._values = data = _as_values(data, "data")
        if data.shape[0] != layout.n_blocks:
            raise ValueError(
                f"data has {data.shape[0]} blocks, but layout keeps {layout.n_blocks} blocks"
            )
        self.stored_layout, self.is_transposed = layout, False
        self._shape = checked_shape("shape", shape, layout.shape, data.shape[1])

    def _store(self, values: Any) -> None:
        """`w.values = values`: others of the shape that is there, as the constructor takes them."""
        new = _as_values(values, "values")
        if new.shape != self._values.shape:
            raise ValueError(f"values takes {self._values.shape} here, got {new.shape}")
        self._values = new

    if not TYPE_CHECKING:  # read by each product: in C
        values = property(attrgetter("_values"), _store)
        shape = property(attrgetter("_shape"))  # of another one a product would read beyond x

    @property
    def data(self) -> np.ndarray | DeviceArray:
        """The blocks in SciPy's order; of a transposed view, a copy."""
        if not self.is_transposed:
            return self.values
        order = self.stored_layout.index.columns.blocks
        if isinstance(self.values, DeviceArray):
            return to_device(self.values.numpy()[order].transpose(0, 2, 1), self.device)
        return np.ascontiguousarray(self.values[order].transpose(0, 2, 1))

    @property
    def indptr(self) -> np.ndarray:
        return self.layout.indptr

    @property
    def indices(self) -> np.ndarray:
        return self.layout.indices

    @property
    def n_blocks(self) -> int:
        return self.values.shape[0]

    @property
    def nnz(self) -> int:
        """Stored values, zeros among them counted."""
        return self.values.size

    @property
    def density(self) -> float:
        return self.stored_layout.density

    @property
    def place(self) -> str:
        return "cuda" if isinstance(self.values, DeviceArray) else "cpu"

    @property
    def device(self) -> str:
        device: str = self.values.device  # as NumPy's arrays have it too
        return device

    @property
    def T(self) -> BlockSparse:
        """The transposed matrix: the same values, walked the other way."""
        view = unchecked(self.values, self.stored_layout, self.shape[::-1])
        view.is_transposed = not self.is_transposed
        return view

    def with_values(self, values: Any) -> BlockSparse:
        """The same matrix with other values, given as `w.values` stores them; not checked."""
        other = unchecked(values, self.stored_layout, self.shape)
        other.is_transposed = self.is_transposed
        return other

    def stored_as(self, like: BlockSparse, argument: str) -> BlockSparse:
        """This matrix with its values in the order of those of `like`.

        Raises ValueError, which calls this matrix by `argument`, where their shapes, block sizes or
        layouts differ.
        """
        for name in ("shape", "block_size", "layout"):
            wanted, got = getattr(like, name), getattr(self, name)
            if wanted != got:
                raise ValueError(f"{argument} takes the {name} {wanted}, got {got}, another")
        if self.is_transposed == like.is_transposed:
            return self
        if like.is_transposed:
            return BlockSparse(self.T.data, like.stored_layout, shape=like.shape[::-1]).T
        return BlockSparse(self.data, like.layout, shape=like.shape)

    def to(self, place: str) -> BlockSparse:
        """This matrix in the memory of "cpu", "cuda" or "cuda:1"; itself if it is there already.

        "cuda" is the GPU in use: see `numbsparse.device`. Of a layout that `Layout.on_device` made,
        "cpu" gives the blocks that it keeps, in `layout.to_host()`. Raises ValueError for another
        place, RuntimeError where there is no GPU.
        """
        if (
            isinstance(place, str)
            and place == "cpu"
            and (host := self.stored_layout.to_host()) is not self.stored_layout
        ):
            values, shape = moved(self.values[: host.n_blocks], place), self.shape
            if self.is_transposed:
                return BlockSparse(values, host, shape=shape[::-1]).T
            return BlockSparse(values, host, shape=shape)
        values = moved(self.values, place)
        return self if values is self.values else self.with_values(values)

    def astype(self, dtype: Any) -> BlockSparse:
        """A copy with another dtype: float16, bfloat16, float32 or float64."""
        dtype, host = float_dtype(dtype), self.to("cpu")
        return host.with_values(host.values.astype(dtype)).to(self.device)

    def copy(self) -> BlockSparse:
        """The same matrix in memory of its own."""
        host = self.to("cpu")
        return host.with_values(host.values.copy()).to(self.device)

    def toarray(self) -> np.ndarray:
        """The dense matrix as a NumPy array, (in_features, out_features)."""
        host, size = self.to("cpu"), self.block_size
        index, (in_blocks, out_blocks) = host.stored_layout.index, host.stored_layout.shape
        dense = np.zeros((in_blocks, size, out_blocks, size), self.dtype)
        dense[index.block_rows, :, index.block_columns, :] = host.values
        dense = dense.reshape(in_blocks * size, out_blocks * size)
        dense = dense.T if self.is_transposed else dense
        return np.ascontiguousarray(dense[: self.shape[0], : self.shape[1]])

    @classmethod
    def from_dense(cls, array: Any, layout: Any, *, block_size: int) -> BlockSparse:
        """The blocks of a dense matrix that a layout keeps; the others are dropped.

        >>> import numpy as np, numbsparse as ns
        >>> ns.BlockSparse.from_dense(np.eye(8), [[1, 0], [0, 1]], block_size=4)
        BlockSparse(8 x 8, float64, 2 blocks of 4 x 4, density 0.5)
        """
        array, layout = as_array(array, "array"), as_layout(layout)
        block_size = integer("block_size", block_size)
        if array.ndim != 2:
            raise ValueError(f"array takes two axes, got {array.ndim}")
        checked_shape("array.shape", array.shape, layout.shape, block_size)
        padded = np.zeros([n * block_size for n in layout.shape], array.dtype)
        padded[: array.shape[0], : array.shape[1]] = array
        blocks = padded.reshape(layout.shape[0], block_size, layout.shape[1], block_size)
        index = layout.index
        return cls(blocks[index.block_rows, :, index.block_columns, :], layout, shape=array.shape)

    @classmethod
    def from_scipy(cls, a: Any) -> BlockSparse:
        """A matrix from SciPy's BSR format, its values shared where they are canonical.

        Values are copied only if blocks occur twice or out of order; they are then summed and
        sorted.

        Parameters
        ----------
        a : scipy.sparse.bsr_array or bsr_matrix of float32 or float64, with square blocks

        Raises
        ------
        TypeError
            If `a` is not in BSR format, or of another dtype.
        ValueError
            If its blocks are not square.

        Examples
        --------
        >>> import numpy as np, scipy.sparse, numbsparse as ns
        >>> a = scipy.sparse.bsr_array(np.eye(8), blocksize=(4, 4))
        >>> np.shares_memory(ns.BlockSparse.from_scipy(a).data, a.data)
        True
        """
        if getattr(a, "format", None) != "bsr":
            raise TypeError(
                f"a takes a SciPy array in BSR format, got {type(a).__name__}: "
                "convert it with a.tobsr(blocksize=(32, 32))"
            )
        if a.blocksize[0] != a.blocksize[1]:
            raise ValueError(f"a takes square blocks, got {a.blocksize}")
        if a.indptr[0] != 0 or (np.diff(a.indptr) < 0).any() or a.indptr[-1] > len(a.indices):
            raise ValueError(
                f"indptr takes rising numbers from 0 to the {len(a.indices)} blocks, got {a.indptr}"
            )
        if not _is_canonical(a):
            a = a.copy()
            a.sort_indices()
            a.sum_duplicates()
        n_blocks = a.indptr[-1]
        grid = (a.shape[0] // a.blocksize[0], a.shape[1] // a.blocksize[1])
        layout = Layout.from_arrays(a.indptr, a.indices[:n_blocks], grid)
        return cls(a.data if len(a.data) == n_blocks else a.data[:n_blocks], layout)

    def to_scipy(self) -> scipy.sparse.bsr_array:
        """This matrix as a `scipy.sparse.bsr_array`, sharing its values where they are on the CPU.

        Raises
        ------
        TypeError
            If the dtype is float16 or bfloat16, which SciPy does not take: `.astype("float32")`
            first.
        ValueError
            If the features are not multiples of the block, which BSR cannot express.
        """
        if self.dtype.itemsize == 2:
            raise TypeError(f'SciPy takes no {self.dtype}: convert with .astype("float32") first')
        if any(n % self.block_size for n in self.shape):
            raise ValueError(
                f"SciPy's BSR takes features that are multiples of {self.block_size}, "
                f"got {self.shape}: use toarray()"
            )
        host = self.to("cpu")
        arrays = (host.data, host.indices.copy(), host.indptr.copy())
        return scipy.sparse.bsr_array(arrays, shape=self.shape, copy=False)

    def save(self, path: Any) -> None:
        """Write this matrix to an `.npz` file that `numpy.load` reads: whole, or not at all.

        Its arrays are `data, indices, indptr, shape, format`, as `scipy.sparse.save_npz` names
        them. bfloat16, which NumPy's format cannot name, is stored as two bytes a value (`|V2`).
        Raises ValueError for a name of another format, which `numbsparse.save` writes.
        """
        if str(path).endswith(".safetensors"):
            raise ValueError(
                f'{path} takes numbsparse.save(path, {{"w": w}}): this writes .npz files'
            )
        write_npz(path, self.arrays())

    @classmethod
    def load(cls, path: Any) -> BlockSparse:
        """Read a matrix that `save` wrote (or `scipy.sparse.save_npz`, in BSR format).

        Raises ValueError if the file is none of theirs, cut short or damaged.
        """
        with open_npz(path, "block-sparse matrix") as arrays:
            return cls.from_arrays(arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        """The NumPy arrays that say all of this matrix, by SciPy's names."""
        return {
            "data": np.asarray(self.to("cpu").data),
            "indices": self.indices,
            "indptr": self.indptr,
            "shape": np.array(self.shape),
            "format": np.array(b"bsr"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> BlockSparse:
        """The matrix that `arrays()` says; arrays in a file are read when they are known to fit."""
        missing = {"data", "indices", "indptr", "shape"} - set(arrays)
        if missing:
            raise ValueError(f"arrays are not a block-sparse matrix: {sorted(missing)} missing")
        data, indices, kind = arrays["data"], arrays["indices"], arrays.get("format")
        if kind is not None and (kind.ndim or np.asarray(kind).item() not in (b"bsr", "bsr")):
            raise ValueError("format takes bsr: SciPy's tobsr(blocksize=(32, 32)) gives it")
        check_data(data)
        if indices.shape != data.shape[:1]:
            raise ValueError(
                f"indices takes the {data.shape[0]} blocks of data, got {indices.shape}"
            )
        features = _features(data, arrays["shape"])
        grid = tuple(-(-n // data.shape[1]) for n in features)
        layout = Layout.from_arrays(arrays["indptr"], indices, grid)
        return cls(np.asarray(data), layout, shape=features)

    def __reduce__(self) -> tuple[Any, ...]:
        stored = self.T if self.is_transposed else self  # what is kept with it is in its order
        return _restore, (stored.arrays(), self.place, self.is_transposed)

    @property
    def _place(self) -> str:  # type: ignore[override]
        return "" if self.place == "cpu" else f", on {self.place}"


def unchecked(values: Any, layout: Layout, shape: tuple[int, int]) -> BlockSparse:
    """What the constructor makes of values that fit, in a tenth of the time."""
    w = BlockSparse.__new__(BlockSparse)
    w._values, w.stored_layout, w._shape, w.is_transposed = values, layout, shape, False
    return w


def _as_values(values: Any, argument: str) -> Any:
    """Blocks as a matrix stores them; what cannot be that is refused, by its argument's name."""
    on_gpu = is_device_operand(values)
    values = as_device_array(values, argument) if on_gpu else as_array(values, argument)
    check_data(values, argument)
    if on_gpu and not values.is_contiguous:
        raise ValueError(f"{argument} on a GPU takes a C-contiguous array, got one with gaps")
    return values if on_gpu else np.ascontiguousarray(values)


def _features(data: Any, shape: Any) -> tuple[int, int]:
    """(in_features, out_features) from an array."""
    if shape.shape != (2,) or shape.dtype.kind not in "iu":
        raise ValueError(
            f"data takes (n_blocks, B, B) and shape two numbers, got {data.shape} "
            f"and {shape.dtype} {shape.shape}"
        )
    in_features, out_features = np.asarray(shape).tolist()
    return in_features, out_features


def _restore(arrays: dict[str, np.ndarray], place: str, is_transposed: bool = False) -> BlockSparse:
    stored = BlockSparse.from_arrays(arrays).to(place)
    return stored.T if is_transposed else stored


def _is_canonical(a: Any) -> bool:
    """Whether block columns rise within each row, each once (SciPy's own flag may be stale)."""
    n_blocks = a.indptr[-1]
    block_rows = np.repeat(np.arange(len(a.indptr) - 1, dtype=np.int64), np.diff(a.indptr))
    columns = a.shape[1] // a.blocksize[1]
    return bool((np.diff(block_rows * columns + a.indices[:n_blocks]) > 0).all())
