"""The producer warps: they take turns requesting the tiles of each step.

`parts.records` says how they read the plan ahead. One lane requests them, chosen by `elect`: for
any other choice the compiler emits a loop over the lanes. A request takes about as long as a step
of small blocks is multiplied, and so there may be several such warps.

The copy engine loads 16-bit blocks of w as they are, and float32's as `parts.images`.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.plan import LINE, SCALED, Form
from numbsparse.kernels.parts.images import load_image
from numbsparse.kernels.parts.records import counting, walking
from numbsparse.kernels.parts.swizzle import load_block_for, load_boxes_for
from numbsparse.kernels.ptx import fence_tensor_map, mbarrier_expect

X, W, SCALED_W = 0, 1, 3  # tensor maps; after W and SCALED_W those that end where x does, then y


@cache
def producer(form: Form) -> Any:
    """produce(fetcher, fresh, source, plan, first, last, shared, base, bars, info).

    source : the maps; of float32, and the images of w; the rows of a tile; gates, if any
    info : the masks of all stages
    """
    tile = form.tile
    N_MAPS = X + 1 if tile.ITEM == 4 else W + form.w_maps
    thinned: tuple[Any, ...] = ()
    if form.gated:
        from numbsparse.kernels.matmul.k6_hopper.gated import gates_in, showing, thinning

        thinned = thinning(tile), showing(tile), gates_in(tile)
    how = requesting(form), tile.FETCHERS, tile.CLUSTER, form.ahead, *thinned
    walk = walking(tile.RECORD, tile.STAGES, *how)

    @cuda.jit(device=True)
    def produce(fetcher, fresh, source, plan, first, last, shared, base, bars, info):
        if fresh != 0:
            for m in range(N_MAPS):
                fence_tensor_map(source[0][m])
        places, gates = (source[2], first, last), source[3]
        walk(fetcher, plan.records, plan.tiles, *places, bars, gates, source, shared, base, info)

    return produce


@cache
def requesting(form: Form) -> Any:
    """What `walking` does for a step: it publishes masks and requests tiles."""
    tile, STAGES, SHARES = form.tile, form.tile.STAGES, form.tile.SHARES
    INPUTS, BLOCKS, UNIT, CLUSTER = tile.INPUTS, tile.BLOCKS, tile.UNIT, tile.CLUSTER
    STAGE, W_START, X_BYTES, W_BYTES = tile.STAGE_BYTES, tile.W_START, tile.X_BYTES, tile.W_BYTES
    COUNTS, FIRST_INPUT, FIRST_BLOCK = SHARES, SHARES + 1, SHARES + 1 + INPUTS
    EVEN, LINE_BYTES = form.even, tile.ITEM * tile.DEPTH
    many, before, has = counting(form.gated)
    DEPTH, ROWS, BOX = tile.DEPTH, tile.ROWS, x_box(form)[1 if form.x_transposed else 0]
    fetch_x = load_boxes_for(form.x_transposed, ROWS // BOX, BOX, X_BYTES * BOX // ROWS // UNIT)
    FLOAT32 = tile.ITEM == 4
    fetch_w = load_image(tile.W_BYTES) if FLOAT32 else fetch_block(form)

    @cuda.jit(device=True)
    def request(step, row, stage, bars, source, shared, base, info):
        for s in range(SHARES):
            info[s * STAGES + stage] = step[s]
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        inputs, blocks = uint32(step[COUNTS] & 255), uint32(step[COUNTS] >> 8)
        x_bytes = uint32(source[2] * LINE_BYTES) if EVEN else X_BYTES
        mbarrier_expect(bars, stage, many(inputs) * x_bytes + many(blocks) * W_BYTES)
        start = uint32(base + stage * (STAGE // UNIT))
        for e in range(INPUTS):
            if has(inputs, e):
                at = start + e * (X_BYTES // UNIT)
                feature, rows = int32(step[FIRST_INPUT + e] * DEPTH), source[2] if EVEN else ROWS
                fetch_x(shared, at, source[0][X], feature, row, rows, bars, stage)
        for b in range(BLOCKS):
            # The blocks of a cluster take turns; each one's copies are for all of them.
            nth = before(blocks, b)
            if has(blocks, b) and (CLUSTER == 1 or (stage + nth) % CLUSTER == rank):
                at = start + W_START // UNIT + nth * (W_BYTES // UNIT)
                w = source[1] if FLOAT32 else source[0]
                fetch_w(w, step[FIRST_BLOCK + b], shared, at, bars, stage)

    return request


def x_box(form: Form, rows: int = 0) -> tuple[int, int]:
    """The box of x that one copy loads, of even tiles `rows`; of x.T where x is feature-major."""
    depth, item, rows = form.tile.DEPTH, form.tile.ITEM, rows or min(form.tile.ROWS, 256)
    return (depth, LINE // item) if form.x_transposed else (rows, depth)


def w_box(form: Form) -> tuple[int, int, int]:
    """The box of w that one copy loads."""
    tile = form.tile
    return (1, tile.B, tile.DEPTH) if form.transposed else (1, tile.DEPTH, min(tile.B, 64))


@cache
def fetch_block(form: Form) -> Any:
    """DEPTH rows of a block of w, or columns for w.T, in panels of at most 64 columns."""
    tile, transposed, ragged, in_two = form.tile, form.transposed, form.ragged, form.w_maps > 2
    DEPTH, PARTS, (_, LINES, WIDTH) = tile.DEPTH, tile.PARTS, w_box(form)
    PANELS, BYTES = 1 if transposed else tile.B // WIDTH, 2 * LINES * WIDTH
    load = load_block_for(tile.CLUSTER)

    @cuda.jit(device=True)
    def fetch_from(w_map, kept, shared, place, bars, stage):
        block, part = int32(kept // PARTS), int32(kept % PARTS * DEPTH)
        for i in range(PANELS):
            at = place + i * BYTES
            if transposed:
                load(shared, at, w_map, part, 0, block, bars, stage)
            else:
                load(shared, at, w_map, i * WIDTH, part, block, bars, stage)

    @cuda.jit(device=True)
    def fetch(maps, kept, shared, place, bars, stage):
        first = W
        if in_two and kept & SCALED:
            first, kept = SCALED_W, uint32(kept ^ uint32(SCALED))
        if ragged and kept >> 31:
            fetch_from(maps[first + 1], kept & 0x7FFFFFFF, shared, place, bars, stage)
        else:
            fetch_from(maps[first], kept, shared, place, bars, stage)

    return fetch
