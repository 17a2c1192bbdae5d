"""Is there a GPU, and what is it?

Without a GPU, kernels can run in numba-cuda's simulator: set NUMBA_ENABLE_CUDASIM=1 before numba
is imported. The simulator's device memory is host memory; everything else is the same code.
"""

from __future__ import annotations

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


@cache
def why_unavailable() -> str | None:
    """None where kernels can run; else one sentence that says what is missing and what to do."""
    if SIMULATED:
        there = find_spec("numba_cuda") is not None
        return (
            None if there else "the simulator is not installed: pip install 'numbsparse[simulator]'"
        )
    missing = _missing()
    return missing and f"{missing}; {WITHOUT}"


def _missing() -> str | None:
    if find_spec("numba_cuda") is None:
        return f"what compiles for it is not installed: {OF_A_GPU}"
    from cuda.core import Device

    try:
        device = Device()
    except Exception:  # the driver's absence shows in many ways, one per platform and version
        return f"no driver or no GPU was found: install NVIDIA's driver, and {OF_A_GPU}"
    if device.compute_capability < (7, 0):
        return f"{device.name} is too old: numbsparse takes compute capability 7.0 and up"
    if (library := missing_compiler()) is not None:
        major = _driver_major()
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


def _driver_major() -> int:
    from cuda.bindings import driver

    return driver.cuDriverGetVersion()[1] // 1000


def is_available() -> bool:
    """Whether kernels can run: on a GPU, or in the simulator."""
    return why_unavailable() is None


def require() -> None:
    """Raise RuntimeError, with the reason, where no kernel can run."""
    if (reason := why_unavailable()) is not None:
        raise RuntimeError(f"a GPU is needed here, but {reason}")


@cache
def current_device() -> Any:
    """The cuda.core Device that everything runs on, made current."""
    require()
    from cuda.core import Device

    device = Device()
    device.set_current()
    return device


def on_this_gpu(what: str) -> None:
    """Refuse `what`, in the words of its user, in a thread of a library that works on another GPU.

    A thread that works on none yet works on ours from now on.
    """
    if SIMULATED:
        return
    from cuda.bindings import driver

    ours = current_device()
    error, theirs = driver.cuCtxGetDevice()
    if error:
        ours.set_current()
    elif int(theirs) != ours.device_id:
        raise ValueError(
            f"{what} is on GPU {int(theirs)}, numbsparse works on GPU {ours.device_id}"
        )


@cache
def compute_capability() -> tuple[int, int]:
    """(major, minor) of the GPU; (7, 0), the least that is supported, in the simulator."""
    if SIMULATED:
        return (7, 0)
    return tuple(current_device().compute_capability)


def card() -> str:
    """The name of the GPU."""
    return "simulator" if SIMULATED else current_device().name


def describe() -> str:
    """Name and driver of the GPU, in a few words."""
    if SIMULATED:
        return "numba-cuda's simulator"
    from cuda.bindings import driver

    version = driver.cuDriverGetVersion()[1]
    return f"{card()}, driver for CUDA {version // 1000}.{version % 1000 // 10}"


def total_memory() -> int:
    """Bytes of the GPU's memory."""
    from cuda.bindings import driver

    current_device()
    _, _, total = driver.cuMemGetInfo()
    return int(total)
