"""What a convolution's sizes say about its window: checked, and made into one."""

from collections.abc import Callable, Iterable, Mapping, Set
from functools import lru_cache
from typing import Any

from numbsparse.kernels.conv import Window
from numbsparse.patterns.checks import INTEGER, NO_NUMBER

MOST = 2**31 - 1  # places of pixels are whole numbers of 32 bits
Pairs = tuple[tuple[int, int], ...]


def conv_window(
    space: tuple[int, ...], kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> Window:
    """The window of a convolution of images of this size, one to three axes.

    Raises TypeError or ValueError that names the argument.
    """
    kernel, stride, dilation = sizes(len(space), kernel_size, stride, dilation)
    spread = _spread(kernel, dilation)
    pairs = _pairs(padding, space, spread, stride)
    small = tuple(
        (n + low + high - s) // step + 1
        for n, (low, high), s, step in zip(space, pairs, spread, stride, strict=True)
    )
    if min(small) < 1:
        raise ValueError(
            f"kernel_size takes at most the padded image: {kernel} at dilation {dilation} spans "
            f"{tuple(spread)} pixels, the image {space} with padding {pairs} has "
            f"{tuple(n + sum(pair) for n, pair in zip(space, pairs, strict=True))}"
        )
    return _window(space, small, kernel, stride, tuple(low for low, _ in pairs), dilation)


def transpose_window(
    space: tuple[int, ...],
    kernel_size: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
) -> Window:
    """The window of the convolution whose transpose takes images of this size."""
    kernel, stride, dilation = sizes(len(space), kernel_size, stride, dilation)
    extra = extra_sizes(output_padding, stride, dilation)
    spread = _spread(kernel, dilation)
    if is_same(padding):
        big = tuple(n * s for n, s in zip(space, stride, strict=True))
        pairs = _pairs(padding, big, spread, stride)
        big = tuple(n + more for n, more in zip(big, extra, strict=True))
    else:
        pairs = _pairs(padding, None, spread, stride)
        big = tuple(
            (n - 1) * s + width - sum(pair) + more
            for n, s, width, pair, more in zip(space, stride, spread, pairs, extra, strict=True)
        )
    if min(big) < 1:
        raise ValueError(
            f"padding takes less than what the taps add: images {space} with kernel_size {kernel}, "
            f"stride {stride} and padding {pairs} would become {big}"
        )
    if not is_same(padding):
        _check_padding(pairs, big, "result")
    return _window(big, space, kernel, stride, tuple(low for low, _ in pairs), dilation)


def known_window(make: Callable[..., Window], *given: Any) -> Window:
    """What `conv_window` or `transpose_window` makes of these, kept.

    Not for what torch.compile traces: it warns of a cache.
    """
    return _kept(make, *given) if _is_plain(given) else make(*given)


@lru_cache(maxsize=256)
def _kept(make: Callable[..., Window], *given: Any) -> Window:
    return make(*given)


def _is_plain(size: Any) -> bool:
    """Whether equal sizes say the same: True and 1.0 equal 1."""
    return type(size) in (int, str) or (type(size) is tuple and all(map(_is_plain, size)))


def sizes(axes: int, kernel_size: Any, stride: Any, dilation: Any) -> tuple[tuple[int, ...], ...]:
    """kernel_size, stride and dilation with a number for every axis."""
    if not 1 <= axes <= 3:
        raise ValueError(
            f"x takes the shape (batch, *space, features) with one to three axes of space, "
            f"got {axes}"
        )
    kernel = _numbers("kernel_size", kernel_size, axes)
    steps = _numbers("stride", stride, axes)
    dilations = _numbers("dilation", dilation, axes)
    if max(steps) > MOST or max(_spread(kernel, dilations)) > MOST:
        raise ValueError(
            f"stride, and dilation times kernel_size, take numbers under 2^31, got stride {steps}, "
            f"dilation {dilations} and kernel_size {kernel}"
        )
    return kernel, steps, dilations


def extra_sizes(
    output_padding: Any, stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """output_padding with a number for every axis."""
    extra = _numbers("output_padding", output_padding, len(stride), least=0)
    for axis, (more, s, d) in enumerate(zip(extra, stride, dilation, strict=True)):
        if more >= max(s, d):
            raise ValueError(
                f"output_padding takes less than the stride or the dilation, {s} and {d} on axis "
                f"{axis}, got {more}"
            )
    return extra


def is_same(padding: Any) -> bool:
    return isinstance(padding, str) and padding == "same"


def check_padding(axes: int, padding: Any) -> None:
    """Refuse what cannot be a padding of images of any size."""
    if not is_same(padding):
        _pairs(padding, None, (1,) * axes, (1,) * axes)


def _spread(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """The pixels from the first tap to the last, on each axis."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]


def in_blocks_of(rows: int, window: Window) -> int:
    """Blocks of features that each tap of a weight has, from the block rows of its layout."""
    if rows % window.taps:
        raise ValueError(
            f"w takes a layout with the same block rows for each of the {window.taps} taps, "
            f"got {rows} block rows"
        )
    return rows // window.taps


def _numbers(argument: str, value: Any, axes: int, least: int = 1) -> tuple[int, ...]:
    numbers = tuple(value) if _several(value) and not isinstance(value, str) else None
    numbers = (value,) * axes if numbers is None else numbers
    if len(numbers) != axes or not all(
        isinstance(n, INTEGER) and not isinstance(n, NO_NUMBER) for n in numbers
    ):
        raise TypeError(
            f"{argument} takes a whole number, or one for each of {axes} axes, got {value!r}"
        )
    if min(numbers) < least:
        raise ValueError(f"{argument} takes whole numbers from {least} on, got {value!r}")
    return tuple(int(n) for n in numbers)


def _several(value: Any) -> bool:
    """Whether it is a list of some kind; an array without axes, a dict and a set are none."""
    if isinstance(value, (bytes, Mapping, Set)):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def _pairs(padding: Any, space: tuple[int, ...] | None, spread: Any, stride: Any) -> Pairs:
    """Padding before and after, on each axis; `space` is None where it does not matter."""
    axes = len(spread)
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * axes
        if is_same(padding) and space is not None:
            totals = [
                max((-(-n // s) - 1) * s + width - n, 0)
                for n, s, width in zip(space, stride, spread, strict=True)
            ]
            return tuple((total // 2, total - total // 2) for total in totals)
        raise ValueError(
            f'padding takes "same", "valid", whole numbers or pairs of them, got {padding!r}'
        )
    padding = tuple(padding) if _several(padding) else padding
    if isinstance(padding, tuple) and any(_several(pair) for pair in padding):
        if len(padding) != axes or not all(
            _several(pair) and len(tuple(pair)) == 2 for pair in padding
        ):
            raise TypeError(
                f"padding takes a (before, after) pair for each of {axes} axes, got {padding!r}"
            )
        pairs: Any = tuple(_numbers("padding", pair, 2, least=0) for pair in padding)
    else:
        pairs = tuple((n, n) for n in _numbers("padding", padding, axes, least=0))
    return pairs if space is None else _check_padding(pairs, space)


def _check_padding(pairs: Pairs, space: tuple[int, ...], whose: str = "image") -> Pairs:
    for axis, (pair, n) in enumerate(zip(pairs, space, strict=True)):
        if max(pair) > n:
            raise ValueError(
                f"padding takes at most the length of the {whose}, {n} on axis {axis}, got {pair}"
            )
    return pairs


def _window(big: Any, small: Any, kernel: Any, stride: Any, low: Any, dilation: Any) -> Window:
    """Of three axes, the first of them one pixel long where there are fewer."""
    given, first = (big, small, kernel, stride, low, dilation), (1, 1, 1, 1, 0, 1)
    each: Any = ((n,) * (3 - len(of)) + tuple(of) for of, n in zip(given, first, strict=True))
    return Window(*each)
