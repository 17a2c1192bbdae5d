"""Images in every order of memory, the windows of their convolutions, and these in float64."""

from functools import cache
from itertools import product as every
from math import prod
from typing import NamedTuple

import numpy as np
from drawn import Operand, placed
from drawn_large import blocks_of, dense_of


def contiguous(shape, order=None):
    """The step of each axis, in items; `order` names the axes from the slowest on."""
    steps, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        steps[axis] = step
        step *= shape[axis]
    return steps


def wider(axis, by):
    """As part of images that are so much wider along an axis."""

    def steps(shape):
        shape = list(shape)
        shape[axis] += by
        return contiguous(shape), 0

    return steps


def every_second(axis):
    def steps(shape):
        shape = [n * (1 + (k == axis % len(shape))) for k, n in enumerate(shape)]
        steps = contiguous(shape)
        steps[axis] *= 2
        return steps, 0

    return steps


def reversed_along(*axes):
    def steps(shape):
        steps, first = contiguous(shape), 0
        for axis in axes:
            first += max(shape[axis] - 1, 0) * steps[axis]
            steps[axis] *= -1
        return steps, first

    return steps


def repeated(axis):
    def steps(shape):
        steps = contiguous(shape)
        steps[axis] = 0
        return steps, 0

    return steps


def axes_first(*axes):
    def steps(shape):
        order = [axis % len(shape) for axis in axes]
        return contiguous(shape, [*order, *(k for k in range(len(shape)) if k not in order)]), 0

    return steps


def plain(shape):
    return contiguous(shape), 0


ORDERS = {
    # (step of each axis, first item) of (batch, *space, features), in items.
    "C": plain,
    "F": lambda shape: (contiguous(shape, range(len(shape))[::-1]), 0),
    "channels first": axes_first(0, -1),
    "images last": lambda shape: (contiguous(shape, [*range(1, len(shape)), 0]), 0),
    "feature gaps": wider(-1, 3),
    "aligned feature gaps": wider(-1, 8),
    "pixel gaps": wider(-2, 1),
    "offset": lambda shape: (contiguous(shape), 1),
    "every second image": every_second(0),
    "every second pixel": every_second(-2),
    "every second feature": every_second(-1),
    "one image repeated": repeated(0),
    "one pixel repeated": repeated(-2),
    "one feature repeated": repeated(-1),
    "images reversed": reversed_along(0),
    "pixels reversed": reversed_along(-2),
    "both reversed": reversed_along(0, -1),
    "read-only": plain,
    "unaligned": plain,
    "field": plain,
}
"""How images may be stored."""

OF_NUMPY = list(ORDERS)[-6:]  # what arrays of other libraries do not have, or is refused


MANY = 64  # blocks: a dense product for each tap is quicker


class Images(Operand):
    """Images in some order, as an array of some library, and the memory around them."""

    @staticmethod
    def lay(values, order):
        return placed(values, order, *ORDERS[order](values.shape))


SIZES_OF_WINDOWS = {
    # Sizes by names that say what they are; of several the last, one for each axis.
    "kernel_size": {"3": 3, "1": 1, "2": 2, "5": 5, "mixed": (2, 1, 3)},
    "stride": {"1": 1, "2": 2, "3": 3, "mixed": (1, 3, 2)},
    "padding": {
        "1": 1,
        "0": 0,
        "2": 2,
        "valid": "valid",
        "same": "same",
        "mixed": ((2, 0), (0, 3), (1, 2)),
    },
    "dilation": {"1": 1, "2": 2, "mixed": (2, 1, 3)},
    "output_padding": {"none": 0, "most": 1},
}


class Window(NamedTuple):
    """Pixel o of the small image sees, through tap t, pixel o * stride - low + t * dilation."""

    big: tuple[int, ...]
    small: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]  # output_padding


@cache
def joined(window, tap):
    """(outputs of the small image that see a pixel, these pixels of the big one): two keys."""
    small, big = [], []
    for n_big, n_small, _, stride, low, dilation, _, t in zip(*window, tap, strict=True):
        offset = t * dilation - low
        seeing = [o for o in range(n_small) if 0 <= o * stride + offset < n_big]
        first, count = (seeing[0], len(seeing)) if seeing else (0, 0)
        begin = first * stride + offset if seeing else 0
        small.append(slice(first, first + count))
        big.append(slice(begin, begin + count * stride, stride))
    return (slice(None), *small), (slice(None), *big)


def sizes_of(case):
    """The arguments of `conv` that say its window."""
    names = ("kernel_size", "stride", "padding", "dilation")
    chosen = {name: SIZES_OF_WINDOWS[name][case[name]] for name in names}
    axes = len(case["space"])
    return {name: of[-axes:] if isinstance(of, tuple) else of for name, of in chosen.items()}


@cache
def window_of(call, space, kernel_size, stride, padding, dilation, output_padding):
    """The window of images of this size, by the names of its sizes; None where it is refused."""
    sizes = sizes_of(locals())
    kernel, strides, dilations = (
        (of,) * len(space) if isinstance(of, int) else of
        for of in (sizes["kernel_size"], sizes["stride"], sizes["dilation"])
    )
    spread = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    transposed, same = call == "conv_transpose", padding == "same"
    most = (max(s, d) - 1 for s, d in zip(strides, dilations, strict=True))
    extra = tuple(n * (output_padding == "most") for n in most)
    if output_padding == "most" and not (transposed and any(extra)):
        return None
    pads = padded(sizes["padding"], space, spread, strides, transposed)
    big, small = list(space), list(space)
    for k, (n, s, width, pad) in enumerate(zip(space, strides, spread, pads, strict=True)):
        if not transposed:
            small[k] = (n + sum(pad) - width) // s + 1
        else:
            big[k] = extra[k] + (n * s if same else (n - 1) * s + width - sum(pad))
    too_long = not same and any(max(pad) > n for pad, n in zip(pads, big, strict=True))
    if min(*big, *small) < 1 or too_long:
        return None
    low = tuple(before for before, _ in pads)
    return Window(tuple(big), tuple(small), kernel, strides, low, dilations, extra)


def padded(padding, space, spread, stride, transposed):
    """(before, after) on each axis."""
    if padding == "same":
        big = [n * s if transposed else n for n, s in zip(space, stride, strict=True)]
        totals = [
            max((-(-n // s) - 1) * s + width - n, 0)
            for n, s, width in zip(big, stride, spread, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, tuple):
        return padding
    return [(0, 0) if padding == "valid" else (padding, padding)] * len(space)


def taps_of(window):
    return list(every(*map(range, window.kernel)))


@cache
def pixels_of_taps(window):
    """How many outputs see a pixel, of each tap."""
    keys = [joined(window, tap)[0][1:] for tap in taps_of(window)]
    return [prod(along.stop - along.start for along in key) for key in keys]


def convolved(product, first, second, pattern, size, window):
    """A product in float64, over the kept blocks and the pixels inside of the images alone.

    first, second: x and the blocks, or dy and the blocks, or x and dy.
    """
    taps, (_, rows, columns) = taps_of(window), pattern.shape
    space, width = (window.small, columns) if product == "forward" else (window.big, rows)
    out = np.zeros((len(first), *space, width * size))
    if product == "weight_grad":
        out = np.zeros((pattern.sum(), size, size))
    if (
        pattern.sum() > MANY
        and np.isfinite(first).all()
        and (product != "weight_grad" or np.isfinite(second).all())
    ):
        return convolved_by_taps(product, first, second, pattern, size, window, out)
    with np.errstate(invalid="ignore"):
        for block, (tap, r, c) in enumerate(np.argwhere(pattern)):
            small, big = joined(window, taps[tap])
            rows, columns = (slice(n * size, (n + 1) * size) for n in (r, c))
            if product == "forward":
                seen = first[big][..., rows]
                w = second[block, : seen.shape[-1]]
                out[small][..., columns] += seen @ w
            elif product == "input_grad":
                dy = first[small][..., columns]
                w = second[block, :, : dy.shape[-1]]
                out[big][..., rows] += dy @ w.T
            else:
                seen, dy = first[big][..., rows], second[small][..., columns]
                dw = np.tensordot(seen, dy, [range(seen.ndim - 1)] * 2)
                out[block, : len(dw), : dw.shape[1]] = dw
    return out


def convolved_by_taps(product, first, second, pattern, size, window, out):
    """The same of what is finite: zeros for all that is not kept change nothing."""
    ends = pattern.sum((1, 2)).cumsum()
    with np.errstate(invalid="ignore"):
        for tap, kept, end in zip(taps_of(window), pattern, ends, strict=True):
            small, big = joined(window, tap)
            blocks = slice(end - kept.sum(), end)
            seen = first[small if product == "input_grad" else big]
            if product == "weight_grad":
                dy = second[small]
                dw = seen.reshape(-1, seen.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
                out[blocks] = blocks_of(dw, kept, size)
            elif product == "forward":
                out[small] += seen @ dense_of(second[blocks], kept, (seen.shape[-1], out.shape[-1]))
            else:
                shape = out.shape[-1], seen.shape[-1]
                out[big] += seen @ dense_of(second[blocks], kept, shape).T
    return out
