"""Tiles of x and w on their way to shared memory: a ring of stages for each warp.

The copy engine brings whole tiles, so a warp spends nothing on them but the asking, and no
registers: what is on its way lies in shared memory. A warp is alone with its ring, so a stage is
free as soon as its lanes have met.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.sums import part_of
from numbsparse.kernels.matmul.k8_small_batch.tiles import words_of
from numbsparse.kernels.ptx import (
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    mbarrier_expect,
    mbarrier_init,
    prefetch_tensor_map,
    sync_warp,
    tma_load_2d,
)

SHARED_BYTES = 225 * 1024  # of a block, with room for the barriers
ALIGNED = 1024  # bytes, where the pattern of swizzled tiles begins anew

Box = tuple[tuple[int, int], int]


class Ring(NamedTuple):
    """What a kernel is made for."""

    form: Form
    size: int  # of a block
    turned: bool  # whether the sum runs along the rows of w
    x_across: bool  # whether x lies feature by feature
    groups: int  # of eight rows of the batch: 2, 4 or 8
    y: str  # how outputs are stored
    warps: int
    stages: int
    far: bool  # whether warps leave sums for each other in global memory
    patient: bool = False  # whether a unit is asked for when the one before it is there

    @property
    def first(self) -> int:
        """Units that a warp asks for at once when it starts."""
        return 1 if self.patient else self.stages

    @property
    def paired(self) -> bool:
        """Whether two rows of w make a line of 128 bytes: the copy engine counts lines."""
        return self.form.halves and self.size == WIDTH

    @property
    def swapped(self) -> bool:
        """Whether w x.T is multiplied, not x w.T: see `swapped_tiles`."""
        return self.form.halves and self.y == "along"

    @property
    def sums(self) -> tuple[int, int]:
        """(M, N) of a warp's mma, the groups of its first operand in twos and of its second."""
        return (2, self.groups) if self.swapped else (self.groups // 2, 4)

    @property
    def part(self) -> int:
        """float32 of a warp's sums."""
        return part_of(*self.sums)

    @property
    def x_words(self) -> int:
        return -(-words_of(self.form) * self.groups // 4 // 256) * 256

    @property
    def stage_words(self) -> int:
        return self.x_words + words_of(self.form)

    @property
    def slot_words(self) -> int:
        """Room for the sums of lines that began with an earlier warp."""
        return 0 if self.far else (self.warps - 1) * self.part

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.warps * self.stages * self.stage_words + self.slot_words) + ALIGNED


def with_stages(ring: Ring, most: int) -> Ring:
    """As many stages as fit."""
    free = SHARED_BYTES - ring._replace(stages=0).shared_bytes
    return ring._replace(stages=min(free // (4 * ring.warps * ring.stage_words), most))


def boxes(ring: Ring) -> tuple[Box, Box]:
    """What is copied at once, of x and of w: (rows, columns), and the bytes of a line."""
    nbytes = 4 * WIDTH // (2 if ring.form.halves else 1)
    x = (WIDTH if ring.x_across else 8 * ring.groups, WIDTH), nbytes
    if ring.paired:
        return x, ((WIDTH // 2, 2 * WIDTH), 2 * nbytes)
    return x, ((WIDTH, WIDTH), nbytes)


@cache
def open_ring(stages: int, many_maps: int) -> Any:
    """Make the barriers of a warp's ring, and let the copy engine fetch the maps meanwhile.

    Where the maps are fresh, it is told so first.
    """

    @cuda.jit(device=True)
    def prepare(bars, bar, fresh, maps):
        if elect() != 0:
            if fresh != 0:
                for k in range(many_maps):
                    fence_tensor_map(maps[k])
            for k in range(many_maps):
                prefetch_tensor_map(maps[k])
            for s in range(stages):
                mbarrier_init(bars, bar + s, 1)
            fence_mbarrier_init()
        sync_warp()

    return prepare


@cache
def ask(ring: Ring) -> Any:
    """Fill a stage with a tile of x and a square of w."""
    TILE, W_START, X_ACROSS = words_of(ring.form), ring.x_words, ring.x_across
    NBYTES = TILE * ring.groups + 4 * TILE  # of groups / 4 tiles, and of one
    X_TILES, CUT = ring.groups // 4 if X_ACROSS else 1, ring.size // WIDTH
    LINES = ring.size // 2 if ring.paired else ring.size  # of a block

    @cuda.jit(device=True)
    def ask_for(x_map, w_map, x_line, square, shared, start, bars, bar):
        if elect() != 0:
            mbarrier_expect(bars, bar, uint32(NBYTES))
            block, part = square // (CUT * CUT), square % (CUT * CUT)
            column, row = int32(part % CUT * WIDTH), int32(block * LINES + part // CUT * WIDTH)
            tma_load_2d(shared, start + W_START, w_map, column, row, bars, bar)
            first = int32(x_line * WIDTH)
            for u in range(X_TILES):
                if X_ACROSS:
                    place = start + u * TILE
                    tma_load_2d(shared, place, x_map, int32(u * WIDTH), first, bars, bar)
                else:
                    tma_load_2d(shared, start, x_map, first, int32(0), bars, bar)

    return ask_for
