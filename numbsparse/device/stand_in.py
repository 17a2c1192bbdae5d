"""A card that is not there: calls go as far as their launches, whose kernels are only compiled.

Memory is the host's, so that plans are worked out as on a card. Nothing is computed: results hold
zeros. A process that has installed it is good for nothing else.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import compiler, kernel_cache, launch, memory, runtime, tensor_map

CAPABILITY = (9, 0)
MULTIPROCESSORS = 132


class Compiled(NamedTuple):
    name: str
    cubin: bytes


def install(
    capability: tuple[int, int] = CAPABILITY,
    multiprocessors: int = MULTIPROCESSORS,
    compiled: Any = None,
    start: Callable[[Any, tuple[Any, ...]], None] = lambda kernel, how: None,
) -> list[Compiled]:
    """Put the card in place; the list grows with each kernel that is compiled from then on.

    compiled : what to do in place of `kernel_cache.compiled`; then the list stays empty
    start : what to do in place of a launch, of what was compiled and how it is launched: (grid,
        block, bytes of shared memory, cluster, overlap, together)
    """
    import cuda.core
    from numba.cuda import dispatcher

    found: list[Compiled] = []

    def build(kernel: Any, signature: Any) -> compiler.Built:
        code = compiler.linked(kernel, compiler.lto_ir(kernel, signature)).code
        made_by = kernel.py_func.__qualname__.removesuffix(".<locals>.kernel")
        module = kernel.py_func.__module__.removeprefix("numbsparse.kernels.")
        found.append(Compiled(f"{module}.{made_by}", code))
        return compiler.Built(found[-1], "", None)

    _Card.compute_capability = capability
    _Card.properties = SimpleNamespace(multiprocessor_count=multiprocessors)
    instead: list[tuple[Any, str, Any]] = [
        (runtime, "why_unavailable", lambda: None),
        (runtime, "make_current", lambda device: None),
        (cuda.core, "Device", _Card),
        (dispatcher, "get_current_device", _Card),  # which device functions are compiled for
        (memory, "take", _Memory),
        (memory, "copy_in", lambda to, host: ctypes.memmove(to, host.ctypes.data, host.nbytes)),
        (memory, "copy_out", lambda host, of: ctypes.memmove(host.ctypes.data, of, host.nbytes)),
        (memory, "copy_within", lambda to, of, n, at=None: ctypes.memmove(to, of, n)),
        (memory, "_free", lambda block: None),
        (tensor_map, "_encoded", lambda key: np.zeros(tensor_map.WORDS, np.int64)),
        (launch, "Prepared", lambda kernel, nbytes, shared_bytes: kernel),
        (launch, "_start", lambda kernel, values, how, capture: start(kernel, how)),
    ]
    if compiled is None:
        instead.append((kernel_cache, "file_of", lambda kernel, signature: None))
        instead.append((compiler, "build", build))
    else:
        instead.append((kernel_cache, "compiled", compiled))
    for module, name, ours in instead:
        setattr(module, name, ours)
    return found


def forget() -> None:
    """Compile for the next call what earlier ones have launched too."""
    launch._prepared.clear()
    launch._compiled.clear()


class _Card:
    """What the library asks of a cuda.core Device, with the figures of an H200 if no others."""

    name = "a card that is not there"
    id = device_id = 0
    compute_capability = CAPABILITY
    properties = SimpleNamespace(multiprocessor_count=MULTIPROCESSORS)

    def __init__(self, device: int = 0):
        pass

    @classmethod
    def get_all_devices(cls) -> "tuple[_Card, ...]":
        return (cls(),)


class _Memory:
    def __init__(self, nbytes: int):
        self._bytes = np.zeros(nbytes + memory.GRAIN, np.uint8)
        self.handle = -(-self._bytes.ctypes.data // memory.GRAIN) * memory.GRAIN
