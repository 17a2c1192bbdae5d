"""Fill an output with NaN before a product, and look for NaN after it: was every value written?"""

import numpy as np
from numba import cuda

from numbsparse.device import DeviceArray, to_device
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks, fill

# Of the bits of a number without its sign, those of infinity are the last before NaN.
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}


def fill_with_nan(array: DeviceArray) -> None:
    """All values of a C-contiguous array."""
    fill(array, np.nan)


def holds_nan(array: DeviceArray) -> bool:
    """Whether a contiguous array of float16, bfloat16 or float32 holds a NaN anywhere."""
    bits, found = _bits(array), to_device(np.zeros(1, np.int32))
    unsigned = (1 << 8 * bits.itemsize - 1) - 1
    largest = INFINITY[array.dtype.name]
    launch(find_kernel, blocks(bits.size), THREADS, bits, unsigned, largest, found)
    return bool(found.item())


def _bits(array: DeviceArray) -> DeviceArray:
    return array.reshape(-1).view(np.dtype(f"uint{8 * array.itemsize}"))


@cuda.jit
def find_kernel(bits, unsigned, largest, found):
    i = cuda.grid(1)
    if i < bits.size and bits[i] & unsigned > largest:
        found[0] = 1  # the same from every thread that finds one
