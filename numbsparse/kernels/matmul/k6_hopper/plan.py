"""How forward and input_grad cut their work, and what a block of threads does step by step."""

from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import Lengths
from numbsparse.kernels.parts.groups import bit_of, bits_set, grouped, lowest_of, write_shares
from numbsparse.kernels.parts.pieces import part_bytes
from numbsparse.kernels.parts.store import Sums
from numbsparse.layout import Index

ALIGNED = 1024  # bytes: where tiles begin in shared memory
LINE = 128  # bytes of a line of x in shared memory, at most
POOL = 224 * 1024  # bytes of shared memory for the stages of float32
READ_AHEAD = 64  # records
LAST = 1 << 31  # in a mask: the group's last step
TO_SCALE = 1 << 25  # in a mask: a block of the share has another gate than one
BEFORE, MOST = 26, 31  # in a mask, from this bit on: kept blocks of the shares before, at most
EDGE = 1 << 31  # in a kept block: it reaches beyond the edge along the sum
SCALED = 1 << 30  # in a kept block: it is read where blocks are times their gates


class Tile(NamedTuple):
    """A block of threads computes ROWS rows of y in COLUMNS strips of columns at once.

    A strip is a block column; in float32, whose sums take more registers, at most 64 columns of
    one. A step loads into one stage of the ring a tile of x for each of up to INPUTS input blocks,
    and up to BLOCKS parts of kept blocks that multiply them.
    """

    B: int
    COLUMNS: int  # a power of 2
    INPUTS: int
    BLOCKS: int
    M_TILES: int  # of 64 rows, in a warpgroup
    WARPGROUPS: int
    STAGES: int
    CLUSTER: int = 1  # blocks of threads that share the blocks of w
    SHARES: int = 1  # of the strips, each with WARPGROUPS // SHARES warpgroups
    FETCHERS: int = 1  # warps that request copies
    ITEM: int = 2  # bytes of a value
    UNIT: int = 1  # bytes in which places in shared memory are counted
    SPLIT: int = 1  # blocks of threads of a cluster that have a part each of a tile's steps

    @property
    def DEPTH(self) -> int:
        """Terms of a sum in a tile of x; a large B takes several."""
        return min(self.B, LINE // self.ITEM)

    @property
    def PARTS(self) -> int:
        """Of a block along the sum."""
        return self.B // self.DEPTH

    @property
    def N(self) -> int:
        """Columns of a strip."""
        return min(self.B, 64) if self.ITEM == 4 else self.B

    @property
    def ACROSS(self) -> int:
        """Strips of a block column."""
        return self.B // self.N

    @property
    def ROWS(self) -> int:
        return 64 * self.M_TILES * (self.WARPGROUPS // self.SHARES)

    @property
    def SHARE(self) -> int:
        """Strips of a warpgroup."""
        return self.COLUMNS // self.SHARES

    @property
    def X_BYTES(self) -> int:
        return self.ITEM * self.ROWS * self.DEPTH

    @property
    def W_BYTES(self) -> int:
        """Of a part of a block; in float32 of its image, hi and lo."""
        return (8 if self.ITEM == 4 else 2) * self.N * self.DEPTH

    @property
    def W_START(self) -> int:
        """Where in a stage the blocks of w begin."""
        return self.INPUTS * self.X_BYTES

    @property
    def STAGE_BYTES(self) -> int:
        size = self.W_START + self.BLOCKS * self.W_BYTES
        return -(-size // ALIGNED) * ALIGNED

    @property
    def RING_BYTES(self) -> int:
        """Where the sums of parts are left, too, once it is empty."""
        own = self.SHARE * self.M_TILES * self.N // 2 if self.SPLIT > 1 else 0  # sums of a thread
        return max(self.STAGES * self.STAGE_BYTES, part_bytes(self.WARPS, own))

    @property
    def BUFFER_BYTES(self) -> int:
        """Where a warp puts y in shared memory; float32 is stored straight from registers."""
        return 0 if self.ITEM == 4 else self.sums("f16").PANEL_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.RING_BYTES + self.WARPS * self.BUFFER_BYTES + ALIGNED

    @property
    def WARPS(self) -> int:
        """That multiply; those that fetch follow."""
        return 4 * self.WARPGROUPS

    @property
    def THREADS(self) -> int:
        """Whole warpgroups hand over registers (setmaxnreg): float32 has one warp that fetches."""
        whole = self.ITEM == 4 and not SIMULATED
        return 32 * (self.WARPS + (4 if whole else self.FETCHERS))

    def sums(self, kind: str) -> Sums:
        """The 16-bit sums of a warp."""
        return Sums(kind, self.B, self.SHARE, self.M_TILES, APART=64)

    @property
    def MASKS(self) -> int:
        """Words of what warps know of the stages: each share's mask in each, and as many zeros."""
        return self.STAGES * (self.SHARES + 1)

    @property
    def RECORD(self) -> int:
        """Numbers of a step: a mask for each share, counts, input blocks, kept blocks."""
        return self.SHARES + 1 + self.INPUTS + self.BLOCKS

    @property
    def REGISTERS(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of one that fetches, if these hand over any.

        Five warpgroups begin with 96 each, three with 168: if all together requested more, some
        would wait forever.
        """
        if self.ITEM == 2:
            return 0, 0
        return (112, 32) if self.WARPGROUPS == 4 else (200, 32)

    @property
    def options(self) -> dict[str, Any]:
        """For cuda.jit: a quarter of a multiprocessor has a quarter of the warps."""
        if self.ITEM == 4:
            return {} if SIMULATED else {"launch_bounds": (self.THREADS, 1)}
        return registers(-(-self.THREADS // 128) * 128)


class Form(NamedTuple):
    """What a kernel is compiled for."""

    tile: Tile
    kind: str  # "f16", "bf16", or the precision of float32
    transposed: bool  # y = x @ w.T
    x_transposed: bool  # x is feature-major
    ragged: bool  # of 16 bits: the last input block reaches beyond the edge
    order: str  # of y, see `parts.store`
    gated: bool = False  # whether the kernel leaves blocks out by gates, and multiplies by them
    w_maps: int = 2  # 4 where kept blocks may be SCALED
    even: bool = False  # tiles have fewer rows than ROWS, as many each
    ahead: bool = False  # the plan is read while earlier kernels end, none of which writes it


# Without clusters 8,192 rows took 1.05 to 1.13 times as long, with one fetcher 1.04 to 1.22 (H200).
TILES = {
    32: Tile(32, 8, 3, 8, 2, 4, 5, 2, 4, 2),
    64: Tile(64, 2, 1, 2, 1, 4, 4, 2),
    128: Tile(128, 1, 1, 1, 1, 4, 4, 2),
}
# Smaller ones, and how many each multiprocessor must have for a tile to be taken before the next:
# fitted to an H200, where products of 96 to 2,048 rows took 0.62 of the time at the median.
SMALLER = {
    32: (Tile(32, 4, 3, 6, 2, 2, 5, 2, 2, 2), Tile(32, 1, 4, 4, 1, 1, 4)),
    64: (Tile(64, 1, 1, 1, 1, 4, 4), Tile(64, 1, 1, 1, 1, 2, 4), Tile(64, 1, 2, 2, 1, 1, 3)),
    128: (Tile(128, 1, 1, 1, 1, 2, 4), Tile(128, 1, 1, 1, 1, 1, 4)),
}
ENOUGH = {32: (1.5, 0.8, 0), 64: (1.5, 1.25, 1.5, 0), 128: (0.9, 0.6, 0)}
# Of up to FEW_ROWS rows these come first, where the parts of tiles, SPLIT of each, are as many as
# the multiprocessors or so many of them, and a strip has so many blocks of w. With 8,192 features,
# density 0.3, 96 and 128 rows they took an H200 0.75 to 0.81, 0.89 to 0.95 and 0.75 to 0.77 of the
# time (B = 32, 64, 128). Four parts took up to twice as long as two; where there are fewer blocks,
# to add the sums takes what is gained.
FEW_ROWS = 256
ONCE = {
    32: ((SMALLER[32][0]._replace(CLUSTER=1, SPLIT=2), 0.9, 35),),
    64: ((SMALLER[64][1]._replace(SPLIT=2), 0.9, 12), (SMALLER[64][1], 0.9, 0)),
    128: tuple((tile._replace(SPLIT=2), 0.5, 3) for tile in SMALLER[128]),
}


def line_tiles(
    size: int, batch: int, features: int = 0, itemsize: int = 2, per_strip: float = -1
) -> list[Tile]:
    """The tile for a block size and others worth trying, as many for any number of features.

    per_strip : blocks of w that a strip of y has, on average; below 0, none of ONCE is taken
    """
    if itemsize == 4:
        return [tile_of_float32(size, batch, features)]
    shapes = TILES[size], *SMALLER[size]
    tiles = [fitted(tile, batch) for tile in shapes]
    enough = [0 if SIMULATED else each * multiprocessors() for each in ENOUGH[size]]
    chosen = next(n for n, of in enumerate(shapes) if pieces(of, batch, features) >= enough[n])
    once = [each for each in ONCE[size] if each[0].ROWS - 64 < batch <= FEW_ROWS]
    first = [
        fitted(of, batch)
        for of, part, least in once
        if part * multiprocessors() <= pieces(of, batch, features) <= multiprocessors()
        and per_strip >= least
    ][:1]
    others = [fitted(of, batch) for of, *_ in once]
    return list(
        dict.fromkeys([*first, tiles[chosen], *tiles, tiles[0]._replace(CLUSTER=1), *others])
    )


def pieces(of: Tile, batch: int, features: int) -> int:
    """How many blocks of threads, or clusters that share w, have a tile or a part of one."""
    return -(-batch // of.ROWS) * -(-features // (of.COLUMNS * of.B)) * of.SPLIT


def fitted(tile: Tile, batch: int) -> Tile:
    """For a small batch with fewer rows, and no cluster to share them.

    In the simulator it has as few threads as the shares allow.
    """
    if SIMULATED:
        tile = tile._replace(WARPGROUPS=tile.SHARES, STAGES=2, FETCHERS=2)
    if batch > tile.ROWS:
        return tile
    tile = tile._replace(M_TILES=min(tile.M_TILES, -(-batch // 64)), CLUSTER=1)
    return tile._replace(WARPGROUPS=-(-batch // (64 * tile.M_TILES)) * tile.SHARES)


def tile_of_float32(size: int, batch: int, features: int) -> Tile:
    """With fewer rows where there would not be a tile for each multiprocessor."""
    columns, rows = 64 // min(size, 64), 64 * 4
    enough = -(-batch // rows) * -(-features // 64) >= multiprocessors()
    warpgroups = 1 if SIMULATED else 4 if enough else 2
    tile = Tile(size, columns, 1, columns, 1, warpgroups, 2, ITEM=4, UNIT=4)
    return tile if SIMULATED else tile._replace(STAGES=POOL // tile.STAGE_BYTES)


class Plan(NamedTuple):
    """What each cluster does, as one argument of a kernel: see `steps_of` and `parts.deal`."""

    records: Any
    strips: Any
    tiles: Any
    tile_starts: Any


def steps_of(index: Index, transposed: bool, tile: Tile, ragged: bool) -> tuple[Any, ...]:
    """(records, strips, lengths) of the groups of strips of the output.

    strips : (groups, COLUMNS), the strips of a group, -1 for none
    records : (steps + READ_AHEAD, RECORD); of each step
        a mask for each share of SHARE strips: bit e * SHARE + g where its strip g has a block at
        the e-th input, the number of blocks BEFORE its own, and LAST;
        the number of inputs, and 256 times that of blocks;
        the inputs, counted in tiles of x; the kept blocks in order of the masks' bits, each as
        (block * ACROSS + strip of it) * PARTS + part, and EDGE.

    Of w, or of w.T, whose columns are the block rows of w. `ragged` says whether the last input
    block reaches beyond the edge.
    """
    walk, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    n_inputs, n_strips = len(others.indptr) - 1, (len(walk.indptr) - 1) * tile.ACROSS
    strips = np.arange(n_strips, dtype=np.int32)[:, None]
    if tile.COLUMNS > 1:  # of whole lines
        strips = grouped(walk, n_inputs, tile.COLUMNS)
    most = walk.indices.size * tile.ACROSS * tile.PARTS + len(strips)  # steps, one of a block each
    records = np.zeros((most + READ_AHEAD, tile.RECORD), np.uint32)
    starts, edge = np.empty(len(strips) + 1, np.int64), n_inputs - 1 if ragged else -1
    kept = np.empty((tile.SHARES, tile.BLOCKS, 2), np.int64)
    met, own = np.zeros(n_inputs, np.uint64), np.empty((n_inputs, tile.COLUMNS), np.int32)
    sizes = tile.INPUTS, tile.BLOCKS, tile.PARTS, tile.SHARE, tile.ACROSS
    _write(*walk, strips, edge, sizes, met, own, kept, records, starts)
    return records[: starts[-1] + READ_AHEAD].view(np.int32), strips, Lengths(starts)


@compiled()
def _write(indptr, inputs, blocks, strips, edge, sizes, met, own, kept, records, starts):
    """The records: as many tiles of x as fit into a step, in order.

    met (inputs,), own (inputs, COLUMNS) : bits of the strips of a group that meet an input, and
        what names their blocks there
    kept (SHARES, BLOCKS, 2) : of each block of a step its share's bit and what names it
    """
    step, (INPUTS, BLOCKS, PARTS, SHARE, ACROSS) = 0, sizes
    counts, there = np.zeros(len(kept), np.int64), np.zeros(met.size // 64 + 1, np.uint64)
    share_of = np.arange(strips.shape[1]) // SHARE
    for group in range(len(strips)):
        starts[group] = step
        place = taken = 0
        for column in range(strips.shape[1]):
            line, across = divmod(strips[group, column], ACROSS)  # of none before the first
            for k in range(indptr[line] if line >= 0 else 0, indptr[line + 1]):
                there[inputs[k] >> 6] |= bit_of(inputs[k] & 63)
                met[inputs[k]] |= bit_of(column)
                own[inputs[k], column] = blocks[k] * ACROSS + across
        for word in range(there.size):
            while there[word]:
                which, there[word] = lowest_of(there[word])
                which += 64 * word
                meet, at_edge = bits_set(met[which]), EDGE if which == edge else 0
                for part in range(PARTS):
                    if place == INPUTS or taken + meet > BLOCKS:
                        write_shares(records[step], kept, counts, BEFORE, place)
                        step, place, taken = step + 1, 0, 0
                    records[step, counts.size + 1 + place] = which * PARTS + part
                    strips_left = met[which]
                    while strips_left:
                        column, strips_left = lowest_of(strips_left)
                        share = share_of[column]
                        kept[share, counts[share], 0] = 1 << (place - share) * SHARE + column
                        kept[share, counts[share], 1] = own[which, column] * PARTS + part + at_edge
                        counts[share] += 1
                    place, taken = place + 1, taken + meet
                met[which] = 0
        write_shares(records[step], kept, counts, BEFORE, place)
        for share in range(counts.size):
            records[step, share] |= LAST
        step += 1
    starts[-1] = step
