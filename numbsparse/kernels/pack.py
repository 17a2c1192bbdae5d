"""Many small arrays copied into a large one, some of them by one launch: to be sent together."""

from collections.abc import Sequence

from numba import cuda

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch

THREADS = 32 if SIMULATED else 256
DEEP, MOST = 8, 264  # words of a thread, where blocks of threads do not exceed the most
AT_ONCE = 8  # arrays of a launch


def pack(arrays: Sequence[DeviceArray], flat: DeviceArray, starts: Sequence[int]) -> None:
    """flat[start:] = a, of each array a, C-contiguous and of the dtype of flat, and its start."""
    width = 4 if all(a.nbytes % 4 == 0 for a in (flat, *arrays)) else flat.itemsize
    into, *words = (a.reshape(-1).view(f"uint{8 * width}") for a in (flat, *arrays))
    for first in range(0, len(words), AT_ONCE):
        some = words[first : first + AT_ONCE]
        at = [start * flat.itemsize // width for start in starts[first : first + AT_ONCE]]
        grid = min(-(-max(a.size for a in some) // (THREADS * DEEP)), MOST), len(some)
        none = AT_ONCE - len(some)  # arguments that no block of threads takes
        some, at = some + some[:1] * none, at + at[:1] * none
        launch(pack_kernel, grid, THREADS, into, tuple(at), *some)


@cuda.jit
def pack_kernel(flat, starts, a, b, c, d, e, f, g, h):
    i = cuda.blockIdx.y
    source, start = (a, b, c, d, e, f, g, h)[i], starts[i]
    for k in range(cuda.grid(1), source.size, cuda.gridsize(1)):
        flat[start + k] = source[k]
