"""What `k7_small_blocks.strips` still calls `repair.repairing_lines`."""

from __future__ import annotations

from numbsparse.kernels.parts.repair import repairing_lines as mender_of_lines

__all__ = ["mender_of_lines"]
