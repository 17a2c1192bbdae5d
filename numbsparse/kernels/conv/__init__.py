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
blocks each line multiplies, `boxes` finds pixels inside kernels and fetches boxes of them, and
`costs` says how long a rung takes, by factors that `python -m numbsparse times --conv` fits.

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

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any

from numbsparse.kernels.conv.costs import UNFOLDED, microseconds, unfolded_by
from numbsparse.kernels.conv.window import Window

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


@cache
def rung(name: str) -> ModuleType:
    """The module of a rung; loaded when first named, because those for GPUs load numba.cuda."""
    return import_module(f"{__name__}.{name}")


def function_of(kernel: str, product: str) -> Callable[..., None]:
    """A product of a rung by name; of k2 also by that of the rung that is to multiply, behind /."""
    name, _, by = kernel.partition("/")
    compute: Callable[..., None] = getattr(rung(name), product)
    return partial(compute, by=by) if by else compute


def chosen(names: Sequence[str], n_blocks: int, *case: Any) -> ModuleType:
    """Of these rungs that serve a case the one that is expected to be the fastest, else the last.

    The case is what `unsupported` takes. Raises ValueError with all their reasons where none does.
    """
    if len(names) > 1 and RUNGS[names[0]] == "cuda":
        names = ranked(tuple(names), n_blocks, *case)
    reasons = []
    for name in reversed(names):
        reason = rung(name).unsupported(*case)
        if reason is None:
            return rung(name)
        reasons.append(reason)
    raise ValueError("; ".join(reasons))


@lru_cache(maxsize=1024)
def ranked(names: tuple[str, ...], n_blocks: int, *case: Any) -> list[str]:
    """The fastest one last: see `costs`."""
    product, block_size, dtype, _, batch, precision, window, n_in, n_out = case
    of = product, block_size, dtype, precision, batch, window, n_in, n_out, n_blocks
    times = {name: microseconds(name, *of) for name in names if name != UNFOLDED}
    for by in unfolded_by(*of)[:1]:
        times[UNFOLDED] = microseconds(f"{UNFOLDED}/{by}", *of)
    return sorted(names, key=lambda name: -times.get(name, inf))


__all__ = ["PRODUCTS", "RUNGS", "Window", "chosen", "function_of", "rung"]
