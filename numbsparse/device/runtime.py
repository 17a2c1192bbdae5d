"""Is there a GPU, and what is it?

Without a GPU, kernels can run in numba-cuda's simulator: set NUMBA_ENABLE_CUDASIM=1 before numba
is imported. The simulator's device memory is host memory; everything else is the same code.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from threading import get_ident
from typing import Any

from numba import config

from numbsparse.simulator import SIMULATED as SIMULATED

CPU_THREADS = config.NUMBA_NUM_THREADS
"""How many threads CPU kernels may use."""

capture: Any = None
"""The capture that is under way, if any: see device/capture.py."""

several_devices = False
"""Whether more than one GPU was used: until then all arrays are on one, and nothing is asked."""

only_device = 0
"""The number of that one."""

simulated_devices = 1
"""How many GPUs the simulator pretends to have; more in tests."""

current_stream: Callable[[], Any]  # set by device/streams.py, which knows this module


replay: ContextVar[Any] = ContextVar("numbsparse_replay", default=None)
recording = replay.get
"""recording() is what this thread's launches are recorded in, if anything: see device/replay.py."""


def capturing() -> Any:
    """That capture for the thread that began it; None for the others, whose work runs as ever."""
    return capture if capture is not None and capture.thread == get_ident() else None


def is_capturing() -> bool:
    """Whether the work of this thread is being captured."""
    return capturing() is not None


WITHOUT = (
    "without a GPU keep to the CPU, or pip install 'numbsparse[simulator]' and set "
    "NUMBA_ENABLE_CUDASIM=1 before Python starts: kernels then run in Numba's simulator, slowly, "
    "for tests and for learning"
)
OF_A_GPU = "pip install 'numbsparse[cu13]' ('numbsparse[cu12]' for a driver of CUDA 12)"
ON_MACOS = (
    "NVIDIA's packages, which GPU kernels and their simulator need, exist for Linux and Windows "
    "only; on macOS everything else runs, on the CPU"
)


@cache
def why_unavailable() -> str | None:
    """None where kernels can run; else one sentence that says what is missing and what to do."""
    if not has_numba_cuda() and sys.platform == "darwin":
        return ON_MACOS
    if SIMULATED:
        install = "pip install 'numbsparse[simulator]'"
        return None if has_numba_cuda() else f"the simulator is not installed: {install}"
    missing = _missing()
    return missing and f"{missing}; {WITHOUT}"


def has_numba_cuda() -> bool:
    """Whether what GPU kernels need to be loaded, or to run in the simulator, is installed."""
    needed = ("numba_cuda", "greenlet") if SIMULATED else ("numba_cuda",)
    return all(find_spec(package) is not None for package in needed)


def require_numba_cuda(what: str) -> None:
    """Raise ImportError, which says what to install, where `what` cannot be loaded."""
    if not has_numba_cuda():
        more = "" if sys.platform == "darwin" else ", or 'numbsparse[cu13]' for a GPU"
        raise ImportError(f"{what} needs numba-cuda: {install('simulator')}{more}")


def install(extra: str) -> str:
    """How to install an extra with numba-cuda."""
    return ON_MACOS if sys.platform == "darwin" else f"pip install 'numbsparse[{extra}]'"


def _missing() -> str | None:
    if not has_numba_cuda():
        return f"the compiler for GPU kernels is not installed: {OF_A_GPU}"
    from cuda.core import Device

    try:
        device = Device()
    except Exception:  # the driver's absence shows in many ways, one per platform and version
        return f"no driver or no GPU was found: install NVIDIA's driver, and {OF_A_GPU}"
    if device.compute_capability < (7, 0):
        return f"{device.name} is too old: numbsparse takes compute capability 7.0 and up"
    if (library := missing_compiler()) is not None:
        major = driver_version() // 1000
        return f"the compiler library {library} was not found: pip install 'numbsparse[cu{major}]'"
    return None


def missing_compiler() -> str | None:
    """The name of a library that numba-cuda needs to compile, if it cannot be loaded."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    library = ""
    try:
        for library in ("nvvm", "nvrtc", "nvJitLink"):
            load_nvidia_dynamic_lib(library)
    except Exception:  # pathfinder raises its own types, one per platform
        return library
    return None


@cache
def driver() -> Any:
    """The driver's functions as cuda-python has them, imported when first needed."""
    from cuda.bindings import driver

    return driver


def driver_version() -> int:
    """Of CUDA, as 13000 for 13.0."""
    version: int = driver().cuDriverGetVersion()[1]
    return version


def checked(result: tuple[Any, ...], what: str) -> Any:
    """What a function of the driver gives; RuntimeError where it failed at `what`."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"{what} failed: {error.name}")
    return values[0] if values else None


def is_available() -> bool:
    """Whether kernels can run: on a GPU, or in the simulator."""
    return why_unavailable() is None


def require() -> None:
    """Raise RuntimeError, with the reason, where no kernel can run."""
    if (reason := why_unavailable()) is not None:
        raise RuntimeError(f"a GPU is needed here, but {reason}")


def n_devices() -> int:
    """How many GPUs there are; RuntimeError where there is none, or none that serves."""
    require()
    if SIMULATED:
        return simulated_devices
    from cuda.core import Device

    return len(Device.get_all_devices())


def current_id() -> int:
    """The number of the GPU that this thread works on."""
    device: int = current_stream().device  # noqa: F821
    return device


def current_device() -> Any:
    """The same as a cuda.core Device. What needs its context is done within `Stream.context`."""
    require()
    return device_at(current_id())


@cache
def device_at(device: int) -> Any:
    from cuda.core import Device

    return Device(device)


_contexts: dict[int, int] = {}  # the driver's handle of each GPU's, once it was current


def make_current(device: int) -> int | None:
    """Make a GPU's context this thread's; returns the one that was, 0 for none, None for itself."""
    _, context = driver().cuCtxGetCurrent()  # an error where CUDA has not begun: no context
    before = int(context or 0)
    if not before or before != _contexts.get(device):
        device_at(device).set_current()
        _contexts[device] = int(driver().cuCtxGetCurrent()[1])
    return None if before == _contexts[device] else before


def context_of(device: int) -> int:
    """The driver's handle of a GPU's context."""
    return_to(make_current(device))
    return _contexts[device]


def return_to(context: int | None) -> None:
    """Make a context current again that `make_current` returned; for none that of our own GPU."""
    if context:
        driver().cuCtxSetCurrent(context)
    elif context is not None:
        make_current(current_id())


class MadeCurrent:
    """Within this context a GPU's context is this thread's."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: int):
        self._device = device

    def __enter__(self) -> None:
        self._before = make_current(self._device)

    def __exit__(self, *error: object) -> None:
        return_to(self._before)


def _asked() -> int | None:
    """Which GPU is asked about: None, so that it is quickly found, while there is only one."""
    return current_id() if several_devices else None


@cache
def _asked_of(device: int | None) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors)."""
    found = current_device() if device is None else device_at(device)
    return tuple(found.compute_capability), int(found.properties.multiprocessor_count)


def compute_capability() -> tuple[int, int]:
    """(major, minor) of the GPU; (7, 0), the least that is supported, in the simulator."""
    return (7, 0) if SIMULATED else _asked_of(_asked())[0]


def multiprocessors() -> int:
    """Of the GPU; there is none in the simulator."""
    return _asked_of(_asked())[1]


def card() -> str:
    """The name of the GPU."""
    return "simulator" if SIMULATED else current_device().name


def describe(device: int | None = None) -> str:
    """Name and driver of a GPU, of the one in use for None, in a few words; else RuntimeError."""
    require()
    if SIMULATED:
        return "numba-cuda's simulator"
    version = driver_version()
    name = card() if device is None else device_at(device).name
    return f"{name}, driver for CUDA {version // 1000}.{version % 1000 // 10}"


def figures(device: int) -> dict[str, Any]:
    """What a GPU is, by name: bytes of its memory, and so on. No work is begun on it."""
    major, minor = device_at(device).compute_capability
    _, total = driver().cuDeviceTotalMem(device)
    found = {"name": describe(device), "compute_capability": f"{major}.{minor}"}
    return found | {"memory": int(total)}


def device_at_address(address: int) -> int:
    """The number of the GPU whose memory is there."""
    if SIMULATED:
        return current_id()
    attribute = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, device = driver().cuPointerGetAttribute(attribute, address)
    return current_id() if int(error) else int(device)
