"""Which GPU work goes to, and whether there is one.

`with ns.device(1):` lets work begin on the second GPU: see `help(ns.device.device)`. Of GPUs
`n_devices()` says how many there are, `describe()` which one is in use, `why_unavailable()` why
there is none; `SIMULATED`, whether kernels run in Numba's simulator.

>>> import numbsparse as ns
>>> ns.device.is_available() == (ns.device.why_unavailable() is None)
True

The rest is for the library, whose only package it is that knows the GPU's runtime: memory, streams,
launches, graphs. `launch` is imported from `numbsparse.device.launch`, so that numba.cuda loads
with the first kernel and not with the package.
"""

import sys
from types import ModuleType

from numbsparse.device import replay
from numbsparse.device.ahead import compile_ahead as compile_ahead
from numbsparse.device.array import DeviceArray as DeviceArray
from numbsparse.device.array import copy_of, empty, moved, refill, simulated
from numbsparse.device.array import to_device as to_device
from numbsparse.device.capture import (
    Arena,
    Capture,
    forget_captures,
    generation,
    in_use,
    is_of_a_graph,
    is_own,
    live,
    outside_capture,
    switched,
    working_stream,
)
from numbsparse.device.fingerprint import source_text
from numbsparse.device.interop import (
    as_device_array,
    empty_in_library_of,
    empty_quickly,
    in_library_of,
    in_order_with,
    is_device_operand,
    is_read_only,
    one_gpu,
    read_quickly,
)
from numbsparse.device.places import device as device
from numbsparse.device.places import id_of, on
from numbsparse.device.runtime import (
    CPU_THREADS,
    SIMULATED,
    card,
    compute_capability,
    describe,
    is_available,
    is_capturing,
    multiprocessors,
    n_devices,
    require,
    why_unavailable,
)
from numbsparse.device.streams import Stream as Stream
from numbsparse.device.streams import beside, joined, order, refuse_in_capture
from numbsparse.device.streams import current as current_stream
from numbsparse.device.streams import stream as stream
from numbsparse.device.streams import synchronize as synchronize


class Room(ModuleType):
    """This package, which is also the function `device`."""

    def __call__(self, of: int | str | None = None) -> Stream:
        return device(of)


sys.modules[__name__].__class__ = Room
