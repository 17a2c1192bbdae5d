"""The only package that knows the GPU's runtime: memory, streams, launches, graphs.

`launch` is imported from `numbsparse.device.launch`, so that numba.cuda loads with the first
kernel and not with the package.
"""

from numbsparse.device import replay
from numbsparse.device.array import DeviceArray, copy_of, empty, refill, to_device
from numbsparse.device.capture import (
    Capture,
    forget_captures,
    generation,
    is_of_a_graph,
    is_own,
    live,
    outside_capture,
)
from numbsparse.device.fingerprint import library
from numbsparse.device.interop import (
    as_device_array,
    empty_in_library_of,
    empty_quickly,
    in_library_of,
    in_order_with,
    is_device_operand,
    read_quickly,
)
from numbsparse.device.runtime import (
    CPU_THREADS,
    SIMULATED,
    card,
    compute_capability,
    describe,
    is_available,
    is_capturing,
    on_this_gpu,
    require,
    why_unavailable,
)
from numbsparse.device.streams import Stream, joined, stream, synchronize
from numbsparse.device.streams import current as current_stream

__all__ = [
    "CPU_THREADS",
    "SIMULATED",
    "Capture",
    "DeviceArray",
    "Stream",
    "as_device_array",
    "card",
    "compute_capability",
    "copy_of",
    "current_stream",
    "describe",
    "empty",
    "empty_in_library_of",
    "empty_quickly",
    "forget_captures",
    "generation",
    "in_library_of",
    "in_order_with",
    "is_available",
    "is_capturing",
    "is_device_operand",
    "is_of_a_graph",
    "is_own",
    "joined",
    "library",
    "live",
    "on_this_gpu",
    "outside_capture",
    "read_quickly",
    "refill",
    "replay",
    "require",
    "stream",
    "synchronize",
    "to_device",
    "why_unavailable",
]
