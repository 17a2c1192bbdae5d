"""Convolutions as block-sparse products over shifted rows; a small ladder of its own.

The weight is a block-sparse matrix whose rows are (tap, in_feature), taps slowest, so block row
tap * in_blocks + i joins in-block i, seen through that tap, to the out-blocks of its columns. A
`Window` says which pixel each tap sees. From k3 on nothing is unfolded in memory: a kernel follows
the rows.

Every rung is a module with the four names of `numbsparse.kernels.matmul`, the products taking the
window too:

    forward(x, values, index, window, y, precision)          # y[:] = conv(x, w)
    input_grad(dy, values, index, window, dx, precision)     # dx[:] = its transpose
    weight_grad(x, dy, index, window, dvalues, precision)    # dvalues = the kept blocks of dw
    unsupported(product, block_size, dtype, place, batch, precision, *call)

What rungs share: `window` says which pixels a tap joins and cuts outputs into tiles, `walks` which
blocks each line multiplies, and `boxes` finds pixels inside kernels and fetches boxes of them.

`x` and `dx` are (batch, pixels of the larger image, in_features), `y` and `dy` (batch, pixels of
the smaller image, out_features), all C-contiguous; the last operand is written whole, and on a GPU
begins at a multiple of 16 bytes. Features may end inside the last block: what `values` holds beyond
the edge is not read, and `dvalues` is zero there, or NaN where infinity or NaN meets it.

`unsupported` says in words why a rung does not serve a product, or returns None. `call` is (window,
in_features, out_features); without it the answer is whether there are calls that the rung serves.
No rung passes a call on to another: `chosen` picks one.

A rung whose float32 products are less than exact has a PRODUCT_ERROR, as those of the ladder: their
relative error, in units of 2^-23.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

from numbsparse.kernels.conv.window import SIDE, Window

PRODUCTS = ("forward", "input_grad", "weight_grad")

RUNGS = {
    "k0_reference": "cpu",
    "k0_cpu": "cpu",
    "k1_naive": "cuda",
    "k2_unfolded": "cuda",
    "k3_tensor_core": "cuda",
    "k4_wgmma": "cuda",
    "k5_small_blocks": "cuda",
    "k6_strips": "cuda",
}
"""The place of each rung, in reading order; k5 is for blocks of 4 and 8, k6 for 8 and 16."""

ANY, U, W, S = 1 << 62, "k2_unfolded", "k4_wgmma", "k6_strips"
BEST: dict[str, tuple[tuple[tuple[str, int], ...], ...]] = {  # blocks up to 8, of 16, larger ones
    "lines": (((U, 64), (S, ANY), (U, 4096)), ((U, 64), (S, 4096), (W, ANY)), ((U, 64),)),
    "lines float32": (((U, ANY),), ((U, 1024),), ((U, 1024),)),
    "weight_grad": (((U, 64), (S, ANY), (U, ANY)), ((U, 64), (W, ANY)), ((U, 1024),)),
    "weight_grad ragged": (  # of images that tiles of SIDE x SIDE do not fill
        ((U, 64), (S, ANY), (U, ANY)),
        ((U, 1024), (S, 4096), (W, ANY)),
        ((U, 2048),),
    ),
    "weight_grad float32": (((U, ANY),), ((U, ANY),), ((U, ANY),)),
}
"""Rungs that are the fastest up to so many outputs, the better one first (measured on an H200)."""


@cache
def rung(name: str) -> ModuleType:
    """The module of a rung; loaded when first named, because those for GPUs load numba.cuda."""
    return import_module(f"{__name__}.{name}")


def chosen(
    names: Sequence[str],
    product: str,
    block_size: int,
    dtype: Any,
    place: str,
    batch: int,
    precision: str,
    window: Window,
    *features: int,
) -> ModuleType:
    """The first of these rungs that serves a case: those of `BEST`, then the last one first.

    The case is what `unsupported` takes. Raises ValueError with all their reasons where none does.
    """
    outputs = batch * prod(window.big if product == "input_grad" else window.small)
    kind = "weight_grad" if product == "weight_grad" else "lines"
    if str(dtype) == "float32":
        kind += " float32"
    elif product == "weight_grad" and any(n % SIDE for n in window.small if n > 1):
        kind += " ragged"
    best = BEST[kind][(block_size > 8) + (block_size > 16)]
    first = [name for name, most in best if outputs <= most and name in names]
    case = product, block_size, dtype, place, batch, precision, window, *features
    reasons = []
    for name in dict.fromkeys((*first, *reversed(names))):
        reason = rung(name).unsupported(*case)
        if reason is None:
            return rung(name)
        reasons.append(reason)
    raise ValueError("; ".join(reasons))


__all__ = ["PRODUCTS", "RUNGS", "Window", "chosen", "rung"]
