"""Memory while a stream is captured, by us or by another library, on a driver that is a model."""

import sys
from types import SimpleNamespace

import pytest
from streams_helpers import Planned, Torch, install, make

import numbsparse as ns
from numbsparse import device
from numbsparse.device import DeviceArray, capture, memory, runtime, streams
from numbsparse.device.array import empty, owners_of
from numbsparse.device.replay import Replay
from numbsparse.kernels.parts import plans

LARGE = (memory.LARGEST_KEPT,)


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


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


def test_memory_freed_while_its_stream_is_captured_is_kept(driver):
    array = empty((7,), "float32")
    with ns.stream(0x100):
        driver.work(array)
    address, driver.captured = array.address, {0x100}
    del array
    assert empty((7,), "float32").address != address


def test_a_capture_takes_what_was_made_on_a_stream_that_joined_it(driver):
    """As torch's backward lets streams join on which leaves were met first."""
    with ns.stream(0x100):
        array = empty((7,), "float32")
        driver.work(array)
    address, driver.captured = array.address, {0x100, 0x200}
    with ns.stream(0x200):
        driver.work(array)
    del array
    driver.captured = set()
    with ns.stream(0x100):
        assert empty((7,), "float32").address != address, "a graph reads it"


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


def test_memory_that_is_kept_is_given_up_while_a_stream_is_captured(driver):
    del_me = [empty((7,), "float32") for _ in range(3)]
    driver.captured = {0x100}
    del_me.clear()
    assert not driver.freed
    memory.give_up_kept()
    assert [allowed for _, allowed in driver.freed] == [True] * 3
