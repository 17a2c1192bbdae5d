"""Work that keeps a stream of a GPU busy, and operands of products beside it."""

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.dtypes import as_dtype

STEPS = 10_000_000  # some 25 ms
LAYOUT = ns.patterns.random(8, 8, 0.4, seed=0)
B = 32
N = 8 * B
ROWS = {"few": 64, "many": 1024}  # of the batch


@cuda.jit
def delay_kernel(out, steps):
    value = out[0]
    for _ in range(steps):
        value = value * float32(0.999) + float32(1)
    out[0] = value


def delay():
    """Keep the current stream busy."""
    launch(delay_kernel, 1, 1, device.empty((1,), "float32"), STEPS)


def drawn(*shape, dtype="float32", seed=0):
    host = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return host.astype(as_dtype(dtype))


def own():
    return ns.stream()


def weight(dtype="float32", seed=1):
    values = drawn(int(LAYOUT.sum()), B, B, dtype=dtype, seed=seed)
    return ns.BlockSparse(values, LAYOUT)
