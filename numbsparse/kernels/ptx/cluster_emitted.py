"""Clusters of blocks, and products whose operands are anywhere: compute capability 9.0."""

from functools import cache
from typing import Any

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    Item,
    Whole,
    check_array,
    emit,
    f32,
    i32,
    i64,
    instruction,
    ordering,
    u32,
)
from numbsparse.kernels.ptx.tiles import Operand
from numbsparse.kernels.ptx.wgmma_emitted import _high, in_pieces, in_place

_OF_FIRST = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"

cluster_sync = ordering("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")
mbarrier_arrive_at = instruction(
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
    "mbarrier.arrive.shared::cluster.b64 _, [there]; }",
    *(Item(dtypes=(types.uint64,)), Whole(u32)),
    name="mbarrier_arrive_at",
)
load_4xf32_at = instruction(
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
    "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [there]; }",
    *(Item(dtypes=(f32,)), Whole(u32)),
    results=4 * (f32,),
    name="load_4xf32_at",
)
store_4xf32_at = instruction(
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
    "st.shared::cluster.v4.f32 [there], {$2, $3, $4, $5}; }",
    *(Item(dtypes=(f32,)), Whole(u32), *4 * (f32,)),
    name="store_4xf32_at",
)


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
    kind: str, units: int, n: int, k_steps: int, a: Operand, b: Operand, joined: bool = False
) -> Any:
    count = units * n // 2
    return _multiply(_chosen(kind, units, n, k_steps, a, b, count, joined), count, units)


@cache
def wgmma_pairs(kind: str, units: int, n: int, k_steps: int, width: int, b: Operand) -> Any:
    count = units * n // 2
    return _multiply(_from_registers(kind, units, n, k_steps, width, b, count), count, units)


def _multiply(text: str, count: int, units: int) -> Any:
    """Of the operands of `text`, the results come first, then the start, the number, the places."""
    accumulators, places = types.UniTuple(f32, count), types.UniTuple(u32, 2 * units)

    def multiply(typing, acc, shared, i, where, number):
        if acc != accumulators or where != places:
            raise TypingError(f"wgmma takes {accumulators} and {places}, got {acc} and {where}")
        check_array("wgmma", shared, i)

        def build(context, builder, signature, args):
            start = in_pieces(context, builder, shared, args[1], args[2])
            low = [builder.extract_value(args[3], k) for k in range(2 * units)]
            values = [builder.extract_value(args[0], k) for k in range(count)]
            results = in_place(builder, text, [start, args[4], *low], values)
            return context.make_tuple(builder, signature.return_type, results)

        return accumulators(accumulators, shared, types.int64, places, u32), build

    return intrinsic(multiply)


def _chosen(kind, units, n, k_steps, a, b, first, joined):
    """The products of the first units.

    A case of its own for each number: ptxas allows no branch between the fence and the wait.
    """
    lines = ["{ .reg .b64 da, db; .reg .b32 low; .reg .pred other;"]
    for number in range(1, units + 1):
        lines += [
            f"setp.ne.u32 other, ${first + 1}, {number};",
            f"@other bra.uni CASE{number};",
            "wgmma.fence.sync.aligned;",
        ]
        for k in range(k_steps):
            # Neighbours have different accumulators, so that none waits for the one before.
            for u in range(1 if joined else number):
                columns = number * n if joined else n
                acc = ", ".join(f"${u * n // 2 + i}" for i in range(columns // 2))
                for operand, name, at in ((a, "da", 0), (b, "db", 1)):
                    lines += [
                        f"add.u32 low, ${first}, ${first + 2 + 2 * u + at};",
                        f"add.u32 low, low, {operand.step(k) >> 4};",
                        f"mov.b64 {name}, {{low, {_high(operand)}}};",
                    ]
                transposed = f"{int(a.transposed)}, {int(b.transposed)}"
                lines += [
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
                    f"{{{acc}}}, da, db, 1, 1, 1, {transposed};"
                ]
        lines += [
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
            f"CASE{number}:",
        ]
    return " ".join([*lines, "}"])


# own = where in a tile of swizzled lines the lane's 16 bytes are: the (lane / 16)-th of line
# 16 (warp % 2) + lane % 16; second = 1 in warps 2 and 3, whose rows are in the second tile.
_OWN_PIECE = (
    "mov.u32 low, %tid.x; and.b32 own, low, 15; and.b32 second, low, 32; "
    "shr.u32 second, second, 1; add.u32 own, own, second; mul.lo.u32 own, own, {width}; "
    "shr.u32 second, own, 7; and.b32 second, second, {pieces} - 1; bfe.u32 apart, low, 4, 1; "
    "xor.b32 second, second, apart; shl.b32 second, second, 4; add.u32 own, own, second; "
    "bfe.u32 second, low, 6, 1;"
)


def _from_registers(kind, units, n, k_steps, width, b, first):
    """The products of the first units, whose first operand `ldmatrix` loads while the unit before
    is multiplied: two sets of registers take turns."""
    registers = 4 * k_steps
    lines = [
        f"{{ .reg .b64 db; .reg .b32 low, own, second, apart, f<{2 * registers}>;",
        f".reg .pred other; {_OWN_PIECE.format(width=width, pieces=width // 16)}",
    ]

    def load(u):
        word, f = f"${first + 2 + 2 * u}", u % 2 * registers
        found = [
            f"and.b32 low, {word}, 0x3FFF; shr.u32 apart, {word}, 16;",
            f"mad.lo.u32 low, apart, second, low; add.u32 low, low, ${first};",
            "shl.b32 low, low, 4; add.u32 low, low, own;",
        ]
        for k in range(k_steps):
            into = ", ".join(f"f{f + 4 * k + e}" for e in range(4))
            found += [
                f"xor.b32 apart, low, {32 * k};",
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{into}}}, [apart];",
            ]
        return found

    def multiply(u):
        acc = ", ".join(f"${u * n // 2 + i}" for i in range(n // 2))
        found = ["wgmma.fence.sync.aligned;"]
        for k in range(k_steps):
            part = ", ".join(f"f{u % 2 * registers + 4 * k + e}" for e in range(4))
            found += [
                f"add.u32 low, ${first}, ${first + 3 + 2 * u}; add.u32 low, low, {b.step(k) >> 4};",
                f"mov.b64 db, {{low, {_high(b)}}};",
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{acc}}}, {{{part}}}, "
                f"db, 1, 1, 1, {int(b.transposed)};",
            ]
        return [*found, "wgmma.commit_group.sync.aligned;"]

    for used in range(1, units + 1):
        lines += [
            f"setp.ne.u32 other, ${first + 1}, {used};",
            f"@other bra.uni CASE{used};",
            *load(0),
        ]
        for u in range(used):
            lines += multiply(u)
            if u + 1 < used:
                lines += ["wgmma.wait_group.sync.aligned 1;"] if u else []
                lines += load(u + 1)
        lines += ["wgmma.wait_group.sync.aligned 0;", f"CASE{used}:"]
    return " ".join([*lines, "}"])
