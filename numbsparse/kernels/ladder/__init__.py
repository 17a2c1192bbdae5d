"""The taught ladder: one product, y = x @ w, in files to be read one after another.

Each step is one file. It adds an idea to the step before and changes little else, so that the diff
of two files is the lesson; `kernels/README.md` tells the story. The names are the same in all:

    BM, BN, BK      rows and columns of y that a block of threads computes, and terms in a step
    TM, TN          rows and columns of a thread
    B               the side of a kept block
    PARTS, part     steps that a block takes, and where in it a step begins
    x_at, w_at      where a tile begins in x and in w, as one long line of values
    xs, ws          tiles of x and w in shared memory
    acc             sums of a thread
    t, warp, lane   a thread in its block, its warp, its number in the warp
    top, left       the first row and column of y of a block of threads
    column          a block column of w; first, steps: where its kept blocks begin, how many steps
    ring, STAGES    from step 9 on: tiles of several steps; full, empty: the barriers of each stage
    TERMS, INPUTS   from step 12 on: terms of a sum in a step, of so many input blocks; record:
                    what a step does
    LINE            length of a line of a tile: in values, from step 9 on in bytes

A step has the contract of a rung of `kernels/matmul`, for the forward product only and for shapes
without edges: `unsupported` and `forward` refuse everything else, and say why. What the library
computes with are the rungs of `kernels/matmul`.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from numbsparse.device import runtime

NAMES = (
    "s01_naive",
    "s02_constants",
    "s03_shared",
    "s04_thread_tile",
    "s05_square_tile",
    "s06_wide",
    "s07_double_buffer",
    "s08_tensor_core",
    "s09_copy_engine",
    "s10_wgmma",
    "s11_producer",
    "s12_grouped",
    "s13_persistent",
    "s14_cluster",
    "s15_store",
)
"""The steps, in reading order."""

STEPS: dict[str, ModuleType]
"""The steps by name, in reading order."""


@cache
def step(name: str) -> ModuleType:
    """Loaded when first named, because steps load numba.cuda; ImportError where it is missing."""
    runtime.require_numba_cuda(name)
    return import_module(f"{__name__}.{name}")


def __getattr__(name: str) -> dict[str, ModuleType]:
    if name != "STEPS":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    steps = globals()["STEPS"] = {name: step(name) for name in NAMES}
    return steps
