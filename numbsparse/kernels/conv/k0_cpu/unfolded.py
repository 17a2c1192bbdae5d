"""What taps see, copied next to each other: rows of a matrix, which is multiplied.

Of one tap nothing is copied twice, so all its products are made so. Of several taps a forward of
few outputs is: w is then read once, and not once for each row of the image.
"""

from functools import lru_cache
from math import prod

import numpy as np

from numbsparse.kernels.conv.window import Window
from numbsparse.kernels.matmul.k0_cpu.lines import product_of
from numbsparse.kernels.matmul.k0_cpu.weight_grad import sum_of

FEW = 512  # outputs
WIDE = 16  # blocks: of smaller ones sums are loaded and stored too often


def pays(product, x, window, size):
    """Whether this is the quicker way. Input-gradients would be added up tap by tap."""
    few = len(x) * prod(window.small) <= FEW and size >= WIDE and x.shape[2] % size == 0
    return window.taps == 1 or (product == "forward" and few)


def multiply_unfolded(x, values, y, index, window, product):
    """y[:] = conv(x, w), or of one tap conv_transpose(x, w)."""
    values = np.ascontiguousarray(values)
    n_rows = len(x) * prod(window.small)
    if product == "forward":
        rows = unfolded(x, window)
        product_of(n_rows, values, index, False)(rows, values, y.reshape(n_rows, y.shape[2]))
        return
    rows = np.empty((len(x), *window.small, y.shape[2]), y.dtype)
    flat = rows.reshape(n_rows, y.shape[2])
    product_of(n_rows, values, index, True)(x.reshape(n_rows, x.shape[2]), values, flat)
    y[:] = 0
    ((outputs, pixels),) = seen_by(window)
    y.reshape(len(x), *window.big, y.shape[2])[pixels] = rows[outputs]


def sum_unfolded(x, dy, dvalues, index, window):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    rows = unfolded(x, window)
    sum_of(len(rows), dvalues, index)(rows, dy.reshape(len(rows), dy.shape[2]), dvalues)


def unfolded(x, window):
    """What taps see, (batch and outputs, taps and features)."""
    batch, _, features = x.shape
    images = x.reshape(batch, *window.big, features)
    rows = np.zeros((batch, *window.small, window.taps, features), x.dtype)
    for tap, (outputs, pixels) in enumerate(seen_by(window)):
        rows[outputs][..., tap, :] = images[pixels]
    return rows.reshape(batch * prod(window.small), window.taps * features)


@lru_cache(maxsize=64)
def seen_by(window: Window) -> list[tuple[tuple[slice, ...], ...]]:
    """Of each tap the outputs whose pixel is in the image, and these pixels, of (batch, *space)."""
    return [_meeting(window, offsets) for offsets in window.offsets().tolist()]


def _meeting(window, offsets):
    outputs, pixels = [slice(None)], [slice(None)]
    for big, small, step, offset in zip(*window[:2], window.stride, offsets, strict=True):
        first = max(0, -(offset // step))
        end = max(first, min(small, (big - 1 - offset) // step + 1))
        outputs.append(slice(first, end))
        begin = first * step + offset
        pixels.append(slice(begin, begin + (end - first) * step, step))
    return tuple(outputs), tuple(pixels)
