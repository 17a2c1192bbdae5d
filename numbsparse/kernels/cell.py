"""The gates of an LSTM's unit from four groups of values: a thread per unit of each row.

z (batch, 4, units) holds input gate, forget gate, candidate and output gate;
c = sigmoid(z_f) * c_before + sigmoid(z_i) * tanh(z_g) * kept;  h = sigmoid(z_o) * tanh(c).
c and its gradient are float32 with 16-bit floats. All arrays are C-contiguous.
"""

from functools import cache

from numba import cuda

from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.lstm.cell import GATES, ONE
from numbsparse.kernels.lstm.on_gpu import activated, gpu_cell_grad, tanh


def forward(z, c_before, kept, c, h):
    """c and h; `kept` (batch, units) is None where the whole update counts."""
    size, units = c.size, c.shape[1]
    arrays = [a.reshape(-1) for a in (z, c_before, c_before if kept is None else kept, c, h)]
    launch(forward_kernel(kept is not None), blocks(size), THREADS, size, units, *arrays)


def backward(z, c_before, kept, c, dh, dc, dz, dc_before):
    """dz and dc_before from the gradients of h and of c."""
    size, units = c.size, c.shape[1]
    arrays = z, c_before, c_before if kept is None else kept, c, dh, dc, dz, dc_before
    flat = [a.reshape(-1) for a in arrays]
    launch(backward_kernel(kept is not None), blocks(size), THREADS, size, units, *flat)


@cache
def forward_kernel(drops):
    @cuda.jit
    def cell_kernel(size, units, z, c_before, kept, c, h):
        at = cuda.grid(1)
        if at < size:
            first = at + at // units * 3 * units
            z_i, z_f = widened(z[first]), widened(z[first + units])
            z_g, z_o = widened(z[first + 2 * units]), widened(z[first + 3 * units])
            i, f, g, o = activated(z_i, z_f, z_g, z_o)
            update = i * g * widened(kept[at]) if drops else i * g
            state = f * widened(c_before[at]) + update
            c[at] = rounded(state, c)
            h[at] = rounded(o * tanh(state), h)

    return cell_kernel


@cache
def backward_kernel(drops):
    @cuda.jit
    def cell_grad_kernel(size, units, z, c_before, kept, c, dh, dc, dz, dc_before):
        at = cuda.grid(1)
        if at < size:
            first = at + at // units * 3 * units
            z_i, z_f = widened(z[first]), widened(z[first + units])
            z_g, z_o = widened(z[first + 2 * units]), widened(z[first + 3 * units])
            i, f, g, o = activated(z_i, z_f, z_g, z_o)
            share = widened(kept[at]) if drops else ONE
            before, slope, of_c = widened(c_before[at]), widened(dh[at]), widened(dc[at])
            gradients = gpu_cell_grad(i, f, g, o, share, before, tanh(widened(c[at])), slope, of_c)
            for k in range(GATES):
                dz[first + k * units] = rounded(gradients[k], dz)
            dc_before[at] = rounded(gradients[GATES], dc_before)

    return cell_grad_kernel
