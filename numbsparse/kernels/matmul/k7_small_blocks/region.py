"""How many blocks of w a block of threads computes at once, and how their x and dy lie."""

from __future__ import annotations

from typing import NamedTuple

from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import SWIZZLED

GROUP = 64  # features of 16 bits that are fetched together: 128 bytes of a row


class Turned(NamedTuple):
    """Which operands are feature-major. A group of theirs is FEATURES lines of DEPTH rows of the
    batch, where else it is DEPTH lines of FEATURES."""

    x: bool
    dy: bool


class Region(NamedTuple):
    """Warps, slots of a warp, groups of features, rows of a stage of x and dy, stages of the ring;
    and warps that ask the copy engine for them.

    There are slots for all blocks of a column that a group of x may have.
    """

    WARPS: int
    SLOTS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    FETCHERS: int = 2
    ITEM: int = 2  # bytes of a value

    @property
    def FEATURES(self) -> int:
        """Of a group."""
        return 2 * GROUP // self.ITEM

    @property
    def SHARE(self) -> int:
        """Groups that a lane asks for, at most, where each lane asks for some."""
        return -(-self.GROUPS // (32 * self.FETCHERS))

    @property
    def GROUP_BYTES(self) -> int:
        return 2 * GROUP * self.DEPTH

    @property
    def STAGE_BYTES(self) -> int:
        return self.GROUPS * self.GROUP_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.STAGES * self.STAGE_BYTES + SWIZZLED
