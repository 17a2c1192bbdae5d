"""What the public products take and give, to type checkers: what came in comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict, overload

import numpy as np

from numbsparse.autograd import Tensor
from numbsparse.block_sparse import A, Array, BlockSparse
from numbsparse.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of Python 3.11 on in typing

Kept = Layout | BlockSparse | np.ndarray | list[Any]  # a layout, or what says one


class HowMuch(TypedDict, total=False):
    kernel: str
    precision: str | None


class How(HowMuch, total=False):
    gate: BlockSparse | Array | None


class HowOfTensors(HowMuch, total=False):
    gate: Tensor | BlockSparse | Array | None


class HowAt(HowMuch, total=False):
    block_size: int | None


class Matmul(Protocol):
    """`numbsparse.matmul`: a Tensor if an operand is one, else what the dense operand is.

    Of arrays of Numba, and of JAX on a GPU, a DeviceArray comes out, which this does not say.
    """

    @overload
    def __call__(
        self, x: Tensor, w: Tensor | BlockSparse | Array, **how: Unpack[HowOfTensors]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: BlockSparse | Array, w: Tensor, **how: Unpack[HowOfTensors]
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        x: BlockSparse | Array,
        w: BlockSparse | Array,
        *,
        gate: Tensor,
        **how: Unpack[HowMuch],
    ) -> Tensor: ...
    @overload
    def __call__(self, x: A, w: BlockSparse, *, out: A | None = None, **how: Unpack[How]) -> A: ...
    @overload
    def __call__(self, x: BlockSparse, w: A, *, out: A | None = None, **how: Unpack[How]) -> A: ...


class Sddmm(Protocol):
    """`numbsparse.sddmm`: a Tensor of a BlockSparse if an operand is a Tensor."""

    @overload
    def __call__(
        self, a: Tensor, b: Tensor | Array, layout: Kept, **how: Unpack[HowAt]
    ) -> Tensor: ...
    @overload
    def __call__(self, a: Array, b: Tensor, layout: Kept, **how: Unpack[HowAt]) -> Tensor: ...
    @overload
    def __call__(self, a: Array, b: Array, layout: Kept, **how: Unpack[HowAt]) -> BlockSparse: ...
