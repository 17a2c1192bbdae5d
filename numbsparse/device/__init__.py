"""The only room that knows the GPU's runtime: memory, streams, launches.

`launch` is imported from `numbsparse.device.launch`, so that numba.cuda loads with the first
kernel and not with the package.
"""

from numbsparse.device.array import DeviceArray, empty, to_device
from numbsparse.device.interop import as_device_array, in_library_of, is_device_operand
from numbsparse.device.runtime import (
    CPU_THREADS,
    SIMULATED,
    compute_capability,
    describe,
    is_available,
    require,
    synchronize,
    why_unavailable,
)

__all__ = [
    "CPU_THREADS",
    "SIMULATED",
    "DeviceArray",
    "as_device_array",
    "compute_capability",
    "describe",
    "empty",
    "in_library_of",
    "is_available",
    "is_device_operand",
    "require",
    "synchronize",
    "to_device",
    "why_unavailable",
]
