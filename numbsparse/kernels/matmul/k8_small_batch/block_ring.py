"""Tiles of x and dy on their way to shared memory, for weight_grad: a ring of stages for each warp.

A stage takes a tile of dy, and one of x where the line of x changes: the products of one line come
after each other, and their x stays in registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.ring import ALIGNED, SHARED_BYTES, Box
from numbsparse.kernels.matmul.k8_small_batch.tiles import words_of
from numbsparse.kernels.ptx import elect, mbarrier_expect, tma_load_2d


class BlockRing(NamedTuple):
    """What a kernel is made for."""

    form: Form
    size: int  # of a block
    x_across: bool  # whether the features of x lie side by side
    dy_across: bool
    warps: int  # of a share
    shares: int
    stages: int

    @property
    def paired(self) -> bool:
        """Whether two rows of dw make a line of 128 bytes: the copy engine counts lines."""
        return self.form.halves and self.size == WIDTH

    @property
    def stage_words(self) -> int:
        return 2 * words_of(self.form)

    @property
    def warp_words(self) -> int:
        """A ring, and a square of dw that waits to be written."""
        return self.stages * self.stage_words + words_of(self.form)

    @property
    def shared_bytes(self) -> int:
        return 4 * self.warps * self.warp_words + ALIGNED


def with_stages(ring: BlockRing, most: int) -> BlockRing:
    """As many stages as fit."""
    free = SHARED_BYTES - ring._replace(stages=0).shared_bytes
    return ring._replace(stages=min(free // (4 * ring.warps * ring.stage_words), most))


def boxes(ring: BlockRing) -> tuple[Box, Box]:
    """What is copied at once, of x or dy and of dw: (rows, columns), and the bytes of a line."""
    nbytes = 4 * WIDTH // (2 if ring.form.halves else 1)
    tile = (WIDTH, WIDTH), nbytes
    return tile, ((WIDTH // 2, 2 * WIDTH), 2 * nbytes) if ring.paired else tile


@cache
def ask(ring: BlockRing) -> Any:
    """Fill a stage with a tile of dy and, where it is another one than before, one of x."""
    TILE = words_of(ring.form)
    copy_x, copy_dy = copy_tile(ring.x_across), copy_tile(ring.dy_across)

    @cuda.jit(device=True)
    def ask_for(x_map, dy_map, x_line, other, dy_line, shared, start, bars, bar):
        if elect() != 0:
            mbarrier_expect(bars, bar, uint32(8 * TILE) if other else uint32(4 * TILE))
            copy_dy(dy_map, dy_line, shared, start, bars, bar)
            if other:
                copy_x(x_map, x_line, shared, uint32(start + TILE), bars, bar)

    return ask_for


@cache
def copy_tile(across: bool) -> Any:
    """32 features of the batch; what is beyond the batch is 0."""

    @cuda.jit(device=True)
    def copy_across(tensor_map, line, shared, start, bars, bar):
        tma_load_2d(shared, start, tensor_map, int32(line * WIDTH), int32(0), bars, bar)

    @cuda.jit(device=True)
    def copy_along(tensor_map, line, shared, start, bars, bar):
        tma_load_2d(shared, start, tensor_map, int32(0), int32(line * WIDTH), bars, bar)

    return copy_across if across else copy_along
