"""What each instruction computes, in NumPy, for the 32 lanes of a warp at once.

Operands are arrays (32,) of one register per lane, or (32, n) of n: row l is lane l. Registers
hold 32 bits; the lower half of one comes first in memory and in a pair.
"""

import numpy as np

LANE = np.arange(32)
# PTX calls them groupID and threadID_in_group.
GROUP, MEMBER = LANE[:, None] // 4, LANE[:, None] % 4


def _fragment(values, row, column):
    """Which value of its matrix, row by row, each of a lane's is, (32, values); and the inverse,
    (rows, columns)."""
    i = np.arange(values)
    rows, columns, _ = np.broadcast_arrays(row(i), column(i), np.zeros((32, values), int))
    place = rows * (columns.max() + 1) + columns
    return place, np.argsort(place, axis=None).reshape(rows.max() + 1, -1)


# PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": a lane holds two by two
# neighbours along k, because two 16-bit values share a register.
A_16x16 = _fragment(8, lambda i: GROUP + i // 2 % 2 * 8, lambda i: 2 * MEMBER + i % 2 + i // 4 * 8)
B_16x8 = _fragment(4, lambda i: 2 * MEMBER + i % 2 + i // 2 * 8, lambda i: GROUP)
C_16x8 = _fragment(4, lambda i: GROUP + i // 2 * 8, lambda i: 2 * MEMBER + i % 2)

# PTX ISA, "Matrix Fragments for mma.m16n8k8", .tf32; c as above.
A_16x8 = _fragment(4, lambda i: GROUP + i % 2 * 8, lambda i: MEMBER + i // 2 * 4)
B_8x8 = _fragment(2, lambda i: MEMBER + i * 4, lambda i: GROUP)


def matrix_of(values: np.ndarray, fragment: tuple[np.ndarray, ...]) -> np.ndarray:
    """The matrix whose values the lanes hold: (32, values) to (rows, columns)."""
    return values.reshape(-1)[fragment[1]]


def mma_m16n8k16_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """d = a @ b + c: (16, 16), (16, 8), (16, 8), in registers (32, 4), (32, 2), (32, 4).

    Products are exact and sums float32. A tensor core adds in an order that is not documented and
    cuts off bits instead of rounding, so its sums differ in their last bits.
    """
    return _mma(float32_of_float16(a), A_16x16, float32_of_float16(b), B_16x8, c)


def mma_m16n8k16_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """As `mma_m16n8k16_f16`, of bfloat16."""
    return _mma(float32_of_bfloat16(a), A_16x16, float32_of_bfloat16(b), B_16x8, c)


def mma_m16n8k8_tf32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """d = a @ b + c: (16, 8), (8, 8), (16, 8), in registers (32, 4), (32, 2), (32, 4).

    The lower 13 bits of a and b are ignored. Sums are as in `mma_m16n8k16_f16`.
    """
    return _mma(float32_of_tf32(a), A_16x8, float32_of_tf32(b), B_8x8, c)


def _mma(a, a_fragment, b, b_fragment, c):
    product = matrix_of(a, a_fragment) @ matrix_of(b, b_fragment)
    return (product + matrix_of(c, C_16x8)).reshape(-1)[C_16x8[0]]


def float32_of_float16(registers: np.ndarray) -> np.ndarray:
    """(32, n) pairs of float16 to (32, 2 n)."""
    return np.ascontiguousarray(registers).view(np.float16).astype(np.float32)


def float32_of_bfloat16(registers: np.ndarray) -> np.ndarray:
    """(32, n) pairs of bfloat16, the upper 16 bits of float32, to (32, 2 n)."""
    upper = np.ascontiguousarray(registers).view(np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32)


def float32_of_tf32(registers: np.ndarray) -> np.ndarray:
    """(32, n) to (32, n): the upper 19 bits of a float32."""
    return (registers & np.uint32(0xFFFFE000)).view(np.float32)


def ldmatrix_x4(rows: np.ndarray) -> np.ndarray:
    """rows (32, 8) uint16 to registers (32, 4): row 8 m + r is row r of matrix m, 8 x 8.

    Register m of lane l holds matrix[m][l // 4, 2 * (l % 4)] and its right neighbour: the fragments
    of A_16x16 where the matrices are its quarters, down first; and of B_16x8, in two registers,
    where they are transposed. PTX ISA, "Warp-level matrix load instruction: ldmatrix".
    """
    pairs = np.ascontiguousarray(rows).view(np.uint32)  # (8 m + r, 4)
    return pairs.reshape(4, 32).T


def ldmatrix_x4_trans(rows: np.ndarray) -> np.ndarray:
    """As `ldmatrix_x4`, of the transposed matrices: lane l has matrix[m][2 * (l % 4), l // 4]..."""
    return ldmatrix_x4(rows.reshape(4, 8, 8).swapaxes(1, 2).reshape(32, 8))


def stmatrix_x4(registers: np.ndarray) -> np.ndarray:
    """(32, 4) to rows (32, 8) uint16: what `ldmatrix_x4` of those rows gives. PTX ISA,
    "Warp-level matrix store instruction: stmatrix"."""
    return np.ascontiguousarray(registers.T).view(np.uint16).reshape(32, 8)


def stmatrix_x4_trans(registers: np.ndarray) -> np.ndarray:
    """As `stmatrix_x4`, of the transposed matrices."""
    matrices = stmatrix_x4(registers).reshape(4, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(1, 2)).reshape(32, 8)


def movmatrix_trans(pairs: np.ndarray) -> np.ndarray:
    """(32,) to (32,): lane l has matrix[l // 4, 2 * (l % 4)] and its right neighbour, and gets
    those of the transposed matrix."""
    matrix = np.ascontiguousarray(pairs).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)


def ldmatrix_x4_if(rows: np.ndarray, wanted: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`ldmatrix_x4` where `wanted` (32,), alike in all lanes, is not 0; else kept (32, 4)."""
    if (wanted != wanted[0]).any():
        raise ValueError(f"a warp loads a matrix as one, but the lanes request {wanted}")
    return ldmatrix_x4(rows) if wanted[0] else kept


def ldmatrix_x4_trans_if(rows: np.ndarray, wanted: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """As `ldmatrix_x4_if`, of the transposed matrices."""
    transposed = np.ascontiguousarray(rows.reshape(4, 8, 8).swapaxes(1, 2)).reshape(32, 8)
    return ldmatrix_x4_if(transposed, wanted, kept)


def cvt_rna_tf32(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest tf32, 10 bits of mantissa; ties away from zero."""
    half = np.uint32(0x1000) * np.isfinite(x)
    return (x.view(np.uint32) + half) & np.uint32(0xFFFFE000)


def cvt_rn_tf32(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest tf32, ties to even; a NaN is 0x7FFFE000."""
    bits = x.view(np.uint32)
    up = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    rounded = np.where(np.isfinite(x), up, bits) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), np.uint32(0x7FFFE000), rounded)


def pack_half2(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Two float32 to two float16 in one register, rounded to nearest even; a NaN is 0x7FFF."""
    pairs = np.array((lo, hi)).T
    with np.errstate(over="ignore"):
        rounded = pairs.astype(np.float16, order="C")
    return _packed(rounded.view(np.uint16), np.isnan(pairs))


def pack_bfloat2(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Two float32 to two bfloat16 in one register, rounded to nearest even; a NaN is 0x7FFF."""
    pairs = np.array((lo, hi)).T
    bits = pairs.view(np.uint32)
    # Just under a half carries into the upper 16 bits where more than a half is cut off, and
    # with the last bit that stays also where it is a half exactly; NaNs alone go over.
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return _packed(rounded.astype(np.uint16, order="C"), np.isnan(pairs))


def _packed(halves, nans):
    """Pairs of 16 bits, the lower first, as one register each."""
    np.putmask(halves, nans, 0x7FFF)
    return halves.view(np.uint32)[..., 0]


def shfl_xor(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Each lane's value of lane ^ mask; (32,) to (32,)."""
    return value[(LANE ^ mask) % 32]


def shfl_idx(value: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Each lane's value of lane `source`, from 0 to 31; (32,) to (32,)."""
    return value[source % 32]


def redux_or(value: np.ndarray) -> np.ndarray:
    """The bits that any lane has, for each lane; (32,) to (32,)."""
    return np.broadcast_to(np.bitwise_or.reduce(value), value.shape)


def elect(unused: np.ndarray) -> np.ndarray:
    """1 for one lane of the warp, 0 for the others; which one is unspecified."""
    return np.where(LANE == 0, np.uint32(1), np.uint32(0))


def sync_warp(nothing: np.ndarray) -> np.ndarray:
    """Lanes continue when all have arrived."""
    return nothing
