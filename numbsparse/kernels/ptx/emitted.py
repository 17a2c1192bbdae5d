"""The instructions on a GPU: intrinsics that emit them, one each."""

from numbsparse.kernels.ptx.assembly import (
    GLOBAL,
    Item,
    Whole,
    f32,
    instruction,
    ldmatrix_if,
    ordering,
    ordering_by,
    same_bits,
    shuffle,
    u32,
    wide_load,
    wide_store,
)

_COPY = "cp.async.cg.shared.global [$0], [$1], 16"
cp_async = instruction(f"{_COPY};", Item(), Item(GLOBAL))
cp_async_zero_fill = instruction(f"{_COPY}, $2;", Item(), Item(GLOBAL), Whole(u32))
cp_async_word = instruction(
    "cp.async.ca.shared.global [$0], [$1], 4, $2;", Item(), Item(GLOBAL), Whole(u32)
)
cp_async_commit = ordering("cp.async.commit_group;")
cp_async_wait = ordering_by("cp.async.wait_group {};", "cp_async_wait", "", lambda n: n >= 0)

_FOUR, _TWO = "{$0, $1, $2, $3}, [$4];", "{$0, $1}, [$2];"
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.{}.shared.b16"
_X2, _X2_TRANS, _X4, _X4_TRANS = map(_LDMATRIX.format, ("x2", "x2.trans", "x4", "x4.trans"))
ldmatrix_x2 = instruction(f"{_X2} {_TWO}", Item(), results=2 * (u32,))
ldmatrix_x2_trans = instruction(f"{_X2_TRANS} {_TWO}", Item(), results=2 * (u32,))
ldmatrix_x4 = instruction(f"{_X4} {_FOUR}", Item(), results=4 * (u32,))
ldmatrix_x4_trans = instruction(f"{_X4_TRANS} {_FOUR}", Item(), results=4 * (u32,))
ldmatrix_x4_if, ldmatrix_x4_trans_if = ldmatrix_if(_X4), ldmatrix_if(_X4_TRANS)

_STMATRIX = "stmatrix.sync.aligned.m8n8.{}.shared.b16 [$0], {{$1, $2, $3, $4}};"
stmatrix_x4 = instruction(_STMATRIX.format("x4"), Item(), *4 * (u32,))
stmatrix_x4_trans = instruction(_STMATRIX.format("x4.trans"), Item(), *4 * (u32,))

movmatrix_trans = instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", u32, results=(u32,))


def _mma(kinds):
    """Three operands in six registers and four sums; the four sums of the result."""
    registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    operands = *6 * (u32,), *4 * (f32,)
    return instruction(f"mma.sync.aligned.{kinds} {registers}", *operands, results=4 * (f32,))


mma_m16n8k16_f16 = _mma("m16n8k16.row.col.f32.f16.f16.f32")
mma_m16n8k16_bf16 = _mma("m16n8k16.row.col.f32.bf16.bf16.f32")
mma_m16n8k8_tf32 = _mma("m16n8k8.row.col.f32.tf32.tf32.f32")

load_4xf32, store_4xf32 = wide_load(4, f32, f32), wide_store(4, f32, f32)
load_4xu32, store_4xu32 = wide_load(4, u32), wide_store(4, u32)
load_2xu32, store_2xu32 = wide_load(2, u32), wide_store(2, u32)
load_1xu32 = wide_load(1, u32)

cvt_rna_tf32 = instruction("cvt.rna.tf32.f32 $0, $1;", f32, results=(u32,))
cvt_rn_tf32 = instruction("cvt.rn.tf32.f32 $0, $1;", f32, results=(u32,))
pack_half2 = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", f32, f32, results=(u32,))
pack_bfloat2 = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", f32, f32, results=(u32,))
unpack_half2 = instruction(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    *(u32,),
    results=(f32, f32),
    name="unpack_half2",
)
unpack_bfloat2 = instruction(
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", u32, results=(f32, f32)
)
ex2 = instruction("ex2.approx.ftz.f32 $0, $1;", f32, results=(f32,))
rcp = instruction("rcp.approx.ftz.f32 $0, $1;", f32, results=(f32,))

as_uint32, as_float32 = same_bits(u32, f32), same_bits(f32, u32)

shfl_xor, shfl_idx = shuffle("bfly"), shuffle("idx")
redux_or = instruction("redux.sync.or.b32 $0, $1, 0xffffffff;", u32, results=(u32,))
sync_warp = ordering("bar.warp.sync 0xffffffff;")
sync_some = instruction("bar.sync $0, $1;", Whole(u32), Whole(u32), name="bar.sync", ordered=True)
