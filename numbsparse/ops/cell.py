"""The gates of an LSTM's units from four groups of values, and their gradients.

i, f, g, o = sigmoid(z_i), sigmoid(z_f), tanh(z_g), sigmoid(z_o)
c = f * c_before + i * g * kept
h = o * tanh(c)

Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997. `kept` is dropout on the update:
Semeniuta, Severyn and Barth, "Recurrent Dropout without Memory Loss", 2016.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.device import empty
from numbsparse.kernels.lstm import GATES
from numbsparse.ops.activations import sigmoid
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.operands import check_beside, on_gpu, state_dtype


def cell(
    z: Any, c_before: Any, kept: Any = None, place: Callable[..., Any] = empty
) -> tuple[Any, Any]:
    """(h, c) of one step.

    Parameters
    ----------
    z : array, (batch, 4, units): input gate, forget gate, candidate, output gate
    c_before : array, (batch, units), float32 with a z of 16-bit floats
    kept : array, (batch, units), of the dtype of z, or None
    place : function like `empty`, which on a GPU says where h is written

    Examples
    --------
    >>> h, c = cell(np.zeros((1, 4, 2), np.float32), np.float32([[2, 4]]))
    >>> c
    array([[1., 2.]], dtype=float32)
    """
    if _check(z, c_before=c_before, kept=kept):
        from numbsparse.kernels.lstm import on_gpu as kernels

        h, c = place(c_before.shape, z.dtype), empty(c_before.shape, c_before.dtype)
        before = gapless(z), None, None, gapless(kept), gapless(c_before)
        kernels.forward(*before, c, h, c.shape[1])  # as of an LSTM whose units are one block
        return h, c
    i, f, g, o = _gates(z)
    c = f * c_before + (i * g if kept is None else i * g * kept)
    return o * np.tanh(c), c


def cell_grad(
    z: Any, c_before: Any, kept: Any, c: Any, dh: Any, dc: Any, place: Callable[..., Any] = empty
) -> tuple[Any, Any]:
    """(dz, dc_before) from the gradients of h and c; on a GPU `place` says where dz is written."""
    if _check(z, c_before=c_before, kept=kept, c=c, dh=dh, dc=dc):
        from numbsparse.kernels.lstm import on_gpu as kernels

        dz, dc_before = place(z.shape, z.dtype), empty(c.shape, c.dtype)
        before = gapless(z), None, gapless(kept), gapless(c_before), gapless(c)
        of_sums = gapless(dh), None, gapless(dc), dz, None
        kernels.backward(*before, *of_sums, c.shape[1], dc_before)
        return dz, dc_before
    i, f, g, o = _gates(z)
    t = np.tanh(c)
    state = dc + dh * o * (1 - t * t)
    update = state if kept is None else state * kept
    of_gates = (
        update * g * i * (1 - i),
        state * c_before * f * (1 - f),
        update * i * (1 - g * g),
        dh * t * o * (1 - o),
    )
    return np.stack(of_gates, axis=1), state * f


def _gates(z: np.ndarray) -> tuple[np.ndarray, ...]:
    return sigmoid(z[:, 0]), sigmoid(z[:, 1]), np.tanh(z[:, 2]), sigmoid(z[:, 3])


def _check(z: Any, **of_units: Any) -> bool:
    """Whether z is on the GPU; refused where the arrays (batch, units) do not fit it."""
    gpu, wide = on_gpu(z, "z"), state_dtype(z.dtype)
    if z.ndim != 3 or z.shape[1] != GATES:
        raise ValueError(f"z takes the shape (batch, {GATES}, units), got {z.shape}")
    for name, array in of_units.items():
        dtype = z.dtype if name in ("kept", "dh") else wide
        if array is not None:
            check_beside(name, array, z.shape[::2], dtype, "z", z)
    return gpu
