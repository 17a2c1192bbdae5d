"""Several GPUs: in which one's context the driver is called, whatever this thread's was before."""

import threading
from types import SimpleNamespace

import pytest
from devices_helpers import X, two  # noqa: F401

from numbsparse import device
from numbsparse.device import launch, memory, runtime, streams

RETURN_TO = runtime.return_to


class Driver:
    """What of the driver waits need, and which GPU's context each call was made in."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self):
        self.context, self.calls = 7, []

    def __getattr__(self, name):
        results = (0,) if "Memcpy" in name else (0, 0)
        return lambda *args: self.calls.append((name, self.context)) or results

    def make_current(self, number):
        before, self.context = self.context, number
        return before

    def return_to(self, context):
        self.context = context


@pytest.fixture
def driver(monkeypatch):
    if not device.SIMULATED:
        pytest.skip("its GPUs are made up")
    driver = Driver()
    monkeypatch.setattr(runtime, "SIMULATED", False)
    monkeypatch.setattr(runtime, "make_current", driver.make_current)
    monkeypatch.setattr(runtime, "return_to", driver.return_to)
    monkeypatch.setattr(runtime, "driver", lambda: driver)
    return driver


@pytest.mark.parametrize(("before", "after"), [(0, 100), (100, 100), (101, 101), (55, 55)])
def test_a_thread_is_on_its_own_gpu_after_another_one(before, after, monkeypatch):
    """On GPU 0, whose context is 100, where it was on none before; elsewhere where it was."""
    driver = pytest.importorskip("cuda.bindings.driver")
    current = [before]
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, current[0]))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: current.__setitem__(0, context))
    monkeypatch.setattr(runtime, "_contexts", {})
    monkeypatch.setattr(runtime, "current_id", lambda: 0)
    monkeypatch.setattr(
        runtime,
        "device_at",
        lambda n: SimpleNamespace(set_current=lambda: current.__setitem__(0, 100 + n)),
    )
    with runtime.MadeCurrent(1):
        assert current == [101]
    assert current == [after]


def test_ones_own_gpu_is_not_the_one_that_was_first_worked_on(driver, monkeypatch):
    """In a thread on none: 0, which CUDA calls current there, not that of the first block."""
    driver.context = 0
    monkeypatch.setattr(runtime, "return_to", RETURN_TO)
    monkeypatch.setattr(streams, "_met", set())
    monkeypatch.setattr(streams.DEFAULT, "_device", None)
    monkeypatch.setattr(streams.Stream, "_asked_device", lambda stream: driver.context)
    with streams.at(0, device=1):
        assert (driver.context, device.current_stream().device) == (1, 1)
    assert device.current_stream().device == driver.context == 0


def test_waits_and_copies_are_made_in_the_context_of_their_gpu(driver):
    """Whatever GPU another library made this thread's, which it is afterwards too."""
    streams.default(1).wait(streams.DEFAULT)
    assert driver.calls == [("cuEventCreate", 0), ("cuEventRecord", 0),
                            ("cuStreamWaitEvent", 1), ("cuEventDestroy", 7)]  # fmt: skip
    for number in range(2):
        driver.calls.clear()
        with streams.default(number):
            driver.context = 7  # as by torch.cuda.set_device
            memory.copy_in(0, X)
            memory.copy_out(X.copy(), 0)
            memory.copy_within(0, 0, 8)
            assert driver.context == 7
        assert [context for _, context in driver.calls] == [number] * 4


def test_a_copy_waits_and_is_waited_for(driver, monkeypatch):
    """It comes after what made the array, and before what its memory serves for next."""
    monkeypatch.setattr(runtime, "require", lambda: None)
    monkeypatch.setattr(runtime, "n_devices", lambda: 2)
    monkeypatch.setattr(memory, "take", lambda nbytes: SimpleNamespace(handle=0x2000))
    monkeypatch.setattr(memory, "_kept", memory._kept)
    monkeypatch.setattr(memory, "_reaching", lambda *pair: pair)
    side = streams.Stream(0x100, device=0)
    x = device.DeviceArray(0x1000, (4,), "float32", None, memory.Block(0x1000, None, stream=side))
    y = x.to("cuda:1")
    assert (y.device, y.address) == ("cuda:1", 0x2000)
    steps = {"cuEventRecord": "done", "cuStreamWaitEvent": "waits", "cuMemcpyPeerAsync": "copies"}
    done = [f"{steps[name]} {context}" for name, context in driver.calls if name in steps]
    for_its_own = ["done 0", "waits 0"] * 2
    assert done == [*for_its_own, "done 0", "waits 1", "copies 1", "done 1", "waits 0"]
    assert x.owner.others == (streams.DEFAULT,)
    del x, y


def test_a_launch_is_tried_again_in_the_context_of_its_gpu(driver, monkeypatch):
    tried = []

    def start(config, *args):
        tried.append(driver.context)
        return (0 if driver.context == 1 else 201,)

    prepared = SimpleNamespace(lock=threading.Lock(), values=memoryview(bytearray(0)))
    prepared.function = prepared.pointers = 0
    monkeypatch.setattr(launch, "_launcher", lambda: (start, lambda *how: how[-1]))
    with streams.default(1):
        driver.context = 7
        launch._start(prepared, b"", ((1,), 1, 0, None, False, False), None)
    assert tried == [7, 1]
    assert driver.context == 7
