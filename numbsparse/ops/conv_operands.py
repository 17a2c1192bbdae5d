"""What convolutions ask of their operands, and how these are stored for a kernel."""

from math import prod
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse, unchecked
from numbsparse.device import DeviceArray
from numbsparse.kernels.conv import Window
from numbsparse.ops.conv_window import in_blocks_of
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.repeats import ALIGNED, C_CONTIGUOUS
from numbsparse.patterns.checks import INTEGER

MOST_PIXELS, MOST_BYTES = 1 << 31, 1 << 35  # kernels count rows, and pieces of 16 bytes


def space_of(x: Any) -> tuple[int, ...]:
    if x.ndim < 3 or x.ndim > 5:
        raise ValueError(
            f"x takes the shape (batch, *space, features) with one to three axes of space, "
            f"got {x.shape}"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"x takes images of at least one pixel and one feature, got {x.shape}")
    return tuple(x.shape[1:-1])


def check_weight(w: Any) -> None:
    if not isinstance(w, BlockSparse):
        raise TypeError(f"w takes a BlockSparse, got {type(w).__name__}")
    if w.is_transposed:
        raise ValueError(
            "w takes a matrix that is not a transposed view, got one: the transpose of conv is "
            "conv_transpose, with the same w"
        )


def check_features(w: BlockSparse, window: Window, features: int, argument: str = "x") -> None:
    """Refuse features that do not end inside the last block row of each tap."""
    size = w.block_size
    in_blocks = in_blocks_of(w.layout.shape[0], window)
    if isinstance(features, bool) or not isinstance(features, INTEGER):
        raise TypeError(f"{argument} takes a whole number, got {features!r}")
    if not (in_blocks - 1) * size < features <= in_blocks * size:
        takes = f"{(in_blocks - 1) * size + 1} to {in_blocks * size}"
        takes = f"{takes} features" if argument == "x" else takes
        raise ValueError(
            f"{argument} takes {takes} with this w, whose {window.taps} taps have {in_blocks} "
            f"block rows of {size} each, got {features}"
        )


def is_away(x: Any, w: BlockSparse) -> bool:
    """Whether x is on the CPU and w on a GPU; refused the other way round, or of another dtype."""
    if x.dtype != w.dtype:
        raise TypeError(f"x and w take one dtype, got {x.dtype} and {w.dtype}")
    on_gpu = isinstance(x, DeviceArray)
    if on_gpu and w.place != "cuda":
        raise ValueError('x is on a GPU and w on the CPU: move the weight with w.to("cuda") first')
    return w.place == "cuda" and not on_gpu


def small_space(window: Window, axes: int) -> tuple[int, ...]:
    return window.small[3 - axes :]


def only_tap(w: BlockSparse, in_features: int) -> BlockSparse:
    """A weight of one tap as a matrix that ends with the features."""
    if w.shape[0] == in_features:
        return w
    return unchecked(w.values, w.layout, (in_features, w.shape[1]))


def whole(x: Any) -> Any:
    """`x` itself, or of a NumPy array with gaps, or between items, a copy."""
    if isinstance(x, DeviceArray):
        return gapless(x)
    usual = C_CONTIGUOUS | ALIGNED
    return x if x.flags.num & usual == usual else np.require(x, requirements=("C", "A"))


def as_pixels(x: Any) -> Any:
    """(batch, *space, features) as (batch, pixels, features), C-contiguous."""
    shape = (x.shape[0], prod(x.shape[1:-1]), x.shape[-1])
    too_large = shape[0] * shape[1] >= MOST_PIXELS or x.nbytes >= MOST_BYTES
    if too_large and isinstance(x, DeviceArray):
        raise ValueError(
            f"x takes under 2^31 pixels and 2^35 bytes on a GPU, got {x.shape} of {x.dtype}: "
            "pass the batch in parts"
        )
    return whole(x).reshape(shape)


def as_rows(x: Any) -> Any:
    return as_pixels(x).reshape(prod(x.shape[:-1]), x.shape[-1])
