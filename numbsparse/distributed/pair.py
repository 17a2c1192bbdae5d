"""Two GPUs of a host that take the mean of what they have, carried by their copy engines.

A collective's kernel takes multiprocessors from what is computed meanwhile; a copy engine takes
none. So each GPU copies what it has as a message to the other's memory while the backward pass goes
on, and at its end both take the mean of their own values and of the messages. Each way carries as
many bytes as in an all-reduce of two.

A large gradient goes in several messages: the means of the first are taken while the last one is on
its way. A message's flag is copied behind it, and set back by who has waited for it. Messages lie
where those of the backward pass before lay, so a pass begins when the other GPU has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.device import DeviceArray, outside_capture, working_stream
from numbsparse.device.shared import send
from numbsparse.device.streams import event_of, follow
from numbsparse.distributed.exchange import memory_of_all
from numbsparse.distributed.group import Group

ALIGNED = 256  # bytes that a message begins at a multiple of
MESSAGE = 2**24  # bytes that it has at most


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where the messages of arrays of so many bytes begin, in words, and then their flags."""
    words = [
        -(-min(MESSAGE, size - first) // ALIGNED) * ALIGNED // 4
        for size in sizes
        for first in range(0, size, MESSAGE)
    ]
    return [0, *np.cumsum(words, dtype=int).tolist()]


class Pair:
    """One of two GPUs, which send arrays of so many bytes, both in the same order.

    mine, theirs : uint32, memory of this GPU and of the other: all messages, a flag for each, and
        one that says that the other GPU has read all
    """

    def __init__(self, mine: DeviceArray, theirs: DeviceArray, sizes: Sequence[int]):
        from numbsparse.kernels import elementwise, exchange  # which load numba.cuda

        self._run, self._await = elementwise.run, exchange.await_flag
        *self._starts, flags = starts_of(sizes)
        self._read = len(self._starts)
        self._mine, self._flags = mine, mine[flags:].view("int32")
        self._theirs, self._their_flags = theirs, theirs[flags:].view("int32")
        self._set = ops.full((1,), 1, "float32", "cuda").view("int32")  # any number but 0
        self._sent: list[tuple[DeviceArray, DeviceArray, Any]] = []
        self._tell(self._read, working_stream())

    @classmethod
    def of(cls, group: Group, sizes: Sequence[int]) -> Pair:
        """The two ranks of a group."""
        starts = starts_of(sizes)
        both = memory_of_all(group, starts[-1], len(starts))
        with outside_capture():
            return cls(both[group.rank], both[1 - group.rank], sizes)

    def begin(self) -> None:
        """Let the current stream wait until the other GPU has read the messages before."""
        self._await(self._flags, self._read)

    def send(self, values: DeviceArray, mean: DeviceArray, stream: int) -> None:
        """Values, C-contiguous, on a stream by its handle; `mean` is where `receive` writes."""
        values, mean = values.reshape(-1), mean.reshape(-1)
        for first in range(0, values.size, items := MESSAGE // values.itemsize):
            k, part = len(self._sent), slice(first, first + items)
            send(values[part], self._theirs[self._starts[k] :], stream)
            self._tell(k, stream)
            self._sent.append((values[part], mean[part], event_of(stream)))

    def receive(self) -> None:
        """mean[:] = that of own values and the other's, of all that was sent.

        On the current stream, which waits for a message of the other GPU after its own was sent:
        so neither waits for the other one in a circle.
        """
        for k, (values, mean, event) in enumerate(self._sent):
            follow(working_stream(), event)
            self._await(self._flags, k)
            at = self._mine.address + 4 * self._starts[k]
            message = DeviceArray(at, values.shape, values.dtype, None, self._mine.owner)
            self._run("mean", mean, values, message)
        self._tell(self._read, working_stream())
        self._sent.clear()

    def _tell(self, flag: int, stream: int) -> None:
        send(self._set, self._their_flags[flag:], stream)
