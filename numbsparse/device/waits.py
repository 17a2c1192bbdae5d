"""What to say on a terminal of what takes longer than two seconds: compiling, or many steps."""

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 2.0  # seconds of compiling, of one kernel or of several in a row, before it is said
PAUSE = 1.0  # seconds without compiling, after which patience is whole again

_began = _ended = float("-inf")  # of the kernels in a row
_busy = Lock()  # of the kernel that is spoken of


@contextmanager
def said(kernel: Any) -> Iterator[None]:
    """Say on the terminal that a kernel, Numba's or plain, compiles, and its time, if it is long.

    Nothing is said where standard error is neither a terminal nor a notebook, nor of a kernel that
    compiles while another does.
    """
    if not _is_watched() or not _busy.acquire(blocking=False):
        yield
        return
    try:
        with _timed(kernel):
            yield
    finally:
        _busy.release()


@contextmanager
def no_collection() -> Iterator[None]:
    """Within this context Python searches for no garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def shown(steps: Collection[T], what: str) -> Iterable[T]:
    """The steps, counted on a terminal if they take longer than PATIENCE, by tqdm if it is here.

    >>> list(shown(range(3), "counting"))
    [0, 1, 2]
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return _counted(steps, what) if _is_watched() else steps
    bar: Iterable[T] = tqdm(steps, desc=what, leave=False, delay=PATIENCE, disable=None)
    return bar


def _counted(steps: Collection[T], what: str) -> Iterator[T]:
    """The steps; a line that counts them is written over and over, and removed in the end."""
    start, line = monotonic(), ""
    try:
        for done, step in enumerate(steps):
            if monotonic() - start > PATIENCE:
                line = f"numbsparse: {what}, {done} of {len(steps)}"
                _write(f"\r{line}")
            yield step
    finally:
        if line:
            _write(f"\r{' ' * len(line)}\r")


@contextmanager
def _timed(kernel: Any) -> Iterator[None]:
    global _began, _ended
    start = monotonic()
    if start - _ended > PAUSE:
        _began = start
    waited: list[bool] = []
    timer = Timer(max(0.0, PATIENCE - (start - _began)), _say, (kernel, waited))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _ended = monotonic()
        if waited:
            _write(f" {_ended - start:.1f} s\n")


def _say(kernel: Any, waited: list[bool]) -> None:
    kernel = getattr(kernel, "py_func", kernel)
    name = f"{kernel.__module__}.{kernel.__qualname__}".replace(".<locals>", "")
    name = name.removeprefix("numbsparse.kernels.")
    _write(f"numbsparse: compiling {name}, once for this machine ...")
    waited.append(True)


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _is_watched() -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
