"""Tensor maps announced to the copy engines of all multiprocessors, by a launch of its own.

A kernel that announces its maps itself does so in each replay of the graph that it is captured in,
and k8 in each of its warps, which has a ring of its own: its products of 1 to 40 rows of 16 bits
took 12 to 15 us in replayed steps, which take 6 to 13 us with all that they do since (H200).
"""

from numba import cuda

from numbsparse.device import SIMULATED, DeviceArray, multiprocessors
from numbsparse.device.launch import launch
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.ptx import fence_tensor_map

LARGE = 120 * 1024  # bytes, or all there are: more than half of a multiprocessor's, who has one
THREADS = 2 if SIMULATED else 32


def announce(maps: DeviceArray) -> None:
    """Each of these maps, (n, 16) or (16,), which stay where they are."""
    of = maps.reshape(-1, maps.shape[-1])
    everywhere = 1 if SIMULATED else multiprocessors()
    large = min(LARGE, shared_memory() or 0)
    launch(announcing_kernel, everywhere, THREADS, of, shared_bytes=large, together=True)


@cuda.jit
def announcing_kernel(maps):
    for k in range(cuda.threadIdx.x, maps.shape[0], cuda.blockDim.x):
        fence_tensor_map(maps[k])
