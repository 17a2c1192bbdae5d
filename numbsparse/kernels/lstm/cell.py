"""The formulas of one unit, compiled for the CPU and for GPUs."""

import numpy as np

GATES = 4
WARPS = 4  # of a block of threads that streams a recurrent weight, that multiply

ONE, TWO = np.float32(1), np.float32(2)


def column(unit, block_size):
    """Where the input gate of a unit is among the gates; the others follow, a block each."""
    block = unit // block_size
    return unit + block * (GATES - 1) * block_size


def cell_grad(i, f, g, o, kept, c_before, t, dh, dc):
    """The gradients of z_i, z_f, z_g, z_o and c_before; t = tanh(c)."""
    dc += dh * o * (ONE - t * t)
    dg = dc * kept
    return (
        dg * g * i * (ONE - i),
        dc * c_before * f * (ONE - f),
        dg * i * (ONE - g * g),
        dh * t * o * (ONE - o),
        dc * f,
    )
