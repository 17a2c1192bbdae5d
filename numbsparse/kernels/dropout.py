"""The dropout mask: a thread per value, which hashes its position."""

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded
from numbsparse.kernels.hashing import MASK, triple32

_triple32 = cuda.jit(device=True)(triple32)


def dropout_mask(mask, keys, threshold, kept):
    """mask[i] = kept if hash(i) >= threshold else 0, for mask (n,) and keys (2,) of the hash."""
    launch(mask_kernel, blocks(mask.size), THREADS, mask, keys, threshold, kept)


@cuda.jit
def mask_kernel(mask, keys, threshold, kept):
    i = cuda.grid(1)
    if i < mask.size:
        bits = _triple32(_triple32((i + int(keys[0])) & MASK) ^ int(keys[1]))
        mask[i] = rounded(kept if bits >= threshold else float32(0), mask)
