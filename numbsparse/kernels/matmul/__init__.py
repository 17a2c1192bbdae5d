"""The ladder: the three block-sparse products, one technique per file, in reading order.

Every rung is a module with the same four names:

    unsupported(product, block_size, dtype, place, batch, precision)   # None, or why, in words
    forward(x, values, index, y, precision)            # y[:] = x @ w
    input_grad(dy, values, index, dx, precision)       # dx[:] = dy @ w.T
    weight_grad(x, dy, index, dvalues, precision)      # dvalues = (x.T @ dy) at the kept blocks

`x` and `dx` are (batch, in_features), `y` and `dy` (batch, out_features), `values` and `dvalues`
(n_blocks, B, B); `index` is the Index of the layout, where the operands are. The last operand is
written whole. Inputs may have any strides; `dvalues` is C-contiguous, `y` and `dx` are, or their
transposes are (feature-major activations). Features may end inside the last block: what `values`
holds beyond the edge is not read, and `dvalues` is zero there. A kernel sees bfloat16 as uint16;
`numbsparse.kernels.floats` converts.

`precision` matters for float32 alone: "highest" is as accurate as a float32 product, "high" allows
factors rounded to tf32 (10 bits of mantissa); a rung may always compute more accurately than asked.

Which tile is fastest differs from card to card. A rung with several worth trying also has

    tile_choices(product, block_size, dtype, batch, precision)   # those, the sensible one first

and its products take `tile`, the number of one; elsewhere "k4_pipelined/1" names the rung with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

PRODUCTS = ("forward", "input_grad", "weight_grad")
PRECISIONS = ("highest", "high")

RUNGS = {
    "k0_reference": "cpu",
    "k0_cpu": "cpu",
    "k1_naive": "cuda",
    "k2_shared": "cuda",
    "k3_registers": "cuda",
    "k4_pipelined": "cuda",
    "k5_tensor_core": "cuda",
    "k6_hopper": "cuda",
    "k7_small_blocks": "cuda",
    "k8_small_batch": "cuda",
}
"""The place of each rung; each is faster than the one before in the same place."""

LADDER: dict[str, ModuleType]
"""The rungs by name, in reading order."""


@cache
def rung(name: str) -> ModuleType:
    """The module of a rung; loaded when first named, because those for GPUs load numba.cuda."""
    return import_module(f"{__name__}.{name}")


def function_of(kernel: str, product: str) -> Callable[..., None]:
    """A product of a rung by name, or of a rung with another of its tiles: "k4_pipelined/1"."""
    name, _, tile = kernel.partition("/")
    compute: Callable[..., None] = getattr(rung(name), product)
    return partial(compute, tile=int(tile)) if tile else compute


def n_tiles(name: str, *case: Any) -> int:
    """How many tiles a rung has to choose from in a case that it serves."""
    module = rung(name)
    return len(module.tile_choices(*case)) if hasattr(module, "tile_choices") else 1


def __getattr__(name: str) -> dict[str, ModuleType]:
    if name != "LADDER":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    ladder = globals()["LADDER"] = {name: rung(name) for name in RUNGS}
    return ladder
