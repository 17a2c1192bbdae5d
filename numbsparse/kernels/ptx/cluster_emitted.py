"""Clusters of blocks, and products whose factors lie anywhere: compute capability 9.0."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    SHARED,
    address,
    check_array,
    emit,
    i32,
    i64,
    order,
    u32,
)
from numbsparse.kernels.ptx.tiles import Operand
from numbsparse.kernels.ptx.wgmma_emitted import _high, _tied

_ARRIVE = (
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
    "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
)

_OF_FIRST = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"


@intrinsic
def cluster_sync(typing):
    return types.void(), order("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")


@intrinsic
def mbarrier_arrive_at(typing, bars, i, rank):
    check_array("mbarrier_arrive_at", bars, i, types.uint64)

    def build(context, builder, signature, args):
        bar = address(context, builder, bars, args[0], args[1], SHARED)
        emit(builder, _ARRIVE, [], [bar, args[2]], memory=True)
        return context.get_dummy_value()

    return types.void(bars, types.int64, u32), build


@cache
def words(count: int) -> Any:
    def typing_of(typing, array, j):
        check_array("words", array, j, types.int32)

        def build(context, builder, signature, args):
            data = context.make_array(array)(context, builder, args[0]).data
            places = [builder.add(args[1], i64(k)) for k in range(count)]
            values = [builder.load(builder.gep(data, [place])) for place in places]
            # That all lanes have the same is known to ptxas from here on: it then works out what is
            # made of them once for a warp, where the descriptors of a product must be.
            values = [emit(builder, _OF_FIRST, [i32], [value])[0] for value in values]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(u32, count)(array, types.int64), build

    return intrinsic(typing_of)


@cache
def wgmma_units(
    kind: str, units: int, sizes: tuple[int, ...], k_steps: int, a: Operand, b: Operand
) -> Any:
    per_unit = max(sizes) // 2
    count = units * per_unit
    accumulators, places = types.UniTuple(types.float32, count), types.UniTuple(u32, 2 * units)
    # Of the operands, the results come first, then the start, the number, and the places.
    text = _chosen(kind, units, sizes, k_steps, a, b, count)

    def multiply(typing, acc, shared, i, where, number):
        if acc != accumulators or where != places:
            raise TypingError(f"wgmma takes {accumulators} and {places}, got {acc} and {where}")
        check_array("wgmma", shared, i)

        def build(context, builder, signature, args):
            start = address(context, builder, shared, args[1], args[2], SHARED)
            low = [builder.extract_value(args[3], k) for k in range(2 * units)]
            values = [builder.extract_value(args[0], k) for k in range(count)]
            # Above the first 18 bits, the address names the block in its cluster.
            start = builder.lshr(builder.and_(start, i32(0x3FFFF)), i32(4))
            operands = [start, args[4], *low]
            results = _tied(builder, text, operands, values)
            return context.make_tuple(builder, signature.return_type, results)

        return accumulators(accumulators, shared, types.int64, places, u32), build

    return intrinsic(multiply)


def _chosen(kind, units, sizes, k_steps, a, b, first):
    """The products of the first units, or of one unit in the size of the number.

    A case of its own for each number: ptxas lets no branch stand between the fence and the wait.
    """
    per_unit, lines = max(sizes) // 2, ["{ .reg .b64 da, db; .reg .b32 low; .reg .pred other;"]
    cases = [(u, max(sizes)) for u in range(1, units + 1)] if units > 1 else [(1, n) for n in sizes]
    for number, (used, n) in enumerate(cases, 1):
        lines += [
            f"setp.ne.u32 other, ${first + 1}, {number};",
            f"@other bra.uni CASE{number};",
            "wgmma.fence.sync.aligned;",
        ]
        for k in range(k_steps):
            # Neighbours have different accumulators, so that none waits for the one before.
            for u in range(used):
                acc = ", ".join(f"${u * per_unit + i}" for i in range(n // 2))
                for factor, name, at in ((a, "da", 0), (b, "db", 1)):
                    lines += [
                        f"add.u32 low, ${first}, ${first + 2 + 2 * u + at};",
                        f"add.u32 low, low, {factor.step(k) >> 4};",
                        f"mov.b64 {name}, {{low, {_high(factor)}}};",
                    ]
                turned = f"{int(a.turned)}, {int(b.turned)}"
                lines += [
                    f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
                    f"{{{acc}}}, da, db, 1, 1, 1, {turned};"
                ]
        lines += [
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
            f"CASE{number}:",
        ]
    return " ".join([*lines, "}"])
