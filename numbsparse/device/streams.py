"""Streams: which one work goes to, and what keeps memory safe between several.

Work goes to the current stream: that of the innermost `with stream(...)` of this thread, else the
legacy default stream. Memory belongs to the stream that it was taken on: see `memory`. A stream is
one of a GPU's, so the current one says which GPU this thread works on: see `devices`.

Another library may be capturing the current stream in a CUDA graph of its own, as torch.cuda.graph
does. Then launches are recorded there; what numbsparse makes once and keeps (plans, tensor maps,
machine code) is made at once on a stream apart.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from numbsparse.device import runtime

LEGACY = 1  # the driver's number of the legacy default stream, which 0 names too
PER_THREAD = 2
REMEMBERED = 64  # streams of others, each with the memory that is kept for it

_checked = partial(runtime.checked, what="work on a stream")

several = False
"""Whether there was ever a stream beside the legacy one: until then nothing has to be ordered."""


class Stream:
    """A CUDA stream; within `with` it is the one that numbsparse works on. See `stream`.

    Attributes
    ----------
    handle : the driver's number of it; 0 where there is no GPU
    device : the number of the GPU that it is one of
    of_torch : whether memory comes from torch, as results of its operators do
    arena : where memory comes from while a library beside torch captures it; None: from nowhere
    """

    __slots__ = (
        "__weakref__", "_core", "_device", "_owner", "arena", "handle", "of_torch", "shelves",
    )  # fmt: skip

    def __init__(
        self, handle: int, core: Any = None, of_torch: bool = False, device: int | None = None
    ):
        global several
        self.handle, self._core, self.of_torch, self._owner = handle, core, of_torch, None
        self._device = device  # None: not asked yet
        self.arena: Any = None
        self.shelves: dict[int, list[tuple[int, Any]]] = {}  # memory that is kept: see `memory`
        several = several or handle > LEGACY

    @property
    def device(self) -> int:
        if self._device is None:
            self._device = self._asked_device()
            meet(self._device)
        return self._device

    def _asked_device(self) -> int:
        if runtime.SIMULATED:
            return 0
        if self.handle > LEGACY:
            return int(self.core.device.device_id)
        if "jax" in sys.modules:  # which leaves the last GPU current, and works on the first
            return 0
        from cuda.core import Device

        return int(Device().device_id)  # the one that CUDA calls current when it is first used

    def __enter__(self) -> "Stream":
        before, context = current(), None
        device = self._device if self.handle <= LEGACY else self.device
        if device is not None and device != before.device:  # asked before it moves
            context = _moved_to(device)
        _outer.set((*_outer.get(), (before, context)))
        _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        *outer, (before, context) = _outer.get()
        _outer.set(tuple(outer))
        _current.set(before)
        runtime.return_to(context)

    def use(self) -> "Stream":
        """Let this thread work on it from now on; all threads, where none used a GPU before."""
        if DEFAULT._device is None and self.handle <= LEGACY:
            DEFAULT._device = self.device
        _moved_to(self.device)
        _current.set(self)
        return self

    def is_same(self, other: "Stream") -> bool:
        """Whether both are one stream of the driver's."""
        if self.handle != other.handle:
            return False
        return self is other or self.handle > LEGACY or self.device == other.device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __repr__(self) -> str:
        where = f", cuda:{self._device}" if runtime.several_devices else ""
        return f"Stream({self.handle:#x}{where})"

    def wait(self, other: Any = None) -> None:
        """What this stream is given from now on waits for what `other` was given so far.

        `other` is what `stream` takes; None is the legacy default stream.
        """
        other = DEFAULT if other is None else stream(other)
        if not runtime.SIMULATED and self.handle and not self.is_same(other):
            order(other.handle, self.handle, other, self)

    def synchronize(self) -> None:
        """Wait on the host until the GPU has done all that this stream was given."""
        if not runtime.SIMULATED and self.handle:
            with self.context():
                _checked(runtime.driver().cuStreamSynchronize(self.handle))

    def context(self) -> AbstractContextManager[Any]:
        """In it the driver's calls mean this stream's GPU, whatever this thread did with others."""
        return nullcontext() if runtime.SIMULATED else runtime.MadeCurrent(self.device)

    def retried(self, start: Callable[[], tuple[Any, ...]]) -> Any:
        """The driver's error of a launch that failed and is tried again; 0 if it runs now.

        Perhaps it failed only because another library made another GPU this thread's.
        """
        with self.context():
            (error,) = start()
        return error

    @property
    def is_captured(self) -> bool:
        """Whether another library is recording this stream in a CUDA graph."""
        if self.handle <= LEGACY or runtime.SIMULATED:  # the legacy stream cannot be captured
            return False
        driver = runtime.driver()
        status = _checked(driver.cuStreamIsCapturing(self.handle))
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    @property
    def core(self) -> Any:
        """The same as cuda.core has it."""
        if self._core is None:
            from cuda.core import LEGACY_DEFAULT_STREAM
            from cuda.core import Stream as CoreStream

            legacy = self.handle == LEGACY
            self._core = LEGACY_DEFAULT_STREAM if legacy else CoreStream.from_handle(self.handle)
        return self._core


def order(first: int, second: int, of: Stream | None = None, to: Stream | None = None) -> None:
    """What the second stream is given from now on waits for what the first was given so far.

    By their handles; where the first is being captured in a graph, the second is from now on too.
    They are on the GPUs of the streams `of` and `to`, else on the one in use.
    """
    driver = runtime.driver()
    with (of or current()).context():
        event = _checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
        _checked(driver.cuEventRecord(event, first))
    with (to or current()).context():
        _checked(driver.cuStreamWaitEvent(second, event, 0))
    _checked(driver.cuEventDestroy(event))  # by the driver, once it is over


DEFAULT = Stream(LEGACY)
_current: ContextVar[Stream] = ContextVar("numbsparse_stream", default=DEFAULT)
_outer: ContextVar[tuple[tuple[Stream, int | None], ...]]
_outer = ContextVar("numbsparse_outer", default=())
_defaults: dict[int, Stream] = {}  # of the other GPUs
_met: set[int] = set()

current = runtime.current_stream = _current.get
"""current() is the stream that the work of this thread goes to."""


def default(device: int) -> Stream:
    """The legacy default stream of a GPU."""
    if device == DEFAULT._device:
        return DEFAULT
    return _defaults.setdefault(device, Stream(LEGACY, device=device))


def meet(device: int) -> None:
    """A GPU is used; with the second one begins the care that several take."""
    global several
    if not _met:
        runtime.only_device = device
    _met.add(device)
    runtime.several_devices = len(_met) > 1
    several = several or runtime.several_devices


def _moved_to(device: int) -> int | None:
    """This thread goes on to a GPU; returns what `make_current` does."""
    if (capture := runtime.capturing()) is not None and capture.device != device:
        raise RuntimeError(
            f"a captured step works on one GPU, this one on cuda:{capture.device}, "
            f"and is to go on on cuda:{device}"
        )
    meet(device)
    return None if runtime.SIMULATED else runtime.make_current(device)


def stream(of: Any = None) -> Stream:
    """A CUDA stream to work on: `with ns.stream(...):` sends numbsparse's work on the GPU there.

    That is each launch, copy and allocation of this thread, and what `synchronize` waits for. The
    innermost one counts. Outside of any, work goes to the legacy default stream; that of `matmul`,
    `sddmm` and the convolutions on arrays of torch or CuPy goes to the stream their library works
    on, and so does all of `numbsparse.torch` and `numbsparse.jax`.

    Parameters
    ----------
    of : optional
        A stream of someone else's: torch's, CuPy's, cuda.core's (any object with
        `__cuda_stream__`), or a handle of the driver's, an int. Behind that, or an ExternalStream
        of torch, it must exist until Python ends: memory is kept for it. None makes one of yours.

    Returns
    -------
    Stream, for `with`, as often as you like
        Its `handle` is the driver's, `wait(other)` lets what it is given from now on wait for what
        another stream was given so far, `synchronize()` waits for it on the host.

    Raises TypeError if `of` is not a stream, ValueError if it is the default stream of a thread,
    which names another stream in each.

    Notes
    -----
    A stream of your own synchronizes with the legacy default stream, as CuPy's do: it sees what was
    done before, and what is done on it is seen after. Two of them run side by side, and so do
    torch's. As everywhere in CUDA, streams that work on one array are ordered by you, by `wait`.
    These wait by themselves: the first kernel on a stream that reads an array made on another one,
    copies to the host, and memory before it is used again. A step captured by `graph` stays on the
    stream of its first call; called on another one, both wait. Without a GPU nothing happens: work
    on the CPU is done when its call returns.

    Within `torch.cuda.graph(...)`, `with ns.stream(torch.cuda.current_stream())` lets torch capture
    what it would not otherwise: work on numbsparse's own arrays, which are then kept for good.
    Where JAX has used the GPU in the same process its threads end a capture of torch's that takes
    long, with or without numbsparse; `capture_error_mode="thread_local"` keeps them apart.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
    >>> side = ns.stream()
    >>> with side:  # with w.to("cuda"), on a stream of its own
    ...     y = np.ones((2, 4), np.float32) @ w
    >>> side.synchronize()

    CUDA C++ Programming Guide, "Asynchronous Concurrent Execution".
    """
    if isinstance(of, Stream):
        return of
    if of is None:
        return _new(nonblocking=False)
    handle = _handle_of(of)
    if handle == PER_THREAD:
        raise ValueError(
            "of takes a stream, got the default stream of a thread, another one in each: make one"
        )
    return at(handle, of) if runtime.is_available() else Stream(0)


def at(handle: int, owner: Any = None, device: int | None = None) -> Stream:
    """The stream of someone else's with this handle; `owner` keeps it in existence.

    It is one of the GPU of that number; for None, of the one in use, or of the one that it says.
    """
    if handle <= LEGACY:
        device = current()._device if device is None else device
        return DEFAULT if device is None else default(device)
    found = _known(handle)
    if owner is not None:  # a stream that is gone must not be asked anything, and is used by blocks
        found._owner = owner
    if device is not None:
        found._device = device
    return found


@lru_cache(maxsize=REMEMBERED)
def _known(handle: int) -> Stream:
    return Stream(handle)


@lru_cache(maxsize=REMEMBERED)
def of_torch(handle: int, device: int) -> Stream:
    """The stream for operators of torch: on a side stream, which it may capture, by its memory."""
    return default(device) if handle <= LEGACY else Stream(handle, None, True, device)


def _new(nonblocking: bool, priority: int | None = None) -> Stream:
    if not runtime.is_available():
        return Stream(0)
    if runtime.SIMULATED:
        return Stream(0, device=runtime.current_id())
    from cuda.core import StreamOptions

    options = StreamOptions(nonblocking=nonblocking, priority=priority)
    device = runtime.current_id()
    with current().context():
        core = runtime.current_device().create_stream(options=options)
    return Stream(int(core.handle), core, device=device)


def beside() -> Stream:
    """A stream that synchronizes with no other, and whose work comes first on the GPU."""
    return _new(nonblocking=True, priority=-1)


def _handle_of(of: Any) -> int:
    handle = getattr(of, "cuda_stream", getattr(of, "ptr", of))  # of torch; of CuPy
    if callable(protocol := getattr(of, "__cuda_stream__", None)):
        _, handle = protocol()
    if not isinstance(handle, int | np.integer) or isinstance(handle, bool) or handle < 0:
        raise TypeError(
            "of takes a stream of torch, CuPy or cuda.core, another object with __cuda_stream__, "
            f"or the handle of a stream, got {of!r}"
        )
    return int(handle)


def refuse_in_capture(what: str, instead: str) -> None:
    """Raise RuntimeError for what cannot be part of a captured step, of ours or of another's."""
    if runtime.capturing() is not None or (several and current().is_captured):
        raise RuntimeError(f"{what} cannot be part of a captured step: {instead}")


after_waiting: list[Callable[[], None]] = []  # each raises if the GPU found that input was wrong


def synchronize() -> None:
    """Wait until the GPU has done all that was asked of it, on the stream in use: see `stream`.

    Where there is no GPU there is nothing to wait for. Raises ValueError where the GPU found the
    coordinates of a `Layout.on_device` wrong.

    >>> import numpy as np, numbsparse as ns
    >>> x = ns.to_device(np.ones(4, np.float32))
    >>> ns.synchronize()
    """
    finish()
    for told in after_waiting:
        told()


def finish() -> None:
    """`synchronize`, and nothing is told: for copies to the host, of which telling is one."""
    refuse_in_capture("synchronize()", "nothing runs before the step is captured; wait after it")
    if not runtime.SIMULATED and runtime.is_available():
        current().synchronize()


@contextmanager
def joined(caller: Stream, worker: Stream) -> Iterator[None]:
    """Within this context work goes to `worker`, after what the caller has been given so far.

    What the caller is given afterwards waits for it.
    """
    if caller.is_same(worker):
        yield
        return
    worker.wait(caller)
    try:
        with worker:
            yield
    finally:
        caller.wait(worker)


@contextmanager
def aside() -> Iterator[None]:
    """Within this context memory is our own, and work is no part of what another library captures.

    Where one captures the current stream, work runs on a stream apart, and is done at the end. On
    others of torch's it stays there: their memory may be a graph's that torch is about to make.
    """
    if several and current().is_captured:
        with relaxed(), _apart(current().device):
            yield
            current().synchronize()
    elif current().of_torch:
        with at(current().handle, device=current()._device):
            yield
    else:
        yield


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread take memory, load kernels and wait for streams that are not captured.

    Captures of other libraries forbid that by default, lest it meets what they record.
    """
    driver = runtime.driver()
    before = _checked(
        driver.cuThreadExchangeStreamCaptureMode(
            driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
    )
    try:
        yield
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(before))


@cache
def _apart(device: int) -> Stream:
    with default(device):
        return _new(nonblocking=True)
