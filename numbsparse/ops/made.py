"""Layouts made from block coordinates where these are: on a GPU without a look at them."""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, current_stream, is_capturing, runtime
from numbsparse.device.streams import after_waiting
from numbsparse.layout import MOST, Index, Layout, cached, grid_of, layout_of
from numbsparse.ops.operands import check_integers, in_order, operand
from numbsparse.ops.shape import reshape
from numbsparse.patterns.checks import integer

Home = tuple[tuple[int, int], int, int | None]  # shape, capacity, and the stream of its making

MOST_PLANS = 16  # of an index that is spared: all are made again for the next layout
MOST_HOMES = 8
_spare: dict[Home, list[tuple[Index, str]]] = {}  # indexes of layouts that are gone, and words
_numbers = count()


class MadeLayout(Layout):
    """What `Layout.on_device` gives. It refuses what only the host can know of a layout.

    The index of one that is gone serves the next one of its shape on its stream, with plans,
    recorded products and its word; unless a graph, or another stream, may still use it.
    """

    def __init__(
        self, shape: tuple[int, int], capacity: int, made: Layout | Index, home: Home | None = None
    ):
        self.shape, self._capacity = shape, capacity
        self._made = made  # of the CPU, the layout of the blocks alone
        self._kept = made.n_blocks if isinstance(made, Layout) else None  # once they are counted
        self._home = home  # None if its index is not spared
        # To which what was wrong is added when it is told; replays of a graph may be many.
        once = isinstance(made, Index) and not made.made.is_captured
        self._told = _told_here() if once else None

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        home, made = self._home, self._made
        if ending() or home is None or home[2] is None or isinstance(made, Layout):
            return
        if len(made.made.launches) <= MOST_PLANS:
            if home not in _spare and len(_spare) >= MOST_HOMES:
                _spare.clear()
            _spare.setdefault(home, []).append((made, self.word))

    longest = 0, 0  # nobody knows

    @property
    def n_blocks(self) -> int:
        return self._capacity

    @cached
    def word(self) -> str:  # nobody looks at its contents
        return "{}x{}-made{}".format(*self.shape, next(_numbers))

    @property
    def place(self) -> str:
        return "cpu" if isinstance(self._made, Layout) else "cuda"

    def check(self) -> int:
        """How many blocks are kept, once the GPU has counted them.

        Raises ValueError if a block was given twice or is not on the grid, or if there are more of
        them than `capacity`, in which case none is kept.
        """
        if isinstance(self._made, Layout):
            return self._made.n_blocks
        kept, twice, outside, distinct = map(int, self._made.made.found.numpy())
        if self._told is not None:
            self._told[:3] += distinct > kept, twice, outside
            self._told = None
        if twice or outside:
            raise ValueError(
                f"rows and columns take each block of the grid {self.shape} once, got {twice} a "
                f"second time and {outside} from outside"
            )
        if distinct > kept:
            raise ValueError(_too_small(self._capacity, distinct))
        if not self._made.made.is_captured:  # which each replay makes anew
            self._kept = kept
        return kept

    @property
    def density(self) -> float:
        """Of its blocks, if they were counted, else of its places."""
        blocks = self._capacity if self._kept is None else self._kept
        return blocks / (self.shape[0] * self.shape[1])

    def counted(self, size: str = "") -> str:
        if self._kept is None:
            return f"places for {self._capacity} blocks{size}, density {self.density:.3g} at most"
        places = "" if self._kept == self._capacity else f" in {self._capacity} places"
        return f"{self._kept} blocks{size}{places}, density {self.density:.3g}"

    def to_host(self) -> Layout:
        """The same blocks as a layout of the host, which has all that layouts have; after `check`.

        Its blocks are the first of the places here, in the same order.
        """
        kept = self.check()
        if isinstance(self._made, Layout):
            return self._made
        walk = self._made.rows
        return Layout.from_arrays(walk.indptr.numpy(), walk.indices.numpy()[:kept], self.shape)

    @property
    def index(self) -> Index:  # type: ignore[override]
        if isinstance(self._made, Layout):
            return self._made.index
        raise TypeError("this layout is on the GPU, and so are its blocks: use its to_host()")

    @property
    def device_index(self) -> Index:  # type: ignore[override]
        if isinstance(self._made, Index):
            if self._home is not None and _stream_in_use() != self._home[2]:
                self._home = None
            return self._made
        raise TypeError("this layout is on the CPU: make it from coordinates on the GPU")

    @property
    def _refused(self) -> Any:
        raise TypeError("only the host can tell this of a layout: use its to_host()")

    _rows = _block_rows = T = _hash = _refused  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "Layout({} x {}, {}, on {})".format(*self.shape, self.counted(), self.place)


@in_order
def on_device(
    rows: Any, columns: Any, shape: tuple[int, int], *, capacity: int | None = None
) -> Layout:
    """A layout from block coordinates where they are: what a router or a top-k gives on a GPU.

    Nothing is copied to the host, where nobody knows which blocks it keeps, nor how many. So it
    has `capacity` places, and `n_blocks` is that: values are (capacity, B, B), in the order of
    SciPy's BSR format, and behind the blocks that are kept places are left over. Products never
    read these, and `sddmm` writes zeros there. All three products take it, and so do their
    gradients. Within a captured graph it is made anew by each replay, from what the coordinates
    are then.

    Parameters
    ----------
    rows, columns : arrays of int32 or int64, of one shape
        The block row and the block column of each block, in any order; -1 for no block. NumPy's
        make a layout for the CPU, those of a GPU one for it.
    shape : (in_blocks, out_blocks)
    capacity : int, optional
        Places for blocks. Default: as many as there are coordinates.

    Returns
    -------
    Layout
        With `check()`, which waits for the GPU and says how many blocks there are, and
        `to_host()`, a layout as others are. What only the host could know (`pattern`, `T`,
        `indices`) raises TypeError. `density` is that of all places until `check` counted the
        blocks, as what is printed says.

    Raises
    ------
    TypeError
        If the coordinates are not integers.
    ValueError
        If their shapes or places differ; on the CPU, if a block is there twice or not on the
        grid, or if there are more than `capacity`. On a GPU these are counted, and `check`
        and the next `synchronize` raise: a block is then kept once, what is not on the grid is
        left out, and of more blocks than `capacity` none is kept.

    Notes
    -----
    On a GPU its products take blocks of 32, 64 and 128, of float16, bfloat16 and float32, and
    compute capability 8.0; they are fastest on 9.0. On a CPU they take what others take. The memory
    of a layout's index and plans stays for the next one of its shape and capacity.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layout = ns.Layout.on_device(np.array([1, 0, -1]), np.array([0, 2, 0]), (2, 3))
    >>> layout, layout.check()
    (Layout(2 x 3, 2 blocks in 3 places, density 0.333, on cpu), 2)
    >>> layout.to_host().pattern.astype(int)
    array([[0, 0, 1],
           [1, 0, 0]])

    After T. Gale, D. Narayanan, C. Young, M. Zaharia, "MegaBlocks: Efficient Sparse Training
    with Mixture-of-Experts", 2022, section 5.
    """
    rows, columns, shape = operand(rows, "rows"), operand(columns, "columns"), grid_of(shape)
    gpu = isinstance(rows, DeviceArray)
    for argument, array in (("rows", rows), ("columns", columns)):
        check_integers(array, argument, "rows", gpu)
    if rows.shape != columns.shape:
        raise ValueError(f"columns takes the shape of rows, {rows.shape}, got {columns.shape}")
    capacity = rows.size if capacity is None else integer("capacity", capacity, least=0, most=MOST)
    rows, columns = (reshape(a, (a.size,)) for a in (rows, columns))
    if not gpu:
        return MadeLayout(shape, capacity, _of_host(rows, columns, shape, capacity))
    home = shape, capacity, _stream_in_use()
    try:
        index, word = _spare.get(home, []).pop()
    except IndexError:
        return MadeLayout(
            shape, capacity, kernels.coordinates.index_of(rows, columns, shape, capacity), home
        )
    kernels.coordinates.write_again(index, rows, columns)
    layout = MadeLayout(shape, capacity, index, home)
    layout.word = word
    return layout


def _stream_in_use() -> int | None:
    """The number of the stream; None where it is captured, or several GPUs have one each."""
    stream = current_stream()
    if is_capturing() or runtime.several_devices or stream.is_captured:
        return None
    return int(stream.handle)


def _of_host(
    rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int], capacity: int
) -> Layout:
    """The layout of these blocks, all of which are looked at."""
    given = (rows != -1) & (columns != -1)
    rows, columns = rows[given].astype(np.int64), columns[given].astype(np.int64)
    for argument, lines, n in (("rows", rows, shape[0]), ("columns", columns, shape[1])):
        if lines.size and not (lines.min() >= 0 and lines.max() < n):
            raise ValueError(
                f"{argument} takes 0 to {n - 1}, or -1 for no block, "
                f"got {lines.min()} to {lines.max()}"
            )
    flat = np.unique(rows * shape[1] + columns)
    if flat.size < rows.size:
        raise ValueError(
            f"rows and columns take each block once, got {rows.size - flat.size} a second time"
        )
    if flat.size > capacity:
        raise ValueError(_too_small(capacity, flat.size))
    return layout_of(shape, flat)


_told: dict[int, np.ndarray] = {}  # of each GPU: how much of its `WRONG` was told


def _told_here() -> np.ndarray:
    return _told.setdefault(current_stream().device, np.zeros(4, np.int32))


def _tell() -> None:
    """Raise ValueError if coordinates were wrong and it was not told, in captured steps too."""
    if "numbsparse.kernels.coordinates" not in sys.modules:
        return
    wrong, device = kernels.coordinates.WRONG, current_stream().device
    numbers = wrong[device].numpy() if device in wrong else _told_here()
    small, twice, outside, _ = numbers - _told_here()
    if small or twice or outside:
        _told[device] = numbers
        few = f", {small} times more than its capacity, up to {numbers[3]}" if small else ""
        raise ValueError(
            "since the last synchronize(), a Layout.on_device was given "
            f"{twice} blocks a second time, {outside} from outside of its grid{few}: what is too "
            "much was left out, of too many blocks all; check() of each layout says where"
        )


after_waiting.append(_tell)


def _too_small(capacity: int, blocks: int) -> str:
    return f"capacity takes at least the number of blocks, {blocks}, got {capacity}"


def taken(layout: Layout, values: Any) -> Any:
    """The places of `values` that kernels of the CPU go through: those of blocks."""
    made = isinstance(layout, MadeLayout) and not isinstance(values, DeviceArray)
    return values[: layout.check()] if made else values


def clear_rest(layout: Layout, values: Any) -> None:
    """Zeros in the places of `values` that no block has."""
    if not isinstance(layout, MadeLayout):
        return
    if isinstance(values, DeviceArray):
        kernels.coordinates.clear_rest(values, layout.device_index.made.found)
    else:
        values[layout.check() :] = 0


# The layout cannot import the package that makes it so, and that package adds this.
Layout.on_device = staticmethod(on_device)  # type: ignore[method-assign]
