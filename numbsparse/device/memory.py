"""Device memory: take it, fill it, copy it. In the simulator it is host memory.

A block belongs to the stream that it was taken on. A stream orders its work, so a block may serve
again there as soon as the host lets go of it, while kernels that read it still wait: they come
first. Small blocks are kept for that, by stream and size. Where another stream uses a block, it
first waits for the block's own, once; and before the block serves again, its own waits for the
others. So nothing is overwritten that a kernel still reads, on any stream.

For torch's operators on its side streams, and while torch captures the current one in a graph,
memory is torch's own: that of a graph comes from the graph's pool.
"""

import atexit
import ctypes
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import cache
from math import prod
from typing import Any
from weakref import WeakSet, finalize

import numpy as np

from numbsparse.device import runtime, streams

GRAIN = 512  # sizes are rounded up to it: the alignment that CUDA gives
LARGEST_KEPT = 2**20  # bytes of a block that is kept
MOST_KEPT = 2**28  # bytes of all of them
HOLES = (0xFF, 0x42)
"""Bytes of simulated memory that were never written: NaN; 48.6 in float32, 3.13 in float16."""

Shelf = list[tuple[int, Any]]

_kept = 0
_streams: WeakSet[streams.Stream] = WeakSet()  # whose memory is kept
_for_good: "dict[int, Block]" = {}  # what graphs of other libraries read, of which no end is known
_taken: WeakSet[Any] = WeakSet()  # buffers
_late: "list[Block]" = []  # to be let go of once their stream is captured no more
_hole = HOLES[0]


class Block:
    """A piece of device memory; back on its shelf when nothing refers to it any more.

    `stream` is its own, None where nothing is to be ordered; `others` are those that used it too.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "buffer",
        "is_lent",
        "nbytes",
        "others",
        "shelf",
        "stream",
    )
    stays = False  # whether something else keeps the memory

    def __init__(
        self,
        address: int,
        buffer: Any,
        nbytes: int = 0,
        shelf: Shelf | None = None,
        stream: streams.Stream | None = None,
    ):
        self.address, self.buffer, self.nbytes, self.shelf = address, buffer, nbytes, shelf
        self.stream: Any = stream
        self.others: tuple[streams.Stream, ...] = ()
        self.is_lent = False  # to another library, which may write to it unseen

    @property
    def device(self) -> int:
        """The number of the GPU."""
        number: int = self.stream.device
        return number

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        global _kept
        if ending() or (self.others and not _in_order(self)):  # this module may be empty by then
            return
        if self.shelf is not None and _kept + self.nbytes <= MOST_KEPT:
            _kept += self.nbytes
            self.shelf.append((self.address, self.buffer))
        elif self.stream is not None and type(self) is Block:
            _free(self)


class Unordered(Block):
    """Memory of no stream's, which knows its GPU by itself."""

    __slots__ = ("device",)

    def __init__(self, *of: Any, **options: Any):
        super().__init__(*of, **options)
        self.device = runtime.current_id()  # type: ignore[misc]


class Simulated(Unordered):
    """Host memory; is a hole when let go, so that a kernel that still reads it is seen."""

    __slots__ = ()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.buffer.fill(_hole)


class Lent(Block):
    """Memory of torch's: `buffer` is a tensor of its bytes. A graph of torch's keeps its own."""

    __slots__ = ()


def allocate(nbytes: int) -> Block:
    """A block of at least so many bytes, held until the Block is collected."""
    global _kept
    stream = streams.current()
    if stream.arena is not None and stream.is_captured:  # stays, so launches may come again
        return stream.arena.allocate(nbytes)  # type: ignore[no-any-return]
    if (recording := runtime.recording()) is not None and recording.takes(nbytes):
        return recording.allocate(nbytes, stream)  # type: ignore[no-any-return]
    if (capture := runtime.capturing()) is not None:
        return capture.arena.allocate(nbytes)
    if streams.several and (stream.of_torch or stream.is_captured):
        return _lent_by_torch(nbytes, stream)
    size = rounded(nbytes)
    shelf = stream.shelves.get(size)
    if shelf:
        address, buffer = shelf.pop()
        _kept -= size
        return Block(address, buffer, size, shelf, stream)
    return _fresh(nbytes, size, stream)


def rounded(nbytes: int) -> int:
    """The bytes of the block that serves a request of `nbytes`."""
    return max(-(-nbytes // GRAIN), 1) * GRAIN


def _fresh(nbytes: int, size: int, stream: streams.Stream) -> Block:
    runtime.require()
    if runtime.SIMULATED:
        return simulated(nbytes)
    late = _late[:]
    _late.clear()
    late.clear()  # once more
    buffer = take(size)
    shelf = None
    if size <= LARGEST_KEPT:
        shelf = stream.shelves.setdefault(size, [])
        if stream not in _streams:
            _streams.add(stream)
            finalize(stream, _forget, stream.shelves).atexit = False
    return Block(int(buffer.handle), buffer, size, shelf, stream)


def _forget(shelves: dict[int, Shelf]) -> None:
    """A stream goes, and before it what was kept for it."""
    global _kept
    _kept -= sum(size * len(shelf) for size, shelf in shelves.items())
    shelves.clear()


def _lent_by_torch(nbytes: int, stream: streams.Stream) -> Block:
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.current_stream(stream.device).cuda_stream != stream.handle:
        raise RuntimeError(
            "this takes memory, which cannot be had while another library than torch captures the "
            "stream: capture it with numbsparse.graph or torch.cuda.graph"
        )
    where = f"cuda:{stream.device}"
    tensor = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=where)
    return Lent(tensor.data_ptr(), tensor, stream=stream)


def note(owners: Iterable[Any], stream: streams.Stream | None = None) -> None:
    """The stream, else the current one, is to use this memory: let it wait for the memory's own.

    A graph that another library captures may be launched at any time: what it uses is kept.
    """
    stream = stream or streams.current()
    captured = stream.is_captured
    for block in owners:
        if not isinstance(block, Block) or block.stream is None:
            continue
        if captured:
            if type(block) is not Lent and id(block) not in _for_good:
                _for_good[id(block)], block.shelf = block, None
                if not block.stream.is_captured:  # else it is done: before a capture all is
                    with streams.relaxed():
                        block.stream.synchronize()
        elif not block.stream.is_same(stream) and stream not in block.others:
            stream.wait(block.stream)
            block.others = (*block.others, stream)


def settle(block: Any, stream: streams.Stream | None = None) -> None:
    """Let the stream, else the current one, wait for all that used what others are to read."""
    stream = stream or streams.current()
    if streams.several and stream.is_captured:
        note((block,), stream)
    elif streams.several and isinstance(block, Block) and block.stream is not None:
        for used in (block.stream, *block.others):
            stream.wait(used)


def _in_order(block: Block) -> bool:
    """Let a block's own stream wait for the others; where that cannot be, the block is kept."""
    all_of_them = (block.stream, *block.others)
    # Without a context, in a thread that never met the GPU; while another library captures.
    with suppress(RuntimeError), streams.relaxed():
        if not any(stream.is_captured for stream in all_of_them):
            for other in block.others:
                block.stream.wait(other)
            return True
    _for_good[id(block.buffer)] = Block(block.address, block.buffer)
    return False


def _free(block: Block) -> None:
    """Back to CUDA's pool by its own stream: where another library captures that one, later."""
    if runtime.SIMULATED:
        return
    if block.stream.is_captured:
        _late.append(Block(block.address, block.buffer, block.nbytes, None, block.stream))
        return
    with block.stream.context(), streams.relaxed():
        block.buffer = None  # in which the driver takes it back in order


def simulated(nbytes: int) -> Block:
    """Fresh memory is a hole, so that a kernel that leaves one is seen."""
    owner = np.full(nbytes + GRAIN, _hole, dtype=np.uint8)
    return Simulated(-(-owner.ctypes.data // GRAIN) * GRAIN, owner)


def device_of(owner: Any, address: int = 0) -> int:
    """The number of the GPU that memory is on: of a block, or an array of another library."""
    if isinstance(owner, Block):
        return owner.device
    if hasattr(owner, "__dlpack_device__"):
        return int(owner.__dlpack_device__()[1])
    if interface := getattr(owner, "__cuda_array_interface__", None):
        address = interface["data"][0]
    return runtime.device_at_address(address)


def hole(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array of the host, for results."""
    dtype = np.dtype(dtype)
    return np.full(prod(shape) * dtype.itemsize, _hole, np.uint8).view(dtype).reshape(shape)


def take(nbytes: int) -> Any:
    """A buffer of CUDA's own pool; what is kept here is given up before memory runs out."""
    try:
        buffer = _from_pool(nbytes)
    except MemoryError:
        if not _kept:
            raise
        give_up_kept()
        buffer = _from_pool(nbytes)
    _taken.add(buffer)
    return buffer


@atexit.register
def _left_to_the_driver() -> None:
    """Free no buffer while Python ends: the process gives all memory back.

    JAX has destroyed the GPU's context by then, and each free would print that it failed.
    """
    for buffer in _taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))


def _from_pool(nbytes: int) -> Any:
    stream = streams.current()
    with stream.context():
        pool = runtime.current_device().memory_resource
        try:
            return pool.allocate(nbytes, stream=stream.core)
        except Exception as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            _, free, total = runtime.driver().cuMemGetInfo()
            where = f" of cuda:{stream.device}" if runtime.several_devices else ""
            raise MemoryError(
                f"{nbytes / 2**20:.1f} MiB of device memory{where} were asked for; "
                f"{free / 2**20:.1f} of {total / 2**20:.1f} MiB are free"
            ) from error


def give_up_kept() -> None:
    """Give all blocks that are kept for later back to CUDA's pool."""
    global _kept
    with nullcontext() if runtime.SIMULATED else streams.relaxed():
        for stream in _streams:
            with stream.context():
                for shelf in stream.shelves.values():
                    shelf.clear()
    _kept = 0


def forget_peak() -> None:
    """Let the pool's `used_mem_high` restart from what is in use now."""
    if not runtime.SIMULATED:
        driver = runtime.driver()
        peak = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        with streams.current().context():
            pool = runtime.current_device().memory_resource.handle
            error = driver.cuMemPoolSetAttribute(pool, peak, driver.cuuint64_t(0))
        runtime.checked(error, "forgetting the peak of the pool's memory")


def copy_in(address: int, host: np.ndarray) -> None:
    """Copy a C-contiguous NumPy array to the device."""
    streams.refuse_in_capture(
        "a copy to the GPU",
        "each replay would copy the same values; make the array an argument of the step",
    )
    _copy("HtoD", "to the GPU", address, host.ctypes.data, host.nbytes)


def copy_out(host: np.ndarray, address: int) -> None:
    """Copy from the device into a C-contiguous NumPy array, and wait for it."""
    streams.refuse_in_capture(
        "a copy to the host (.numpy(), .item(), float())",
        "its values do not exist yet; return the array and read it outside",
    )
    _copy("DtoH", "to the host", host.ctypes.data, address, host.nbytes)
    if host.nbytes and not runtime.SIMULATED:
        streams.finish()


def copy_within(target: int, source: int, nbytes: int, of: int | None = None) -> None:
    """Copy from one place on the GPU in use to another; `of` is the GPU that the source is on."""
    _copy("DtoD", "on the GPU", target, source, nbytes, of)


def _copy(
    way: str, words: str, target: int, source: int, nbytes: int, of: int | None = None
) -> None:
    if (recording := runtime.recording()) is not None:  # a copy is not launched again
        recording.is_whole = False
    if runtime.SIMULATED:
        ctypes.memmove(target, source, nbytes)
    elif nbytes:
        driver, stream = runtime.driver(), streams.current()
        with stream.context():
            if of is None or of == stream.device:
                copy = getattr(driver, f"cuMemcpy{way}Async")
                error = copy(target, source, nbytes, stream.handle)
            else:
                to, of_source = _reaching(stream.device, of)
                how = target, to, source, of_source, nbytes, stream.handle
                error = driver.cuMemcpyPeerAsync(*how)
        runtime.checked(error, f"copying {words}")


@cache
def _reaching(*pair: int) -> tuple[int, ...]:
    """The contexts of two GPUs, which reach each other's memory from now on."""
    contexts = tuple(map(runtime.context_of, pair))
    for i in range(2):
        device = runtime.device_at(pair[i])
        with runtime.MadeCurrent(pair[i]), suppress(Exception):  # else by the host's memory
            if device.can_access_peer(runtime.device_at(pair[1 - i])):
                device.memory_resource.peer_accessible_by.add(pair[1 - i])
                runtime.driver().cuCtxEnablePeerAccess(contexts[1 - i], 0)
    return contexts


def view(address: int, nbytes: int) -> np.ndarray:
    """Simulated device memory as bytes that NumPy can read and write."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=np.uint8)  # type: ignore[call-overload]
