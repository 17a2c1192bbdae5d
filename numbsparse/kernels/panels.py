"""A matrix packed in panels: what a register tile reads becomes one run of memory."""

from ctypes import addressof, c_char
from functools import cache

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from numbsparse.kernels.cores import DONE, compiled, inner, next_share, read_only, wait
from numbsparse.kernels.simd import CACHE_LINE, fetch_add, load, store, store_transposed

STRIP = 128  # rows of a panel packed at a time


def empty_panels(panels: int, length: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """Memory for panels (panels, length, columns), aligned to a cache line.

    Else every vector of a cache line's size would straddle two lines.
    """
    count, line = panels * length * columns, CACHE_LINE // dtype.itemsize
    buffer = np.empty(count + line, dtype)
    # NumPy's own ways to an address take four times as long.
    address = addressof(c_char.from_buffer(buffer))  # type: ignore[arg-type]
    first = -(address // dtype.itemsize) % line
    return buffer[first : first + count].reshape(panels, length, columns)


def with_unit_stride(x: np.ndarray) -> np.ndarray:
    """x, or a copy if neither of its axes is a run of memory."""
    flags = x.flags
    is_run = flags.c_contiguous or x.itemsize in x.strides
    return x if is_run and flags.aligned else np.ascontiguousarray(x)


def has_unit_stride(x: np.ndarray) -> bool:
    """Whether each row of x is a run of memory."""
    return x.strides[1] == x.itemsize and x.flags.aligned


@intrinsic
def shortened(typing, packed, length):
    """The memory of panels (panels, ., columns) as shorter ones, (panels, length, columns).

    NumPy's `reshape` takes half as long to compile as the kernel that needs this.
    """

    def build(context, builder, signature, args):
        array = context.make_array(packed)(context, builder, args[0])
        panels, _, columns = cgutils.unpack_tuple(builder, array.shape)
        item = array.itemsize
        row = builder.mul(columns, item)
        strides = builder.mul(args[1], row), row, item
        array.nitems = builder.mul(panels, builder.mul(args[1], columns))
        array.shape = cgutils.pack_array(builder, (panels, args[1], columns))
        array.strides = cgutils.pack_array(builder, strides)
        return impl_ret_borrowed(context, builder, packed, array._getvalue())

    return packed(packed, types.int64), build


@inner()
def run_of(block_rows, block, last, most):
    """The end of the blocks of one line from `block` on: before `last`, and `most` at most."""
    end = block + 1
    while end < min(block + most, last) and block_rows[end] == block_rows[block]:
        end += 1
    return end


@inner()
def places_of_run(block, end, block_columns, size, length, v, sources, targets):
    """Where column v of each block of a run begins: its panel of `length` rows, and its weights.

    Past the end of the run it is the last block again.
    """
    for piece in range(len(sources)):
        here = min(block + piece, end - 1)
        sources[piece] = (block_columns[here] * size + v) * length
        targets[piece] = here * size * size + v


def signature_of_pack(dtype):
    return types.void(
        types.int64,  # core
        types.int64[::1],  # counts
        read_only(dtype, 2, "A"),  # source
        dtype[:, :, ::1],  # packed (panels, length, columns)
    )


@cache
def pack_kernel(dtype):
    """packed[panel, q, v] = source[panel * columns + v, q], zero beyond the edge of `source`.

    One axis of `source` has unit stride, and squares of 4 x 4 follow it through the registers.
    Returns when every panel is packed, by whichever core.
    """

    @compiled(signature_of_pack(dtype))
    def kernel(core, counts, source, packed):
        panels, length, columns = packed.shape
        p_stride, q_stride = (
            source.strides[0] // source.itemsize,
            source.strides[1] // source.itemsize,
        )
        strips = (length + STRIP - 1) // STRIP  # in a panel
        strip, end = next_share(core, counts, 1, panels * strips)
        while strip < end:
            panel, first = strip // strips, strip % strips * STRIP
            p_first, last = panel * columns, min(first + STRIP, length)
            count = max(0, min(columns, source.shape[0] - p_first))
            v_squares, q_squares = count - count % 4, last - (last - first) % 4
            if q_stride == 1:
                for v in range(0, v_squares, 4):
                    for q in range(first, q_squares, 4):
                        square = load(source, ((p_first + v) * p_stride + q,), 0, p_stride, 4, 4)
                        store_transposed(
                            square, packed, (panel * length + q) * columns + v, columns
                        )
            else:
                for q in range(first, q_squares, 4):
                    for v in range(0, v_squares, 4):
                        square = load(source, (p_first + v + q * q_stride,), 0, q_stride, 4, 4)
                        store(square, packed, ((panel * length + q) * columns + v,), 0, columns)
            for q in range(first, last):
                for v in range(v_squares if q < q_squares else 0, count):
                    packed[panel, q, v] = source[p_first + v, q]
                packed[panel, q, count:] = 0
            fetch_add(counts, DONE, 1)
            strip, end = next_share(core, counts, 1, panels * strips)
        wait(counts, panels * strips)

    return kernel
