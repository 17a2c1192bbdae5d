"""A tile whose steps are cut among the blocks of threads of a cluster: see `plan.ONCE`."""

from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.plan import Form
from numbsparse.kernels.parts.cluster_sums import add_parts
from numbsparse.kernels.ptx import shfl_idx


def joining(form: Form) -> Any:
    """join(sums, columns, base): the slice that this block of a cluster stores, of all its blocks.

    The slice takes the first place among the sums, and its strips that of the columns, counted in
    what `Tile.stored` has for a block. Gives the first row of it.
    """
    tile, of = form.tile, form.tile.stored(form.kind)
    SPLIT, OWN, TILES, STRIPS = tile.SPLIT, tile.FOURS // tile.SPLIT, tile.M_TILES, tile.B // 8
    COLUMNS, WIDTH, ACROSS, SUMS = of.COLUMNS, of.B // 8, tile.B // of.B, 4 * OWN
    add = add_parts(SPLIT, SPLIT, 1, SPLIT, OWN)

    @cuda.jit(device=True)
    def join(sums, columns, base):
        own, t = cuda.local.array(SUMS, float32), uint32(cuda.threadIdx.x)
        add(sums, own, shfl_idx(uint32(t // 32), 0), base)
        for k in range(SUMS):
            sums[k] = own[k]
        first = int32(cuda.blockIdx.x % SPLIT * OWN)
        for c in range(COLUMNS):
            column = columns[first // (TILES * STRIPS) + c]
            strip = first % STRIPS // WIDTH
            columns[c] = column * ACROSS + strip if column >= 0 else -1
        return first // STRIPS % TILES * 64

    return join
