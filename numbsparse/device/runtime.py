"""Is there a GPU, and what is it?

Without a GPU, kernels can run in numba-cuda's simulator: set NUMBA_ENABLE_CUDASIM=1 before numba
is imported. The simulator's device memory is host memory; everything else is the same code.
"""

from __future__ import annotations

import sys
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
    """Whether numba-cuda is installed, without which no GPU kernel can be loaded."""
    return find_spec("numba_cuda") is not None


def require_numba_cuda(what: str) -> None:
    """Raise ImportError, which says what to install, where `what` cannot be loaded."""
    if not has_numba_cuda():
        more = "" if sys.platform == "darwin" else ", or 'numbsparse[cu13]' for a GPU"
        raise ImportError(f"{what} takes numba-cuda: {install('simulator')}{more}")


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
