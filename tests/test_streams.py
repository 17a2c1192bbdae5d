"""Streams, their order and their memory, on a driver that is a model."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_helpers import Planned, Torch, install, make

import numbsparse as ns
from numbsparse import device
from numbsparse.device import interop, launch, memory, runtime, streams
from numbsparse.device.array import empty
from numbsparse.kernels.parts import plans
from numbsparse.layout import Layout


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


def test_without_a_gpu_there_is_nothing_to_wait_for(monkeypatch):
    monkeypatch.setattr(runtime, "SIMULATED", False)
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "there is none")
    monkeypatch.setattr(streams, "after_waiting", [])  # earlier tests left what is told
    ns.synchronize()


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


def test_the_innermost_stream_counts_in_its_thread_only(driver):
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
    del array
    assert not driver.events


def test_launches_go_to_the_current_stream_in_order(driver, monkeypatch):
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


def test_a_stream_of_others_lives_as_long_as_the_arrays_made_on_it(driver):
    owner = SimpleNamespace(ptr=0x7A0)
    with ns.stream(owner):
        array = empty((7,), "float32")
    assert streams.at(0x7A0) is array.owner.stream
    assert array.owner.stream._owner is owner


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


def test_calls_are_remembered_for_each_stream(driver, monkeypatch):
    seen, index = [], Layout([[1]]).index
    arrays = tuple(empty((7,), "float32") for _ in "abc")

    def make(index, *operands, first):
        seen.append("first" if first else "later")
        if (recording := runtime.recording()) is not None:
            recording.add(lambda: seen.append("again") or (0,))

    def again(handle):
        with ns.stream(handle):
            plans.again(index, make, arrays)

    for handle in (1, 1, 0x100, 0x100, 1):
        again(handle)
    driver.captured = {0x200, 0x100}
    for handle in (0x200, 0x200, 0x100):
        again(handle)
    driver.captured = set()
    again(0x200)
    assert seen == ["first", "later"] * 2 + ["again"] + ["first"] * 4
