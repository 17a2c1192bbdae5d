"""Simulated threads in an order of one's choosing, for kernels that must not depend on any."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np

from numbsparse.simulator import SIMULATED


@contextmanager
def in_turns(order: str | int = "rising") -> Iterator[None]:
    """Run the threads of a block one after another, each until it must wait, in a given order.

    A GPU promises no order between two barriers: a kernel whose results depend on it is wrong. Here
    the order is chosen, so that such a kernel goes wrong every time, and not once in a thousand.

    Parameters
    ----------
    order : "rising" or "falling" by the threads' numbers, or a seed for a random one

    Raises
    ------
    ValueError
        If `order` is another word.
    RuntimeError
        Outside the simulator.

    Examples
    --------
    >>> from numba import cuda, float32
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.device.launch import launch
    >>> @cuda.jit
    ... def shift_kernel(x, y):  # a barrier is missing
    ...     t, tile = cuda.threadIdx.x, cuda.shared.array(4, float32)
    ...     tile[t] = x[t]
    ...     y[t] = tile[(t + 1) % 4]
    >>> x, y = ns.to_device(np.arange(4, dtype=np.float32)), ns.to_device(np.zeros(4, np.float32))
    >>> if ns.device.SIMULATED:
    ...     with ns.testing.in_turns("falling"):
    ...         launch(shift_kernel, 1, 4, x, y)
    ...     print(y.numpy()[:3])
    ... else:
    ...     print("[1. 2. 3.]")
    [1. 2. 3.]
    """
    if isinstance(order, str) and order not in ("rising", "falling"):
        raise ValueError(f'order takes "rising", "falling" or a seed, got {order!r}')
    if not SIMULATED:
        raise RuntimeError("an order needs the simulator: set NUMBA_ENABLE_CUDASIM=1 before import")
    from numbsparse.simulator import threads

    rng = None if isinstance(order, str) else np.random.default_rng(order)

    def ordered(those: Sequence[Any]) -> Sequence[Any]:
        if rng is not None:
            return [those[i] for i in rng.permutation(len(those))]
        if not isinstance(those, range):  # these have begun
            those = sorted(those, key=attrgetter("rank"))
        return those[::-1] if order == "falling" else those

    usual = threads.order
    threads.order = ordered
    try:
        yield
    finally:
        threads.order = usual
