"""Which pixels the taps of a convolution join, as grids of outputs that all look the same way."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

Three = tuple[int, int, int]


class Window(NamedTuple):
    """Pixel o of the small image sees, through tap t, pixel o * stride - low + t * dilation.

    Every field has three axes; images of fewer have axes of length 1 in front.
    """

    big: Three
    small: Three
    kernel: Three
    stride: Three
    low: Three  # padding before the first pixel
    dilation: Three

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def is_identity(self) -> bool:
        """Whether each pixel sees itself alone: a product of matrices."""
        return self.taps == 1 and self.big == self.small and not any(self.low)

    @lru_cache(maxsize=512)  # noqa: B019  a window is a few numbers
    def passes(self, product: str) -> tuple[Pass, ...]:
        """The outputs of a product, each in one of the passes, without taps that see no pixel."""
        if product == "weight_grad":
            return (_forward(self),)
        if product == "forward":
            return (_forward(self).seeing(self.big),)
        return tuple(of.seeing(self.small) for of in _input_grad(self))

    def view(self, product: str, of: Pass) -> View:
        """One of the passes of a product, for a kernel."""
        seen, written = self.big, self.small
        if product == "input_grad":
            seen, written = written, seen
        return View(of.counts, of.step, of.first, of.scale, seen, written)


class View(NamedTuple):
    """What a kernel knows of a `Pass`; the sizes of the images that it sees, and of its outputs."""

    counts: Three
    step: Three
    first: Three
    scale: Three
    sizes: Three
    out_sizes: Three


class Pass(NamedTuple):
    """Outputs o * step + first for o below counts; taps[k] sees o * scale + offsets[k]."""

    counts: Three
    step: Three
    first: Three
    scale: Three
    taps: tuple[int, ...]
    offsets: tuple[Three, ...]

    def seeing(self, sizes: Three) -> Pass:
        """Without the taps that see no pixel of an image of these sizes."""
        kept = [
            k
            for k, offset in enumerate(self.offsets)
            if all(map(_meets, self.counts, self.scale, offset, sizes))
        ]
        return self._replace(
            taps=tuple(self.taps[k] for k in kept), offsets=tuple(self.offsets[k] for k in kept)
        )

    def outputs(self, sizes: Three) -> np.ndarray:
        """The pixel of each output, (outputs,), in an image of these sizes."""
        places = np.indices(self.counts).reshape(3, -1).T * self.step + self.first
        return np.ravel_multi_index(tuple(places.T), sizes)

    def sources(self, k: int, sizes: Three) -> np.ndarray:
        """The pixel that each output sees through taps[k], (outputs,), or -1 outside the image."""
        places = np.indices(self.counts).reshape(3, -1).T * self.scale + self.offsets[k]
        inside = ((places >= 0) & (places < sizes)).all(axis=1)
        return np.where(inside, places @ (sizes[1] * sizes[2], sizes[2], 1), -1)


def _forward(window: Window) -> Pass:
    offsets = tuple(
        _three(t * d - low for t, d, low in zip(tap, window.dilation, window.low, strict=True))
        for tap in np.ndindex(*window.kernel)
    )
    taps = tuple(range(window.taps))
    return Pass(window.small, (1, 1, 1), (0, 0, 0), window.stride, taps, offsets)


def _input_grad(window: Window) -> tuple[Pass, ...]:
    """A pass for the pixels of each residue modulo the stride: the same taps reach all of them."""
    passes = []
    for first in product(
        *(range(min(s, n)) for s, n in zip(window.stride, window.big, strict=True))
    ):
        counts = _three(
            -(-(n - f) // s) for n, f, s in zip(window.big, first, window.stride, strict=True)
        )
        taps, offsets = [], []
        for number, tap in enumerate(np.ndindex(*window.kernel)):
            steps = [
                divmod(f + low - t * d, s)
                for f, low, t, d, s in zip(
                    first, window.low, tap, window.dilation, window.stride, strict=True
                )
            ]
            if not any(rest for _, rest in steps):
                taps.append(number)
                offsets.append(_three(whole for whole, _ in steps))
        passes.append(
            Pass(counts, window.stride, _three(first), (1, 1, 1), tuple(taps), tuple(offsets))
        )
    return tuple(passes)


def _meets(count: int, scale: int, offset: int, size: int) -> bool:
    """Whether o * scale + offset is from 0 to size - 1 for an o below count."""
    first = max(-(offset // scale), 0)
    return first < count and first * scale + offset < size


def _three(numbers: Iterable[int]) -> Three:
    a, b, c = (int(n) for n in numbers)
    return a, b, c
