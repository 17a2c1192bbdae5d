"""A driver that is a model: clocks instead of a GPU, and memory that knows who used it."""

from collections import Counter
from types import SimpleNamespace

import numpy as np

from numbsparse.device import DeviceArray, memory, runtime, streams
from numbsparse.device.array import empty, owners_of
from numbsparse.kernels.parts import plans
from numbsparse.layout import Layout


class Driver:
    """Streams and events as vector clocks, and what each address was used for, and when."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self):
        self.clocks = {}  # of each stream: how much of each other's work comes before its next
        self.host = Counter()  # what the host has seen the end of
        self.events, self.uses, self.captured = {}, {}, set()
        self.mode, self.n_buffers, self.freed = "global", 0, []

    def clock(self, handle):
        return self.clocks.setdefault(handle, Counter()) | self.host

    def cuEventCreate(self, flags):
        self.events[len(self.events)] = None
        return 0, len(self.events) - 1

    def cuEventRecord(self, event, handle):
        assert handle not in self.captured
        self.events[event] = self.clock(handle)
        return (0,)

    def cuStreamWaitEvent(self, handle, event, flags):
        assert handle not in self.captured
        self.clocks[handle] = self.clock(handle) | self.events[event]
        return (0,)

    def cuEventDestroy(self, event):
        return (0,)

    def cuStreamSynchronize(self, handle):
        assert handle not in self.captured
        assert not self.captured or self.mode == "relaxed"
        self.host |= self.clock(handle)
        return (0,)

    def cuStreamIsCapturing(self, handle):
        return 0, int(handle in self.captured)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.mode = self.mode, mode
        return 0, before

    def work(self, array):
        """A kernel on the current stream uses this array."""
        memory.note(owners_of((array,)))
        handle = streams.current().handle
        self.clocks[handle] = self.clock(handle) + Counter({handle: 1})
        self.uses.setdefault(array.address, []).append((handle, self.clocks[handle][handle]))

    def has_seen(self, handle, address):
        """Whether all work on this address comes before what the stream is given next."""
        return self.comes_after(handle, self.uses.get(address, ()))

    def comes_after(self, handle, uses):
        clock = self.clock(handle)
        return all(clock[other] >= number for other, number in uses)

    def buffer(self, nbytes):
        self.n_buffers += 1
        return Buffer(0x10000 * self.n_buffers, self, streams.current().handle)


class Buffer:
    """Memory of CUDA's pool, which is freed by the stream that it was taken on."""

    def __init__(self, handle, driver, stream):
        self.handle, self.driver, self.stream = handle, driver, stream

    def __del__(self):
        driver = self.driver
        allowed = self.stream not in driver.captured
        allowed &= not driver.captured or driver.mode == "relaxed"
        driver.freed.append((self.handle, allowed))


def install(monkeypatch):
    driver = Driver()
    streams._known.cache_clear()
    for module, name, ours in (
        (runtime, "SIMULATED", False),
        (runtime, "require", lambda: None),
        (runtime, "is_available", lambda: True),
        (runtime, "current_device", lambda: None),
        (runtime, "make_current", lambda device: None),
        (streams.DEFAULT, "_device", 0),
        (streams.Stream, "device", 0),
        (runtime, "driver", lambda: driver),
        (streams, "several", True),
        (streams, "_apart", lambda device: streams.at(99)),
        (memory, "take", driver.buffer),
        (memory, "_for_good", {}),
        (memory, "_late", []),
        (memory, "_kept", 0),
        (streams.DEFAULT, "shelves", {}),
    ):
        monkeypatch.setattr(module, name, ours)
    return driver


class Torch:
    def __init__(self, handle):
        self.cuda_stream = handle


class Planned:
    """A layout on a GPU, whose arrays go there as copies."""

    def __init__(self, monkeypatch):
        self.sent = 0

        def to_device(host):
            self.sent += 1
            assert not streams.current().is_captured
            array = empty(host.shape, host.dtype)
            return DeviceArray(array.address, array.shape, array.dtype, None, array.owner)

        monkeypatch.setattr(plans, "to_device", to_device)
        self.index = plans.Sent(Layout([[1, 0], [1, 1]]).index)


def make(index, n):
    assert isinstance(index.rows.indptr, np.ndarray)
    return np.arange(n), n, plans.scratch(3, np.float32), plans.scratch(2, np.int32)
