"""Run a kernel's blocks, one at a time, or as many together as wait for each other: a cluster, all.

What Numba's simulator does differently from a GPU, or slowly, is corrected here for all launches,
Numba's own too; so this is imported only in the simulator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
from numba import types
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray
from numba.cuda.simulator.kernel import (
    BlockManager,
    FakeCUDAKernel,
    _get_kernel_context,
    swapped_cuda_module,
)
from numba.cuda.simulator.kernelapi import FakeCUDALocal, FakeCUDAShared
from numba.np.numpy_support import as_dtype

from numbsparse.simulator import accesses, stacks
from numbsparse.simulator.arrays import DYNAMIC, Shared, in_global_memory, shared_bytes
from numbsparse.simulator.threads import Block, Turns, current

Shape = tuple[int, ...]  # along x, y and z

ALONE: Shape = (1, 1, 1)
NUMBAS = (types.Integer, types.Float)

_cluster = _together = ALONE
_coming: dict[Shape, list[Block]] = {}  # blocks that are not all there yet


def run(
    kernel: Any,
    grid: Shape,
    block: Any,
    shared_bytes: int,
    args: Iterable[Any],
    cluster: Shape | None = None,
    together: bool = False,
) -> None:
    """Run a kernel on a grid, whose blocks wait for others of their cluster, or for all."""
    accesses.begin_launch(kernel, grid, block)
    given = [_given(arg) for arg in args]
    switching = nullcontext() if stacks.OF_ONE_THREAD else _on_one_core()
    with switching, _at_once(grid, cluster, together):
        kernel[grid, block, 0, shared_bytes](*given)


def _given(arg: Any, inside: bool = False) -> Any:
    """What a kernel sees of an argument; inside a NamedTuple Numba's simulator does not look."""
    if isinstance(arg, np.ndarray):
        array = in_global_memory(arg)
        return FakeWithinKernelCUDAArray(array) if inside else array
    if isinstance(arg, tuple) and type(arg) is not tuple:
        return type(arg)(*(_given(item, inside=True) for item in arg))
    return arg


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Where the system can: there Python's threads hand over their turn several times as fast.

    Processes side by side take different ones.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores is not None:
        os.sched_setaffinity(0, {sorted(cores)[_number() % len(cores)]})
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _number() -> int:
    """Of this process among those side by side: pytest-xdist counts its own."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw") or os.getpid())


@contextmanager
def _at_once(grid: Shape, cluster: Shape | None, together: bool) -> Iterator[None]:
    """While a kernel is launched whose blocks wait for others, of their cluster or of the grid."""
    global _cluster, _together
    shape = ALONE if cluster is None else _three(cluster)
    if any(n % c for n, c in zip(_three(grid), shape, strict=True)):
        raise ValueError(f"grid takes a multiple of the cluster {cluster}, got {grid}")
    _cluster, _together = shape, _three(grid) if together else shape
    try:
        yield
    finally:
        _cluster = _together = ALONE
        _coming.clear()


def _run_block(manager: Any, place: Sequence[int], *args: Any) -> None:
    """In the place of `BlockManager.run`; under `cuda.jit(debug=True)` a division by 0 raises."""

    def work() -> None:
        with np.errstate(divide="raise"):
            manager._f(*args)

    block = Block(manager, place, work if manager._debug else partial(manager._f, *args))
    blocks = _coming.setdefault(_group(block, _together), [])
    blocks.append(block)
    if len(blocks) == prod(_together):
        del _coming[_group(block, _together)]
        for each in blocks:
            each.cluster = [b for b in blocks if _group(b, _cluster) == _group(each, _cluster)]
        Turns(blocks).run()


def _three(shape: Shape) -> Shape:
    return (*shape, *ALONE)[:3]


def _group(block: Block, shape: Shape) -> Shape:
    return tuple(p // n for p, n in zip(_three(block.place), shape, strict=True))


def _calling(plain: Callable[..., None]) -> Callable[..., Any]:
    """A kernel, or a device function in it: its module sees the simulator's `cuda` meanwhile.

    The simulator's own looks through the module in each call of a device function, which takes
    longer than most of these functions; here that is done once per launch.
    """
    seen: set[Any] = set()  # functions, and modules by the identity of their names
    swaps = ExitStack()

    def call(kernel: Any, *args: Any) -> Any:
        function = kernel.fn
        if kernel in seen:
            return function(*args)
        cuda = _get_kernel_context()
        if cuda is None:
            with swaps:
                swaps.callback(seen.clear)
                swaps.enter_context(_numpys_types(function, True))
                return plain(kernel, *args)
        if new := id(function.__globals__) not in seen:
            swaps.enter_context(swapped_cuda_module(function, cuda))
        swaps.enter_context(_numpys_types(function, new))
        seen.update((kernel, id(function.__globals__)))
        return function(*args)

    return call


@contextmanager
def _numpys_types(function: Any, of_module: bool) -> Iterator[None]:
    """A function sees NumPy's types in the place of Numba's: `uint32(x)` takes half the time.

    They are names of its module, or of a function around it.
    """
    names = function.__globals__
    numbas = {name: kind for name, kind in names.items() if of_module and type(kind) in NUMBAS}
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or ()]
    cells = [(cell, kind) for cell, kind in cells if type(kind) in NUMBAS]
    names.update((name, getattr(np, kind.name)) for name, kind in numbas.items())
    for cell, kind in cells:
        cell.cell_contents = getattr(np, kind.name)
    try:
        yield
    finally:
        names.update(numbas)
        for cell, kind in cells:
            cell.cell_contents = kind


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`array[i, j]` in global memory; the simulator looks three times at what it found."""

    def read(array: Any, place: Any) -> Any:
        if type(array._item) is FakeCUDAArray:  # nobody watches
            found = array._item._ary[place]
            if type(found) not in (np.ndarray, np.void):
                return found
        return plain(array, place)

    return read


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`cuda.local.array`, whose size is noted."""

    def array(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        accesses.note_local(made.nbytes)
        return made

    return array


def _shared_array(memory: Any, shape: Any, dtype: Any, alignment: None = None) -> Any:
    """`cuda.shared.array`: a block has one for each call in the compiled text, and the dynamic one.

    The latter is aligned to 16 bytes and no more; all others are at an offset of 0.
    """
    kind = np.ndarray if accesses.watcher is None else Shared
    dtype = np.dtype(as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    name = (_compiled_place(sys._getframe(1)), dtype, shape) if shape else DYNAMIC
    shape = shape or memory._dynshared_size // dtype.itemsize
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return shared_bytes(current().block, name, nbytes).view(dtype).reshape(shape).view(kind)


def _compiled_place(frame: Any) -> Any:
    """Where a call is in the compiled text, be it reached once or often.

    Numba compiles a function once for the types of its arguments, wherever it is called from; two
    functions of the same text, as a factory makes them, are two. Of the types those of arrays are
    looked at here. Numba also compiles again for another number in the text (`part(x, 0)`, `part(x,
    1)`), which cannot be seen here: the calls share an array where they may have two.
    """
    function: Any = frame.f_code
    kinds: tuple[Any, ...] = ()
    if frame.f_back.f_code is FakeCUDAKernel.__call__.__code__:  # `call` of `_calling`
        calling = frame.f_back.f_locals
        function = calling["kernel"]
        kinds = tuple((a.dtype, a.ndim) for a in calling["args"] if getattr(a, "ndim", 0))
    return function, kinds, accesses.place_in(frame)


BlockManager.run = _run_block
FakeCUDAShared.array = _shared_array
FakeCUDALocal.array = _noting(FakeCUDALocal.array)
FakeCUDAKernel.__call__ = _calling(FakeCUDAKernel.__call__)
FakeWithinKernelCUDAArray.__getitem__ = _reading(FakeWithinKernelCUDAArray.__getitem__)
for name in ("_item.shape", "_item._ary.dtype", "_item._ary.size"):
    setattr(FakeWithinKernelCUDAArray, name.rpartition(".")[2], property(attrgetter(name)))
