"""The ladder: the three block-sparse products, rung by rung, in reading order.

Every rung is a module with the same four names:

    unsupported(product, block_size, dtype, place, batch, precision)   # None, or why, in words
    forward(x, values, index, y, precision)            # y[:] = x @ w
    input_grad(dy, values, index, dx, precision)       # dx[:] = dy @ w.T
    weight_grad(x, dy, index, dvalues, precision)      # dvalues = (x.T @ dy) at the kept blocks

One that does not compute a product lacks it, and `unsupported` says so.

`x` and `dx` are (batch, in_features), `y` and `dy` (batch, out_features), `values` and `dvalues`
(n_blocks, B, B); `index` is the Index of the layout, where the operands are. The last operand is
written whole. Inputs may have any strides; `dvalues` is C-contiguous, `y` and `dx` are, or their
transposes are (feature-major activations). Features may end inside the last block: what `values`
holds beyond the edge is not read, and `dvalues` is zero there, or NaN where infinity or NaN meets
it. A kernel sees bfloat16 as uint16; `numbsparse.kernels.floats` converts.

`precision` matters only for float32: "highest" is as accurate as a float32 product, "high" allows
operands rounded to tf32 (10 bits of mantissa); a rung may always compute more accurately than
asked. A rung whose float32 products are less than exact says so: PRODUCT_ERROR is the largest
relative error of one at "highest", in units of 2^-23.

Which tile is fastest differs from card to card. A rung with several worth trying also has

    tile_choices(product, block_size, dtype, batch, precision)   # those, the sensible one first

and its products take `tile`, the number of one; elsewhere "k6_hopper/1" names the rung with it.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

from numbsparse.device import runtime

PRODUCTS = ("forward", "input_grad", "weight_grad")
PRECISIONS = ("highest", "high")

RUNGS = {
    "k0_reference": "cpu",
    "k0_cpu": "cpu",
    "k1_naive": "cuda",
    "k3_registers": "cuda",
    "k5_tensor_core": "cuda",
    "k6_hopper": "cuda",
    "k7_small_blocks": "cuda",
    "k8_small_batch": "cuda",
    "k9_dense_tiles": "cuda",
}
"""The place of each rung, in reading order.

With blocks of 32 and more and large batches that is the order of their speed. k7_small_blocks is
for blocks under 32, k8_small_batch for small batches; at such batches earlier rungs have no order.
k9_dense_tiles is for many blocks under 32.
"""

LADDER: dict[str, ModuleType]
"""The rungs by name, in reading order."""


MADE_SIZES = (32, 64, 128)
"""Block sizes of layouts made on a GPU; smaller blocks are fast with plans of the host alone."""


OWN: dict[str, Any] = {}
"""The rungs of users, which `add_rung` entered."""


def add_rung(name: str, module: Any) -> None:
    """Enter a rung of one's own, for as long as this process lives.

    `kernel=name` computes with it, and the benchmark checks it and times it with the others.
    `kernel="auto"` and `ns.tune` keep to the library's.

    Parameters
    ----------
    name : a new one, without "/"; one of `OWN` is replaced
    module : anything with `unsupported` and the products that this does not refuse

    Raises
    ------
    ValueError
        If the name is taken by the library, as "auto" and "all" are.
    TypeError
        If `module` lacks `unsupported`, or all of the products.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from types import SimpleNamespace
    >>> from numbsparse.kernels.matmul import OWN, add_rung, k0_reference, reach
    >>> mine = SimpleNamespace(unsupported=reach.reach("mine", "cpu"), forward=k0_reference.forward)
    >>> add_rung("mine", mine)
    >>> w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
    >>> ns.matmul(np.ones((1, 4), np.float32), w, kernel="mine")
    array([[4., 4., 4., 4.]], dtype=float32)
    >>> del OWN["mine"]
    """
    if name in (*RUNGS, "auto", "all") or "/" in name:
        raise ValueError(f"name takes a new one without '/', got {name!r}")
    if not hasattr(module, "unsupported") or not any(hasattr(module, p) for p in PRODUCTS):
        raise TypeError(f"module takes one with `unsupported` and some of {PRODUCTS}")
    OWN[name] = module


def serving_own(*case: Any) -> list[str]:
    """The rungs of users that serve (product, block_size, dtype, place, batch, precision)."""
    return [name for name, module in OWN.items() if module.unsupported(*case) is None]


def rung(name: str) -> Any:
    """The module of a rung."""
    return OWN[name] if name in OWN else _of_the_library(name)


@cache
def _of_the_library(name: str) -> ModuleType:
    """Loaded when first named: those for GPUs load numba.cuda. Raises ImportError without it."""
    if RUNGS.get(name) == "cuda":
        runtime.require_numba_cuda(name)
    return import_module(f"{__name__}.{name}")


def function_of(kernel: str, product: str) -> Callable[..., None]:
    """A product of a rung by name, or of a rung with another of its tiles: "k6_hopper/1"."""
    name, _, tile = kernel.partition("/")
    compute: Callable[..., None] = getattr(rung(name), product)
    return partial(compute, tile=int(tile)) if int(tile or 0) else compute  # some have 0 alone


def takes_gates(kernel: str, product: str, known: bool) -> bool:
    """Whether a product of a rung takes `gates`, (n_blocks,) float32, on a GPU.

    `known` is whether the host knows which are zero: then the rung is to leave these out already.
    A weight_grad need not compute them.
    """
    name = "TAKES_GATES" if known else "TAKES_UNKNOWN_GATES"
    return product in getattr(rung(kernel.partition("/")[0]), name, ())


def takes_places(kernel: str, product: str, dtype: Any) -> bool:
    """Whether a product takes an index that names its blocks by where they are among others.

    Of 16 bits: float32 has images of all blocks, or finds the rows of a block by its number.
    """
    places = getattr(rung(kernel.partition("/")[0]), "TAKES_PLACES", ())
    return product in places and dtype.itemsize == 2


def scales_slowly(kernel: str, size: int, work: int) -> bool:
    """Whether a product of so many multiply-adds takes long where gates are neither 0 nor 1."""
    most: dict[int, int] = getattr(rung(kernel.partition("/")[0]), "SCALES_IN_STAGES", {})
    return work <= most.get(size, 0)


def n_tiles(name: str, *case: Any) -> int:
    """How many tiles a rung has to choose from in a case that it serves."""
    module = rung(name)
    return len(module.tile_choices(*case)) if hasattr(module, "tile_choices") else 1


def __getattr__(name: str) -> dict[str, ModuleType]:
    if name != "LADDER":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    ladder = globals()["LADDER"] = {name: rung(name) for name in RUNGS}
    return ladder
