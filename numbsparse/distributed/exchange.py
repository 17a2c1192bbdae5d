"""What ranks that split a layer exchange, by collectives or by memory that others write."""

from typing import Any

from numbsparse import ops
from numbsparse.device import DeviceArray, outside_capture
from numbsparse.device.shared import opened, shared
from numbsparse.distributed.group import Group


class Exchange:
    """Arrays of all ranks, whose last axis is cut into as many even parts as there are ranks."""

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def gather(self, part: Any, whole: Any) -> Any:
        """whole[:] = the ranks' parts, beside each other."""
        parts = self.group.all_gather(ops.reshape(part, (1, *part.shape)))
        ops.copy_into(_apart(whole, self.size), parts)
        return whole

    def part(self, whole: Any) -> Any:
        """This rank's part, a view."""
        return _apart(whole, self.size)[self.rank]

    def collect(self, term: Any, part: Any) -> Any:
        """part[:] = this rank's part of the sum of all ranks' terms."""
        terms = ops.copy(_apart(term, self.size))
        self.group.reduce_scatter(terms, out=ops.reshape(part, (1, *part.shape)))
        return part


class PeerExchange(Exchange):
    """The same between GPUs of one host, which write each other's memory: see `exchange`."""

    def __init__(self, group: Group, nbytes: int):
        super().__init__(group)
        from numbsparse.kernels import exchange  # which loads numba.cuda

        size, words = group.size, -(-nbytes // 4)  # of a slot
        all_of = memory_of_all(group, 2 * size * words, size)
        with outside_capture():
            count = ops.zeros((1,), "float32", "cuda").view("int32")
        boxes = [a[:-size].reshape(2, size, words) for a in all_of]
        flags = [a[-size:].view("int32") for a in all_of]
        self.nbytes, self._kernels = nbytes, exchange
        own = boxes[self.rank], boxes, flags[self.rank], flags
        self.ends = exchange.Ends(self.rank, size, *own, count)

    def gather(self, part: Any, whole: Any) -> Any:
        self._kernels.send_whole(part, self.ends)
        self._kernels.receive_whole(part, whole, self.ends)
        return whole

    def collect(self, term: Any, part: Any) -> Any:
        self._kernels.send_parts(term, self.ends)
        self._kernels.receive_sum(term, part, self.ends)
        return part


def memory_of_all(group: Group, words: int, flags: int) -> list[DeviceArray]:
    """Zeros, uint32, on the GPU of each rank of this host, which all of them reach.

    The last ones are flags that kernels wait for.
    """
    with outside_capture():
        mine, handle = shared(words + flags)
        group._waiting.append(mine[words:])
        return [
            mine if rank == group.rank else opened(theirs, words + flags)
            for rank, theirs in enumerate(group.share(handle))
        ]


def _apart(whole: Any, size: int) -> Any:
    """(..., size * n) as (size, ..., n), a view."""
    *outer, last = whole.shape
    n = whole.ndim
    return ops.transpose(
        ops.reshape(whole, (*outer, size, last // size)), (n - 1, *range(n - 1), n)
    )
