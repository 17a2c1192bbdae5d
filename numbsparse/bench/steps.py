"""What is known of the steps of the taught ladder: length, reads, speed beside the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from numbsparse.bench.ladder import Reads, idea_of, lines_of, reads_at
from numbsparse.bench.results import Row, on_gpu, rate_of, teraflops
from numbsparse.bench.roofline import Roofline, roofline
from numbsparse.bench.show import table
from numbsparse.kernels.ladder import NAMES, STEPS

SIZES = (32, 64, 128)
FIRST_OF_HALVES = "s08_tensor_core"
WIDTH, INDENT = 100, "    "
HEADINGS = """\
                         new  reads per output  TFLOP/s over kept blocks  times the  roofline,
step              lines lines   global   shared  B = 32      64     128  one before  B = 32\
"""


class Figures(NamedTuple):
    """Of a step, at 8192 x 8192, batch 8192, density 0.1."""

    name: str
    idea: str
    lines: int
    new: int | None  # that the step before has not; its docstring aside
    reads: Reads
    speeds: tuple[float | None, ...]  # operations a second for each of SIZES
    gain: float | None  # times as fast as the step before it in the same dtype, at B = 32
    roof: Roofline
    rate: float  # operations a second at the roofline

    @property
    def numbers(self) -> list[str]:
        gain = "" if self.gain is None else f"{self.gain:.1f}"
        counts = [f"{count:,.0f}" for count in self.reads]
        roof = f"{teraflops(self.rate)} {self.roof.bound}"
        lines = [str(self.lines), "" if self.new is None else str(self.new)]
        return [*lines, *counts, *map(teraflops, self.speeds), gain, roof]


def figures() -> Iterator[Figures]:
    """Of each step, in order."""
    before: Figures | None = None
    for name in NAMES:
        dtype = dtype_of(name)
        shape = _row(dtype, SIZES[0])
        reads, roof = reads_at(name, shape, dtype), roofline(name, shape)
        assert reads is not None
        assert roof is not None
        speeds = tuple(rate_of(name, _measured(dtype, B), "forward", dtype) for B in SIZES)
        new = None if before is None else new_lines(before.name, name)
        gain = None
        if before and dtype_of(before.name) == dtype and speeds[0] and before.speeds[0]:
            gain = speeds[0] / before.speeds[0]
        rate, module = shape["flops"] / roof.seconds, STEPS[name]
        before = Figures(
            name, idea_of(module), lines_of(module), new, reads, speeds, gain, roof, rate
        )
        yield before


def dtype_of(name: str) -> str:
    """Of a step's numbers."""
    return "float32" if name < FIRST_OF_HALVES else "float16"


@cache
def new_lines(before: str, after: str) -> int:
    """Lines of a step, docstring aside, that the step before has not."""
    bodies = [text_of(name).split('"""', 2)[2].splitlines() for name in (before, after)]
    matcher = SequenceMatcher(None, bodies[0], bodies[1], autojunk=False)
    return sum(end - begin for what, _, _, begin, end in matcher.get_opcodes() if what != "equal")


def text_of(name: str) -> str:
    return Path(STEPS[name].__file__ or "").read_text(encoding="utf-8")


def printed() -> str:
    """The table that `python -m numbsparse ladder` prints below that of the rungs."""
    head = fill(
        "The taught ladder, kernels/ladder: y = x @ w alone, in files to be read one after another "
        "for what each adds. Float32 to s07, then float16; new lines are those that the step "
        "before has not; the roofline is what the card's limits allow, and which one does.",
        WIDTH,
    )
    parts = [head, HEADINGS]
    for found in figures():
        cells = [cell.rjust(width) for cell, width in zip(found.numbers, COLUMNS, strict=True)]
        idea = fill(found.idea, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        parts.append(f"{found.name:18}{''.join(cells).rstrip()}\n{idea}")
    return "\n\n".join(parts)


COLUMNS = (5, 6, 9, 9, 8, 8, 8, 12, 16)


def written() -> str:
    """The table of the lessons."""
    cells = []
    for found in figures():
        lines, new, from_global, from_shared, *speeds, gain, roof = found.numbers
        link = f"[{found.name}](ladder/{found.name}.py)"
        both, reads = f"{lines} / {new}" if new else lines, f"{from_global} / {from_shared}"
        cells.append([link, found.idea, both, reads, " / ".join(speeds), gain, roof])
    heads = ["step", "idea", "lines / new", "reads per output, global / shared"]
    heads += ["TFLOP/s at B = 32 / 64 / 128", "times the one before", "roofline, B = 32"]
    section = on_gpu().get("steps")
    machine = f"{section['machine']}; `{section['command']}`" if section else "Not yet timed"
    return (
        "8192 x 8192, batch 8192, density 0.1; float32 to s07, then float16. "
        f"{machine}.\n\n{table(heads, cells)}\n"
    )


def _row(dtype: str, size: int) -> Row:
    """The benchmark's row of a shape: of the steps, or as the ladder's at another block size."""
    measured: list[Row] = _measured(dtype, size)
    if measured:
        return measured[0]
    rows: list[dict[str, Any]] = on_gpu()["ladder"]["rows"]
    same = {"product": "forward", "dtype": dtype, "features": 8192, "block_size": 32}
    return next(row for row in rows if same.items() <= row.items()) | {"block_size": size}


def _measured(dtype: str, size: int) -> list[Row]:
    section = on_gpu().get("steps", {"rows": []})
    wanted = {"dtype": dtype, "block_size": size}
    return [row for row in section["rows"] if wanted.items() <= row.items()]
