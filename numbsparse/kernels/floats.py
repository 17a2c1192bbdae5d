"""Floating-point numbers as kernels load and store them: float32 inside, whatever the array holds.

A kernel sees an array of bfloat16 as its bits, uint16; arrays of real uint16 are refused before. So
loads pass through `widened`, and stores through `rounded`: at no cost for float32, and for float16
as Numba converts it.
"""

import numpy as np
from numba import types

from numbsparse.device import SIMULATED
from numbsparse.kernels.ptx import as_float32, as_uint32

kinds = np if SIMULATED else types  # as the modules of kernels see them there
float16, float32, uint16, uint32 = kinds.float16, kinds.float32, kinds.uint16, kinds.uint32


def widened(item):
    """An item of an array, as float32."""
    kind = type(item)
    return item if kind is np.float32 else (_from_bits if kind is np.uint16 else _from_float)(item)


def rounded(value, array):
    """A float32 as an item of the array: the nearest one, ties to even."""
    if array.dtype.type is np.uint16:
        return _to_bits(value, array)
    return (_to_half if array.dtype.type is np.float16 else _as_it_is)(value, array)


def _from_bits(item):
    return as_float32(uint32(uint32(item) << uint32(16)))


def _from_float(item):
    return float32(item)


def _to_bits(value, array):
    value = float32(value)
    if value != value:
        return uint16(0x7FFF)  # cut off, a NaN could become an infinity
    bits = as_uint32(value)
    # Just under a half carries into the upper 16 bits where more than a half is cut off, and with
    # the last bit that stays also where it is a half exactly.
    return uint16(uint32(bits + uint32(0x7FFF) + (bits >> uint32(16) & uint32(1))) >> uint32(16))


def _to_half(value, array):
    return float16(value)


def _as_it_is(value, array):
    return value


if not SIMULATED:
    from numba.cuda.extending import overload

    @overload(widened)
    def _widened(item):
        return _from_bits if item == types.uint16 else _from_float

    @overload(rounded)
    def _rounded(value, array):
        if array.dtype == types.uint16:
            return _to_bits
        return _to_half if array.dtype == types.float16 else _as_it_is
