"""Where the values of a tile are in shared memory, for the copy engine and for `wgmma`.

A tile is LINES lines of 16-bit values or of float32, cut into panels: a panel holds `width` bytes
of every line, gapless, and wider tiles have several panels, `panel` bytes from one to the next.
Eight lines are a group, and groups may be apart, as those of a part of an image are. Within a
panel the pieces of 16 bytes are swizzled, so that neither a line nor a column of pieces hits a
bank twice: `swizzled` says how. The hardware uses the address, not the line, so panels start at
multiples of 8 lines, and are read from any line on.
"""

from typing import Any, NamedTuple


class Operand(NamedTuple):
    """How an operand of a product is stored in shared memory."""

    width: int  # bytes of a line in a panel: 32, 64 or 128
    panel: int  # bytes from one panel to the next
    transposed: bool = False  # whether the sum runs down the lines; else along them
    group: int = 0  # bytes from 8 lines to the next 8; 0: gapless

    @property
    def apart(self) -> int:
        return self.group or 8 * self.width

    def step(self, k: int) -> int:
        """The byte where the k-th 16 terms of the sum begin; 8 of float32, never transposed."""
        if self.transposed:
            return 2 * k * self.apart
        panel, within = divmod(32 * k, self.width)
        return panel * self.panel + within

    def rows(self, m: int) -> int:
        """The byte where the m-th 64 rows of the product begin."""
        return 128 // self.width * m * self.panel if self.transposed else 8 * m * self.apart

    def place(self, row: Any, k: Any, itemsize: int = 2) -> Any:
        """The byte of a row of the product and a term of its sum, swaps left out."""
        line, along = (k, row) if self.transposed else (row, k)
        panel, within = divmod(itemsize * along, self.width)
        return panel * self.panel + line // 8 * self.apart + line % 8 * self.width + within


def swizzled(byte: Any, width: int) -> Any:
    """Where the hardware puts what belongs at a byte of shared memory.

    Bits 4 to 6 of the address, the piece in 128 bytes, are XORed with bits 7 to 9, the lines of 128
    bytes: with all three of them at panels of 128 bytes, two at 64, one at 32. PTX ISA, "Tensor
    swizzling modes".
    """
    return byte ^ (byte >> 7 & (width // 16 - 1)) << 4
