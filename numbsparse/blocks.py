"""Matrices of blocks, of any library: what they have in common, and which values and shapes fit."""

from typing import Any

from numbsparse.dtypes import FLOATS
from numbsparse.layout import Layout
from numbsparse.patterns.checks import integer, pair


class Blocks:
    """What matrices of every library have in common: values of blocks, and which way they lie.

    `values` and `stored_layout` are those of the matrix, or of its transpose if `is_transposed`.
    """

    values: Any
    stored_layout: Layout
    shape: tuple[int, int]
    is_transposed: bool
    ndim = 2
    _place = ""  # what is told of it, if anything
    # NumPy steps back, so that `numpy_array @ w` reaches `w.__rmatmul__`.
    __array_ufunc__ = None

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Blocks):
            raise TypeError("== takes no two matrices here: compare their values and layouts")
        return NotImplemented

    __hash__ = object.__hash__

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a BlockSparse is not made dense silently: call .toarray() or .to_dense(), "
            "or to move it .to(place)"
        )

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def layout(self) -> Layout:
        return self.stored_layout.T if self.is_transposed else self.stored_layout

    @property
    def stored_shape(self) -> tuple[int, int]:
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def block_size(self) -> int:
        size: int = self.values.shape[-1]
        return size

    def own_size(self, block_size: int | None) -> int:
        """The block size, of a matrix that is the `layout` of a product; another is refused."""
        if block_size is not None and integer("block_size", block_size) != self.block_size:
            takes = f"that of layout, {self.block_size}"
            raise ValueError(f"block_size takes {takes}, got {block_size}")
        return self.block_size

    def __repr__(self) -> str:
        blocks = self.stored_layout.counted(f" of {self.block_size} x {self.block_size}")
        size = f"{self.shape[0]} x {self.shape[1]}"
        return f"BlockSparse({size}, {self.values.dtype}, {blocks}{self._place})"


def check_data(data: Any, argument: str = "data") -> None:
    """Refuse another dtype, or blocks that are not square."""
    if str(data.dtype) not in FLOATS:
        raise TypeError(f"{argument} takes {', '.join(FLOATS)}, got {data.dtype}")
    if data.ndim != 3 or data.shape[1] != data.shape[2] or data.shape[1] == 0:
        raise ValueError(f"{argument} takes the shape (n_blocks, B, B), got {data.shape}")


def check_values(values: Any, n_blocks: int) -> None:
    """Refuse an array of any library that does not hold the blocks of a layout of so many."""
    shape = tuple(values.shape)
    if len(shape) != 3 or shape[1] != shape[2] or shape[0] != n_blocks:
        raise ValueError(f"values takes the shape ({n_blocks}, B, B) with this layout, got {shape}")


def checked_shape(
    argument: str, shape: Any, grid: tuple[int, int], block_size: int
) -> tuple[int, int]:
    """The shape, for None that of whole blocks.

    One that does not end within the last block row and the last block column is refused.
    """
    full = grid[0] * block_size, grid[1] * block_size
    if shape is None:
        return full
    takes = f"at most {full} and less than a block under it"
    sides = [integer(f"{argument}[{i}]", n) for i, n in enumerate(pair(argument, takes, shape))]
    if any(not whole - block_size < n <= whole for n, whole in zip(sides, full, strict=True)):
        raise ValueError(f"{argument} takes {takes}, got {tuple(shape)}")
    return sides[0], sides[1]
