"""The instructions on a GPU: intrinsics that emit them, one each.

In the texts $0, $1, ... are the registers of the results, then of the operands.
"""

from __future__ import annotations

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    GLOBAL,
    Item,
    f32,
    ldmatrix_if,
    mma,
    on_items,
    on_registers,
    order,
    same_bits,
    shuffle,
    stmatrix,
    u32,
    wide_load,
    wide_store,
)


@intrinsic
def cp_async(typing, shared, i, source, j):
    text = "cp.async.cg.shared.global [$0], [$1], 16;"
    return on_items("cp_async", text, [Item(shared, i), Item(source, j, GLOBAL)])


@intrinsic
def cp_async_zero_fill(typing, shared, i, source, j, n):
    if not isinstance(n, types.Integer):
        raise TypingError(f"cp_async_zero_fill takes a number of bytes, got {n}")
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    return on_items("cp_async_zero_fill", text, [Item(shared, i), Item(source, j, GLOBAL), u32])


@intrinsic
def cp_async_commit(typing):
    return types.void(), order("cp.async.commit_group;")


@intrinsic
def cp_async_wait(typing, n):
    if not isinstance(n, types.IntegerLiteral):
        raise TypingError(f"cp_async_wait takes a constant, got {n}")
    return types.void(n), order(f"cp.async.wait_group {n.literal_value};")


@intrinsic
def ldmatrix_x4(typing, shared, i):
    return _ldmatrix("ldmatrix.sync.aligned.m8n8.x4.shared.b16", shared, i)


@intrinsic
def ldmatrix_x4_trans(typing, shared, i):
    return _ldmatrix("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", shared, i)


@intrinsic
def ldmatrix_x2(typing, shared, i):
    name = "ldmatrix.sync.aligned.m8n8.x2.shared.b16"
    return on_items(name, name + " {$0, $1}, [$2];", [Item(shared, i)], 2 * [u32])


@intrinsic
def ldmatrix_x2_trans(typing, shared, i):
    name = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16"
    return on_items(name, name + " {$0, $1}, [$2];", [Item(shared, i)], 2 * [u32])


def _ldmatrix(name, shared, i):
    return on_items(name, name + " {$0, $1, $2, $3}, [$4];", [Item(shared, i)], 4 * [u32])


@intrinsic
def movmatrix_trans(typing, value):
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return on_registers(text, [u32], [u32], [value])


@intrinsic
def stmatrix_x4(typing, shared, i, r0, r1, r2, r3):
    return stmatrix("stmatrix.sync.aligned.m8n8.x4.shared.b16", shared, i, r0, r1, r2, r3)


@intrinsic
def stmatrix_x4_trans(typing, shared, i, r0, r1, r2, r3):
    return stmatrix("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", shared, i, r0, r1, r2, r3)


@intrinsic
def ldmatrix_x4_if(typing, shared, i, wanted, r0, r1, r2, r3):
    name = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    return ldmatrix_if(name, shared, i, wanted, r0, r1, r2, r3)


@intrinsic
def ldmatrix_x4_trans_if(typing, shared, i, wanted, r0, r1, r2, r3):
    name = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    return ldmatrix_if(name, shared, i, wanted, r0, r1, r2, r3)


@intrinsic
def mma_m16n8k16_f16(typing, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    return mma(name, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)


@intrinsic
def mma_m16n8k16_bf16(typing, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    return mma(name, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)


@intrinsic
def mma_m16n8k8_tf32(typing, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    name = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    return mma(name, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)


@intrinsic
def load_4xf32(typing, array, j):
    return wide_load(array, j, f32, f32)


@intrinsic
def load_4xu32(typing, array, j):
    return wide_load(array, j, u32)


@intrinsic
def load_2xu32(typing, array, j):
    return wide_load(array, j, u32, count=2)


@intrinsic
def load_1xu32(typing, array, j):
    return wide_load(array, j, u32, count=1)


@intrinsic
def store_4xf32(typing, array, j, v0, v1, v2, v3):
    return wide_store(array, j, f32, f32, v0, v1, v2, v3)


@intrinsic
def store_4xu32(typing, array, j, v0, v1, v2, v3):
    return wide_store(array, j, u32, None, v0, v1, v2, v3)


@intrinsic
def store_2xu32(typing, array, j, v0, v1):
    return wide_store(array, j, u32, None, v0, v1)


@intrinsic
def cvt_rna_tf32(typing, x):
    return on_registers("cvt.rna.tf32.f32 $0, $1;", [u32], [f32], [x])


@intrinsic
def pack_half2(typing, lo, hi):
    return on_registers("cvt.rn.f16x2.f32 $0, $2, $1;", [u32], [f32, f32], [lo, hi])


@intrinsic
def pack_bfloat2(typing, lo, hi):
    return on_registers("cvt.rn.bf16x2.f32 $0, $2, $1;", [u32], [f32, f32], [lo, hi])


@intrinsic
def ex2(typing, x):
    return on_registers("ex2.approx.ftz.f32 $0, $1;", [f32], [f32], [x])


@intrinsic
def rcp(typing, x):
    return on_registers("rcp.approx.ftz.f32 $0, $1;", [f32], [f32], [x])


@intrinsic
def unpack_half2(typing, word):
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
    return on_registers(text, [f32, f32], [u32], [word])


@intrinsic
def unpack_bfloat2(typing, word):
    text = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return on_registers(text, [f32, f32], [u32], [word])


@intrinsic
def as_uint32(typing, x):
    return same_bits(u32, f32, x)


@intrinsic
def as_float32(typing, bits):
    return same_bits(f32, u32, bits)


@intrinsic
def shfl_xor(typing, value, mask):
    return shuffle("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", value, mask)


@intrinsic
def shfl_idx(typing, value, source):
    return shuffle("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", value, source)


@intrinsic
def redux_or(typing, value):
    return on_registers("redux.sync.or.b32 $0, $1, 0xffffffff;", [u32], [u32], [value])


@intrinsic
def sync_warp(typing):
    return types.void(), order("bar.warp.sync 0xffffffff;")
