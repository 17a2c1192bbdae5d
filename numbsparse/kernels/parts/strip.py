"""A strip of y, or a region of w, in a block of threads: its warps, its sums, a stage of its ring.

`matmul.k7_small_blocks` has such of matrices, `conv.k6_strips` of images.
"""

from typing import Any, NamedTuple

from numbsparse.kernels.card import handed_over, registers
from numbsparse.kernels.parts.pieces import part_bytes, parts_at
from numbsparse.kernels.parts.swizzle import PERIOD

LINE = 128  # bytes of a group of a region in a row of the batch
SECTOR = 32  # bytes that memory writes at once
WARP_COLUMNS = 32
ALIGNED = 4  # steps: what says where they are is fetched by 16 bytes
FETCHING = 32  # registers of a thread that fetches, where others have what it lacks


class Strip(NamedTuple):
    """Block size, rows of y, warps that multiply; features that are fetched together, such groups
    and steps in a stage; stages of the ring; blocks of threads that share the groups of x, each for
    columns and warps of its own.

    A stage begins with how many steps each warp has and where they are; gates may follow, then the
    values of w, then the groups, ROWS lines of WIDTH features each, their pieces swizzled; of x
    that is feature-major boxes of WIDTH lines of 128 bytes along the batch. So what a warp reads
    ahead of the last step stays as long as the stage does; x in boxes may be the next stage's.
    """

    B: int
    ROWS: int
    WARPS: int
    WIDTH: int
    GROUPS: int
    STEPS: int
    STAGES: int
    CLUSTER: int = 1
    FETCHERS: int = 4  # warps, at no cost: as many registers are left with one of them
    ITEM: int = 2  # bytes of a value
    SPLIT: int = 1  # blocks of threads of a cluster that have a part of the sum each
    PACKED: bool = False  # whether w comes in the order of its steps (`parts.packed`)
    GATED: str = ""  # the dtype of values that are multiplied by gates
    RAGGED: bool = False  # whether a block of these has features that are not there
    BOX: int = 0  # pixels of a group that several taps see (`pixels.Shared`); 0: ROWS
    SHIFTS: int = 1  # of a box, by which its blocks are counted
    BESIDE: int = 1  # blocks of threads of a multiprocessor
    FREE: bool = False  # whether parts of a sum that is split meet in stages that are not filled

    @property
    def COLUMNS(self) -> int:
        """Block columns of a warp."""
        return WARP_COLUMNS // self.B

    @property
    def TOGETHER(self) -> int:
        """Neighbouring block columns of a warp, which write whole sectors of 32 bytes."""
        return max(SECTOR // (self.B * self.ITEM), 1)

    @property
    def BLOCKS_A_STEP(self) -> int:
        return blocks_of_step(self.B, self.ITEM)

    @property
    def HEAD(self) -> int:
        """Words that say how many steps each warp has."""
        return -(-self.WARPS // ALIGNED) * ALIGNED

    @property
    def GATES(self) -> bool:
        """Whether a stage has the gates of its blocks, and who multiplies looks at them.

        Steps of blocks of 8 are too short for that: of 64 rows they took 1.64 times as long as
        without gates, in float32 1.25, where lanes that scale them take 1.20 and 1.04 (H200).
        """
        return self.GATED != "" and not self.PACKED and self.B == 16

    @property
    def W_START(self) -> int:
        """Bytes of a stage before the values of w."""
        return 4 * (self.HEAD + self.STEPS * (2 if self.GATES else 1))

    @property
    def STEP_BYTES(self) -> int:
        return self.ITEM * self.BLOCKS_A_STEP * self.B**2

    @property
    def X_START(self) -> int:
        return -(-(self.W_START + self.STEPS * self.STEP_BYTES) // PERIOD) * PERIOD

    @property
    def SPAN(self) -> int:
        """Features of a group, as blocks of w are counted."""
        return self.WIDTH * self.SHIFTS

    @property
    def GROUP_BYTES(self) -> int:
        return self.ITEM * self.WIDTH * (self.BOX or self.ROWS)

    def BOX_ROWS(self, transposed: bool) -> int:
        """Rows of the batch in one copy of a group; of feature-major x those of a line."""
        return 128 // self.ITEM if transposed else self.ROWS

    @property
    def ZERO_BYTES(self) -> int:
        """A group of zeros where a step may be half empty; of boxes a line is enough."""
        if self.BLOCKS_A_STEP == 1:
            return 0
        return PERIOD if self.BOX else self.GROUP_BYTES

    @property
    def STAGE_BYTES(self) -> int:
        return self.X_START + self.GROUPS * self.GROUP_BYTES + self.ZERO_BYTES

    @property
    def SLICES(self) -> int:
        """Blocks that store y of a sum that is split; of float32 a lane has rows of two tiles."""
        return min(self.SPLIT, 4 if self.ITEM == 2 else 2)

    @property
    def SLICE(self) -> int:
        """Rows that such a block stores."""
        return 16 * -(-self.ROWS // 16 // self.SLICES)

    @property
    def BEHIND(self) -> int:
        """Bytes besides the stages: where they begin, and of boxes what is read ahead of a step."""
        return PERIOD + (self.GROUP_BYTES if self.BOX and self.ITEM == 4 else 0)

    @property
    def PART_BYTES(self) -> int:
        """Of the parts of a slice of a sum that is split."""
        return part_bytes(self.WARPS, self.SPLIT * self.SLICE) if self.SPLIT > 1 else 0

    @property
    def PARTS_AT(self) -> int:
        """Where in the ring these are: in its last stages, or where it was."""
        return parts_at(self.STAGES, self.STAGE_BYTES, self.PART_BYTES) if self.FREE else 0

    @property
    def SHARED_BYTES(self) -> int:
        return max(self.STAGES * self.STAGE_BYTES, self.PART_BYTES) + self.BEHIND

    @property
    def bare(self) -> "Strip":
        """What `plan_strips` asks for: sums that are split, or gated, have the same plan."""
        return self._replace(SPLIT=1, GATED="", RAGGED=False)


def registers_of(strip: Strip) -> tuple[int, int, dict[str, Any]]:
    """As `handed_over`: of four fours of warps some are."""
    if strip.WARPS != 12:
        return 0, 0, registers(32 * (strip.WARPS + strip.FETCHERS) * strip.BESIDE, most=255)
    return handed_over(strip.WARPS, strip.FETCHERS, FETCHING)


def blocks_of_step(B: int, item: int) -> int:
    """Two of 8 x 8 fill the 16 terms of an mma of 16 bits."""
    return 16 // B if item == 2 else 1


class Region(NamedTuple):
    """Warps that multiply, slots of a warp, groups of features, rows of a stage of x and dy, stages
    of the ring; warps that request them from the copy engine; bytes of a value; slots that are
    multiplied at once, of which a warp has a multiple; and blocks of threads, a cluster, that sum
    over a part of the batch each.

    A group is DEPTH lines of FEATURES; of a transposed operand FEATURES lines of DEPTH rows of the
    batch. Where taps share boxes (`pixels.Shared`) it has room for BOX lines, and its features
    count once for each of SHIFTS lines. There are slots for all blocks of a column that a group of
    x may have.
    """

    WARPS: int
    SLOTS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    FETCHERS: int = 2
    ITEM: int = 2
    AT_ONCE: int = 1
    SPLIT: int = 1
    BOX: int = 0
    SHIFTS: int = 1

    @property
    def FEATURES(self) -> int:
        """Of a group."""
        return LINE // self.ITEM

    @property
    def LINES(self) -> int:
        """That a group has room for."""
        return self.BOX or self.DEPTH

    @property
    def GROUP_BYTES(self) -> int:
        return LINE * self.LINES

    @property
    def CODES(self) -> int:
        """Of the slots of all warps."""
        return self.WARPS * self.SLOTS

    @property
    def STAGE_BYTES(self) -> int:
        return self.GROUPS * self.GROUP_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.STAGES * self.STAGE_BYTES + PERIOD
