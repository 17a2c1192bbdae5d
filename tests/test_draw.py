"""Pictures: what the text shows block by block, that it fits, and the figure."""

import io
import sys

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.draw import draw

HALVES = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}


def framed(drawing):
    """The lines inside the frame, and all lines around it."""
    lines = str(drawing).split("\n")
    top = next(i for i, line in enumerate(lines) if line.startswith("┌"))
    bottom = next(i for i, line in enumerate(lines) if line.startswith("└"))
    return [line[1:-1] for line in lines[top + 1 : bottom]], lines[:top] + lines[bottom + 1 :]


def read_halves(rows):
    cells = np.array([[HALVES[sign] for sign in row] for row in rows], dtype=bool)
    return cells.transpose(0, 2, 1).reshape(2 * len(rows), -1)


def read_braille(rows):
    """Dots are numbered down the left, down the right, and the lowest two last."""
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    pattern = np.zeros((4 * len(rows), 2 * len(rows[0])), dtype=bool)
    for i, row in enumerate(rows):
        for j, sign in enumerate(row):
            for dot, (down, right) in enumerate(places):
                pattern[4 * i + down, 2 * j + right] = ord(sign) - 0x2800 >> dot & 1
    return pattern


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 16)], ids=str)
def test_a_small_pattern_is_drawn_two_characters_per_block(shape):
    pattern = ns.patterns.random(*shape, 0.4, seed=0)
    rows, _ = framed(draw(pattern))
    assert [[row[i : i + 2] == "██" for i in range(0, len(row), 2)] for row in rows] == (
        pattern.tolist()
    )
    assert "".join(rows).strip("█ ") == ""


@pytest.mark.parametrize(
    ("shape", "read"),
    [((17, 17), read_halves), ((60, 78), read_halves), ((79, 20), read_braille),
     ((20, 79), read_braille), ((155, 156), read_braille)],
    ids=["17x17", "60x78", "79x20", "20x79", "155x156"],
)  # fmt: skip
def test_every_block_shows(shape, read):
    pattern = ns.patterns.random(*shape, 0.3, seed=1)
    rows, _ = framed(draw(pattern))
    seen = read(rows)
    assert np.array_equal(seen[: shape[0], : shape[1]], pattern)
    assert seen.sum() == pattern.sum()


def test_a_large_pattern_is_drawn_in_shades_of_density():
    pattern = np.zeros((400, 400), dtype=bool)
    pattern[:200, :200] = True  # full
    pattern[200:, 200:] = np.indices((200, 200)).sum(axis=0) % 2  # half full
    pattern[399, 0] = True  # one block in its cell
    rows, around = framed(draw(pattern, max_width=42))  # cells of 20 x 10 blocks
    assert rows == ["█" * 20 + " " * 20] * 10 + [" " * 20 + "▒" * 20] * 9 + [
        "░" + " " * 19 + "▒" * 20
    ]
    assert around[-1] == "a character covers 20 x 10 blocks; █ means density 1"


@pytest.mark.parametrize("max_width", [8, 20, 80, 200])
@pytest.mark.parametrize(
    "shape", [(1, 1), (16, 3), (5, 900), (900, 5), (33, 33), (1000, 1000)], ids=str
)
def test_the_picture_fits(shape, max_width):
    rows, _ = framed(draw(ns.patterns.random(*shape, 0.1, seed=0), max_width=max_width))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) + 2 <= max_width
    assert len(rows) <= max_width // 2


def test_the_text_around_the_picture():
    _, around = framed(draw(ns.patterns.banded(4, 8, width=1)))
    assert around == [
        "4 x 8 blocks, 20 kept, density 0.625 (inputs down, outputs across)",
        "each row keeps 4 to 6, each column 2 to 3",
    ]
    _, around = framed(draw(ns.patterns.dense(3, 2)))
    assert around[-1] == "each row keeps 2, each column 3"


def test_no_block_at_all():
    rows, around = framed(draw(np.zeros((200, 200), dtype=bool)))
    assert set("".join(rows)) == {" "}
    assert "0 kept, density 0 " in around[0]


def test_layouts_and_weights_are_drawn_as_their_pattern():
    pattern = ns.patterns.watts_strogatz(20, 2, 0.3, seed=0)
    layout = ns.Layout(pattern)
    w = ns.BlockSparse(np.zeros((layout.n_blocks, 4, 4), np.float32), layout)
    assert repr(draw(layout)) == repr(draw(w)) == repr(draw(pattern))
    assert repr(draw(pattern.astype(int).tolist())) == repr(draw(pattern))


def test_a_drawing_does_not_change_with_its_pattern():
    pattern = ns.patterns.dense(3, 3)
    drawing = draw(pattern)
    before = repr(drawing)
    pattern[:] = False
    assert repr(drawing) == before


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        ([[1, 2]], {}, ValueError, "^pattern takes .* got 2"),
        ([[np.nan]], {}, ValueError, "^pattern takes .* got nan"),
        (np.ones(3), {}, ValueError, "^pattern takes .* got 1 dimension"),
        ("layout", {}, TypeError, "^pattern takes .* got str"),
        ([[1]], {"max_width": 7}, ValueError, "^max_width takes .* got 7"),
        ([[1]], {"max_width": 40.0}, TypeError, "^max_width takes .* got 40.0"),
        ([[1]], {"max_width": True}, TypeError, "^max_width takes .* got True"),
    ],
    ids=["2", "nan", "1-D", "str", "7", "40.0", "True"],
)
def test_refusals(pattern, options, error, message):
    with pytest.raises(error, match=message):
        draw(pattern, **options)


SHAPES = [(1, 1), (24, 24), (60, 100), (300, 4), (4, 300), (900, 1000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.slow
def test_figure(shape):
    pytest.importorskip("matplotlib")
    pattern = ns.patterns.random(*shape, 0.2, seed=0)
    figure = draw(pattern).figure()
    image, columns, rows = figure.axes
    assert figure.get_suptitle().startswith(f"{shape[0]} x {shape[1]} blocks\n{pattern.sum()} kept")
    assert (image.get_xlabel(), image.get_ylabel()) == ("out block", "in block")
    # Inputs run down and outputs across, and the margins run along with them.
    assert image.get_ylim() == rows.get_ylim() == (shape[0] - 0.5, -0.5)
    assert image.get_xlim() == columns.get_xlim() == (-0.5, shape[1] - 0.5)
    assert np.array_equal(columns.patches[0].get_data().values, pattern.sum(axis=0))
    assert np.array_equal(rows.patches[0].get_data().values, pattern.sum(axis=1))
    if max(shape) <= 400:
        assert np.array_equal(image.images[0].get_array(), pattern)
    # Everything written is on the paper.
    figure.canvas.draw()
    paper, ink = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert paper.x0 <= ink.x0 < ink.x1 <= paper.x1
    assert paper.y0 <= ink.y0 < ink.y1 <= paper.y1


def test_plot_into_own_axes():
    figure_module = pytest.importorskip("matplotlib.figure")
    pattern = ns.patterns.banded(30, 50, width=2)
    ax = figure_module.Figure().add_subplot()
    assert draw(pattern).plot(ax) is ax
    assert np.array_equal(ax.images[0].get_array(), pattern)
    assert "30 x 50 blocks" in ax.get_title()


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_save(tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    draw(ns.patterns.dense(3, 4)).save(tmp_path / f"layout.{ending}")
    assert [path.name for path in tmp_path.iterdir()] == [f"layout.{ending}"]
    assert (tmp_path / f"layout.{ending}").read_bytes().startswith(start)


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layout.png"
    path.write_bytes(b"before")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        draw(ns.patterns.dense(3, 4)).save(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("layout.png", b"before")]


@pytest.mark.parametrize("name", ["layout", "layout.xyz"])
def test_an_unknown_format_is_refused(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"^path takes .*png.* got"):
        draw(ns.patterns.dense(3, 4)).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    drawing = draw(ns.patterns.dense(3, 4))
    assert "██" in repr(drawing)
    assert drawing._repr_png_() is None
    for ask in (drawing.figure, lambda: drawing.save(tmp_path / "layout.png")):
        with pytest.raises(ImportError, match=r"^a figure needs matplotlib: pip .*\[examples\]'$"):
            ask()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii", "utf-8"])
@pytest.mark.parametrize("shape", [(8, 8), (20, 60), (90, 150), (400, 500)], ids=str)
def test_it_can_be_printed_to_files_of_any_encoding(encoding, shape, rng, monkeypatch):
    """Windows gives a pipe or a file such an encoding."""
    drawing = draw(rng.random(shape) < 0.5)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    whole = repr(drawing)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    if encoding == "utf-8":
        assert repr(drawing) == whole
    else:
        assert repr(drawing).isascii()
        assert ("#" in repr(drawing)) or shape == (400, 500)
    print(drawing)


def test_plain_signs_stand_for_the_same_blocks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    rows = repr(draw([[1, 0], [0, 1]])).splitlines()
    assert rows[1:5] == ["+----+", "|##  |", "|  ##|", "+----+"]


def test_a_notebook_shows_the_figure():
    pytest.importorskip("matplotlib")
    assert draw(ns.patterns.dense(3, 4))._repr_png_().startswith(b"\x89PNG")
