"""Patterns of convolution weights: the same features through every tap, or through some."""

from typing import Any

import numpy as np

from numbsparse.patterns.checks import Pattern, as_pattern, flag, integer, real_array


def taps(pattern: Any, kernel_size: Any, *, kept: Any = None) -> Pattern:
    """The pattern of a convolution's weight, (taps * in_blocks, out_blocks), for `ns.conv`.

    Block row tap * in_blocks + i joins in-block i, seen through that tap; taps are counted in C
    order of `kernel_size`. The pattern of the features is repeated for every tap that is `kept`.

    Parameters
    ----------
    pattern : pattern, (in_blocks, out_blocks)
    kernel_size : tuple of int, one to three
    kept : array of bool of the shape kernel_size, optional
        False where a tap is masked: it gets no blocks, and costs nothing. See `causal`.

    Raises TypeError or ValueError that names the argument.

    >>> import numbsparse as ns
    >>> ns.patterns.taps([[1, 0], [0, 1]], (3,), kept=[1, 1, 0]).astype(int)
    array([[1, 0],
           [0, 1],
           [1, 0],
           [0, 1],
           [0, 0],
           [0, 0]])
    """
    pattern, kernel = as_pattern(pattern), _kernel(kernel_size)
    kept = np.ones(kernel, bool) if kept is None else as_kept(kept, kernel)
    return (kept.reshape(-1, 1, 1) & pattern).reshape(-1, pattern.shape[1])


def causal(kernel_size: Any, *, centre: bool = True) -> np.ndarray:
    """Which taps see pixels that come before their own in raster order: bool, of `kernel_size`.

    With `centre` the pixel itself is seen too. For `taps` and for layers; each size is odd, and the
    convolution's padding is "same".

    Follows van den Oord, Kalchbrenner and Kavukcuoglu, "Pixel Recurrent Neural Networks", 2016,
    whose mask A is centre=False and whose mask B is centre=True.

    >>> import numbsparse as ns
    >>> ns.patterns.causal((3, 3)).astype(int)
    array([[1, 1, 1],
           [1, 1, 0],
           [0, 0, 0]])
    """
    kernel = _kernel(kernel_size)
    if not all(n % 2 for n in kernel):
        raise ValueError(f"kernel_size takes odd sizes here, which have a centre, got {kernel}")
    number = np.arange(np.prod(kernel)).reshape(kernel)
    middle = number.size // 2
    return number <= middle if flag("centre", centre) else number < middle


def _kernel(kernel_size: Any) -> tuple[int, ...]:
    if not isinstance(kernel_size, tuple | list) or not 1 <= len(kernel_size) <= 3:
        raise TypeError(f"kernel_size takes a tuple of one to three integers, got {kernel_size!r}")
    return tuple(integer("kernel_size", n) for n in kernel_size)


def as_kept(kept: Any, kernel: tuple[int, ...], argument: str = "kept") -> np.ndarray:
    """Which taps are kept, as booleans of the shape of the kernel."""
    takes = f"booleans (or zeros and ones) of the shape {kernel}"
    array = real_array(argument, kept, takes)
    if array.shape != kernel:
        raise ValueError(f"{argument} takes {takes}, got the shape {array.shape}")
    if not ((array == 0) | (array == 1)).all():
        raise ValueError(f"{argument} takes {takes}, got other numbers")
    return array.astype(bool)
