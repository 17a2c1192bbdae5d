"""`wgmma` of tf32 with the first operand in registers, on a GPU: float32 by three products."""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import TypingError

from numbsparse.kernels.ptx.assembly import (
    SHARED,
    address,
    check_array,
    emit,
    f32,
    i32,
    of_arity,
    u32,
)
from numbsparse.kernels.ptx.wgmma_emitted import in_place


@cache
def wgmma_split(
    n: int, k_steps: int, exact: bool, units: int = 1, apart: bool = False, alone: bool = False
) -> Any:
    count, registers = units * n // 2, units * 4 * k_steps
    text = _text(n, k_steps, exact, units, apart, alone)
    along = 8 if apart else n  # columns whose matrices of the same terms are contiguous

    def multiply(typing, acc, hi, lo, shared, *places):
        if any(a.dtype != kind for a, kind in ((acc, f32), (hi, u32), (lo, u32))):
            raise TypingError(f"wgmma_split takes float32 and two uint32, got {acc}, {hi}, {lo}")
        for place in places:
            check_array("wgmma_split", shared, place, f32)

        def build(context, builder, signature, args):
            values = []
            for array, arg in ((hi, args[1]), (lo, args[2]))[: 2 if exact else 1]:
                data = context.make_array(array)(context, builder, arg).data
                values += [builder.load(builder.gep(data, [i32(k)])) for k in range(registers)]
            for place in args[4:]:
                where = address(context, builder, shared, args[3], place, SHARED)
                # Core matrices, 8 columns x 4 terms: n / 8 side by side, then the next terms.
                values += [builder.or_(builder.lshr(where, i32(4)), i32(along << 16))]
            data = context.make_array(acc)(context, builder, args[0]).data
            sums = [builder.gep(data, [i32(k)]) for k in range(count)]
            if alone:
                found = in_place(builder, text, values, [builder.load(at) for at in sums])
            else:
                floats = [ir.FloatType()] * count
                products = emit(builder, text, floats, values, memory=True, early=True)
                pairs = zip(sums, products, strict=True)
                found = [builder.fadd(builder.load(at), product) for at, product in pairs]
            for at, value in zip(sums, found, strict=True):
                builder.store(value, at)
            return context.get_dummy_value()

        return types.void(acc, hi, lo, shared, *(types.int64 for _ in places)), build

    return of_arity(multiply, 4 + units)


def _text(n, k_steps, exact, units, apart, alone):
    """Everything from the fence to the wait; the small products of all steps come first, because
    the tensor cores cut off what they add, less of a small sum than of a large one."""
    per_unit, registers = n // 2, 4 * k_steps
    of_values = units * per_unit
    of_places = of_values + (2 if exact else 1) * units * registers
    # across: bytes to 8 columns more
    along, across = (8, (256 if alone else 512) * k_steps) if apart else (n, 128)
    small = [(step, a, 1 - a) for step in range(k_steps) for a in (1, 0)] if exact else []
    products = small + [(step, 0, 0) for step in range(k_steps)]
    lines = ["{ .reg .b64 db; .reg .b32 low;", "wgmma.fence.sync.aligned;"]
    for number, (step, a, b) in enumerate(products):
        # Neighbours have different accumulators, so that none waits for the one before.
        for u in range(units):
            acc = ", ".join(f"${u * per_unit + k}" for k in range(per_unit))
            first = of_values + (a * units + u) * registers + 4 * step
            part = ", ".join(f"${k}" for k in range(first, first + 4))
            lines += [
                f"add.u32 low, ${of_places + u}, {(b * k_steps + step) * along * 32 >> 4};",
                f"mov.b64 db, {{low, {across >> 4}}};",
                f"wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 "
                f"{{{acc}}}, {{{part}}}, db, {int(alone or number > 0)}, 1, 1;",
            ]
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])
