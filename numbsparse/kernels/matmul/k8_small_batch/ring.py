"""A ring of stages in shared memory for each warp, and how tiles are loaded into a stage.

A warp has its ring to itself, so a stage is free once its lanes are synchronised. Where whole tiles
can be copied, the copy engine does it, and the warp only requests it. Elsewhere, for blocks under
32, features that end inside a tile and cards without a copy engine, its lanes copy pieces of 16
bytes to the same places (`cp.async`); either way nothing passes through registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.card import registers
from numbsparse.kernels.parts.gathers import Reach, copying
from numbsparse.kernels.parts.tiles import WIDTH, Form
from numbsparse.kernels.ptx import (
    cp_async_commit,
    cp_async_wait,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    load_2xu32,
    load_4xu32,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    sync_warp,
    tma_load_2d,
)

ALIGNED = 1024  # bytes after which the pattern of swizzled tiles repeats


class Source(NamedTuple):
    """How tiles are loaded into a stage: by the copy engine, or by the lanes of the warp."""

    engine: bool
    stages: int
    overlap: bool  # whether the kernel may start while the one before it ends
    reach: Reach | None = None  # of lanes


def jit_for(warps: int) -> Any:
    """cuda.jit with as many registers a thread as `warps` warps leave each."""
    return cuda.jit(**registers(32 * warps, most=255))


@cache
def reading(blocks: int) -> Any:
    """read(plan, unit): a unit's record, two numbers for each of its blocks and two more."""
    WORDS = 2 * blocks + 2

    @cuda.jit(device=True)
    def read_four(plan, unit):
        v = load_4xu32(plan, unit * WORDS)
        return int32(v[0]), int32(v[1]), int32(v[2]), int32(v[3])

    @cuda.jit(device=True)
    def read_two(plan, at):
        v = load_2xu32(plan, at)
        return int32(v[0]), int32(v[1])

    @cuda.jit(device=True)
    def read_six(plan, unit):
        at = unit * WORDS
        return read_two(plan, at) + read_two(plan, at + 2) + read_two(plan, at + 4)

    @cuda.jit(device=True)
    def read_ten(plan, unit):
        at = unit * WORDS
        first = read_two(plan, at) + read_two(plan, at + 2) + read_two(plan, at + 4)
        return first + read_two(plan, at + 6) + read_two(plan, at + 8)

    return {1: read_four, 2: read_six, 4: read_ten}[blocks]


@cache
def opening(source: Source, many_maps: int) -> Any:
    """Make the barriers of a warp's ring, and let the copy engine fetch the maps meanwhile.

    Where the maps are fresh, they are announced first.
    """
    STAGES = source.stages

    @cuda.jit(device=True)
    def prepare(bars, bar, fresh, maps):
        if elect() != 0:
            if fresh != 0:
                for k in range(many_maps):
                    fence_tensor_map(maps[k])
            for k in range(many_maps):
                prefetch_tensor_map(maps[k])
            for s in range(STAGES):
                mbarrier_init(bars, bar + s, 1)
            fence_mbarrier_init()
        sync_warp()

    @cuda.jit(device=True)
    def nothing(bars, bar, fresh, maps):
        pass

    return prepare if source.engine else nothing


@cache
def waiting(source: Source) -> Any:
    """wait(bars, bar, phase): until the stage is filled that the warp requested first."""
    PENDING = source.stages - 1

    @cuda.jit(device=True)
    def for_the_engine(bars, bar, phase):
        mbarrier_wait(bars, bar, phase)

    @cuda.jit(device=True)
    def for_the_lanes(bars, bar, phase):
        cp_async_wait(PENDING)
        sync_warp()

    return for_the_engine if source.engine else for_the_lanes


@cache
def closing(source: Source) -> Any:
    """close(): what lanes copied since the last time is one stage, perhaps an empty one."""

    @cuda.jit(device=True)
    def commit():
        cp_async_commit()

    @cuda.jit(device=True)
    def nothing():
        pass

    return nothing if source.engine else commit


@cuda.jit(device=True)
def square_of(place, shift):
    """(column, row) among values in lines of 32 << shift, of the one at 32 * place."""
    return int32((place & ((1 << shift) - 1)) * WIDTH), int32(place >> shift)


@cache
def engine_asks(form: Form, groups: int, x_across: bool) -> Any:
    """request(record, ...): fill a stage with a square of w, and tiles of x from row `top` on.

    `w_view` is (size of a block, shift as in `square_of`, `paired` as in `tiles`).
    """
    TILE, X_WORDS, X_TILES = WIDTH * form.row, x_words(form, groups), groups // 4 if x_across else 1
    NBYTES = 4 * form.row * (8 * groups + WIDTH)

    @cuda.jit(device=True)
    def request(record, x, x_view, top, values, w_view, maps, shared, start, bars, bar):
        if elect() != 0:
            mbarrier_expect(bars, bar, uint32(NBYTES))
            column, row = square_of(record[0], w_view[1])
            tma_load_2d(shared, start + X_WORDS, maps[1], column, row, bars, bar)
            first = int32(record[1] * WIDTH)
            for u in range(X_TILES):
                others = int32(top + u * WIDTH)
                column, row = (others, first) if x_across else (first, others)
                tma_load_2d(shared, start + u * TILE, maps[0], column, row, bars, bar)

    return request


@cache
def x_words(form: Form, groups: int) -> int:
    """Words of a tile of x in a stage; that of w begins where the pattern of swizzles does."""
    return -(-8 * groups * form.row // 256) * 256


@cache
def lanes_ask(
    form: Form, groups: int, x_across: bool, transposed: bool, depth: int, reach: Reach
) -> Any:
    """The same by the lanes, of as many blocks as make 32 terms; what is not there is 0."""
    X_WORDS, TILE = x_words(form, groups), WIDTH * form.row
    X_TILES = groups // 4 if x_across else 1
    copy_x = copying(form, (WIDTH, 8 * groups // X_TILES), depth, not x_across, reach)
    copy_w = copying(form, (WIDTH, depth), depth, transposed, reach, of_values=True)

    @cuda.jit(device=True)
    def request(record, x, x_view, top, values, w_view, maps, shared, start, bars, bar):
        batch, features, x_batch, x_feature = x_view
        x_stride, w_start = x_feature if x_across else x_batch, uint32(start + X_WORDS)
        for u in range(X_TILES):
            first, place = top + u * WIDTH, uint32(start + u * TILE)
            copy_x(x, record, features, x_stride, first, batch, shared, place)
        copy_w(values, record, features, w_view[0], int64(0), depth, shared, w_start)

    return request
