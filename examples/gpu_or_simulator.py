"""Import this before numba: where there is no GPU, kernels run in Numba's CUDA simulator."""

import ctypes
import os


def has_gpu() -> bool:
    """Whether the driver is there and finds one."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


if not has_gpu():
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
