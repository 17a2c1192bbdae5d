"""Sums that arithmetic on tensor cores made NaN where plain ones are not, computed anew.

An infinity split in two becomes NaN, and so it does times the zeros that fill up a block. All
outputs are looked at, in the order of memory; NaNs are rare.
"""

from __future__ import annotations

from numba import cuda, int32, int64

from numbsparse.device.launch import launch
from numbsparse.kernels.conv.k1_naive import output_of
from numbsparse.kernels.conv.places import place_of
from numbsparse.kernels.conv.walks import line_walk, planned
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.views import span

THREADS = 128
RUN = 8  # outputs that a thread looks at


def repair_lines(product, x, values, index, window, y):
    """The outputs of a product that are NaN, computed anew."""
    sizes, out_sizes = window.big, window.small
    if product == "input_grad":
        sizes, out_sizes = out_sizes, sizes
    for of in window.passes(product):
        walk = planned(index, window, line_walk, product, of)
        launch(
            repair_kernel, -(-y.size // (THREADS * RUN)), THREADS,
            x, values, int(product == "input_grad"), *walk, sizes, out_sizes,
            of.step, of.first, of.scale, span(y), y.shape[2],
        )  # fmt: skip


@cuda.jit
def repair_kernel(
    x, values, turned, indptr, taps, others, blocks, offsets, sizes, out_sizes, step, first, scale,
    y, features,
):  # fmt: skip
    start = int64(cuda.blockIdx.x) * (THREADS * RUN) + cuda.threadIdx.x
    for at in range(start, min(start + THREADS * RUN, y.size), THREADS):
        value = widened(y[at])
        if value != value:
            n, place = place_of(at // features, out_sizes)
            o, own = of_pass(place, step, first)
            if own:
                total = output_of(
                    x, values, turned, indptr, taps, others, blocks, offsets, sizes, scale, n, o,
                    at % features,
                )  # fmt: skip
                y[at] = rounded(total, y)


@cuda.jit(device=True)
def of_pass(place, step, first):
    """(output, whether it is one) of a pass that stands at a place."""
    a, b, c = place[0] - first[0], place[1] - first[1], place[2] - first[2]
    own = a % step[0] == 0 and b % step[1] == 0 and c % step[2] == 0
    return (int32(a // step[0]), int32(b // step[1]), int32(c // step[2])), own
