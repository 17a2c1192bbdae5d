"""The roles in a block of threads of a weight-gradient of float32.

wgmma reads the second operand from shared memory with contiguous terms of the sum, and in a
batch-major dy they are below each other: so some warps do nothing but split the panels of dy into
hi and lo, a step ahead of the warpgroups that multiply, and leave images of the strips in one of
BUFFERS buffers. x passes through registers.

Lane 4 g + q of a warp has the rows g and g + 8 of an mma of 16 rows, and of every 8 terms of the
sum the q-th and the (q + 4)-th. Which terms these are is free as long as both operands agree: here
rows 2 q and 2 q + 1 of the batch. Rows g and g + 8 are two neighbouring features. So what is read
together from swizzled panels of 32 lines of 128 bytes shares no bank.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.matmul.k6_hopper.gated import keeping, numbers_of
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import BUFFERS, Tile
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.repair import nan_in_sums, repair_block
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_float32,
    as_uint32,
    fence_proxy_async,
    load_2xu32,
    load_4xf32,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    store_2xu32,
    store_4xf32,
    sync_warp,
    wait_for_earlier_kernels,
    wgmma_split,
)

LINE = 32  # values of a line of a panel


@cache
def supplier(tile: Tile, kind: str, transposed: tuple[bool, bool], load: Any, gated: bool) -> Any:
    """`supplier`: warps that make images of dy; the last one requests copies, one lane a panel."""
    STAGES, LOADERS, DEPTH = tile.STAGES, tile.LOADERS, tile.DEPTH
    PANEL_BYTES, X_SIZE = tile.PANEL_BYTES, tile.X_PANELS * tile.PANEL_BYTES // 4
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + BUFFERS
    STAYS, AHEAD, transpose = tile.STAYS, tile.AHEAD, transposer(tile, kind, transposed[1])
    keep = keeping(tile)

    @cuda.jit(device=True)
    def supply(own, maps, tables, item, gates, shared, base, bars):
        heads, loads, places, outs = tables
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory
        lane, items = uint32(cuda.threadIdx.x) % 32, heads.shape[0]
        steps, strips, stages = heads[item, 1], heads[item, 5], uint32(heads[item, 6])
        buffer_size, stage_size = uint32(heads[item, 7]), uint32(heads[item, 8])
        begin = uint32(base // 4 + BUFFERS * buffer_size)
        asks, asked, left, row = own == LOADERS - 1, item, int32(0), int32(0)
        panel, code, mine, nbytes = int32(0), uint32(0), False, uint32(0)
        stage = buffer = then = phase = buffer_phase = uint32(0)
        then_phase, step = uint32(1), int32(1) - int32(stages)
        while steps > 0:
            if asks and asked < items:
                if left == 0:
                    left, row = heads[asked, 1], int32(heads[asked, 0] * DEPTH)
                    mine, nbytes = lane < heads[asked, 2], uint32(heads[asked, 3] * PANEL_BYTES)
                    if mine:
                        panel, code = loads[asked, lane, 0], uint32(loads[asked, lane, 1])
                    if gated:
                        mine, n = keep(heads, loads, places, outs, asked, gates, code, mine)
                        nbytes = uint32(n * PANEL_BYTES)
                    if AHEAD:
                        wait_for_earlier_kernels()
                mbarrier_wait(bars, EMPTY + then, then_phase)
                if lane == 0:
                    mbarrier_expect(bars, FULL + then, nbytes)
                if mine:
                    at = uint32(4 * (begin + then * stage_size))
                    load(maps, panel, row, code, shared, at, bars, FULL + then)
                left, row = int32(left - 1), int32(row + DEPTH)
                if left == 0:
                    asked += cuda.gridDim.x if STAYS else items
                then, then_phase = following(then, then_phase, stages)
            if step >= 0:
                mbarrier_wait(bars, FULL + stage, phase)
                mbarrier_wait(bars, FREE + buffer, buffer_phase ^ 1)
                start = uint32(begin + stage * stage_size + X_SIZE)
                transpose(ring, start, own, strips, uint32(base // 4 + buffer * buffer_size))
                fence_proxy_async()
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, EMPTY + stage)
                    mbarrier_arrive(bars, SHOWN + buffer)
                stage, phase = following(stage, phase, stages)
                buffer, buffer_phase = following(buffer, buffer_phase, BUFFERS)
            step = int32(step + 1)
            if step == steps:
                item += cuda.gridDim.x
                if not STAYS or item >= items:
                    break
                steps, strips, step = heads[item, 1], heads[item, 5], int32(0)

    return supply


@cache
def transposer(tile: Tile, kind: str, dy_transposed: bool) -> Any:
    """transpose(ring, start, warp, count, buffer): images of `count` strips; see `ptx.wgmma_split`.

    Column 4 k + e of each 32 is in the e-th matrix of 8 columns, there in line 2 k, or from the
    fifth k on in those between: so four lanes store 64 bytes side by side. Here a lane has four
    terms of each of four columns, or of a feature-major dy 16 terms of one.
    """
    N, LOADERS, HALF, ACROSS = tile.N, tile.LOADERS, tile.DEPTH * tile.N, tile.N // tile.PANEL
    SIZE, PER_IMAGE, IMAGE = tile.PANEL_BYTES // 4, tile.N // 16, tile.IMAGE // 4
    RAW, exact = (4, 4), kind == "highest"
    split = splitting(exact)

    @cuda.jit(device=True)
    def line_of(four):
        return 4 * (four % 4 * 2 + four // 4)

    @cuda.jit(device=True)
    def store(ring, at, a, b, c, d):
        (ah, al), (bh, bl), (ch, cl), (dh, dl) = split(a), split(b), split(c), split(d)
        store_4xf32(ring, at, as_float32(ah), as_float32(bh), as_float32(ch), as_float32(dh))
        if exact:
            at = at + HALF
            store_4xf32(ring, at, as_float32(al), as_float32(bl), as_float32(cl), as_float32(dl))

    @cuda.jit(device=True)
    def from_rows(ring, panel, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        raw = cuda.local.array(RAW, float32)
        for j in range(4):
            line = 8 * (high // 2) + high % 2 + 2 * j
            four = load_4xf32(ring, panel + (16 * chunk + line) * LINE + (low ^ line % 8) * 4)
            for e in range(4):
                raw[j, e] = four[e]
        to = image + (4 * chunk + high) * (4 * N) + line_of(low)
        for e in range(4):
            store(ring, to + e * 32, raw[0, e], raw[1, e], raw[2, e], raw[3, e])

    @cuda.jit(device=True)
    def from_columns(ring, panel, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        line, raw = 4 * low + high, cuda.local.array(RAW, float32)
        # Half of the lanes begin with the other 8 terms, to avoid bank conflicts.
        start, begin = panel + line * LINE, low // 4
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            for u in range(2):
                four = load_4xf32(ring, start + ((2 * eight + u) ^ line % 8) * 4)
                for e in range(4):
                    raw[2 * j + u, e] = four[e]
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            to, k = image + eight * (8 * N) + high * 32 + line_of(low), 2 * j
            for u in range(2):
                terms = raw[k, u], raw[k, u + 2], raw[k + 1, u], raw[k + 1, u + 2]
                store(ring, to + u * (4 * N), *terms)

    @cuda.jit(device=True)
    def transpose(ring, start, warp, count, buffer):
        for unit in range(warp, count * PER_IMAGE, LOADERS):
            panel, chunk = unit // 2, unit % 2
            image = buffer + unit // PER_IMAGE * IMAGE + panel % ACROSS * 128
            if dy_transposed:
                from_columns(ring, start + panel * SIZE, chunk, image)
            else:
                from_rows(ring, start + panel * SIZE, chunk, image)

    return transpose


@cache
def multiplier(tile: Tile, kind: str, transposed: tuple[bool, bool], gated: bool) -> Any:
    """`multiplier`, with the sums (UNITS, N / 8, 4) in place; if `gated`, of units left."""
    STAGES, IMAGE, UNITS, DEPTH = tile.STAGES, tile.IMAGE // 4, tile.UNITS, tile.DEPTH
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + BUFFERS
    VALUES, exact = (UNITS, DEPTH // 2), kind == "highest"
    split, read, SIZE = splitting(exact), reader(tile, transposed[0]), tile.PANEL_BYTES // 4
    PER_PANEL, X_PANELS = IMAGE * tile.PANEL // tile.N, tile.X_PANELS
    add, one = (wgmma_split(tile.N, DEPTH // 8, exact, units) for units in (UNITS, 1))
    number_of = numbers_of(tile, gated)

    @cuda.jit(device=True)
    def multiply(warp, head, places, line, shared, base, bars, ring_at, sums):
        ring = cuda.shared.array(0, float32, ALIGNMENT)
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        stages, buffer_size = uint32(number_of(head, 6)), uint32(number_of(head, 7))
        stage_size, begin = uint32(number_of(head, 8)), uint32(base // 4 + BUFFERS * buffer_size)
        number = places[line, group, 0]
        half, row = warp % 4 // 2, warp % 2 * 16
        upper_x = uint32(begin + ((places[line, group, 1] & 0xFFFF) + half) * SIZE)
        lower_x = uint32(begin + ((places[line, group, 2 * UNITS - 1] & 0xFFFF) + half) * SIZE)
        upper = uint32(base // 4 + (places[line, group, 2] - X_PANELS) * PER_PANEL)
        lower = uint32(base // 4 + (places[line, group, 2 * UNITS] - X_PANELS) * PER_PANEL)
        raw = cuda.local.array(VALUES, float32)
        hi, lo = cuda.local.array(VALUES, uint32), cuda.local.array(VALUES, uint32)
        clear(sums)
        stage, phase, buffer, buffer_phase = ring_at
        for _ in range(number_of(head, 1)):
            mbarrier_wait(bars, FULL + stage, phase)
            at = uint32(stage * stage_size)
            read(ring, uint32(upper_x + at), row, raw[0])
            if UNITS > 1:
                read(ring, uint32(lower_x + at), row, raw[1])
            for m in range(UNITS):
                for i in range(DEPTH // 2):
                    hi[m, i], lo[m, i] = split(raw[m, i])
            fence_proxy_async()  # or the copy engine may write what is still being read
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, EMPTY + stage)
            mbarrier_wait(bars, SHOWN + buffer, buffer_phase)
            at = uint32(buffer * buffer_size)
            if UNITS > 1 and (not gated or number == UNITS):
                add(sums, hi, lo, ring, upper + at, lower + at)
            elif not gated or number == 1:
                one(sums[0], hi[0], lo[0], ring, upper + at)
            if lane == 0:
                mbarrier_arrive(bars, FREE + buffer)
            stage, phase = following(stage, phase, stages)
            buffer, buffer_phase = following(buffer, buffer_phase, BUFFERS)
        return stage, phase, buffer, buffer_phase

    return multiply


@cache
def reader(tile: Tile, x_transposed: bool) -> Any:
    """read(ring, start, row, raw): raw = what a lane has of 16 rows of x, of the panel at `start`
    those from `row` on."""
    EIGHTS = tile.DEPTH // 8

    @cuda.jit(device=True)
    def read_rows(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for k in range(2):
            line = 2 * q + k
            at = start + line * LINE + ((row // 4 + g // 2) ^ line) * 4 + g % 2 * 2
            for s in range(EIGHTS):
                a, b = load_2xu32(ring, at + s * (8 * LINE))
                raw[4 * s + 2 * k], raw[4 * s + 2 * k + 1] = as_float32(a), as_float32(b)

    @cuda.jit(device=True)
    def read_columns(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(2):
            line = 2 * g + u  # and of 16 rows, so that these shift no piece
            own = uint32(line * LINE + (q // 2 ^ line % 8) * 4 + q % 2 * 2)
            for s in range(EIGHTS):
                a, b = load_2xu32(ring, start + row * LINE + int64(own ^ 8 * s))
                raw[4 * s + u], raw[4 * s + 2 + u] = as_float32(a), as_float32(b)

    return read_columns if x_transposed else read_rows


def storer(tile: Tile, kind: str, transposed: tuple[bool, bool]) -> Any:
    """`storer`, of no kind of parts of blocks. Where a sum is NaN, the lane that has it repairs it:
    a split makes NaN of infinities."""
    repairs = transposed if kind == "highest" else None
    return storing(tile, tile.B if kind else tile.PART, repairs)


@cache
def storing(tile: Tile, B: int, repairs: tuple[bool, bool] | None = None) -> Any:
    """To blocks of B x B: four neighbours at once; two, where x and dy are exchanged.

    repairs : whether x and dy are feature-major, as `repair_block` takes it; None, there is no need
    """
    swapped, UNITS = tile.SWAPPED, tile.UNITS
    orders = (swapped, *(repairs or (False, False)))
    ACROSS, PARTS = tile.N // tile.PANEL, B // 32
    DOWN, ALONG = (1, B) if swapped else (B, 1)  # from a row to the next, and from a column

    @cuda.jit(device=True)
    def place_of(m, c, warp, outs, item):
        """Where a lane's sums of the c-th 32 columns of a product begin; or -1."""
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        half, row = warp % 4 // 2, int64(warp % 2 * 16 + 2 * (lane // 4))
        part = int64(outs[item, group, (2 * m + half) * ACROSS + c])
        at = part // PARTS * (32 * B) + part % PARTS * 32
        return at + row * DOWN + 4 * (lane % 4) * ALONG if part >= 0 else int64(-1)

    @cuda.jit(device=True)
    def store_rows(of, c, i, out, at):
        for u in range(2):
            a, b, k = of[4 * c], of[4 * c + 1], 2 * u + i
            store_4xf32(out, at + u * B, a[k], b[k], of[4 * c + 2, k], of[4 * c + 3, k])

    @cuda.jit(device=True)
    def store_columns(of, c, i, out, at):
        for e in range(4):
            sums = of[4 * c + e]
            store_2xu32(out, at + e * B, as_uint32(sums[i]), as_uint32(sums[2 + i]))

    store_part = store_columns if swapped else store_rows

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        for m in range(UNITS):
            for c in range(ACROSS):
                start = place_of(m, c, warp, outs, item)
                if start >= 0:
                    for i in range(2):
                        store_part(sums[m], c, i, out, start + 16 * i * ALONG)
        if repairs is not None and nan_in_sums(sums):
            for number in range(8 * outs.shape[2]):  # of a constant the loop would be unrolled
                c, u, e = number // 16, number // 8 % 2, number % 8
                start = place_of(c // ACROSS, c % ACROSS, warp, outs, item)
                if start >= 0:
                    at = start + u * DOWN + (e // 4 * 16 + e % 4) * ALONG
                    repair_block(out, at, B, dense, orders)

    return store
