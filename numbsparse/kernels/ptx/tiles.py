"""Where the values of a tile lie in shared memory, for the copy engine and for `wgmma`.

A tile is LINES lines of 16-bit values, cut into panels: a panel holds `width` bytes of every line,
gapless, and wider tiles have several panels, `panel` bytes from one to the next. Within a panel the
pieces of 16 bytes change places, so that neither a line nor a column of pieces meets a bank twice:
`swizzled` says how. The hardware goes by the address, so panels start at multiples of 8 lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operand(NamedTuple):
    """How a factor of a product lies in shared memory."""

    width: int  # bytes of a line in a panel: 32, 64 or 128
    panel: int  # bytes from one panel to the next
    turned: bool = False  # whether the sum runs down the lines; else along them

    def step(self, k: int) -> int:
        """The byte where the k-th 16 terms of the sum begin."""
        if self.turned:
            return 16 * k * self.width
        panel, within = divmod(32 * k, self.width)
        return panel * self.panel + within

    def rows(self, m: int) -> int:
        """The byte where the m-th 64 rows of the product begin."""
        return 128 // self.width * m * self.panel if self.turned else 64 * m * self.width

    def place(self, row: Any, k: Any) -> Any:
        """The byte of a row of the product and a term of its sum, swaps left out."""
        line, along = (k, row) if self.turned else (row, k)
        return 2 * along // self.width * self.panel + line * self.width + 2 * along % self.width


def swizzled(byte: Any, width: int) -> Any:
    """Where the hardware puts what stands at a byte of shared memory.

    Bits 4 to 6 of the address, the piece in 128 bytes, are XORed with bits 7 to 9, the lines of 128
    bytes: with all three of them at panels of 128 bytes, two at 64, one at 32. PTX ISA, "Tensor
    swizzling modes".
    """
    return byte ^ (byte >> 7 & (width // 16 - 1)) << 4
