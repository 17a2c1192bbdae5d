"""How an intrinsic of `emitted` becomes one instruction: addresses, registers, inline assembly.

Each function returns the signature for Numba and the function that builds the code. Types are
checked, not converted, because a float32 that quietly becomes a uint32 is a wrong number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import TypingError

i32, i64 = ir.IntType(32), ir.IntType(64)
u32, f32 = types.uint32, types.float32

GLOBAL, SHARED = 1, 3  # LLVM's numbers of the address spaces
_LETTERS = {"i32": "r", "i64": "l", "float": "f"}  # kinds of registers, in inline assembly
_MMA_REGISTERS = " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"


def order(text):
    """An instruction without operands that orders accesses to memory."""

    def build(context, builder, signature, args):
        emit(builder, text, [], [], memory=True)
        return context.get_dummy_value()

    return build


class Item(NamedTuple):
    """An operand that is the address of an item of an array; without an index, of its first."""

    array: Any
    index: Any = None
    space: int = SHARED
    dtype: Any = None


def on_items(name, text, operands, results=()):
    """An instruction that reads or writes where its items are; other operands are types.

    Their order is that of the text and of the intrinsic, which takes an item as array and index.
    """
    taken = []
    for operand in operands:
        if isinstance(operand, Item):
            index = types.int64 if operand.index is None else operand.index
            check_array(name, operand.array, index, operand.dtype)
            taken += [operand.array] if operand.index is None else [operand.array, types.int64]
        else:
            taken.append(operand)

    def build(context, builder, signature, args):
        rest, values = iter(args), []
        for operand in operands:
            value = next(rest)
            if isinstance(operand, Item):
                i = i64(0) if operand.index is None else next(rest)
                value = address(context, builder, operand.array, value, i, operand.space)
            values.append(value)
        kinds = [context.get_value_type(kind) for kind in results]
        return _packed(context, builder, signature, emit(builder, text, kinds, values, memory=True))

    return _result(results)(*taken), build


def ldmatrix_if(name, shared, i, wanted, *kept):
    """A predicated load: a branch would end what the compiler moves about as one piece."""
    check_array(name, shared, i)
    _check(name, 5 * [u32], [wanted, *kept])

    def build(context, builder, signature, args):
        source = address(context, builder, shared, args[0], args[1], SHARED)
        load = name + " {$0, $1, $2, $3}, [$4];"
        text = "{ .reg .pred p; setp.ne.u32 p, $5, 0; @p " + load + " }"
        operands = [source, args[2]]
        results = emit(builder, text, 4 * [i32], operands, memory=True, kept=args[3:])
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(u32, 4)(shared, types.int64, u32, u32, u32, u32, u32), build


def stmatrix(name, shared, i, *registers):
    _check(name, 4 * [u32], registers)
    return on_items(name, name + " [$0], {$1, $2, $3, $4};", [Item(shared, i), *registers])


def mma(name, *operands):
    wanted = 6 * [u32] + 4 * [f32]
    return on_registers(name + _MMA_REGISTERS, 4 * [f32], wanted, operands)


def shuffle(text, value, lane):
    if value not in (u32, types.int32, f32) or not isinstance(lane, types.Integer):
        raise TypingError(f"shfl takes a register of 32 bits and an integer, got {value}, {lane}")
    return on_registers(text, [value], [value, types.int32], [value, types.int32])


def on_registers(text, results, wanted, got, ordered=False):
    """An instruction on registers only; `ordered`, it is not moved."""
    _check(text.split()[0], wanted, got)

    def build(context, builder, signature, args):
        kinds = [context.get_value_type(kind) for kind in results]
        values = emit(builder, text, kinds, args, memory=ordered)
        return _packed(context, builder, signature, values)

    return _result(results)(*wanted), build


def _result(results):
    """What an instruction of these results returns: nothing, the one, or a tuple."""
    if len(results) > 1:
        return types.UniTuple(results[0], len(results))
    return results[0] if results else types.void


def _packed(context, builder, signature, values):
    if signature.return_type == types.void:
        return context.get_dummy_value()
    if len(values) == 1:
        return values[0]
    return context.make_tuple(builder, signature.return_type, values)


def same_bits(result, wanted, got):
    """mov.b32, as a cast that the compiler sees through."""
    _check("mov.b32", [wanted], [got])

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(wanted), build


def wide_load(array, j, kind, dtype=None, count=4):
    """A plain load: the compiler finds out whether it is ld.global.v4 or ld.shared.v4."""
    check_array(f"a load of {4 * count} bytes", array, j, dtype)

    def build(context, builder, signature, args):
        pointer = _vector(context, builder, array, args[0], args[1], kind, count)
        vector = builder.load(pointer, align=4 * count)
        values = [builder.extract_element(vector, i32(k)) for k in range(count)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(kind, count)(array, types.int64), build


def wide_store(array, j, kind, dtype, *values):
    count = len(values)
    check_array(f"a store of {4 * count} bytes", array, j, dtype)
    _check(f"a store of {4 * count} bytes", count * [kind], values)

    def build(context, builder, signature, args):
        pointer = _vector(context, builder, array, args[0], args[1], kind, count)
        vector = ir.Constant(ir.VectorType(context.get_value_type(kind), count), ir.Undefined)
        for k in range(count):
            vector = builder.insert_element(vector, args[2 + k], i32(k))
        builder.store(vector, pointer, align=4 * count)
        return context.get_dummy_value()

    return types.void(array, types.int64, *values), build


def _vector(context, builder, array, value, j, kind, count):
    """A pointer to `count` values of `kind` at item j."""
    data = context.make_array(array)(context, builder, value).data
    vector = ir.VectorType(context.get_value_type(kind), count)
    return builder.bitcast(builder.gep(data, [j]), vector.as_pointer())


def address(context, builder, array, value, i, space):
    """The address of item i: 64 bits in global memory, 32 in shared."""
    data = context.make_array(array)(context, builder, value).data
    data = builder.addrspacecast(data, ir.PointerType(data.type.pointee, space))
    width = i32 if space == SHARED else i64
    i = builder.trunc(i, i32) if space == SHARED else i
    return builder.add(
        builder.ptrtoint(data, width), builder.mul(i, width(array.dtype.bitwidth // 8))
    )


def emit(builder, text, results, operands, memory=False, kept=()):
    """One instruction: the values of its results.

    With `memory`, loads and stores stay on their side of it; `kept` are the values that the results
    have before. Warp-wide ones, all with .sync in their names, are convergent: the compiler may not
    move them to where fewer lanes pass.
    """
    returned = ir.VoidType()
    if results:
        returned = results[0] if len(results) == 1 else ir.LiteralStructType(results)
    constraints = ["=" + _LETTERS[str(kind)] for kind in results]
    constraints += [_LETTERS[str(operand.type)] for operand in operands]
    constraints += [str(k) for k in range(len(kept))]
    constraints += ["~{memory}"] if memory else []
    operands = [*operands, *kept]
    function = ir.FunctionType(returned, [operand.type for operand in operands])
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=memory)
    attributes = ("convergent",) if ".sync" in text else ()
    value = builder.call(assembly, operands, attrs=attributes)
    if len(results) < 2:
        return [value]
    return [builder.extract_value(value, k) for k in range(len(results))]


def _check(name, wanted, got):
    if list(wanted) != list(got):
        wanted, got = (", ".join(map(str, kinds)) for kinds in (wanted, got))
        raise TypingError(f"{name} takes {wanted}, got {got}")


def check_array(name, array, i, dtype=None):
    fits = isinstance(array, types.Array) and array.layout == "C"
    if not (fits and (array.dtype == dtype or (dtype is None and _is_number(array.dtype)))):
        wanted = "numbers" if dtype is None else dtype
        raise TypingError(f"{name} takes an array of {wanted} in C order, got {array}")
    if not isinstance(i, types.Integer):
        raise TypingError(f"{name} takes the flat index of an item, got {i}")


def _is_number(dtype):
    return isinstance(dtype, types.Integer | types.Float)
