"""Pictures of patterns: text for a terminal, a figure where matplotlib is installed."""

from __future__ import annotations

import io
import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse.files import write_bytes
from numbsparse.patterns.checks import as_pattern, integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The signs for a cell of blocks, and what each block of the cell adds to the number of its sign.
WIDE = ["  ", "██"], [[1]]
HALVES = [" ", "▀", "▄", "█"], [[1], [2]]
BRAILLE = [chr(0x2800 + dots) for dots in range(256)], [[1, 8], [2, 16], [4, 32], [64, 128]]
SHADES = [" ", "░", "▒", "▓", "█"]
# For a file or a pipe whose encoding lacks them, as on Windows.
PLAIN = str.maketrans("░▒▓█─│┌┐└┘", ".:*#-|++++")

INK = "#1f3a5f"
MARGIN_INK = "#9aa9bd"
DPI = 150
FORMATS = ("png", "pdf", "svg")
FINEST = 400  # a side of more blocks than this is drawn as shades in the figure


def draw(pattern: Any, *, max_width: int = 80) -> Drawing:
    """A picture of which blocks are kept: inputs downwards, outputs across.

    It shows as text in a terminal and wherever it is printed, and as a figure in a notebook that
    has matplotlib. `.save("layout.png")` writes the figure to a file, `.figure()` returns it,
    `.plot(ax)` draws into axes of your own.

    Parameters
    ----------
    pattern : a pattern, a Layout or a BlockSparse
    max_width : int
        The text picture is at most this many characters wide and about half as many lines high; at
        least 8. A pattern too large for a character per two blocks is drawn in braille, a dot per
        block; one too large for that in shades, each for the density of a rectangle of blocks.
        Where the standard output has none of these characters, ASCII is drawn.

    Raises
    ------
    TypeError, ValueError
        If `pattern` is none of the three, or `max_width` is not an integer of at least 8.

    Examples
    --------
    >>> import numbsparse as ns
    >>> ns.draw(ns.patterns.banded(4, 8, width=1))
    4 x 8 blocks, 20 kept, density 0.625 (inputs down, outputs across)
    ┌────────────────┐
    │████████        │
    │████████████    │
    │    ████████████│
    │        ████████│
    └────────────────┘
    each row keeps 4 to 6, each column 2 to 3
    >>> ns.draw(ns.patterns.watts_strogatz(64, 3, 0.1, seed=0)).save("layout.png")  # doctest: +SKIP
    """
    width = integer("max_width", max_width, least=8)
    layout = getattr(pattern, "layout", None)
    owner = layout if hasattr(layout, "pattern") else pattern
    return Drawing(as_pattern(getattr(owner, "pattern", owner)).copy(), width)


class Drawing:
    """What `draw` returns: a picture as text, and as a matplotlib figure on demand."""

    def __init__(self, pattern: np.ndarray, max_width: int):
        self.pattern = pattern
        self.max_width = max_width

    def __repr__(self) -> str:
        plain = not _can_print(BRAILLE[0][-1] + "".join(map(chr, PLAIN)))
        rows, note = _text(self.pattern, self.max_width - 2, plain)
        frame = "─" * len(rows[0])
        title = f"{_summary(self.pattern)} (inputs down, outputs across)"
        picture = [f"┌{frame}┐", *(f"│{row}│" for row in rows), f"└{frame}┘"]
        text = "\n".join([title, *picture, _fans(self.pattern), *note])
        return text.translate(PLAIN) if plain else text

    def _repr_png_(self) -> bytes | None:
        try:
            return self._render("png")
        except ImportError:
            return None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the figure whole or not at all; the path ends in its format: png, pdf or svg.

        Raises
        ------
        ImportError
            Without matplotlib.
        ValueError
            If it ends in another format.
        """
        path = Path(path)
        file_format = path.suffix[1:].lower()
        if file_format not in FORMATS:
            raise ValueError(f"path takes a name that ends in .png, .pdf or .svg, got {path.name}")
        write_bytes(path, self._render(file_format))

    def figure(self) -> Figure:
        """The pattern as a matplotlib figure; its margins show the blocks of each row and column.

        Opens no window, and touches no state of pyplot. Raises ImportError without matplotlib.
        """
        figures = matplotlib_figure()
        shades, _ = _pool(self.pattern, FINEST, FINEST)
        # A whole number of pixels per cell, so that cells drawn alike look alike.
        cell = max(1, 4.6 * DPI // max(shades.shape)) / DPI
        high, wide = (max(1.0, cell * cells) for cells in shades.shape)
        # Inches around the image.
        left, below, above, right, margin, gap = 0.8, 0.6, 0.6, 0.4, 0.7, 0.12
        total = (left + wide + gap + margin + right, below + high + gap + margin + above)
        figure: Figure = figures.Figure(figsize=total, dpi=DPI)

        def axes(x: float, y: float, width: float, height: float) -> Axes:
            box = (x / total[0], y / total[1], width / total[0], height / total[1])
            return figure.add_axes(box)

        image = self.plot(axes(left, below, wide, high))
        image.set(aspect="auto", title="")
        _plot_counts(axes(left, below + high + gap, wide, margin), self.pattern.sum(axis=0), "x")
        _plot_counts(axes(left + wide + gap, below, margin, high), self.pattern.sum(axis=1), "y")
        title = _summary(self.pattern).replace(", ", "\n", 1)
        figure.suptitle(title, x=left / total[0], y=1 - 0.15 / total[1], ha="left", fontsize=10)
        return figure

    def plot(self, ax: Axes) -> Axes:
        """Draw the pattern into matplotlib axes, with a title and without margins; returns them."""
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm
        from matplotlib.ticker import MaxNLocator

        in_blocks, out_blocks = self.pattern.shape
        shades, (h, w) = _pool(self.pattern, FINEST, FINEST)
        ax.imshow(
            shades,
            cmap=LinearSegmentedColormap.from_list("ink", ["white", INK]),
            # The square root: a cell with one block of many is still seen.
            norm=PowerNorm(0.5, vmin=0, vmax=shades.max() or 1),
            interpolation="nearest",
            extent=(-0.5, shades.shape[1] * w - 0.5, shades.shape[0] * h - 0.5, -0.5),
        )
        ax.set(xlim=(-0.5, out_blocks - 0.5), ylim=(in_blocks - 0.5, -0.5))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(
                MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
            )
        if max(in_blocks, out_blocks) <= 40:
            ax.set_xticks(np.arange(out_blocks + 1) - 0.5, minor=True)
            ax.set_yticks(np.arange(in_blocks + 1) - 0.5, minor=True)
            ax.grid(which="minor", color="white", linewidth=1)
            ax.tick_params(which="minor", length=0)
        ax.set(xlabel="out block", ylabel="in block", title=_summary(self.pattern))
        return ax

    def _render(self, file_format: str) -> bytes:
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format=file_format)
        return buffer.getvalue()


def _plot_counts(ax: Axes, counts: np.ndarray, along: str) -> None:
    """Blocks per column above the image (along x), or blocks per row to the right of it (y)."""
    edges = np.arange(counts.size + 1) - 0.5
    most = max(1, int(counts.max()))
    ax.spines[:].set_visible(False)
    ax.tick_params(labelsize=8)
    if along == "x":
        ax.stairs(counts, edges, fill=True, color=MARGIN_INK)
        ax.set(xlim=(edges[0], edges[-1]), ylim=(0, most), xticks=[], yticks=[most])
        ax.set_ylabel("blocks per\ncolumn", fontsize=8)
    else:
        ax.stairs(counts, edges, fill=True, color=MARGIN_INK, orientation="horizontal")
        ax.set(ylim=(edges[-1], edges[0]), xlim=(0, most), yticks=[], xticks=[most])
        ax.set_xlabel("blocks\nper row", fontsize=8)


def matplotlib_figure() -> Any:
    """matplotlib's module of figures, which draw without a screen; ImportError without it."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError(
            "a figure needs matplotlib: pip install 'numbsparse[examples]'"
        ) from error
    return figure


def _can_print(characters: str) -> bool:
    """Whether the standard output's encoding has them."""
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text(pattern: np.ndarray, width: int, plain: bool) -> tuple[list[str], list[str]]:
    """Rows of characters, each at most `width` wide, and a note on what shades mean.

    `plain`: of these characters those in PLAIN only.
    """
    height = width // 2
    drawn = (
        (WIDE, min(16, height), min(16, width // 2)),
        (HALVES, 2 * height, width),
        (BRAILLE, 4 * height, 2 * width),
    )
    for (signs, values), most_rows, most_columns in drawn[: 1 if plain else None]:
        if pattern.shape[0] <= most_rows and pattern.shape[1] <= most_columns:
            return _spell(pattern, signs, np.array(values)), []
    density, (h, w) = _pool(pattern, height, width)
    darkest = density.max() or 1.0
    shade = np.ceil(density / darkest * (len(SHADES) - 1)).astype(int)
    note = f"a character covers {h} x {w} blocks; █ means density {darkest:.2g}"
    return ["".join(SHADES[s] for s in row) for row in shade], [note]


def _spell(pattern: np.ndarray, signs: list[str], values: np.ndarray) -> list[str]:
    """A sign per cell of blocks, chosen by which of them are kept."""
    h, w = values.shape
    padded = np.pad(pattern, [(0, -pattern.shape[0] % h), (0, -pattern.shape[1] % w)])
    cells = padded.reshape(padded.shape[0] // h, h, padded.shape[1] // w, w)
    chosen = np.einsum("ihjw,hw->ij", cells.astype(int), values)
    return ["".join(signs[c] for c in row) for row in chosen]


def _pool(pattern: np.ndarray, height: int, width: int) -> tuple[np.ndarray, tuple[int, int]]:
    """The density in each of at most height x width equal rectangles, and their sides."""
    h, w = -(-pattern.shape[0] // height), -(-pattern.shape[1] // width)
    rows, columns = np.arange(0, pattern.shape[0], h), np.arange(0, pattern.shape[1], w)

    def pooled(a: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(a.astype(float), rows, axis=0), columns, axis=1)

    return pooled(pattern) / pooled(np.ones_like(pattern)), (h, w)


def _summary(pattern: np.ndarray) -> str:
    in_blocks, out_blocks = pattern.shape
    kept = int(pattern.sum())
    return f"{in_blocks} x {out_blocks} blocks, {kept} kept, density {kept / pattern.size:.3g}"


def _fans(pattern: np.ndarray) -> str:
    def span(counts: np.ndarray) -> str:
        least, most = counts.min(), counts.max()
        return f"{least}" if least == most else f"{least} to {most}"

    return f"each row keeps {span(pattern.sum(axis=1))}, each column {span(pattern.sum(axis=0))}"
