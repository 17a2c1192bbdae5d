"""Places: the CPU and each GPU, by name; which GPU work goes to.

A GPU is named by its default stream: within `with device(1)` new arrays, streams and graphs are on
GPU 1. An operation runs where its arrays are, whichever GPU is current.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numbsparse.device import runtime, streams


def device(of: int | str | None = None) -> streams.Stream:
    """The default stream of a GPU: `with ns.device(1):` lets work begin there.

    Within it `"cuda"` means this GPU: new arrays, streams of one's own and captured steps are on
    it, and `synchronize` waits for it. It does not say where an operation runs: that is where its
    arrays are, all on one GPU.

    Parameters
    ----------
    of : int or str, optional
        The number of a GPU, from 0 on, or a place such as "cuda:1". None: the one in use.

    Returns
    -------
    Stream, for `with`, as often as you like; see `stream`
        `.use()` is for the rest of this thread instead, and for all threads of a process that has
        used no GPU yet: for one process a GPU.

    Raises TypeError or ValueError where there is no such GPU, RuntimeError where there is none.

    Notes
    -----
    Outside of any, work goes to the GPU that CUDA calls current when numbsparse first uses one: 0,
    or what `torch.cuda.set_device` said before; in a process with JAX, which leaves the last GPU
    current, to 0. JAX's arrays are computed where they are. Within, CUDA's current device is this
    one for all libraries.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> with ns.device(0):
    ...     x = ns.to_device(np.ones(4, np.float32))
    >>> x.device
    'cuda:0'
    """
    runtime.require()
    place = "cuda" if of is None else of if isinstance(of, str) else f"cuda:{_number(of)}"
    if (number := id_of(place, "of")) is None:
        raise ValueError(f"of takes a GPU, got {of!r}")
    return streams.default(number)


def _number(of: Any) -> int:
    if isinstance(of, bool) or not hasattr(of, "__index__"):
        raise TypeError(f'of takes the number of a GPU, or a place as "cuda:1", got {of!r}')
    return int(of)


def id_of(place: Any, argument: str = "place") -> int | None:
    """The number of the GPU that a place names, "cuda" the one in use; None for "cpu"."""
    if isinstance(place, str) and place == "cpu":
        return None
    kind, _, number = place.partition(":") if isinstance(place, str) else ("", "", "")
    if kind != "cuda" or not (number.isdecimal() or place == "cuda"):
        raise ValueError(f'{argument} takes "cpu", "cuda" or a GPU as in "cuda:1", got {place!r}')
    if not number:
        runtime.require()
        return runtime.current_id()
    if int(number) >= (n := runtime.n_devices()):
        raise ValueError(f'{argument} takes "cuda:0" to "cuda:{n - 1}" here, got {place!r}')
    return int(number)


def on(place: str | int | None) -> AbstractContextManager[Any]:
    """A context in which work goes to the GPU of a place; nothing changes for the CPU or None."""
    number = place if isinstance(place, int) or place is None else id_of(place)
    if number is None or number == runtime.current_id():
        return nullcontext()
    return streams.default(number)
