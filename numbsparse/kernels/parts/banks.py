"""Where a piece of 16 bytes is in a tile of shared memory: pieces read together use all banks.

Shared memory has 32 banks of 4 bytes, so eight pieces are read at once, without bank conflicts, if
they are at eight different places of 128 bytes. Those of one line are; those of one column are
because `swap`, which follows from the line, is XORed into the place. Every size is a power of two,
so a place moves by constant lines and pieces without being computed again.
"""

from functools import cache
from typing import Any

from numba import cuda


@cache
def place(PIECES: int, PIECE: int, swap: Any) -> tuple[Any, Any]:
    """(place_in, move) for a tile with PIECES in a line and PIECE items in a piece.

    place_in(line, piece) is the item where a piece begins; move(at, line, piece) where the piece
    begins that is `line` lines and `piece` pieces further on than `at`, if adding these carries no
    bit within either. `at` may count from any multiple of 128 bytes.
    """

    @cuda.jit(device=True)
    def place_in(line, piece):
        return ((line * PIECES + piece) ^ swap(line)) * PIECE

    @cuda.jit(device=True)
    def move(at, line, piece):
        by = (line * PIECES + piece) ^ swap(line)
        return (at ^ (by % 8 * PIECE)) + by // 8 * (8 * PIECE)

    return place_in, move


@cache
def swap_for_rows(PIECES: int) -> Any:
    """For `ldmatrix`, which reads one piece of each of eight neighbouring lines."""
    LINES, SWAPPED = max(8 // PIECES, 1), min(PIECES, 8)  # lines in 128 bytes

    @cuda.jit(device=True)
    def swap(line):
        return line // LINES % SWAPPED

    return swap


@cache
def swap_for_lanes(PIECES: int, STEP: int) -> Any:
    """For loads lane by lane: two to eight pieces of a line, of lines that are STEP apart."""
    LINES = max(STEP, 8 // PIECES)

    @cuda.jit(device=True)
    def swap(line):
        group = line // LINES
        return group % 2 * 4 + group // 2 % 2 * 2 + group // 4 % 2

    return swap
