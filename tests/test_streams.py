"""Streams, their order and their memory, on a driver that is a model: clocks instead of a GPU."""

import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device
from numbsparse.device import DeviceArray, capture, interop, launch, memory, runtime, streams
from numbsparse.device.array import empty, owners_of
from numbsparse.device.replay import Replay
from numbsparse.kernels.parts import calls, plans
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


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


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


class CuPy:
    def __init__(self, handle):
        self.ptr = handle


class Core:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.mark.parametrize("make", [int, np.int64, Torch, CuPy, Core])
def test_streams_of_others(make):
    made = ns.stream(make(0x500))
    assert made.handle == 0x500
    assert made is ns.stream(0x500) is ns.stream(made) is streams.at(0x500)
    assert made.__cuda_stream__() == (0, 0x500)
    assert ns.stream(make(0)) is ns.stream(make(1)) is streams.DEFAULT


@pytest.mark.parametrize("of", [-1, True, 0.5, "stream", np.ones(3), Torch("7"), Core(None)])
def test_what_is_no_stream_is_refused(of):
    with pytest.raises(TypeError, match="of takes a stream of torch, CuPy or"):
        ns.stream(of)


def test_the_stream_of_a_thread_is_refused():
    with pytest.raises(ValueError, match="the default stream of a thread"):
        ns.stream(2)


def test_the_innermost_stream_counts_in_its_thread_only():
    one, two, seen = ns.stream(0x600), ns.stream(0x700), []
    with one:
        with two, one:
            thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
            thread.start()
            thread.join()
            assert device.current_stream() is one
        assert device.current_stream() is one
        with pytest.raises(KeyError), two:
            raise KeyError
        assert device.current_stream() is one
    assert device.current_stream() is seen[0] is streams.DEFAULT


@pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
def test_products_on_a_stream_are_those_without(rng):
    x, values = rng.standard_normal((3, 8)), rng.standard_normal((2, 4, 4))
    w = ns.BlockSparse(values.astype(np.float32), [[1], [1]])
    x = x.astype(np.float32)
    side = ns.stream()
    with side:
        y = ns.matmul(ns.to_device(x), w.to("cuda"))
        step = ns.graph(lambda x: ns.matmul(x, w.to("cuda")))
        z = step(x)
        ns.synchronize()
    side.wait()
    side.synchronize()
    np.testing.assert_allclose(y.numpy(), x @ w.toarray(), atol=1e-5)
    np.testing.assert_array_equal(z.numpy(), y.numpy())


class Theirs:
    """An array in GPU memory, of a library that works on a stream."""

    def __init__(self, host):
        self.array = ns.to_device(host)
        self.__cuda_array_interface__ = self.array.__cuda_array_interface__


X, IMAGE = np.ones((3, 8), np.float32), np.ones((1, 5, 8), np.float32)
W = ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1], [1]])
TAPS = ns.BlockSparse(np.ones((6, 4, 4), np.float32), np.ones((6, 1)))
PRODUCTS = {
    "matmul": lambda: ns.matmul(Theirs(X), W.to("cuda")),
    "matmul, features first": lambda: W.T.to("cuda") @ Theirs(X.T.copy()),
    "sddmm": lambda: ns.sddmm(Theirs(X.T.copy()), Theirs(X), [[1, 0], [0, 1]]),
    "conv": lambda: ns.conv(Theirs(IMAGE), TAPS.to("cuda"), kernel_size=3),
    "conv_transpose": lambda: ns.conv_transpose(
        Theirs(IMAGE[..., :4].copy()), TAPS.to("cuda"), kernel_size=3
    ),
    "conv_weight_grad": lambda: ns.conv_weight_grad(
        Theirs(IMAGE), Theirs(IMAGE[:, :3, :4].copy()), TAPS, kernel_size=3
    ),
}


@pytest.mark.skipif(not device.SIMULATED, reason="on a GPU: test_streams_gpu.py")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_go_to_the_stream_of_their_library(name, monkeypatch):
    used, waits, allocate = [], [], memory.allocate
    theirs = streams.at(0x100)
    way = SimpleNamespace(
        read=lambda x: None,
        empty_like=lambda x, shape: None,
        stream_of=lambda x: theirs if isinstance(x, Theirs) else None,
    )
    product = PRODUCTS[name]

    def spy(nbytes):
        used.append(device.current_stream().handle)
        return allocate(nbytes)

    monkeypatch.setattr(interop, "SHORT_WAYS", (way,))
    monkeypatch.setattr(streams.Stream, "wait", lambda s, o: waits.append((s.handle, o.handle)))
    monkeypatch.setattr(memory, "allocate", spy)
    product()
    assert used[-1] == 0x100
    assert not waits
    with ns.stream(0x200):
        product()
        assert used[-1] == 0x200
        assert waits == [(0x200, 0x100), (0x100, 0x200)]
    assert device.current_stream() is streams.DEFAULT


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["make", "use", "use", "drop", "read"]),
        st.sampled_from([1, 0x100, 0x200, 0x300]),  # the stream; 1 is the default one
        st.integers(0, 5),  # the array
    ),
    max_size=40,
)


@pytest.mark.skipif(not device.SIMULATED, reason="its streams are made up")
@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_memory_serves_again_after_all_that_used_it(actions):
    with pytest.MonkeyPatch.context() as patch:
        driver = install(patch)
        arrays = {}
        for what, handle, i in actions:
            with ns.stream(handle):
                if what == "make" or (what != "drop" and i not in arrays):
                    arrays.pop(i, None)
                    array = arrays[i] = empty((7,), "float32")
                    assert driver.has_seen(handle, array.address), "still in use elsewhere"
                    driver.uses.pop(array.address, None)
                    driver.work(array)
                if what == "drop":
                    arrays.pop(i, None)
                elif what == "read":
                    memory.settle(arrays[i].owner)
                    assert driver.has_seen(handle, arrays[i].address), "read before it is written"
                else:
                    driver.work(arrays[i])
                    made = driver.uses[arrays[i].address][:1]
                    assert driver.comes_after(handle, made), "used before it is made"
        arrays.clear()
        assert memory._kept <= 40 * 512


def test_what_a_stream_made_is_waited_for_once(driver):
    with ns.stream(0x100):
        array = empty((7,), "float32")
        driver.work(array)
    with ns.stream(0x200):
        driver.work(array[2:].T)
        assert driver.has_seen(0x200, array.address)
        events = len(driver.events)
        driver.work(array)
        assert len(driver.events) == events
    assert not driver.has_seen(1, array.address)


def test_streams_have_memory_of_their_own_while_they_last(driver):
    made = {}
    for handle in (1, 0x100, 0x200):
        with ns.stream(handle):
            made[handle] = empty((7,), "float32").address
    for handle in (0x200, 1, 0x100):
        with ns.stream(handle):
            assert empty((9,), "float32").address == made[handle]
    assert memory._kept == 3 * 512
    own = streams.Stream(0x800, object())
    with own:
        empty((200,), "float32")
    assert memory._kept == 3 * 512 + 1024
    del own
    assert memory._kept == 3 * 512
    memory.give_up_kept()
    assert memory._kept == 0
    with ns.stream(0x100):
        assert empty((7,), "float32").address not in made.values()


def test_before_a_second_stream_nothing_is_ordered(driver, monkeypatch):
    monkeypatch.setattr(streams, "several", False)
    monkeypatch.setattr(memory, "note", None)
    monkeypatch.setattr(launch, "_prepare", lambda *args: (None, b""))
    monkeypatch.setattr(launch, "_start", lambda *args: None)
    array = empty((7,), "float32")
    launch.launch(None, 1, 1, array)
    launch.Bound(None, 1, 1, array)(array)
    del array
    assert not driver.events


@pytest.mark.parametrize("bound", [False, True])
def test_launches_go_to_the_current_stream_in_order(driver, monkeypatch, bound):
    started = []
    prepared = SimpleNamespace(lock=threading.Lock(), values=memoryview(bytearray(0)))
    prepared.function = prepared.pointers = 0
    monkeypatch.setattr(launch, "_prepare", lambda *args: (prepared, b""))
    launcher = lambda config, *args: started.append(config) or (0,)  # noqa: E731
    monkeypatch.setattr(launch, "_launcher", lambda: (launcher, lambda *how: how[-1]))
    array = empty((7,), "float32")
    driver.work(array)
    for handle in (0x100, 1, 0x200):
        with ns.stream(handle):
            if bound:
                launch.Bound(None, 1, 1, array)(array)
            else:
                launch.launch(None, 1, 1, (array,))
            assert driver.has_seen(handle, array.address)
    assert started == [0x100, 1, 0x200]


def test_without_a_gpu_streams_do_nothing(monkeypatch, rng):
    monkeypatch.setattr(runtime, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "SIMULATED", False)
    monkeypatch.setattr(runtime, "driver", None)
    x = rng.standard_normal((3, 8), dtype=np.float32)
    for of in (None, 0x500, Torch(7)):
        with ns.stream(of) as side:
            y = ns.matmul(x, W)
            ns.sddmm(x.T, y, W)
        side.wait()
        side.synchronize()
        assert side.handle == 0
    with pytest.raises(TypeError, match="of takes a stream"):
        ns.stream("side")


def test_another_library_reads_after_all_that_used_an_array(driver):
    array = empty((7,), "float32")
    for handle in (1, 0x100, 0x200):
        with ns.stream(handle):
            driver.work(array)
    memory.settle(array.owner, streams.at(0x300))
    assert driver.has_seen(0x300, array.address)
    driver.captured = {0x400}
    memory.settle(array.owner, streams.at(0x400))
    assert driver.host[1] == 1
    assert memory._for_good


def test_joined_streams_come_one_after_the_other(driver):
    array = empty((7,), "float32")
    with ns.stream(0x100):
        driver.work(array)
    caller, worker = ns.stream(0x100), ns.stream(0x200)

    def fails():
        with device.joined(caller, worker):
            assert device.current_stream() is worker
            assert driver.has_seen(0x200, array.address)
            driver.work(array)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert driver.has_seen(0x100, array.address)


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


def test_streams_share_a_plan_but_not_what_kernels_write(driver, monkeypatch):
    planned = Planned(monkeypatch)
    with ns.stream(0x100):
        one = plans.planned(planned.index, make, 5)
        assert plans.planned(planned.index, make, 5) is one
    with ns.stream(0x200):
        two = plans.planned(planned.index, make, 5)
    assert one[0] is two[0]
    assert one[1] == 5
    assert {one[2].address, one[3].address}.isdisjoint({two[2].address, two[3].address})
    before = planned.sent
    with ns.stream(0x300):
        plans.planned(planned.index, lambda index: (np.arange(3), 4))
    assert planned.sent == before + 1


def torch_that_captures(monkeypatch, handle):
    """A module that has memory for the stream with this handle."""
    tensors = []

    def tensor(nbytes, dtype, device):
        tensors.append(nbytes)
        return SimpleNamespace(data_ptr=lambda: 0x9000000 + 0x10000 * len(tensors))

    cuda = SimpleNamespace(current_stream=lambda device: Torch(handle))
    module = SimpleNamespace(cuda=cuda, empty=tensor, uint8="uint8")
    monkeypatch.setitem(sys.modules, "torch", module)
    return tensors


def test_while_torch_captures_memory_is_of_its_graph(driver, monkeypatch):
    tensors = torch_that_captures(monkeypatch, 0x100)
    before = empty((7,), "float32")
    driver.work(before)
    driver.captured = {0x100}
    with ns.stream(0x100):
        array = empty((7,), "float32")
        assert type(array.owner) is memory.Lent
        memory.note(owners_of((array, before)))
        assert tensors == [28]
        assert driver.host[1] == 1, "what the graph reads was not waited for"
        assert driver.mode == "global"
        for refused in (ns.synchronize, lambda: ns.to_device([1.0]), before.numpy):
            with pytest.raises(RuntimeError, match="cannot be part of a captured step"):
                refused()
    address = before.address
    del before, array
    assert empty((7,), "float32").address != address, "memory that a graph reads was given away"


def test_operators_of_torch_take_its_memory_on_its_side_streams(driver, monkeypatch):
    tensors = torch_that_captures(monkeypatch, 0x100)
    assert streams.of_torch(0, 0) is streams.of_torch(1, 0) is streams.DEFAULT
    with streams.of_torch(0x100, 0):
        array = empty((7,), "float32")
        driver.work(array)
    assert tensors == [28]
    driver.work(array)
    assert driver.has_seen(1, array.address)
    owner = array.owner
    del array
    assert owner.others == (streams.DEFAULT,)
    events = len(driver.events)
    del owner
    assert len(driver.events) == events + 1, "torch gives it to others while it is read"


def test_while_another_library_captures_no_memory_is_taken(driver, monkeypatch):
    torch_that_captures(monkeypatch, 0)
    driver.captured = {0x100}
    with (
        ns.stream(0x100),
        pytest.raises(RuntimeError, match="while another library than torch captures"),
    ):
        empty((7,), "float32")


def test_what_is_kept_is_made_aside_while_torch_captures(driver, monkeypatch):
    tensors = torch_that_captures(monkeypatch, 0x100)
    filled = []
    monkeypatch.setattr("numbsparse.kernels.elementwise.fill", lambda a, v: filled.append(a))
    planned = Planned(monkeypatch)
    driver.captured = {0x100}
    with ns.stream(0x100):
        one = plans.planned(planned.index, make, 5)
        two = plans.planned(planned.index, make, 5)
    assert one[0] is two[0]
    assert one[0].owner.stream.handle == 99
    assert type(one[2].owner) is type(two[3].owner) is memory.Lent
    assert filled == [one[3], two[3]], "counters begin at zero in each launch of the graph"
    assert tensors == [12, 8, 12, 8]
    assert device.current_stream() is streams.DEFAULT


def test_what_is_kept_on_a_side_stream_of_torch_is_no_memory_of_torch(driver, monkeypatch):
    tensors = torch_that_captures(monkeypatch, 0x100)
    planned = Planned(monkeypatch)
    with streams.of_torch(0x100, 0) as side:
        kept = plans.planned(planned.index, make, 5)
        assert device.current_stream() is side
    assert tensors == [], "of a pool that torch may be about to give to a graph"
    assert {a.owner.stream.handle for a in kept if isinstance(a, DeviceArray)} == {0x100}


def test_a_stream_of_others_lives_as_long_as_the_arrays_made_on_it(driver):
    owner = SimpleNamespace(ptr=0x7A0)
    with ns.stream(owner):
        array = empty((7,), "float32")
    assert streams.at(0x7A0) is array.owner.stream
    assert array.owner.stream._owner is owner


def test_memory_freed_while_its_stream_is_captured_is_kept(driver):
    array = empty((7,), "float32")
    with ns.stream(0x100):
        driver.work(array)
    address, driver.captured = array.address, {0x100}
    del array
    assert empty((7,), "float32").address != address


def test_memory_for_a_stream_that_a_library_beside_torch_captures_stays(driver):
    """In an arena: taken on a stream apart, it serves again there, and launches may come again."""
    stream, replay, seen = ns.stream(0x100), Replay(), []
    stream.arena, driver.captured = capture.Arena(), {0x100}
    token = runtime.replay.set(replay)
    for _ in range(2):
        with stream:
            seen.append(empty((7,), "float32").address)
    runtime.replay.reset(token)
    assert replay.is_whole
    assert seen == [seen[0]] * 2
    assert [buffer.stream for buffer in stream.arena._buffers] == [99]
    driver.captured = set()
    with stream:
        assert empty((7,), "float32").address != seen[0]
    assert not driver.freed
    stream.arena = None
    assert [allowed for _, allowed in driver.freed] == [True]


def test_what_kernels_write_is_made_once_for_each_arena(driver, monkeypatch):
    planned, stream, found = Planned(monkeypatch), ns.stream(0x100), []
    driver.captured = {0x100}
    for arena in (capture.Arena(), capture.Arena()):
        stream.arena = arena
        with stream:
            found += [plans.planned(planned.index, make, 5) for _ in range(2)]
            other = plans.planned(Planned(monkeypatch).index, make, 5)
        assert other[3].address != found[-1][3].address, "of another layout"
    stream.arena = None
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[0][0] is found[2][0]
    assert found[0][3].address != found[2][3].address


LARGE = (memory.LARGEST_KEPT,)


def test_a_large_array_is_freed_while_another_stream_is_captured(driver):
    array, before = empty(LARGE, "float32"), empty(LARGE, "float32")
    with ns.stream(0x100):
        driver.work(before)
    driver.captured = {0x200}
    addresses = array.address, before.address
    del array, before
    assert driver.freed == [(address, True) for address in addresses]
    assert driver.mode == "global"
    assert driver.has_seen(1, addresses[1]), "freed while another stream reads it"


def test_a_large_array_of_the_captured_stream_is_freed_after(driver):
    with ns.stream(0x100):
        array = empty(LARGE, "float32")
    address, driver.captured = array.address, {0x100}
    del array
    empty(LARGE, "float32")
    driver.captured = set()
    assert (address, True) not in driver.freed
    empty(LARGE, "float32")
    assert (address, True) in driver.freed
    assert all(allowed for _, allowed in driver.freed)


def test_nothing_is_freed_when_python_ends(driver):
    shelf = []
    block = memory.Block(512, "buffer", 512, shelf, streams.DEFAULT)
    block.others = (streams.at(0x100),)
    block.__del__(lambda: True)
    assert not shelf
    assert not driver.events
    block.__del__()
    assert shelf == [(512, "buffer")]
    block.shelf, block.others, block.stream = None, (), None


def test_memory_that_is_kept_is_given_up_while_a_stream_is_captured(driver):
    del_me = [empty((7,), "float32") for _ in range(3)]
    driver.captured = {0x100}
    del_me.clear()
    assert not driver.freed
    memory.give_up_kept()
    assert [allowed for _, allowed in driver.freed] == [True] * 3


def test_calls_are_remembered_for_each_stream(driver, monkeypatch):
    seen, index = [], Layout([[1]]).index
    arrays = tuple(empty((7,), "float32") for _ in "abc")

    def make(index, *operands):
        return calls.Call(
            lambda *held: seen.append("first"), lambda *held: seen.append("later"), ()
        )

    def again(handle):
        with ns.stream(handle):
            calls.again(index, make, arrays)

    for handle in (1, 1, 0x100, 0x100, 1):
        again(handle)
    driver.captured = {0x200, 0x100}
    for handle in (0x200, 0x200, 0x100):
        again(handle)
    driver.captured = set()
    again(0x200)
    assert seen == ["first", "later"] * 2 + ["later"] + ["first"] * 4
