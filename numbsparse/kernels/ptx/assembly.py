"""How the intrinsics of `emitted` are made: addresses, registers, inline assembly.

Types are checked, not converted, because a float32 that quietly becomes a uint32 is a wrong number.
"""

from inspect import Parameter, Signature
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

i32, i64 = ir.IntType(32), ir.IntType(64)
u32, f32 = types.uint32, types.float32

GLOBAL, SHARED = 1, 3  # LLVM's numbers of the address spaces
_LETTERS = {"i32": "r", "i64": "l", "float": "f"}  # kinds of registers, in inline assembly


class Item(NamedTuple):
    """An operand that is the address of an item: two arguments, an array and a flat index."""

    space: int = SHARED
    dtypes: tuple[Any, ...] = ()  # of the array; any numbers
    first: bool = False  # of its first item: one argument, the array


class Whole(NamedTuple):
    """An operand that is any integer, converted."""

    kind: Any


def instruction(text, *operands, results=(), name="", ordered=None):
    """The intrinsic of one instruction.

    In the text $0, $1, ... are the registers of the results, then those of the operands, in whose
    order the intrinsic takes them: each an `Item`, a `Whole`, or the type of a register.

    name : what an error says; None of the text: its first word
    ordered : whether the compiler leaves it in its place among loads and stores; None: with an Item
    """
    name, at_items = name or text.split()[0], any(isinstance(o, Item) for o in operands)

    def typing_of(typing, *got):
        rest, taken = iter(got), []
        for operand in operands:
            kind = next(rest)
            if isinstance(operand, Item):
                index = types.int64 if operand.first else next(rest)
                check_array(name, kind, index, *operand.dtypes)
                taken += [kind] if operand.first else [kind, types.int64]
            elif isinstance(operand, Whole):
                if not isinstance(kind, types.Integer):
                    raise TypingError(f"{name} takes an integer, got {kind}")
                taken.append(operand.kind)
            else:
                _check(name, [operand], [kind])
                taken.append(operand)

        def build(context, builder, signature, args):
            given, values = zip(signature.args, args, strict=True), []
            for operand in operands:
                kind, value = next(given)
                if isinstance(operand, Item):
                    i = i64(0) if operand.first else next(given)[1]
                    value = address(context, builder, kind, value, i, operand.space)
                values.append(value)
            kinds = [context.get_value_type(kind) for kind in results]
            memory = at_items if ordered is None else ordered
            found = emit(builder, text, kinds, values, memory)
            if len(found) > 1:
                return context.make_tuple(builder, signature.return_type, found)
            return found[0] if results else context.get_dummy_value()

        result = results[0] if results else types.void
        result = types.UniTuple(result, len(results)) if len(results) > 1 else result
        return result(*taken), build

    count = sum(2 if isinstance(o, Item) and not o.first else 1 for o in operands)
    return of_arity(typing_of, count)


def of_arity(typing_of, count):
    """The intrinsic of a function that is given the types of `count` arguments."""
    names = ("typing", *(f"a{k}" for k in range(count)))
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing_of.__signature__ = Signature(parameters)  # which Numba reads
    return intrinsic(typing_of)


def ordering(text):
    """An instruction without operands that orders accesses to memory."""
    return instruction(text, ordered=True)


def ordering_by(text, name, wanted, fits):
    """As `ordering`, with a constant n for the place in the text."""

    def typing_of(typing, n):
        if not isinstance(n, types.IntegerLiteral) or not fits(n.literal_value):
            raise TypingError(f"{name} takes a constant{wanted}, got {n}")

        def build(context, builder, signature, args):
            emit(builder, text.format(n.literal_value), [], [], memory=True)
            return context.get_dummy_value()

        return types.void(n), build

    return intrinsic(typing_of)


def ldmatrix_if(name):
    """A predicated load: a branch would end what the compiler moves about as one piece."""

    def typing_of(typing, shared, i, wanted, r0, r1, r2, r3):
        check_array(name, shared, i)
        _check(name, 5 * [u32], [wanted, r0, r1, r2, r3])

        def build(context, builder, signature, args):
            source = address(context, builder, shared, args[0], args[1], SHARED)
            load = name + " {$0, $1, $2, $3}, [$4];"
            text = "{ .reg .pred p; setp.ne.u32 p, $5, 0; @p " + load + " }"
            operands = [source, args[2]]
            results = emit(builder, text, 4 * [i32], operands, memory=True, kept=args[3:])
            return context.make_tuple(builder, signature.return_type, results)

        return types.UniTuple(u32, 4)(shared, types.int64, u32, u32, u32, u32, u32), build

    return intrinsic(typing_of)


def shuffle(mode):
    """A register of another lane, of any type of 32 bits."""

    def typing_of(typing, value, lane):
        if value not in (u32, types.int32, f32) or not isinstance(lane, types.Integer):
            raise TypingError(f"shfl takes 32 bits and an integer, got {value}, {lane}")

        def build(context, builder, signature, args):
            text = f"shfl.sync.{mode}.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            return emit(builder, text, [context.get_value_type(value)], args)[0]

        return value(value, types.int32), build

    return intrinsic(typing_of)


def same_bits(result, wanted):
    """mov.b32, as a cast that the compiler sees through."""

    def typing_of(typing, got):
        _check("mov.b32", [wanted], [got])

        def build(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(result))

        return result(wanted), build

    return intrinsic(typing_of)


def wide_load(count, kind, *dtypes):
    """A plain load: the compiler finds out whether it is ld.global.v4 or ld.shared.v4."""

    def typing_of(typing, array, j):
        check_array(f"a load of {4 * count} bytes", array, j, *dtypes)

        def build(context, builder, signature, args):
            pointer = _vector(context, builder, array, args[0], args[1], kind, count)
            vector = builder.load(pointer, align=4 * count)
            values = [builder.extract_element(vector, i32(k)) for k in range(count)]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(kind, count)(array, types.int64), build

    return intrinsic(typing_of)


def wide_store(count, kind, *dtypes):
    def typing_of(typing, array, j, *values):
        check_array(f"a store of {4 * count} bytes", array, j, *dtypes)
        _check(f"a store of {4 * count} bytes", count * [kind], values)

        def build(context, builder, signature, args):
            pointer = _vector(context, builder, array, args[0], args[1], kind, count)
            vector = ir.Constant(ir.VectorType(context.get_value_type(kind), count), ir.Undefined)
            for k in range(count):
                vector = builder.insert_element(vector, args[2 + k], i32(k))
            builder.store(vector, pointer, align=4 * count)
            return context.get_dummy_value()

        return types.void(array, types.int64, *values), build

    return of_arity(typing_of, 2 + count)


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


def emit(builder, text, results, operands, memory=False, kept=(), early=False):
    """One instruction, or several: the values of its results.

    With `memory`, loads and stores stay on their side of it; `kept` are the values that the results
    have before, and `early` says that some are written before all operands are read. Warp-wide
    ones, all with .sync in their names, are convergent: the compiler may not move them to where
    fewer lanes pass.
    """
    returned = ir.VoidType()
    if results:
        returned = results[0] if len(results) == 1 else ir.LiteralStructType(results)
    constraints = [("=&" if early else "=") + _LETTERS[str(kind)] for kind in results]
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


def check_array(name, array, i, *dtypes):
    fits = isinstance(array, types.Array) and array.layout == "C"
    numbers = types.Integer | types.Float
    if not (fits and (array.dtype in dtypes if dtypes else isinstance(array.dtype, numbers))):
        wanted = " or ".join(map(str, dtypes)) or "numbers"
        raise TypingError(f"{name} takes an array of {wanted} in C order, got {array}")
    if not isinstance(i, types.Integer):
        raise TypingError(f"{name} takes the flat index of an item, got {i}")
