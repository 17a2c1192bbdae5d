"""Run a kernel's blocks, one at a time, or as many together as wait for each other: a cluster, all.

What Numba's simulator does differently from a GPU, or slowly, is corrected here for all launches,
Numba's own too; so this is imported only in the simulator.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from numba import types
from numba.cuda.simulator import kernel as simulated
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray
from numba.cuda.simulator.kernel import (
    BlockManager,
    FakeCUDAKernel,
    _get_kernel_context,
    swapped_cuda_module,
)
from numba.cuda.simulator.kernelapi import FakeCUDALocal, FakeCUDAModule, FakeCUDAShared
from numba.np.numpy_support import as_dtype

from numbsparse.simulator import accesses, c_math
from numbsparse.simulator.arrays import DYNAMIC, Global, Shared, seen, shared_bytes
from numbsparse.simulator.threads import Block, Turns, current

Shape = tuple[int, ...]  # along x, y and z

ALONE: Shape = (1, 1, 1)
SHOWN = (types.Integer, types.Float, FakeCUDAKernel)  # a kernel sees something else for these

_cluster = _together = ALONE
_coming: dict[Shape, list[Block]] = {}  # blocks that are not all there yet
_swaps = ExitStack()  # undone after the launch
_dtypes: dict[Any, np.dtype] = {}  # by what they are in a kernel
_swapped: set[Any] = set()  # functions, and modules by the identity of their names


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
    with _at_once(grid, cluster, together):
        kernel[grid, block, 0, shared_bytes](*given)


def _given(arg: Any, inside: bool = False) -> Any:
    """What Numba's simulator is to have of an argument; inside a NamedTuple it does not look."""
    if isinstance(arg, np.ndarray):
        array = seen(arg, Global)
        return array if inside else FakeCUDAArray(array)
    if isinstance(arg, tuple) and type(arg) is not tuple:
        return type(arg)(*(_given(item, inside=True) for item in arg))
    return arg


def _seen(arg: Any) -> Any:
    """What a kernel sees of it: a NumPy array, which does all that kernels do with theirs.

    Numba's has fields too, as attributes.
    """
    array = arg._item._ary if type(arg) is FakeWithinKernelCUDAArray else None
    if not isinstance(array, np.ndarray) or array.dtype.fields:
        return arg
    return array if isinstance(array, Global) else array.view(Global)


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

    if manager._f not in _swapped:
        _swap(manager._f)
    function = partial(manager._f, *map(_seen, args))

    def work() -> None:
        with np.errstate(divide="raise"):
            function()

    block = Block(manager, place, work if manager._debug else function)
    blocks = _coming.setdefault(_group(block, _together), [])
    blocks.append(block)
    if len(blocks) == math.prod(_together):
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
    longer than most of these functions; here that is done once per launch, for all that a kernel's
    modules name.
    """

    def call(kernel: Any, *args: Any) -> Any:
        if kernel.fn not in _swapped:
            if _get_kernel_context() is None:
                with _swaps:
                    _swaps.callback(_swapped.clear)
                    return plain(kernel, *args)
            _swap(kernel.fn)
        return kernel.fn(*args)

    return call


def _swap(function: Any) -> None:
    """What a function names is what a simulated one is to see, and so on for device functions.

    Names are of its module, or of a function around it. NumPy's types stand for Numba's:
    `uint32(x)` takes half the time; and for a device function what it calls, but where shared
    arrays are told apart by who is called. `math` is as C has it.
    """
    _swapped.add(function)
    found = []

    def shown(value: Any) -> Any:
        if value is math:
            return c_math.math
        if type(value) is not FakeCUDAKernel:
            return _converting(value.name)
        if value._device and value.fn not in _swapped:
            _swapped.add(value.fn)
            found.append(value.fn)
        return value.fn if value._device and "shared" not in value.fn.__code__.co_names else value

    names = function.__globals__
    if id(names) not in _swapped:
        _swapped.add(id(names))
        _swaps.enter_context(swapped_cuda_module(function, _get_kernel_context()))
        before = {
            name: value for name, value in names.items() if type(value) in SHOWN or value is math
        }
        names.update((name, shown(value)) for name, value in before.items())
        _swaps.callback(names.update, before)
    for cell in function.__closure__ or ():
        if type(value := cell.cell_contents) in SHOWN:
            cell.cell_contents = shown(value)
            _swaps.callback(setattr, cell, "cell_contents", value)
    for other in found:
        _swap(other)


@cache
def _converting(name: str) -> Callable[[Any], Any]:
    """What `name` is in a kernel: `uint32(x)`, and the type of an array.

    Small whole numbers are kept: NumPy makes one in ten times as long as it is found.
    """
    number = getattr(np, name)
    box = np.zeros(1, number)

    def by_array(value: Any) -> Any:  # in half of the time of `number`
        box[0] = value
        return box[0]

    # What does not fit an array of signed numbers is an error there.
    make = number if issubclass(number, np.signedinteger) else by_array

    class Made(dict[Any, Any]):
        def __missing__(self, value: Any) -> Any:
            if type(value) is number:
                return value
            made = make(value)
            if -65536 < value < 65536 and made == value:
                self[int(value)] = made
            return made

    found = Made().__getitem__

    def convert(x: Any) -> Any:
        return found(x) if type(x) is int else x if type(x) is number else make(x)

    shown = convert if issubclass(number, np.floating) else found  # -0.0 would be found as 0
    _dtypes[shown] = np.dtype(number)
    return shown


class _Cuda(FakeCUDAModule):  # type: ignore[misc]
    """`cuda` as a kernel sees it: what it asks for most takes no detour."""

    threadIdx = property(lambda self: current().threadIdx)
    blockIdx = property(lambda self: current().blockIdx)

    def grid(self, n: int) -> Any:
        thread = current()
        x = thread.blockIdx.x * self.blockDim.x + thread.threadIdx.x
        return x if n == 1 else super().grid(n)


def _dtype(of: Any) -> np.dtype:
    return _dtypes.get(of) or np.dtype(as_dtype(of) if isinstance(of, types.Type) else of)


def _local_array(memory: Any, shape: Any, dtype: Any) -> Any:
    """`cuda.local.array`, whose size is noted."""
    made = np.empty(shape, _dtype(dtype))
    if accesses.watcher is not None:
        accesses.note_local(made.nbytes)
    return made


def _shared_array(memory: Any, shape: Any, dtype: Any, alignment: None = None) -> Any:
    """`cuda.shared.array`: a block has one for each call in the compiled text, and the dynamic one.

    The latter is aligned to 16 bytes and no more; all others are at an offset of 0.
    """
    dtype = _dtype(dtype)
    name = (_compiled_place(sys._getframe(1)), dtype, shape) if shape else DYNAMIC
    block = current().block
    made = block.own.setdefault(_shared_array, {})
    array = made.get((name, dtype))
    if array is None:
        shape = shape or memory._dynshared_size // dtype.itemsize
        nbytes = dtype.itemsize * (math.prod(shape) if isinstance(shape, tuple) else shape)
        array = shared_bytes(block, name, nbytes).view(dtype).reshape(shape)
        array = made[name, dtype] = seen(array, Shared)
    return array


def _compiled_place(frame: Any) -> Any:
    """Where a call is in the compiled text, be it reached once or often.

    Numba compiles a function once for the types of its arguments, wherever it is called from; two
    functions of the same text, as a factory makes them, are two. Of the types those of arrays are
    looked at here. Numba also compiles again for another number in the text (`part(x, 0)`, `part(x,
    1)`), which cannot be seen here: the calls share an array where they may have two.
    """
    called: Any = None
    if frame.f_back.f_code is FakeCUDAKernel.__call__.__code__:  # `call` of `_calling`
        calling = frame.f_back.f_locals
        kinds = tuple((a.dtype, a.ndim) for a in calling["args"] if getattr(a, "ndim", 0))
        called = calling["kernel"], kinds
    return called, accesses.site_of(frame)


simulated.FakeCUDAModule = lru_cache(_Cuda)  # of a grid, a block and its dynamic memory
BlockManager.run = _run_block
FakeCUDAShared.array = _shared_array
FakeCUDALocal.array = _local_array
FakeCUDAKernel.__call__ = _calling(FakeCUDAKernel.__call__)
