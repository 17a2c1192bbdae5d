"""A small tile of numbers in the CPU's vector registers, as a value for compiled code to pass on.

Compilers keep a loop's sums in registers only when they can see every one of them. A `Tile` makes
that explicit: `zeros`, `multiply_add`, `store` each become a fixed run of vector instructions, so a
plain loop around `multiply_add` runs with all its sums in registers and loads only its operands.
All of it works only inside `numba.njit`. Positions count elements from an array's first one, and
nothing is bounds-checked.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

i32, i64 = ir.IntType(32), ir.IntType(64)
CACHE_LINE = 64


@cache
def _target() -> tuple[str, list[str]]:
    """(triple, features) of the CPU that Numba compiles for."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, features.split(",")


def vector_registers() -> int:
    """How many vector registers the CPU has."""
    triple, features = _target()
    return 32 if "+avx512f" in features or triple.startswith(("aarch64", "arm64")) else 16


def lanes(dtype: types.Float) -> int:
    """How many numbers one vector register holds."""
    features = _target()[1]
    bits = 512 if "+avx512f" in features else 256 if "+avx" in features else 128
    return bits // dtype.bitwidth


class Tile(types.Type):
    """`tile[r, v]`: each row fills one register or several; short rows get short vectors."""

    def __init__(self, dtype, rows, columns):
        self.dtype, self.rows, self.columns = dtype, rows, columns
        self.size = dtype.bitwidth // 8
        self.lanes = min(columns, lanes(dtype))
        self.vectors = columns // self.lanes
        scalar = ir.FloatType() if self.size == 4 else ir.DoubleType()
        self.vector = ir.VectorType(scalar, self.lanes)
        super().__init__(f"Tile({dtype}, {rows} x {columns})")


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager, tile):
        super().__init__(manager, tile, ir.ArrayType(tile.vector, tile.rows * tile.vectors))


def _at(context, builder, array_type, array, *positions):
    """Pointer to `array[sum(positions)]`."""
    pointer = context.make_array(array_type)(context, builder, array).data
    for position in positions:
        pointer = builder.gep(pointer, [position])
    return pointer


def _vector_at(builder, pointer, step, vector):
    return builder.bitcast(builder.gep(pointer, [step]), vector.as_pointer())


def _shuffle(builder, a, b, picks):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(i32, len(picks)), picks))


@intrinsic(prefer_literal=True)
def zeros(typing, like, rows, columns):
    """A tile of `rows` x `columns` zeros, of the dtype of the array `like`."""
    tile = Tile(like.dtype, rows.literal_value, columns.literal_value)

    def build(context, builder, signature, args):
        return ir.Constant(context.get_value_type(tile), None)

    return tile(like, rows, columns), build


@intrinsic(prefer_literal=True)
def load(typing, a, starts, shift, stride, rows, columns):
    """`tile[r] = a[s + shift + r * stride:][:n]` for each `s` in the tuple `starts`, end to end."""
    tile = Tile(a.dtype, rows.literal_value, columns.literal_value)
    piece = tile.columns // len(starts)

    def build(context, builder, signature, args):
        array, a_starts, a_shift, a_stride = args[:4]
        value = ir.Constant(context.get_value_type(tile), ir.Undefined)
        for r in range(tile.rows):
            line = builder.mul(a_stride, i64(r))
            pieces = [
                _at(context, builder, a, array, builder.extract_value(a_starts, p), a_shift, line)
                for p in range(len(starts))
            ]
            for v in range(tile.vectors):
                vector = _gather(builder, tile, pieces, piece, v)
                value = builder.insert_value(value, vector, r * tile.vectors + v)
        return value

    return tile(a, starts, types.int64, types.int64, rows, columns), build


@intrinsic
def multiply_add(typing, tile, a, start, stride, b, starts, shift):
    """`tile[r, v] += a[start + r * stride] * row[v]`, one step of a matrix product.

    `row` is `b[s + shift:][:n]` for each `s` in the tuple `starts`, end to end, n elements each.
    """
    piece = tile.columns // len(starts)

    def build(context, builder, signature, args):
        value, a_array, a_start, a_stride, b_array, b_starts, b_shift = args
        pointer = _at(context, builder, a, a_array, a_start)
        pieces = [
            _at(context, builder, b, b_array, builder.extract_value(b_starts, p), b_shift)
            for p in range(len(starts))
        ]
        row = [_gather(builder, tile, pieces, piece, v) for v in range(tile.vectors)]
        undefined = ir.Constant(tile.vector, ir.Undefined)
        for r in range(tile.rows):
            scalar = builder.load(builder.gep(pointer, [builder.mul(a_stride, i64(r))]))
            spread = builder.insert_element(undefined, scalar, i32(0))
            spread = _shuffle(builder, spread, undefined, [0] * tile.lanes)
            for v in range(tile.vectors):
                number = r * tile.vectors + v
                # "contract" lets the two become one fused multiply-add, and nothing else.
                product = builder.fmul(spread, row[v], flags=("contract",))
                total = builder.extract_value(value, number)
                total = builder.fadd(product, total, flags=("contract",))
                value = builder.insert_value(value, total, number)
        return value

    signature = tile(tile, a, types.int64, types.int64, b, starts, types.int64)
    return signature, build


def _gather(builder, tile, pieces, piece, v):
    """Vector `v` of a row that is stored as `pieces` of `piece` elements."""
    first = v * tile.lanes
    if piece >= tile.lanes:
        pointer = _vector_at(builder, pieces[first // piece], i64(first % piece), tile.vector)
        return builder.load(pointer, align=tile.size)
    part = ir.VectorType(tile.vector.element, piece)
    parts = [
        builder.load(_vector_at(builder, pieces[p], i64(0), part), align=tile.size)
        for p in range(first // piece, (first + tile.lanes) // piece)
    ]
    while len(parts) > 1:
        picks = list(range(2 * parts[0].type.count))
        halves = parts[::2], parts[1::2]
        parts = [_shuffle(builder, a, b, picks) for a, b in zip(*halves, strict=True)]
    return parts[0]


@intrinsic
def store(typing, tile, out, starts, shift, stride):
    """`out[s + shift + r * stride:][:n]` = its n columns of `tile[r]`, for each `s` in `starts`."""
    piece = tile.columns // len(starts)

    def build(context, builder, signature, args):
        value, array, out_starts, out_shift, out_stride = args
        step = min(piece, tile.lanes)
        for column in range(0, tile.columns, step):
            first = builder.extract_value(out_starts, column // piece)
            pointer = _at(context, builder, out, array, first, out_shift, i64(column % piece))
            for r in range(tile.rows):
                vector = builder.extract_value(value, r * tile.vectors + column // tile.lanes)
                if step < tile.lanes:
                    picks = [column % tile.lanes + i for i in range(step)]
                    vector = _shuffle(builder, vector, vector, picks)
                target = _vector_at(builder, pointer, builder.mul(out_stride, i64(r)), vector.type)
                builder.store(vector, target, align=tile.size)
        return context.get_dummy_value()

    return types.void(tile, out, starts, types.int64, types.int64), build


@intrinsic
def store_transposed(typing, tile, out, start, stride):
    """`out[start + v * stride + r] = tile[r, v]`; `rows` is a power of two.

    Number the elements of the registers one after another. Interleaving the first half of the
    registers with the second rotates the bits of that number by one, so log2(rows) rounds move the
    bits of `r` from the top to the bottom: that is the transposed tile.
    """

    def build(context, builder, signature, args):
        value, array, out_start, out_stride = args
        rows, width = tile.rows, tile.lanes
        pointer = _at(context, builder, out, array, out_start)
        low = [i // 2 + i % 2 * width for i in range(width)]
        high = [pick + width // 2 for pick in low]
        for v in range(tile.vectors):
            flat = [builder.extract_value(value, r * tile.vectors + v) for r in range(rows)]
            for _ in range(rows.bit_length() - 1):
                flat = [
                    _shuffle(builder, a, b, picks)
                    for a, b in zip(flat[: rows // 2], flat[rows // 2 :], strict=True)
                    for picks in (low, high)
                ]
            step = min(rows, width)
            for first in range(0, rows * width, step):
                vector, line = flat[first // width], v * width + first // rows
                if step < width:
                    picks = [first % width + i for i in range(step)]
                    vector = _shuffle(builder, vector, vector, picks)
                row = builder.gep(pointer, [builder.mul(out_stride, i64(line))])
                target = _vector_at(builder, row, i64(first % rows), vector.type)
                builder.store(vector, target, align=tile.size)
        return context.get_dummy_value()

    return types.void(tile, out, types.int64, types.int64), build


@intrinsic(prefer_literal=True)
def prefetch(typing, a, start, count):
    """Prefetch the cache lines of `a[start:][:count]`, to be read soon; they may be outside `a`."""
    size = a.dtype.bitwidth // 8

    def build(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.bitcast(_at(context, builder, a, args[0], args[1]), byte)
        for offset in range(0, count.literal_value * size, CACHE_LINE):
            # Read, keep in every cache level, data.
            builder.call(function, [builder.gep(pointer, [i64(offset)]), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(a, types.int64, count), build


@intrinsic
def fetch_add(typing, counters, i, n):
    """Add `n` to `counters[i]`, int64, as one indivisible step; the value before."""

    def build(context, builder, signature, args):
        pointer = _at(context, builder, counters, args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(counters, types.int64, types.int64), build
