"""All steps of an LSTM in one run of every CPU core: their products, and the gates between.

A step takes less than a millisecond; to wake a core for its product takes a good part of that. So
the cores stay awake over all steps: one by one, 16 to 64 rows of 256 to 1,024 units took 8 cores
forward 1.3 to 2.5 times as long. They share out a product's tiles, wait for each other, share out
the rows of the gates, and wait again. Each phase of each step has counters of its own. Where core 0
waits long for another core, which another program holds, core 0 finishes by itself.
"""

from functools import cache

import numpy as np
from numba import from_dtype, types

from numbsparse.kernels.at_address import address_of, call_of
from numbsparse.kernels.cores import (
    DONE,
    compiled,
    inner,
    next_share,
    on_cores,
    read_only,
    wait_or_part,
)
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.on_cpu import activate, all_kept, by_gate, differentiate, update
from numbsparse.kernels.matmul.k0_cpu.lines import (
    OUTER_CACHE,
    SLAB,
    signature_of_tiles,
    tile_shape,
    tiles_kernel,
)
from numbsparse.kernels.panels import empty_panels, pack_kernel, signature_of_pack
from numbsparse.kernels.simd import fetch_add, lanes

PHASES = 3  # of a step: an operand is packed, then multiplied; then the gates
FLOATS = (np.float32, np.float64)


def serves(values: np.ndarray, batch: int, units: int) -> bool:
    """Whether it pays: floats, more rows than half a vector, and gates that fit the cache."""
    most = SLAB // (GATES * units)
    return values.dtype in FLOATS and lanes(from_dtype(values.dtype)) // 2 < batch <= most


def forward(gates, bias, kept, hs, cs, values, index):
    """h[1:], c[1:], and i, f, g and o in `gates` in the place of their x parts.

    gates (time, batch, 4 * width), hs and cs (time + 1, batch, units).
    """
    x = np.empty(gates.shape[1:], gates.dtype)
    by_gates = (by_gate(a, values.shape[1]) for a in (x, gates, bias))
    arrays = x, *by_gates, all_kept(kept, hs), hs, cs
    _run(forward_kernel, len(gates), arrays, values, index.columns, hs.shape[1:])


def backward(gates, kept, cs, dy, dgates, dc, dbias, values, index):
    """dgates[t - 1] from dgates[t], the last one first, in place of the gates.

    dc is the gradient of c[t] before and after; dbias (1, 4 * width) is added to.
    """
    dh = np.empty(dc.shape, dc.dtype)
    arrays = dh, dgates, by_gate(dgates, values.shape[1]), all_kept(kept, cs), cs, dy, dc
    _run(backward_kernel, len(gates) - 1, arrays, values, index.rows, dgates.shape[1:])
    for t in reversed(range(len(gates) - 1)):
        dbias += np.add.reduce(dgates[t], axis=0)


def _run(kernel, steps, arrays, values, walk, shape):
    """`shape` (batch, features) is that of the operand that is packed in each step."""
    (batch, features), dtype = shape, from_dtype(values.dtype)
    size = values.shape[1]
    most = tile_shape(size)[1]
    panels = -(-batch // (most * lanes(dtype)))
    columns = -(-batch // (panels * lanes(dtype))) * lanes(dtype)  # of all panels alike
    packed = empty_panels(panels, features, columns, values.dtype)
    on_cores(
        kernel(dtype),
        (
            arrays,
            (packed, values, tuple(walk), values.nbytes > OUTER_CACHE),
            (address_of(pack_kernel(dtype)), address_of(tiles_kernel(dtype, size, columns))),
        ),
        phases=1 + PHASES * steps,
        work=batch,
        multiply_adds=values.size * batch,
    )


@cache
def forward_kernel(dtype):
    arrays = (
        dtype[:, ::1],  # x (batch, 4 * width), and by gate
        dtype[:, :, :, ::1],
        dtype[:, :, :, :, ::1],  # z (time, batch, blocks, 4, B)
        read_only(dtype, 3),  # bias (blocks, 4, B)
        read_only(dtype, 3),  # kept (time or 1, batch or 1, units)
        *(dtype[:, :, ::1], dtype[:, :, ::1]),  # hs, cs (time + 1, batch, units)
    )

    @inner()
    def gates(arrays, t, n, end):
        _, r, z, bias, kept, hs, cs = arrays
        activate(z[t, n:end], r[n:end], bias)
        some = kept[min(t, len(kept) - 1), min(n, kept.shape[1] - 1) :]
        update(z[t, n:end], some, cs[t, n:end], cs[t + 1, n:end], hs[t + 1, n:end])

    return steps_kernel(dtype, False, arrays, 5, gates)


@cache
def backward_kernel(dtype):
    arrays = (
        dtype[:, ::1],  # dh (batch, units)
        dtype[:, :, ::1],  # dgates (time, batch, 4 * width), and by gate
        dtype[:, :, :, :, ::1],
        read_only(dtype, 3),  # kept (time or 1, batch or 1, units)
        read_only(dtype, 3),  # cs (time + 1, batch, units)
        read_only(dtype, 3),  # dy (time, batch, units)
        dtype[:, ::1],  # dc (batch, units)
    )

    @inner()
    def gates(arrays, t, n, end):
        dh, _, dz, kept, cs, dy, dc = arrays
        some = kept[min(t, len(kept) - 1), min(n, kept.shape[1] - 1) :]
        states = cs[t, n:end], cs[t + 1, n:end]
        differentiate(dz[t, n:end], some, *states, dy[t, n:end], dh[n:end], dc[n:end])

    return steps_kernel(dtype, True, arrays, 1, gates)


def steps_kernel(dtype, back, arrays, operand, gates):
    """Of each step: arrays[0] = the product of that of an array, then its `gates`, by rows."""
    walk = types.UniTuple(read_only(types.int32, 1), 3)  # indptr (lines + 1,), indices, blocks
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        types.BaseTuple.from_types(arrays),
        # packed (panels, features, columns), values (n_blocks, B, B), the walk, line by line or not
        types.Tuple((dtype[:, :, ::1], read_only(dtype, 3), walk, types.boolean)),
        types.UniTuple(types.int64, 2),  # where the `pack_kernel` and the `tiles_kernel` are
    )
    pack, multiply = call_of(signature_of_pack(dtype)), call_of(signature_of_tiles(dtype))

    @compiled(signature)
    def kernel(core, progress, share, arrays, recurrent, at):
        (packed, values, walk, by_line), out = recurrent, arrays[0]
        operands, batch = (packed, values, back, walk, out, by_line), len(out)
        steps = len(progress) // PHASES
        for step in range(steps):
            t = steps - 1 - step if back else step
            counts = progress[1 + PHASES * step :]
            of_step = arrays[operand][t + 1 if back else t]
            pack(at[0], (core, counts[0], of_step, packed))
            tiles = multiply(at[1], (core, counts[1], share, *operands))
            if not wait_or_part(core, counts[1], tiles, progress[0]):
                return
            n, end = next_share(core, counts[2], share, batch)
            while n < end:
                gates(arrays, t, n, end)
                fetch_add(counts[2], DONE, end - n)
                n, end = next_share(core, counts[2], share, batch)
            if not wait_or_part(core, counts[2], batch, progress[0]):
                return

    return kernel
