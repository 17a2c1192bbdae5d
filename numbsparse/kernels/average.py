"""A moving average of weights: a thread per weight."""

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import widened


def average_step(average, p, share):
    """average += share[0] * (p - average); a share of 1 makes it p, whatever it was."""
    launch(average_kernel, blocks(p.size), THREADS, average.span, p.span, share)


@cuda.jit
def average_kernel(average, p, share):
    i = cuda.grid(1)
    if i < p.size:
        value = widened(p[i])
        if share[0] < float32(1):
            value = average[i] + share[0] * (value - average[i])
        average[i] = value
