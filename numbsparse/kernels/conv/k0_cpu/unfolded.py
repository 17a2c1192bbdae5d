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


def pays(product, batch, features, window, size):
    """Whether this is the quicker way. Input-gradients would be added up tap by tap."""
    few = batch * prod(window.small) <= FEW and size >= WIDE and features % size == 0
    return window.taps == 1 or (product == "forward" and few)


def unfolded_of(batch, values, index, window, product):
    """conv(x, w), or of one tap conv_transpose(x, w), as a function of x, values and y."""
    n_rows, seen = batch * prod(window.small), seen_by(window, product)
    multiply = product_of(n_rows, values, index, product == "input_grad")

    def forward(x, values, y):
        rows = gathered(x, *seen).reshape(n_rows, window.taps * x.shape[2])
        multiply(rows, values, y.reshape(n_rows, y.shape[2]))

    def input_grad(x, values, y):
        rows = np.empty((batch, prod(window.small), y.shape[2]), y.dtype)
        multiply(x.reshape(n_rows, x.shape[2]), values, rows.reshape(n_rows, y.shape[2]))
        gathered(rows, *seen, y)

    return forward if product == "forward" else input_grad


def sum_unfolded_of(batch, dvalues, index, window):
    """The weight-gradient of one tap as a function of x, dy and dvalues."""
    n_rows, seen = batch * prod(window.small), seen_by(window, "forward")
    add_up = sum_of(n_rows, dvalues, index)

    def compute(x, dy, dvalues):
        rows = gathered(x, *seen).reshape(n_rows, x.shape[2])
        add_up(rows, dy.reshape(n_rows, dy.shape[2]), dvalues)

    return compute


def gathered(x, pixels, outside, out=None):
    """What `seen_by` says of x (batch, pixels, features): (batch, pixels and taps, features)."""
    rows = x.take(pixels, axis=1, out=out, mode="clip")
    rows[:, outside] = 0
    return rows


@lru_cache(maxsize=64)
def seen_by(window: Window, product: str) -> tuple[np.ndarray, np.ndarray]:
    """The pixel that each one of a result sees through each tap, and where that is outside."""
    sources = window.sources(product).T.reshape(-1)
    return sources, np.flatnonzero(sources < 0)
