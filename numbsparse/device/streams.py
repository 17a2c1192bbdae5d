"""Streams: which one work goes to, and what keeps memory safe between several.

Work goes to the current stream: that of the innermost `with stream(...)` of this thread, else the
legacy default stream. Memory belongs to the stream that it was taken on: see `memory`.

Another library may be capturing the current stream in a CUDA graph of its own, as torch.cuda.graph
does. Then launches are recorded there; what numbsparse makes once and keeps (plans, tensor maps,
machine code) is made at once on a stream apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import numpy as np

from numbsparse.device import runtime

LEGACY = 1  # the driver's number of the legacy default stream, which 0 names too
PER_THREAD = 2
REMEMBERED = 64  # streams of others, each with the memory that is kept for it

several = False
"""Whether there was ever a stream beside the legacy one: until then nothing has to be ordered."""


class Stream:
    """A CUDA stream; within `with` it is the one that numbsparse works on. See `stream`.

    Attributes
    ----------
    handle : the driver's number of it; 0 where there is no GPU
    of_torch : whether memory comes from torch, as results of its operators do
    """

    __slots__ = ("__weakref__", "_core", "_owner", "handle", "of_torch", "shelves")

    def __init__(self, handle: int, core: Any = None, of_torch: bool = False):
        global several
        self.handle, self._core, self.of_torch, self._owner = handle, core, of_torch, None
        self.shelves: dict[int, list[tuple[int, Any]]] = {}  # memory that is kept: see `memory`
        several = several or handle > LEGACY

    def __enter__(self) -> Stream:
        _outer.set((*_outer.get(), current()))
        _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        *outer, before = _outer.get()
        _outer.set(tuple(outer))
        _current.set(before)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __repr__(self) -> str:
        return f"Stream({self.handle:#x})"

    def wait(self, other: Any = None) -> None:
        """What this stream is given from now on waits for what `other` was given so far.

        `other` is what `stream` takes; None is the legacy default stream.
        """
        other = DEFAULT if other is None else stream(other)
        if runtime.SIMULATED or not self.handle or self.handle == other.handle:
            return
        driver = _driver()
        event = _checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
        _checked(driver.cuEventRecord(event, other.handle))
        _checked(driver.cuStreamWaitEvent(self.handle, event, 0))
        _checked(driver.cuEventDestroy(event))  # by the driver, once it is over

    def synchronize(self) -> None:
        """Wait on the host until the GPU has done all that this stream was given."""
        if not runtime.SIMULATED and self.handle:
            _checked(_driver().cuStreamSynchronize(self.handle))

    @property
    def is_captured(self) -> bool:
        """Whether another library is recording this stream in a CUDA graph."""
        if self.handle <= LEGACY or runtime.SIMULATED:  # the legacy stream cannot be captured
            return False
        driver = _driver()
        status = _checked(driver.cuStreamIsCapturing(self.handle))
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    @property
    def core(self) -> Any:
        """The same as cuda.core has it."""
        if self._core is None:
            from cuda.core import LEGACY_DEFAULT_STREAM
            from cuda.core import Stream as CoreStream

            runtime.current_device()
            legacy = self.handle == LEGACY
            self._core = LEGACY_DEFAULT_STREAM if legacy else CoreStream.from_handle(self.handle)
        return self._core


DEFAULT = Stream(LEGACY)
_current: ContextVar[Stream] = ContextVar("numbsparse_stream", default=DEFAULT)
_outer: ContextVar[tuple[Stream, ...]] = ContextVar("numbsparse_outer_streams", default=())

current = _current.get
"""current() is the stream that the work of this thread goes to."""


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
        `__cuda_stream__`), or the driver's handle of one, an int. It must exist for as long as
        arrays that were made on it. None makes one of your own.

    Returns
    -------
    Stream, for `with`, as often as you like
        Its `handle` is the driver's, `wait(other)` lets what it is given from now on wait for what
        another stream was given so far, `synchronize()` waits for it on the host.

    Raises TypeError if `of` is no stream, ValueError if it is the default stream of a thread, which
    names another stream in each.

    Notes
    -----
    A stream of your own takes turns with the legacy default stream, as CuPy's do: it sees what was
    done before, and what is done on it is seen after. Two of them run side by side, and so do
    torch's. As everywhere in CUDA, streams that work on one array are ordered by you, by `wait`.
    These wait by themselves: the first kernel on a stream that reads an array made on another one,
    copies to the host, and memory before it is used again. A step captured by `graph` stays on the
    stream of its first call; called on another one, both wait. Without a GPU nothing happens: work
    on the CPU is done when its call returns.

    Within `torch.cuda.graph(...)`, `with ns.stream(torch.cuda.current_stream())` lets torch capture
    what it would not otherwise: work on numbsparse's own arrays, which are then kept for good.

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


def at(handle: int, owner: Any = None) -> Stream:
    """The stream of someone else's with this handle; `owner` keeps it in existence."""
    if handle <= LEGACY:
        return DEFAULT
    found = _known(handle)
    if owner is not None:  # a stream that is gone must not be asked anything, and is used by blocks
        found._owner = owner
    return found


@lru_cache(maxsize=REMEMBERED)
def _known(handle: int) -> Stream:
    return Stream(handle)


@lru_cache(maxsize=REMEMBERED)
def of_torch(handle: int) -> Stream:
    """The stream for operators of torch: on a side stream, which it may capture, by its memory."""
    return DEFAULT if handle <= LEGACY else Stream(handle, of_torch=True)


def _new(nonblocking: bool) -> Stream:
    if runtime.SIMULATED or not runtime.is_available():
        return Stream(0)
    from cuda.core import StreamOptions

    core = runtime.current_device().create_stream(options=StreamOptions(nonblocking=nonblocking))
    return Stream(int(core.handle), core)


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


def synchronize() -> None:
    """Wait until the GPU has done all that was asked of it, on the stream in use: see `stream`.

    >>> import numpy as np, numbsparse as ns
    >>> x = ns.to_device(np.ones(4, np.float32))
    >>> ns.synchronize()
    """
    refuse_in_capture("synchronize()", "nothing runs before the step is captured; wait after it")
    if not runtime.SIMULATED:
        runtime.current_device()
        current().synchronize()


@contextmanager
def joined(caller: Stream, worker: Stream) -> Iterator[None]:
    """Within this context work goes to `worker`, after what the caller has been given so far.

    What the caller is given afterwards waits for it.
    """
    if caller.handle == worker.handle:
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
        with relaxed(), _apart():
            yield
            current().synchronize()
    elif current().of_torch:
        with at(current().handle):
            yield
    else:
        yield


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread take memory, load kernels and wait for streams that are not captured.

    Captures of other libraries forbid that by default, lest it meets what they record.
    """
    driver = _driver()
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
def _apart() -> Stream:
    return _new(nonblocking=True)


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    runtime.current_device()
    return driver


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"work on a stream failed: {error.name}")
    return values[0] if values else None
