"""How forward and input_grad cut their work, and how much shared memory it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from numbsparse.device import SIMULATED

ALIGNED = 1024  # bytes: where tiles begin in shared memory


class Tile(NamedTuple):
    """A block of threads computes ROWS rows of y in COLUMNS block columns at once.

    A step brings into one stage of the ring a tile of x for each of up to INPUTS input blocks, and
    up to BLOCKS kept blocks that meet them.
    """

    B: int
    COLUMNS: int  # a power of 2
    INPUTS: int
    BLOCKS: int
    M_TILES: int  # of 64 rows, in a warpgroup
    WARPGROUPS: int
    STAGES: int
    CLUSTER: int = 1  # blocks of threads that share the blocks of w
    SHARES: int = 1  # of the columns, each with WARPGROUPS // SHARES warpgroups
    FETCHERS: int = 1  # warps that ask for copies
    ROOMS: int = 1  # panels of y that a warp has room for

    @property
    def DEPTH(self) -> int:
        """Terms of a sum in a tile of x; a large B takes several."""
        return min(self.B, 64)

    @property
    def PARTS(self) -> int:
        return self.B // self.DEPTH

    @property
    def ROWS(self) -> int:
        return 64 * self.M_TILES * (self.WARPGROUPS // self.SHARES)

    @property
    def SHARE(self) -> int:
        """Block columns of a warpgroup."""
        return self.COLUMNS // self.SHARES

    @property
    def X_BYTES(self) -> int:
        return 2 * self.ROWS * self.DEPTH

    @property
    def W_BYTES(self) -> int:
        return 2 * self.B * self.DEPTH

    @property
    def WIDTH(self) -> int:
        """Columns of a panel of w or y."""
        return min(self.B, 64)

    @property
    def ROOM_BYTES(self) -> int:
        return 2 * 16 * self.WIDTH

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
        return self.STAGES * self.STAGE_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.RING_BYTES + self.WARPS * self.ROOMS * self.ROOM_BYTES + ALIGNED

    @property
    def WARPS(self) -> int:
        """That multiply; after them come those that fetch."""
        return 4 * self.WARPGROUPS

    @property
    def THREADS(self) -> int:
        return 32 * (self.WARPS + self.FETCHERS)

    @property
    def SUMS(self) -> int:
        """Accumulators of a thread."""
        return self.SHARE * self.M_TILES * self.B // 2

    @property
    def RECORD(self) -> int:
        """Numbers that tell of a step: a mask for each share, counts, input blocks, kept blocks."""
        return self.SHARES + 1 + self.INPUTS + self.BLOCKS

    @property
    def MASKS(self) -> int:
        """Of all stages, for each share."""
        return self.STAGES * self.SHARES

    @property
    def options(self) -> dict[str, Any]:
        """For cuda.jit: a quarter of a multiprocessor has 16384 registers for its warps."""
        warps = -(-self.THREADS // 128)
        registers = min(16384 // (32 * warps) // 8 * 8, 248)
        return {} if SIMULATED else {"max_registers": registers}


TILES = {
    32: Tile(32, 8, 3, 8, 2, 4, 5, 2, 4, 2),
    64: Tile(64, 2, 1, 2, 1, 4, 4, 2),
    128: Tile(128, 1, 1, 1, 1, 4, 4, 2),
}


def tile_of(size: int, batch: int) -> Tile:
    """The tile for a block size: for a small batch with fewer rows, and no cluster to share them.

    In the simulator it is a small one, for it runs a thread for a thread.
    """
    tile = TILES[size]
    if SIMULATED:
        tile = tile._replace(WARPGROUPS=tile.SHARES, STAGES=2, FETCHERS=2)
        return tile if batch > tile.ROWS else tile._replace(CLUSTER=1)
    if batch > tile.ROWS:
        return tile
    tile = tile._replace(M_TILES=min(tile.M_TILES, -(-batch // 64)), CLUSTER=1)
    return tile._replace(WARPGROUPS=-(-batch // (64 * tile.M_TILES)) * tile.SHARES)


def line_tiles(size: int, batch: int) -> list[Tile]:
    """That tile, and those worth trying beside it."""
    tile = tile_of(size, batch)
    return [tile, tile._replace(CLUSTER=1)] if tile.CLUSTER > 1 else [tile]
