"""Which gradients are reduced together, and where: small ones side by side in one array."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from numbsparse import device
from numbsparse.device import DeviceArray

ALIGNED = 256  # bytes that a gradient begins at a multiple of


class Bucket(NamedTuple):
    """Gradients of one dtype, by number, where each begins, and the items of all."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def buckets_of(order: Sequence[int], arrays: Sequence[Any], least: int) -> list[Bucket]:
    """Buckets of `least` bytes and more, by their last gradients; a large gradient has its own.

    arrays : what the gradients are like, by number
    """
    found, filling = list[list[int]](), dict[Any, list[int]]()
    for i in order:
        if arrays[i].nbytes >= least:
            found.append([i])
            continue
        own = filling.setdefault(arrays[i].dtype, [])
        own.append(i)
        if sum(arrays[j].nbytes for j in own) >= least:
            found.append(filling.pop(arrays[i].dtype))
    place = {i: nth for nth, i in enumerate(order)}
    by_end = sorted([*found, *filling.values()], key=lambda own: place[own[-1]])
    return [_placed(own, arrays) for own in by_end]


def _placed(numbers: list[int], arrays: Sequence[Any]) -> Bucket:
    grain = ALIGNED // arrays[numbers[0]].itemsize
    ends = np.cumsum([-(-arrays[i].size // grain) * grain for i in numbers])
    starts, last = [0, *ends[:-1].tolist()], numbers[-1]
    return Bucket(tuple(numbers), tuple(starts), starts[-1] + arrays[last].size)


class Work:
    """A `backward` that is under way: what was found, and where the means of all ranks come.

    buckets : in the order in which they are reduced; None where it is not known yet
    of : the bucket of each gradient, by parameter's number
    found : the values of each, which are kept: on another stream they may still be read
    """

    def __init__(self, trained: tuple[int, ...], buckets: list[Bucket] | None):
        self.trained, self.buckets, self.reduced = trained, buckets, 0
        self.of = {i: bucket for bucket in buckets or () for i in bucket.numbers}
        self._flat: dict[int, Any] = {}  # by the first of a bucket
        self.found: dict[int, Any] = {}
        self.means: dict[int, Any] = {}
        self.in_parts: dict[int, Any] = {}  # values that are on their way already

    def next(self) -> Bucket | None:
        """The bucket that is reduced next."""
        if self.buckets is None or self.reduced == len(self.buckets):
            return None
        return self.buckets[self.reduced]

    def mean_of(self, i: int, values: Any) -> Any:
        """Where the mean of gradient i comes: a part of its bucket's array."""
        if i not in self.means:
            bucket = self.of.get(i) or Bucket((i,), (0,), values.size)
            first, start = bucket.numbers[0], bucket.starts[bucket.numbers.index(i)]
            if first not in self._flat:
                new = device.empty if isinstance(values, DeviceArray) else np.empty
                self._flat[first] = new((bucket.size,), values.dtype)
            self.means[i] = self._flat[first][start : start + values.size].reshape(values.shape)
        return self.means[i]

    def complete(self) -> Iterator[tuple[Any, Any]]:
        """What is to be reduced, (values, mean), of each further bucket that is there."""
        while (bucket := self.next()) and all(i in self.found for i in reversed(bucket.numbers)):
            self.reduced += 1
            first, *others = bucket.numbers
            if others:
                flat = self._flat[first]
                pack([self.found[i] for i in bucket.numbers], flat, bucket.starts)
                yield flat, flat
            elif self.in_parts.get(first) is not self.found[first]:
                yield self.found[first], self.means[first]


def pack(arrays: list[Any], flat: Any, starts: Sequence[int]) -> None:
    """flat[start:] = each array."""
    if isinstance(flat, DeviceArray):
        from numbsparse.kernels.pack import pack as on_gpu  # which loads numba.cuda

        on_gpu(arrays, flat, starts)
        return
    for a, start in zip(arrays, starts, strict=True):
        flat[start : start + a.size] = a.reshape(-1)
