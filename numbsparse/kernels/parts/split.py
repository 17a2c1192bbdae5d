"""float32 on tensor cores, which take tf32: float32 with 10 bits of mantissa.

"high" rounds each operand to tf32. "highest" splits it, x = hi + lo with hi the nearest tf32, and
adds the three products lo * hi, hi * lo and hi * hi: what is left out is 2^-22 of a product. A
tensor core cuts off bits when it adds, always towards zero, and more of a large sum; so the
products of every few terms start from zero, the small ones first, and their sum is added in
float32. Values below 2^-113 lose bits of their lo, which is then too small for a float32; a hi that
is not finite makes NaN of the sum, and such outputs are computed again.
"""

from typing import Any

from numba import cuda, uint32, uint64

from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    cvt_rn_tf32,
    cvt_rna_tf32,
    mma_m16n8k8_tf32,
)


def splitting(exact: bool, fast: bool = False) -> Any:
    """split(x) = (hi, lo), the bits of both; with "high" lo is 0. `fast` takes a GPU of 9.0."""
    if exact:
        return split_exact
    return round_in_one if fast else round_to_tf32


@cuda.jit(device=True)
def split_exact(x):
    """(hi, lo) of x = hi + lo, hi the nearest tf32; an mma ignores the last 13 bits of both.

    cvt.rna_tf32 takes three instructions more, for a NaN, which the addition may turn into 0: then
    it is lo that is NaN.
    """
    hi = uint32(uint64(as_uint32(x)) + uint64(0x1000))  # beyond 32 bits of a NaN of ones
    return hi, as_uint32(x - as_float32(uint32(hi & uint32(0xFFFFE000))))


@cuda.jit(device=True)
def split_in_two(x):
    """`split_exact` in two instructions, not three: 11 % less time in strips of blocks of 16 and
    1,024 rows (H200). It takes a GPU of 9.0."""
    hi = cvt_rn_tf32(x)
    return hi, as_uint32(x - as_float32(hi))


@cuda.jit(device=True)
def round_to_tf32(x):
    return cvt_rna_tf32(x), uint32(0)


@cuda.jit(device=True)
def round_in_one(x):
    """In one instruction, where `round_to_tf32` takes three."""
    return cvt_rn_tf32(x), uint32(0)


@cuda.jit(device=True)
def add_product(a0, a1, a2, a3, b0, b1, c):
    """c (4,) += 16 x 8 values by 8 x 8, each lane's registers of an mma."""
    c[0], c[1], c[2], c[3] = mma_m16n8k8_tf32(a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3])
