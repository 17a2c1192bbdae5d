"""A hash that NumPy, Python and the GPU compute alike.

Numbers are below 2^32: Python integers, NumPy arrays of uint32, or int64 in a kernel, where a
product may overflow but its low 32 bits are right.
"""

from typing import Any

MASK = 0xFFFFFFFF


def triple32(x: Any) -> Any:
    """A permutation of the integers below 2^32 that looks random.

    The hash "triple32" of C. Wellons, "Prospecting for Hash Functions", 2018.
    """
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK
    return x ^ (x >> 14)
