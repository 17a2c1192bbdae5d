"""What a warp does with a unit of dw: its products, and from their sums to memory.

Products are of fragments of x that a warp holds, times tiles of dy. The sums are a square of 32, or
the small blocks that are side by side there. The warp leaves them in shared memory, a row of the
square in each row, its pieces of 16 bytes exchanged as in `tiles`; the copy engine or the lanes
take them from there (`writing`).
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.repair import nan_in_sums, plain_sum
from numbsparse.kernels.parts.requests import picking
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand, fragment, products
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import (
    as_float32,
    as_uint32,
    bulk_commit,
    bulk_wait_read,
    elect,
    fence_proxy_async,
    load_4xu32,
    stmatrix_x4,
    store_4xu32,
    sync_warp,
    tma_store_3d,
)


def apart_of(form: Form, operand: Operand) -> tuple[int, int]:
    """(words, steps) from a tile of 32 rows of the batch to the next one; a slab is one tile."""
    return (0, form.steps) if operand.slab else (WIDTH * form.row, 0)


@cache
def holding(form: Form, x: Operand, TILES: int) -> Any:
    """hi[s], lo[s] = the fragments of tiles of x at each step; of two tiles not split yet."""
    STEPS, (TILE, NEXT) = form.steps, apart_of(form, x)
    take, PITCHED = fragment(form, x, TILES == 1 or not form.split), x.has_pitch

    @cuda.jit(device=True)
    def hold(tile, start, pitch, hi, lo):
        for u in range(TILES):
            for s in range(STEPS):
                at, n = uint32(start + u * TILE), u * STEPS + s
                how = pitch if PITCHED else uint32(0)
                take(tile, at, uint32(s + u * NEXT), how, (), hi[n], lo[n])

    return hold


def sums_of(form: Form, x: Operand) -> tuple[int, int, int]:
    """The shape of acc: of float32 dy is the first operand, of 16 bits x, as they are stored."""
    return (-(-x.groups // 2), 4, 4) if form.is_16_bit else (2, x.groups, 4)


@cache
def consuming(form: Form, x: Operand, dy: Operand, TILES: int, LONG: bool) -> Any:
    """acc += the products of what is held of x and tiles of dy, each multiplied when it is read: to
    hold float32 of dy for longer, so that the next tile is requested before, took 1.01 to 1.07
    times as long (H200)."""
    STEPS, FRAGMENT, (TILE, NEXT) = form.steps, (4, 2), apart_of(form, dy)
    take, step = fragment(form, dy), multiplying(form, x, TILES, LONG)
    PITCHED = dy.has_pitch

    @cuda.jit(device=True)
    def multiply(tile, start, pitch, x_hi, x_lo, acc):
        for u in range(TILES):
            for s in range(STEPS):
                at, n = uint32(start + u * TILE), u * STEPS + s
                number, how = uint32(s + u * NEXT), pitch if PITCHED else uint32(0)
                hi, lo = cuda.local.array(FRAGMENT, uint32), cuda.local.array(FRAGMENT, uint32)
                take(tile, at, number, how, (), hi, lo)
                step(n, x_hi[n], x_lo[n], hi, lo, acc)

    return multiply


@cache
def multiplying(form: Form, x: Operand, TILES: int, LONG: bool) -> Any:
    """acc += the products of a step, of fragments of x and dy.

    Those of split float32 start from zero at each step and are added in float32: sums are short
    here, and tensor cores cut off what they add. Unless the batch is `LONG`, acc is zero before the
    first.
    """
    SPLIT, ROWS, SUMS = form.split, x.groups + x.groups % 2, sums_of(form, x)
    HELD, X_FIRST, LATE = (ROWS, 2), form.is_16_bit, form.split and TILES > 1
    add, split = products(form, *SUMS[:2]), splitting(True)

    @cuda.jit(device=True)
    def three(x_hi, x_lo, hi, lo, acc):
        # The smallest first; lo times lo is less than what a float32 holds.
        add(hi, x_lo, acc)
        add(lo, x_hi, acc)
        add(hi, x_hi, acc)

    @cuda.jit(device=True)
    def multiply(n, x_hi, x_lo, hi, lo, acc):
        if X_FIRST:
            add(x_hi, hi, acc)
        elif not SPLIT:
            add(hi, x_hi, acc)
        elif n == 0 and not LONG:
            three(x_hi, x_lo, hi, lo, acc)
        else:
            sums = cuda.local.array(SUMS, float32)
            pieces.clear(sums)
            three(x_hi, x_lo, hi, lo, sums)
            pieces.add(acc, sums)

    @cuda.jit(device=True)
    def split_x(n, x, unused, hi, lo, acc):
        x_hi, x_lo = cuda.local.array(HELD, uint32), cuda.local.array(HELD, uint32)
        for j in range(ROWS):
            for e in range(2):
                x_hi[j, e], x_lo[j, e] = split(as_float32(x[j, e]))
        multiply(n, x_hi, x_lo, hi, lo, acc)

    return split_x if LATE else multiply


@cache
def writing(form: Form, depth: int, groups: int, engine: bool) -> Any:
    """Write a unit of lines of `depth` features, by the copy engine or by the lanes.

    Its sums are of `groups` times 8 features of x.
    """
    leave = leave_16_bit(form.dtype, groups, engine) if form.is_16_bit else leave_float32(groups)
    repair, write_pieces = repairing(depth, groups), writing_pieces(form, depth)
    SPLIT, ENGINE = form.split, engine

    @cuda.jit(device=True)
    def write(operands, w_view, record, dvalues, shared, leaving, acc):
        if ENGINE and elect() != 0:
            bulk_wait_read()  # of what was left here before
        sync_warp()
        leave(shared, leaving, w_view[0], acc)
        if SPLIT and nan_in_sums(acc):
            repair(operands, record, shared, leaving)
        if ENGINE:
            fence_proxy_async()
        sync_warp()
        if ENGINE:
            if elect() != 0:
                tma_store_3d(shared, leaving, operands[4][2], 0, record[0], 0)
                bulk_commit()
        else:
            write_pieces(record, w_view[0], dvalues, shared, leaving)

    return write


@cache
def leave_float32(groups: int) -> Any:
    """Sums whose first operand is dy: four neighbours of a row in a lane, see `tiles.products`."""

    @cuda.jit(device=True)
    def leave(shared, leaving, size, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for p in range(2):
            place = leaving + 32 * (2 * q + p) + 4 * (g ^ (2 * q + p))
            for n in range(groups):
                v0, v1 = as_uint32(acc[0, n, p]), as_uint32(acc[0, n, 2 + p])
                v2, v3 = as_uint32(acc[1, n, p]), as_uint32(acc[1, n, 2 + p])
                store_4xu32(shared, place + 256 * n, v0, v1, v2, v3)

    return leave


@cache
def leave_16_bit(dtype: str, groups: int, on_hopper: bool) -> Any:
    """On Hopper by `stmatrix`: up to 24 % less time (8,192 features, B = 64, 32 rows)."""
    GROUPS, ON_HOPPER, pack = groups, on_hopper, PACK[dtype]

    @cuda.jit(device=True)
    def leave(shared, leaving, size, acc):
        lane = uint32(cuda.threadIdx.x) % 32
        paired = uint32(16 if ON_HOPPER and size == WIDTH else 0)  # as in `tiles.take_16_bit`
        for j in range(GROUPS):
            m, i = j // 2, j % 2 * 2
            v0, v1 = pack(acc[m, 0, i], acc[m, 0, i + 1]), pack(acc[m, 1, i], acc[m, 1, i + 1])
            v2, v3 = pack(acc[m, 2, i], acc[m, 2, i + 1]), pack(acc[m, 3, i], acc[m, 3, i + 1])
            if ON_HOPPER:
                row, piece = 8 * j + lane % 8, lane // 8
                place = (16 * row + 4 * (piece ^ (row // 2 % 4))) ^ (2 * row & paired)
                stmatrix_x4(shared, leaving + place, v0, v1, v2, v3)
            else:
                row, word = 8 * j + lane // 4, leaving + lane % 4
                key = row // 2 % 4
                shared[word + 16 * row + 4 * key] = v0
                shared[word + 16 * row + 4 * (1 ^ key)] = v1
                shared[word + 16 * row + 4 * (2 ^ key)] = v2
                shared[word + 16 * row + 4 * (3 ^ key)] = v3

    return leave


@cache
def repairing(depth: int, groups: int) -> Any:
    """Compute again what is NaN of what this lane left; 0 beyond the features."""
    LINE, line_of = 2 * (WIDTH // depth), picking(1, WIDTH // depth)

    @cuda.jit(device=True)
    def repair(operands, record, tile, start):
        x, x_view, dy, dy_view, _ = operands
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for number in range(8 * groups):
            n, p, k = number // 8, number // 4 % 2, number % 4
            i, column = 8 * n + 2 * q + p, 4 * g + k
            at = start + 32 * i + 4 * (g ^ (2 * q + p)) + k
            value = as_float32(tile[at])
            if value != value:
                value = float32(0)
                line = line_of(record, column // depth)
                row, column = record[LINE] * depth + i, line * depth + column % depth
                if row < x_view[1] and column < dy_view[1]:
                    x_at, dy_at = row * x_view[3], column * dy_view[3]
                    value = plain_sum(value, x, x_at, x_view[2], dy, dy_at, dy_view[2], x_view[0])
                tile[at] = as_uint32(value)

    return repair


@cache
def writing_pieces(form: Form, depth: int) -> Any:
    """The lanes write what they left, each 16 bytes of a row of a block at once."""
    RUN, ROW, PIECES, SHARE = form.run, form.row, WIDTH // form.run, WIDTH // form.row
    SHIFT, LAST = uint32(PIECES.bit_length() - 1), uint32(PIECES - 1)
    place_of = picking(0, WIDTH // depth)

    @cuda.jit(device=True)
    def write(record, size, dvalues, shared, leaving):
        lane = uint32(cuda.threadIdx.x) % 32
        for n in range(depth * PIECES // 32):
            number = uint32(lane + 32 * n)
            row, piece = number >> SHIFT, number & LAST  # as in `parts.requests`
            place = place_of(record, piece * RUN // depth)
            if place >= 0:
                swizzled = piece ^ (row // SHARE % (8 // SHARE))
                v = load_4xu32(shared, leaving + row * ROW + 4 * swizzled)
                at = int64(place) * WIDTH + row * size + piece * RUN % depth
                store_4xu32(dvalues, at, v[0], v[1], v[2], v[3])

    return write
