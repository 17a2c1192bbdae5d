"""`wgmma` on a GPU, and tuples of accumulators.

The accumulators of a thread are one tuple, handed in and out of one block of assembly that holds
everything from the fence to the wait: so no compiler moves them while products are in flight, and
none of them leaves its register. A step must be long enough to hide the wait.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    SHARED,
    address,
    check_array,
    emit,
    f32,
    i32,
    of_arity,
    ordering_by,
    u32,
)
from numbsparse.kernels.ptx.tiles import Operand

_SWIZZLES = {128: 1, 64: 2, 32: 3}
_FLOAT = ir.FloatType()


@cache
def wgmma(
    kind: str,
    m_tiles: int,
    n: int,
    k_steps: int,
    a: Operand,
    b: Operand,
    columns: int = 0,
    inputs: int = 1,
    stride: int = 0,
) -> Any:
    per_column = m_tiles * n // 2
    count = max(columns, 1) * per_column
    accumulators = types.UniTuple(f32, count)
    # Of the operands, the results come first, then the two places and the mask.
    one = _products(kind, m_tiles, n, k_steps, a, b, count)
    block = n * k_steps * 32
    text = _in_flight(_chosen(one, per_column, columns, inputs, stride, block, count))

    def multiply(typing, acc, xs, i, ws, j, *mask):
        if acc != accumulators:
            raise TypingError(f"this wgmma takes {accumulators}, got {acc}")
        check_array("wgmma", xs, i)
        check_array("wgmma", ws, j)

        def build(context, builder, signature, args):
            places = (
                _place(context, builder, xs, args[1], args[2], a),
                _place(context, builder, ws, args[3], args[4], b),
            )
            values = [builder.extract_value(args[0], k) for k in range(count)]
            results = in_place(builder, text, [*places, *args[5:]], values)
            return context.make_tuple(builder, signature.return_type, results)

        masks = (u32 for _ in mask)
        return accumulators(accumulators, xs, types.int64, ws, types.int64, *masks), build

    return of_arity(multiply, 6 if columns else 5)


@cache
def zeros(count: int) -> Any:
    def typing_of(typing):
        def build(context, builder, signature, args):
            values = [ir.Constant(_FLOAT, 0.0)] * count
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(f32, count)(), build

    return intrinsic(typing_of)


@intrinsic
def to_local(typing, values, local):
    check_array("to_local", local, types.int64, f32)

    def build(context, builder, signature, args):
        data = context.make_array(local)(context, builder, args[1]).data
        for k in range(values.count):
            builder.store(builder.extract_value(args[0], k), builder.gep(data, [i32(k)]))
        return context.get_dummy_value()

    return types.void(values, local), build


@cache
def from_local(count: int) -> Any:
    def typing_of(typing, local):
        check_array("from_local", local, types.int64, f32)

        def build(context, builder, signature, args):
            data = context.make_array(local)(context, builder, args[0]).data
            values = [builder.load(builder.gep(data, [i32(k)])) for k in range(count)]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(f32, count)(local), build

    return intrinsic(typing_of)


def _set_registers(name, direction):
    text = f"setmaxnreg.{direction}.sync.aligned.u32 {{}};"
    return ordering_by(text, name, ", 24 to 256 by eights", lambda n: n in range(24, 257, 8))


more_registers = _set_registers("more_registers", "inc")
fewer_registers = _set_registers("fewer_registers", "dec")


def _products(kind, m_tiles, n, k_steps, a, b, first):
    """The text of one column's products: a function of its first accumulator and a's place."""
    terms = 8 if kind == "tf32" else 16
    kinds = f"m64n{n}k{terms}.f32.{kind}.{kind}"
    transposed = "" if kind == "tf32" else f", {int(a.transposed)}, {int(b.transposed)}"

    def text(start, place):
        lines = []
        for k in range(k_steps):
            for m in range(m_tiles):
                numbers = range(start + m * n // 2, start + (m + 1) * n // 2)
                acc = ", ".join(f"${i}" for i in numbers)
                lines += [
                    f"add.u32 low, ${first}, {(place + a.rows(m) + a.step(k)) >> 4};",
                    f"mov.b64 da, {{low, {_high(a)}}};",
                    f"add.u32 low, at, {b.step(k) >> 4};",
                    f"mov.b64 db, {{low, {_high(b)}}};",
                    f"wgmma.mma_async.sync.aligned.{kinds} {{{acc}}}, da, db, 1, 1, 1{transposed};",
                ]
        return lines

    return text


def _chosen(one, per_column, columns, inputs, stride, block, first):
    """The products that the mask names; their blocks are stored one after another."""
    lines = [f"mov.b32 at, ${first + 1};"]
    if not columns:
        return [*lines, *one(0, 0)]
    for bit in range(inputs * columns):
        e, g = divmod(bit, columns)
        if g == 0:
            # All tests of an input at once, so that none is waited for; and as floats: integers
            # that all lanes share would be tested by another unit, which takes longer.
            for k in range(columns):
                lines += [
                    f"and.b32 low, ${first + 2}, {1 << bit + k};",
                    "mov.b32 number, low;",
                    f"setp.eq.f32 none{k}, number, 0f00000000;",
                ]
        lines += [
            f"@none{g} bra.uni PAST{bit};",
            *one(g * per_column, e * stride),
            f"add.u32 at, at, {block >> 4};",
            f"PAST{bit}:",
        ]
    return lines


def _in_flight(lines):
    begin = [
        "{ .reg .b64 da, db; .reg .b32 low, at; .reg .f32 number; .reg .pred none<32>;",
        "wgmma.fence.sync.aligned;",
    ]
    end = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
    return " ".join([*begin, *lines, *end])


def _place(context, builder, array, value, i, operand):
    """The lower word of a descriptor: the address, and the bytes from panel to panel."""
    place = in_pieces(context, builder, array, value, i)
    return builder.or_(place, i32(operand.panel // 16 << 16))


def in_pieces(context, builder, array, value, i):
    """The address of item i in pieces of 16 bytes, as descriptors have it."""
    place = address(context, builder, array, value, i, SHARED)
    # Above the first 18 bits, the address names the block in its cluster.
    return builder.lshr(builder.and_(place, i32(0x3FFFF)), i32(4))


def _high(operand):
    """The upper word of a descriptor: the bytes of 8 lines, and the swizzle."""
    return operand.apart >> 4 | _SWIZZLES[operand.width] << 30


def in_place(builder, text, operands, values):
    """One block of assembly that changes all the values, float32, in place."""
    return emit(builder, text, [_FLOAT] * len(values), operands, memory=True, kept=values)
