"""One function per PTX instruction, for kernels that say exactly what the GPU does.

On a GPU a name is an intrinsic that emits its instruction (`emitted`); in the simulator the same
name runs its NumPy meaning (`simulated`, `meaning`), so a kernel runs unchanged in both, with
clusters and with grids whose blocks wait for each other. `meaning` also defines the layout of the
matrix fragments.

Memory is named by an array in C order and the flat index of an item, never by an address. Registers
are uint32 and float32 exactly: Numba makes uint64 of uint32 + uint32, so wrap sums in uint32().
Pieces of 16 bytes start at multiples of 16 bytes, and so must the shared arrays that hold them:
`cuda.shared.array(shape, dtype, ALIGNMENT)`, with ALIGNMENT imported by its name, because Numba
needs a constant there. Dynamic ones have no higher alignment, in the simulator too, and swizzles
use the address: `first_multiple` says where it is 0, and bits are swapped before that is added.
Warp-wide instructions are run by all 32 lanes of a warp together.

>>> from numba import cuda
>>> from numbsparse.kernels import ptx
>>> @cuda.jit
... def first_four_doubled(x, out):
...     a, b, c, d = ptx.load_4xf32(x, 0)
...     ptx.store_4xf32(out, 0, a + a, b + b, c + c, d + d)
"""

from importlib import import_module

from numbsparse.device import SIMULATED, runtime

try:
    _here, _bulk, _cluster, _grid, _split, _wgmma = (
        import_module(f"numbsparse.kernels.ptx.{of}{'simulated' if SIMULATED else 'emitted'}")
        for of in ("", "bulk_", "cluster_", "grid_", "split_", "wgmma_")
    )
    from numbsparse.kernels.ptx.tiles import Operand as Operand
except ImportError:
    runtime.require_numba_cuda("numbsparse.kernels.ptx")
    raise

ALIGNMENT = None if SIMULATED else 16  # bytes; Numba's own choice is the size of one item

# Asynchronous copies from global to shared memory; compute capability 8.0. A thread
# waits for its own; the block's are there after cuda.syncthreads(). The n of cp_async_wait is a
# number in the text or the name of a constant, not an expression.
cp_async = _here.cp_async  # (shared, i, source, j): 16 bytes, from source[j] to shared[i] onwards
cp_async_zero_fill = _here.cp_async_zero_fill  # (..., n): n of the 16 bytes, zeros after them
cp_async_word = _here.cp_async_word  # (..., n): n of 4 bytes, zeros after them
cp_async_commit = _here.cp_async_commit  # (): the thread's copies since the last one are a group
cp_async_wait = _here.cp_async_wait  # (n): until all but the newest n groups are there

# An 8 x 8 matrix of 16-bit values, transposed across the lanes of a warp; 7.5.
movmatrix_trans = _here.movmatrix_trans  # uint32 -> uint32; two neighbours of a row

# Four 8 x 8 matrices of 16-bit values from shared memory to registers; warp-wide, 7.5.
ldmatrix_x4 = _here.ldmatrix_x4  # (shared, i) -> 4 uint32; lane 8m + r gives row r of matrix m
ldmatrix_x4_trans = _here.ldmatrix_x4_trans  # the same, of the transposed matrices
ldmatrix_x2 = _here.ldmatrix_x2  # two matrices, of the rows that lanes 0 to 15 give
ldmatrix_x2_trans = _here.ldmatrix_x2_trans
# (shared, i, wanted, r0..r3): the same if `wanted`, one uint32 for the warp, is not 0; else r0..r3
ldmatrix_x4_if = _here.ldmatrix_x4_if
ldmatrix_x4_trans_if = _here.ldmatrix_x4_trans_if

# The way back: (shared, i, 4 uint32); lane 8m + r says where row r of matrix m goes; 9.0.
stmatrix_x4 = _here.stmatrix_x4
stmatrix_x4_trans = _here.stmatrix_x4_trans

# d = a @ b + c on the tensor cores; warp-wide, 8.0. (a0..a3, b0, b1, c0..c3) -> 4 float32
mma_m16n8k16_f16 = _here.mma_m16n8k16_f16  # a register of a, b: two float16
mma_m16n8k16_bf16 = _here.mma_m16n8k16_bf16  # two bfloat16
mma_m16n8k8_tf32 = _here.mma_m16n8k8_tf32  # one float32 of which 10 bits of mantissa count

# 16 or 8 bytes at once between registers and global or shared memory.
load_4xf32 = _here.load_4xf32  # (array, j) -> 4 float32; array of float32
load_4xu32 = _here.load_4xu32  # (array, j) -> 4 uint32; array of any numbers
store_4xf32 = _here.store_4xf32  # (array, j, 4 float32)
store_4xu32 = _here.store_4xu32  # (array, j, 4 uint32)
load_2xu32 = _here.load_2xu32  # (array, j) -> 2 uint32; array of any numbers
load_1xu32 = _here.load_1xu32  # (array, j) -> 1 uint32, in a tuple too
store_2xu32 = _here.store_2xu32  # (array, j, 2 uint32)

# Rounding and packing; 8.0.
cvt_rna_tf32 = _here.cvt_rna_tf32  # float32 -> uint32, the nearest tf32, ties away from zero
cvt_rn_tf32 = _here.cvt_rn_tf32  # the same, ties to even: one instruction, not three; 9.0
pack_half2 = _here.pack_half2  # (lo, hi) float32 -> uint32, two float16
pack_bfloat2 = _here.pack_bfloat2  # (lo, hi) float32 -> uint32, two bfloat16
unpack_half2 = _here.unpack_half2  # uint32 -> (lo, hi) float32, of two float16
unpack_bfloat2 = _here.unpack_bfloat2  # of two bfloat16

# To about 22 bits, as the hardware has them; denormal numbers are zeros.
ex2 = _here.ex2  # float32 -> 2 ** x
rcp = _here.rcp  # float32 -> 1 / x

# The same 32 bits as another type.
as_uint32 = _here.as_uint32
as_float32 = _here.as_float32

# A register of another lane, of uint32, int32 or float32; warp-wide.
shfl_xor = _here.shfl_xor  # (value, mask): the value of lane ^ mask
shfl_idx = _here.shfl_idx  # (value, source): the value of lane `source`

# The bits of all lanes of a warp together, in one register for all; 8.0.
redux_or = _here.redux_or  # uint32 -> uint32

# All lanes of a warp are here, and see what the others wrote; 7.0.
sync_warp = _here.sync_warp  # ()
# The same of `count` threads, neighbours from a multiple of that on, by a barrier of their block
# that no others use, (number from 1 to 15, count).
sync_some = _here.sync_some

# Barriers in shared memory that count arrivals and bytes; 9.0. `bars` is a shared array of uint64.
mbarrier_init = _bulk.mbarrier_init  # (bars, i, count): a phase takes `count` arrivals; one thread
mbarrier_expect = _bulk.mbarrier_expect  # (bars, i, nbytes): arrive, and the phase takes the bytes
mbarrier_arrive = _bulk.mbarrier_arrive  # (bars, i)
cp_async_arrive = _bulk.cp_async_arrive  # (bars, i): when all that this thread copies is there
mbarrier_wait = _bulk.mbarrier_wait  # (bars, i, parity): until the phase of this parity is over
fence_mbarrier_init = _bulk.fence_mbarrier_init  # (): the copy engine sees the new barriers
fence_proxy_async = _bulk.fence_proxy_async  # (): the copy engine and wgmma see the thread's stores
elect = _bulk.elect  # () -> uint32: 1 in one lane of the warp; the one that requests copies

# A box of an array to shared memory by the copy engine, tensor_map (device.tensor_map) says how it
# is stored there; what reaches beyond the array is 0. One thread requests it, 9.0.
tma_load_2d = _bulk.tma_load_2d  # (shared, i, tensor_map, column, row, bars, j): to shared[i] on
tma_load_3d = _bulk.tma_load_3d  # (shared, i, tensor_map, column, row, layer, bars, j)
tma_load_5d = _bulk.tma_load_5d  # (..., column, row, layer, block, image, bars, j), of five axes
tma_load_2d_multicast = _bulk.tma_load_2d_multicast  # (..., j, ranks): as tma_load_3d_multicast
tma_load_3d_multicast = _bulk.tma_load_3d_multicast  # (..., j, ranks): to those of the cluster
# (shared, i, source, j, nbytes, bars, k): gapless bytes, a multiple of 16, without a box
bulk_load = _bulk.bulk_load
# And back to the array, where the box is inside it; (): those since the last commit are a group,
# and shared memory may be written again when all groups of the thread were read.
tma_store_2d = _bulk.tma_store_2d  # (shared, i, tensor_map, column, row), neither negative
tma_store_3d = _bulk.tma_store_3d  # (shared, i, tensor_map, column, row, layer)
tma_store_5d = _bulk.tma_store_5d  # (shared, i, tensor_map, column, row, layer, block, image)
bulk_commit = _bulk.bulk_commit  # ()
bulk_wait_read = _bulk.bulk_wait_read  # ()
fence_tensor_map = _bulk.fence_tensor_map  # (tensor_map): before its first use in a kernel
prefetch_tensor_map = _bulk.prefetch_tensor_map  # (tensor_map): on its way to the copy engine
prefetch_parameters = _bulk.prefetch_parameters  # (a, b, c, d): sizes, 0 or more, of the kernel
first_multiple = _bulk.first_multiple  # (shared, nbytes) -> uint32: item at a multiple of nbytes

# A kernel launched with `overlap` begins while those before it end; 9.0. All threads wait before
# they read what an earlier kernel wrote, or write at all.
wait_for_earlier_kernels = _bulk.wait_for_earlier_kernels  # ()
let_next_kernel_start = _bulk.let_next_kernel_start  # (): once all blocks have said so or ended

# Between blocks of a grid that all run at once; 7.0, the fence 9.0.
# (array, j) -> uint32; what its writer wrote before it is seen after it
load_acquire = _grid.load_acquire
# of int32, between GPUs: (array, j) -> int32; (array, j, n): array[j] = n after what came before
load_acquire_system = _grid.load_acquire_system
store_release_system = _grid.store_release_system
# (array, j, n): array[j] += n after all that this thread wrote, or saw written
add_release = _grid.add_release
# (array of int32, j, n) -> array[j] before; then what was written before other additions is seen
add_acq_rel = _grid.add_acq_rel
# (): what other blocks wrote, and was acquired, is seen by the copy engine, and the other way round
fence_proxy_async_global = _grid.fence_proxy_async_global

# Blocks of a cluster, which run together and reach each other's shared memory; 9.0.
cluster_sync = _cluster.cluster_sync  # (): all threads of the cluster synchronise
mbarrier_arrive_at = _cluster.mbarrier_arrive_at  # (bars, i, rank): at the barrier of that block
load_4xf32_at = _cluster.load_4xf32_at  # (shared, j, rank) -> 4 float32 of that block's array
store_4xf32_at = _cluster.store_4xf32_at  # (shared, j, rank, 4 float32): into that block's array

# Products of a warpgroup, 128 threads, of tiles in shared memory; 9.0. wgmma makes a function of
# kind ("f16", "bf16"; "tf32" of float32, with 8 for 16 terms), 64 m_tiles rows, n columns,
# 16 k_steps terms, and how a (rows, terms) and b (columns, terms) are stored:
# (acc, a, i, b, j) -> acc, all tuples of m_tiles * n / 2 float32. With
# `columns`, acc holds as many of these, one after another, and (acc, a, i, b, j, mask) multiplies
# the same a by those columns whose bit the mask has, their b gapless from b[j] on; `inputs` a's,
# `stride` bytes from one to the next, each have `columns` bits of the mask in turn.
wgmma = _wgmma.wgmma  # (kind, m_tiles, n, k_steps, a: Operand, b: Operand, columns=0, ...)
zeros = _wgmma.zeros  # (count): makes a function () -> a tuple of float32
to_local = _wgmma.to_local  # (values, local): a tuple to a local array of float32
from_local = _wgmma.from_local  # (count): makes a function (local) -> a tuple of float32

# Registers of a thread, for all of a warpgroup: some warpgroups of a block give what others take,
# which wait until they are there. (n): from now on, a constant multiple of 8 from 24 to 256; the
# launch bounds say how many it had; 9.0.
more_registers = _wgmma.more_registers
fewer_registers = _wgmma.fewer_registers

# Products whose operands are anywhere: (acc, shared, i, where, number) -> acc. `where`, a tuple of
# two words for each of `units` products of 64 rows, says where a and b are from shared[i] on; the
# first `number` of them are computed; `joined`, as one product where the first is, so many times as
# wide, whose columns lie side by side.
wgmma_units = _cluster.wgmma_units  # (kind, units, n, k_steps, a: Operand, b: Operand, joined)
# The same, where a has 32 rows each of two tiles, whose lines run along the sum: by `ldmatrix` they
# go through registers, for a descriptor would have them one behind the other.
wgmma_pairs = _cluster.wgmma_pairs  # (kind, units, n, k_steps, width of a's lines, b: Operand)
# (count): makes a function (array of int32, j) -> a tuple of uint32, j the same in all of a warp
words = _cluster.words

# The same of float32: hi and lo of the first operand in registers, those of the second in shared
# memory. (acc, hi, lo, shared, i), the first three local arrays; acc is added to in float32.
# With two units, acc, hi and lo are of two products, and (acc, hi, lo, shared, i, j) says where the
# second operand of each is.
wgmma_split = _split.wgmma_split  # (n, k_steps, exact, units=1, apart=False)
