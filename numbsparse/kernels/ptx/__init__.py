"""One function per PTX instruction, for kernels that say exactly what the GPU does.

On a GPU a name is an intrinsic that emits its instruction (`emitted`); in the simulator the same
name runs its NumPy meaning (`simulated`, `meaning`), so a kernel runs unchanged in both. `meaning`
is also where the layout of the matrix fragments stands.

Memory is named by an array in C order and the flat index of an item, never by an address. Registers
are uint32 and float32 exactly: Numba makes uint64 of uint32 + uint32, so wrap sums in uint32().
Pieces of 16 bytes start at multiples of 16 bytes, and so must the shared arrays that they lie in:
`cuda.shared.array(shape, dtype, ALIGNMENT)`, with ALIGNMENT imported by its name, because Numba
wants a constant there. Warp-wide instructions are run by all 32 lanes of a warp together.

>>> from numba import cuda
>>> from numbsparse.kernels import ptx
>>> @cuda.jit
... def first_four_doubled(x, out):
...     a, b, c, d = ptx.load_4xf32(x, 0)
...     ptx.store_4xf32(out, 0, a + a, b + b, c + c, d + d)
"""

from __future__ import annotations

from typing import Any

from numbsparse.device import SIMULATED
from numbsparse.kernels.ptx import emitted, simulated

_here: Any = simulated if SIMULATED else emitted

ALIGNMENT = None if SIMULATED else 16  # bytes; Numba's own choice is the size of one item

# Copies from global to shared memory that go on beside the thread; compute capability 8.0. A thread
# waits for its own; the block's are there after cuda.syncthreads(). The n of cp_async_wait is a
# number in the text or the name of a constant, not an expression.
cp_async = _here.cp_async  # (shared, i, source, j): 16 bytes, from source[j] to shared[i] onwards
cp_async_zero_fill = _here.cp_async_zero_fill  # (..., n): n of the 16 bytes, zeros after them
cp_async_commit = _here.cp_async_commit  # (): the thread's copies since the last one are a group
cp_async_wait = _here.cp_async_wait  # (n): until all but the newest n groups are there

# Four 8 x 8 matrices of 16-bit values from shared memory to registers; warp-wide, 7.5.
ldmatrix_x4 = _here.ldmatrix_x4  # (shared, i) -> 4 uint32; lane 8m + r gives row r of matrix m
ldmatrix_x4_trans = _here.ldmatrix_x4_trans  # the same, of the transposed matrices

# d = a @ b + c on the tensor cores; warp-wide, 8.0. (a0..a3, b0, b1, c0..c3) -> 4 float32
mma_m16n8k16_f16 = _here.mma_m16n8k16_f16  # a register of a, b: two float16
mma_m16n8k16_bf16 = _here.mma_m16n8k16_bf16  # two bfloat16
mma_m16n8k8_tf32 = _here.mma_m16n8k8_tf32  # one float32 of which 10 bits of mantissa count

# 16 bytes at once between registers and global or shared memory.
load_4xf32 = _here.load_4xf32  # (array, j) -> 4 float32; array of float32
load_4xu32 = _here.load_4xu32  # (array, j) -> 4 uint32; array of any numbers
store_4xf32 = _here.store_4xf32  # (array, j, 4 float32)
store_4xu32 = _here.store_4xu32  # (array, j, 4 uint32)

# Rounding and packing; 8.0.
cvt_rna_tf32 = _here.cvt_rna_tf32  # float32 -> uint32, the nearest tf32, halves away from zero
pack_half2 = _here.pack_half2  # (lo, hi) float32 -> uint32, two float16
pack_bfloat2 = _here.pack_bfloat2  # (lo, hi) float32 -> uint32, two bfloat16

# The same 32 bits as another type.
as_uint32 = _here.as_uint32
as_float32 = _here.as_float32

# A register of another lane, of uint32, int32 or float32; warp-wide.
shfl_xor = _here.shfl_xor  # (value, mask): the value of lane ^ mask
shfl_idx = _here.shfl_idx  # (value, source): the value of lane `source`
