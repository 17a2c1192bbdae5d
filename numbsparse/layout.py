"""Which blocks of a matrix are kept, and how to walk them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import scipy.sparse

from numbsparse.dtypes import as_array, check_kind
from numbsparse.patterns import as_pattern
from numbsparse.patterns.checks import integer, pair

MOST = 2**31 - 1  # lines, or blocks, that int32 counts
SPREAD = 32  # blocks of a grid for each that is kept

if TYPE_CHECKING:
    cached = cached_property
else:

    class cached(cached_property):
        """Without the lock of Python before 3.12, which one object holds for all of its class.

        Other threads waited for it, and a process that was forked meanwhile waited for ever.
        """

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            if owner is None:
                return self
            value = vars(owner)[self.attrname] = self.func(owner)
            return value


class Walk(NamedTuple):
    """The kept blocks line by line: what a kernel follows to sum one output line.

    Line `i` owns the positions `indptr[i]` to `indptr[i + 1]`; at position `k` it meets line
    `indices[k]` of the other axis in the stored block `blocks[k]`. Within a line `indices` rise.
    """

    indptr: Any  # (lines + 1,) int32
    indices: Any  # (n_blocks,) int32
    blocks: Any  # (n_blocks,) int32


@dataclass(eq=False)
class Index:
    """The index arrays of a layout, all int32; the values are stored once, in row order.

    `forward` follows `columns`, `input_grad` follows `rows`, `weight_grad` takes a block at a time.
    """

    rows: Walk  # a line per block row; blocks = 0, 1, 2, ...
    columns: Walk  # a line per block column; blocks permuted
    block_rows: Any  # (n_blocks,) int32
    block_columns: Any  # (n_blocks,) int32
    on_host: Index | None = None  # of one on the GPU, the same as NumPy arrays
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  # see kernels/parts/plans.py
    calls: dict[Any, Any] = field(default_factory=dict, repr=False)  # and kernels/parts/plans.py
    made: Any = None  # of one made on the GPU, what is known there: see kernels/coordinates.py
    replays: dict[Any, Any] = field(default_factory=dict, repr=False)  # see device/replay.py

    def __post_init__(self) -> None:
        """On the host arrays are read-only: for others what plans would be compiled once more."""
        for array in (*self.rows, *self.columns, self.block_rows, self.block_columns):
            if isinstance(array, np.ndarray):
                _read_only(array)


class Layout:
    """The kept blocks of a block-sparse matrix, in the order of SciPy's BSR format.

    Parameters
    ----------
    pattern : array of bool, (in_blocks, out_blocks)
        True where a block is kept. See `numbsparse.patterns` for makers of patterns.

    Attributes
    ----------
    shape : (in_blocks, out_blocks)
    n_blocks : kept blocks
    density : kept blocks / all blocks
    indptr, indices : SciPy's BSR index arrays, int32
    index : every index array that a kernel needs

    Raises
    ------
    TypeError, ValueError
        If `pattern` is not a 2-D array of booleans (or of zeros and ones).

    Examples
    --------
    >>> import numbsparse as ns
    >>> layout = ns.Layout([[1, 0, 1], [0, 1, 0]])
    >>> layout
    Layout(2 x 3, 3 blocks, density 0.5)
    >>> layout.indptr, layout.indices
    (array([0, 2, 3], dtype=int32), array([0, 2, 1], dtype=int32))

    Of two layouts of one shape `a | b` keeps the blocks of both, `a & b` those that both keep, and
    `a - b` those of `a` alone; a result that equals an operand is that operand, plans and all.

    >>> (layout | ns.Layout([[0, 1, 0], [0, 1, 0]])).pattern.astype(int)
    array([[1, 1, 1],
           [0, 1, 0]])
    """

    device_index: Index | None = None  # `index` on the GPU, once numbsparse.ops sent it there
    _met: tuple[Any, np.ndarray] | None = None  # another layout, and `positions_in` it

    if TYPE_CHECKING:  # added by numbsparse.ops.made

        @staticmethod
        def on_device(
            rows: Any, columns: Any, shape: tuple[int, int], *, capacity: int | None = None
        ) -> Layout: ...

    def __init__(self, pattern: Any):
        pattern = as_pattern(pattern)
        # Faster than np.nonzero, which has a loop for each number of axes.
        self._set(pattern.shape, *np.divmod(np.flatnonzero(pattern), pattern.shape[1]))

    @classmethod
    def from_arrays(cls, indptr: Any, indices: Any, shape: tuple[int, int]) -> Layout:
        """A layout from SciPy's BSR index arrays; `indices` must rise within each block row.

        Raises TypeError unless they are integers, ValueError unless they form a layout; a side has
        up to 2^31 - 1 blocks.

        >>> import numbsparse as ns
        >>> ns.Layout.from_arrays([0, 2, 3], [0, 2, 1], (2, 3)).pattern.astype(int)
        array([[1, 0, 1],
               [0, 1, 0]])
        """
        in_blocks, out_blocks = grid_of(shape)
        given = {"indptr": indptr, "indices": indices}  # of a file, maybe not read yet
        indptr, indices = (a if hasattr(a, "shape") else as_array(a, n) for n, a in given.items())
        if np.shape(indptr) != (in_blocks + 1,):
            raise ValueError(
                f"indptr takes the shape ({in_blocks + 1},) for {in_blocks} block rows, "
                f"got {np.shape(indptr)}"
            )
        indptr = _integers("indptr", indptr)
        if indptr[0] != 0 or (np.diff(indptr) < 0).any():
            got = np.array2string(indptr, threshold=8, edgeitems=3)
            raise ValueError(f"indptr takes {in_blocks + 1} rising numbers from 0 on, got {got}")
        if np.shape(indices) != (indptr[-1],):
            raise ValueError(
                f"indices takes the shape ({indptr[-1]},) (the last of indptr), "
                f"got {np.shape(indices)}"
            )
        indices = _integers("indices", indices)
        if indices.size and not (indices.min() >= 0 and indices.max() < out_blocks):
            raise ValueError(
                f"indices takes block columns from 0 to {out_blocks - 1}, "
                f"got {indices.min()} to {indices.max()}"
            )
        block_rows = np.repeat(np.arange(in_blocks), np.diff(indptr))
        if (np.diff(block_rows * out_blocks + indices) <= 0).any():
            raise ValueError("indices takes rising numbers within each block row, each once")
        layout = cls.__new__(cls)
        layout._set((in_blocks, out_blocks), block_rows, indices)
        return layout

    def _set(
        self, shape: tuple[int, ...], block_rows: np.ndarray, block_columns: np.ndarray
    ) -> None:
        in_blocks, _ = grid = grid_of(shape)
        if block_rows.size > MOST:
            raise ValueError(
                f"pattern keeps {block_rows.size} blocks; a layout takes up to 2^31 - 1"
            )
        indptr = np.zeros(in_blocks + 1, np.int32)
        np.cumsum(np.bincount(block_rows, minlength=in_blocks), out=indptr[1:])
        everything, self.shape = np.arange(block_rows.size, dtype=np.int32), grid
        walk = indptr, block_columns.astype(np.int32), everything
        self._rows = Walk(*map(_read_only, walk))
        self._block_rows = _read_only(block_rows.astype(np.int32))

    @cached
    def index(self) -> Index:
        indptr, lines, blocks = self._rows
        by_column = scipy.sparse.csr_array((blocks, lines, indptr), shape=self.shape).tocsc()
        arrays = by_column.indptr, by_column.indices, by_column.data
        return Index(self._rows, Walk(*arrays), self._block_rows, lines)

    @cached
    def n_blocks(self) -> int:
        return self._block_rows.size

    @cached
    def longest(self) -> tuple[int, int]:
        """The most blocks of a block row, and of a block column."""
        rows, columns = np.diff(self.indptr), np.bincount(self.indices)
        return int(rows.max(initial=0)), int(columns.max(initial=0))

    def check(self) -> int:
        """How many blocks are kept: `n_blocks`, but for a layout that `on_device` made."""
        return self.n_blocks

    def to_host(self) -> Layout:
        """This layout; of one that `on_device` made, one that the host knows."""
        return self

    def counted(self, size: str = "") -> str:
        """How many blocks, of this size, and their density, in words."""
        return f"{self.n_blocks} blocks{size}, density {self.density:.3g}"

    @property
    def density(self) -> float:
        return self.n_blocks / (self.shape[0] * self.shape[1])

    @property
    def indptr(self) -> np.ndarray:
        return self._rows.indptr

    @property
    def indices(self) -> np.ndarray:
        return self._rows.indices

    @property
    def pattern(self) -> np.ndarray:
        """The pattern as a new bool array, (in_blocks, out_blocks)."""
        pattern = np.zeros(self.shape, dtype=bool)
        pattern[self._block_rows, self.indices] = True
        return pattern

    @cached
    def flat_indices(self) -> np.ndarray:
        """block row * out_blocks + block column of each kept block, int64, rising."""
        return _read_only(self._block_rows.astype(np.int64) * self.shape[1] + self.indices)

    def find(self, block_rows: Any, block_columns: Any) -> np.ndarray:
        """Where in the stored order these blocks are, int64; -1 for others, off the grid too.

        >>> import numbsparse as ns
        >>> ns.Layout([[1, 0, 1], [0, 1, 0]]).find([0, 0, 1, 0], [1, 2, 1, 4])
        array([-1,  1,  2, -1])
        """
        rows, columns = (
            _integers("block_rows", block_rows),
            _integers("block_columns", block_columns),
        )
        try:
            np.broadcast_shapes(rows.shape, columns.shape)
        except ValueError:
            got = f"got {rows.shape} and {columns.shape}"
            raise ValueError(f"block_rows and block_columns take one shape, {got}") from None
        in_rows, in_columns = (
            (numbers >= 0) & (numbers < n)
            for numbers, n in zip((rows, columns), self.shape, strict=True)
        )  # else another block is found
        return self._positions(np.where(in_rows & in_columns, rows * self.shape[1] + columns, -1))

    def positions_in(self, other: Layout) -> np.ndarray:
        """Where in the stored order of `other` each block of this layout is; -1 where it is not.

        Those of the last one are kept: moments follow a change of layout after their weight.
        """
        self._check_shape(other, "positions_in")
        met = self._met  # of which another thread may make one of another layout meanwhile
        if met is None or met[0]() is not other:
            met = self._met = ref(other), _read_only(other._positions(self.flat_indices))
        return met[1]

    def _positions(self, flat: np.ndarray) -> np.ndarray:
        return positions_among(self.flat_indices, flat)

    def select(self, kept: Any) -> Layout:
        """The layout of those blocks where `kept`, bool (n_blocks,) in the stored order, is True.

        >>> import numbsparse as ns
        >>> ns.Layout([[1, 0, 1], [0, 1, 0]]).select([True, False, True]).pattern.astype(int)
        array([[1, 0, 0],
               [0, 1, 0]])
        """
        kept = as_array(kept, "kept")
        if kept.dtype != bool or kept.shape != (self.n_blocks,):
            raise ValueError(
                f"kept takes {self.n_blocks} booleans, got {kept.dtype} of shape {kept.shape}"
            )
        if kept.all():
            return self
        layout = Layout.__new__(Layout)
        layout._set(self.shape, self._block_rows[kept], self.indices[kept])
        return layout

    def __or__(self, other: Layout) -> Layout:
        self._check_shape(other, "|")
        more = other.flat_indices[self._positions(other.flat_indices) < 0]
        if not more.size:
            return self
        if self.n_blocks + more.size == other.n_blocks:
            return other
        return layout_of(self.shape, self.flat_indices, more)

    def __and__(self, other: Layout) -> Layout:
        self._check_shape(other, "&")
        both = self.select(other._positions(self.flat_indices) >= 0)
        return other if both.n_blocks == other.n_blocks and both is not self else both

    def __sub__(self, other: Layout) -> Layout:
        self._check_shape(other, "-")
        return self.select(other._positions(self.flat_indices) < 0)

    def _check_shape(self, other: Layout, what: str) -> None:
        check_kind(what, other, Layout, "a Layout")
        if self.shape != other.shape:
            raise ValueError(
                f"{what} takes two layouts of one shape, got {self.shape} and {other.shape}"
            )

    @cached
    def T(self) -> Layout:
        """The layout of the transposed matrix."""
        layout = Layout.__new__(Layout)
        order = self.index.columns.blocks
        layout._set(self.shape[::-1], self.index.block_columns[order], self.index.block_rows[order])
        layout.__dict__["T"] = self
        return layout

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Layout)
            and self.shape == other.shape
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    @cached
    def _hash(self) -> int:
        return hash((self.shape, self.indptr.tobytes(), self.indices.tobytes()))

    def __hash__(self) -> int:
        return self._hash

    @cached
    def word(self) -> str:
        """A word for its contents, the same in every process."""
        contents = sha256(self.indptr.tobytes() + self.indices.tobytes()).hexdigest()
        return "{}x{}-{}".format(*self.shape, contents[:32])

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.from_arrays, (self.indptr, self.indices, self.shape)

    def __repr__(self) -> str:
        return "Layout({} x {}, {})".format(*self.shape, self.counted())


def as_layout(layout: Any, argument: str = "layout") -> Layout:
    """A Layout as it is; a pattern made one."""
    return layout if isinstance(layout, Layout) else Layout(as_pattern(layout, argument))


def layout_of(shape: tuple[int, int], *flat: np.ndarray) -> Layout:
    """The layout of these blocks, each given once by its flat index, int64; not checked."""
    together = np.concatenate(flat)
    together.sort(kind="stable")  # which merges what is sorted already
    layout, rows = Layout.__new__(Layout), together // shape[1]  # a third of the time of divmod
    layout._set(shape, rows, together - rows * shape[1])
    layout.__dict__["flat_indices"] = _read_only(together)
    return layout


def positions_among(rising: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where in rising integers those that are wanted are, int64; -1 where they are not."""
    if not rising.size:
        return np.full(wanted.shape, -1)
    beyond = int(rising[-1]) + 1
    if rising[0] >= 0 and beyond <= SPREAD * rising.size:  # a table is faster than a search
        table = np.full(beyond + 1, -1, np.int16 if rising.size < 2**15 else np.int32)
        table[rising] = np.arange(rising.size, dtype=table.dtype)
        return table[np.minimum(wanted.astype(np.uint64), np.uint64(beyond))].astype(np.int64)
    positions = np.minimum(np.searchsorted(rising, wanted), rising.size - 1)
    return np.where(rising[positions] == wanted, positions, -1)


def grid_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(in_blocks, out_blocks), that int32 can count."""
    sides = pair("shape", "(in_blocks, out_blocks)", shape)
    in_blocks, out_blocks = (integer("shape", n, most=MOST) for n in sides)
    return in_blocks, out_blocks


def _integers(argument: str, numbers: Any) -> np.ndarray:
    array = as_array(numbers, argument)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{argument} takes integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
