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
USUAL = 0x101  # of the flags of NumPy's arrays: C-contiguous, aligned


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
    flags = x.flags
    return flags.num & USUAL == USUAL or (x.strides[1] == x.itemsize and flags.aligned)


def room_for(panels: int, length: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """Memory that `panels_in` finds panels in: to align them here would take a microsecond."""
    return np.empty(panels * length * columns + CACHE_LINE // dtype.itemsize, dtype)


@intrinsic
def panels_in(typing, room, panels, length, columns):
    """The panels (panels, length, columns) in memory of `room_for`, from a cache line on."""

    def build(context, builder, signature, args):
        source = context.make_array(room)(context, builder, args[0])
        address = builder.ptrtoint(source.data, args[1].type)
        address = builder.and_(
            builder.add(address, address.type(CACHE_LINE - 1)), address.type(-CACHE_LINE)
        )
        data = builder.inttoptr(address, source.data.type)
        row = builder.mul(args[3], source.itemsize)
        strides = builder.mul(args[2], row), row, source.itemsize
        return _view(context, builder, signature.return_type, source, data, args[1:], strides)

    return types.Array(room.dtype, 3, "C")(room, *[types.int64] * 3), build


@intrinsic
def panels_of(typing, x, width):
    """x (batch, features) as panels (features // width, batch, width), where it is."""

    def build(context, builder, signature, args):
        source = context.make_array(x)(context, builder, args[0])
        batch, features = cgutils.unpack_tuple(builder, source.shape)
        row, item = cgutils.unpack_tuple(builder, source.strides)
        shape = builder.sdiv(features, args[1]), batch, args[1]
        strides = builder.mul(args[1], item), row, item
        return _view(context, builder, signature.return_type, source, source.data, shape, strides)

    return x.copy(ndim=3, layout="A")(x, types.int64), build


@intrinsic
def shortened(typing, packed, length):
    """The memory of panels (panels, ., columns) as shorter ones, (panels, length, columns).

    NumPy's `reshape` takes half as long to compile as the kernel that needs this.
    """

    def build(context, builder, signature, args):
        source = context.make_array(packed)(context, builder, args[0])
        panels, _, columns = cgutils.unpack_tuple(builder, source.shape)
        row = builder.mul(columns, source.itemsize)
        strides = builder.mul(args[1], row), row, source.itemsize
        shape = panels, args[1], columns
        return _view(context, builder, packed, source, source.data, shape, strides)

    return packed(packed, types.int64), build


def _view(context, builder, result, source, data, shape, strides):
    """An array of this type at `data`, in memory that `source` has."""
    made = context.make_array(result)(context, builder)
    owner = {"meminfo": source.meminfo, "parent": source.parent}
    how = {"shape": shape, "strides": strides, "itemsize": source.itemsize}
    context.populate_array(made, data=data, **how, **owner)
    return impl_ret_borrowed(context, builder, result, made._getvalue())


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
