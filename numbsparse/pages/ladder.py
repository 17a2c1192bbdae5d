"""The rungs and the taught steps: idea, length, reads, speed; the tables of `numbsparse ladder`."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache, partial
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import NamedTuple

from numbsparse import device
from numbsparse.bench.results import Row, card_of
from numbsparse.kernels.ladder import NAMES, STEPS
from numbsparse.kernels.matmul import LADDER, PRODUCTS, RUNGS
from numbsparse.machine import reach_of
from numbsparse.pages.committed import (
    gain_of,
    in_section,
    on_cpu,
    on_gpu,
    rate_of,
    ratio,
    rows_of,
    shape_of,
    teraflops,
)
from numbsparse.pages.reads import Reads, Roofline, reads_at, roofline

SIZES = (32, 64, 128)  # of the steps
FIRST_IN_FLOAT16 = "s08_tensor_core"
INDENT = "    "
COLUMNS = (5, 10, 9, 11, 8, 8, 9)
HEADINGS = """\
                         reads per output   TFLOP/s over kept blocks  times the
rung              lines    global   shared    forward      dx      dw  best before\
"""
STEP_COLUMNS = (5, 6, 9, 9, 8, 8, 8, 12, 16)
STEP_HEADINGS = """\
                         new  reads per output  TFLOP/s over kept blocks  times the  roofline,
step              lines lines   global   shared  B = 32      64     128  one before  B = 32\
"""
_paragraph = partial(fill, width=100)
_indented = partial(_paragraph, initial_indent=INDENT, subsequent_indent=INDENT)


def idea_of(module: ModuleType) -> str:
    """The first sentence of its docstring, without the rung's number."""
    return (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")


def idea_at(name: str, rows: list[Row]) -> str:
    """Its idea, and what it was measured with where that is not the ladder's shape."""
    idea = idea_of(LADDER[name])
    if name == "k0_cpu":
        return f"{idea} ({shape_of(rows[0])}, float32)"
    usual = shape_of(on_gpu()["ladder"]["rows"][0])
    return f"{idea} ({shape_of(rows[0])})" if rows and shape_of(rows[0]) != usual else idea


def lines_of(name: str) -> int:
    """Lines that say something, of a rung's file or of its folder's files."""
    path = file_of(name)
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def table(dtype: str = "float16") -> str:
    """A few lines for each rung, up to 100 columns wide.

    Parameters
    ----------
    dtype : "float16" or "float32", of the speeds and the reads
    """
    head = _paragraph(
        f"The ladder: y = x @ w (forward), dx = dy @ w.T and dw = x.T @ dy, in {dtype}. Reads are "
        "values of x and w for each value of y, by the formula at the head of each rung; speeds "
        "were measured at density 0.1. The last column is of the forward product."
    )
    parts, reasons = [head, HEADINGS], list[str]()
    for name in LADDER:
        rows, own = rows_of(name), "float32" if name == "k0_cpu" else dtype
        here, why_not = reach_of(name)
        if why_not:
            reasons += [why_not] if why_not not in reasons else []
            here += f"; not {'more' if here.startswith('here') else 'here'}: "
            here += f"[{reasons.index(why_not) + 1}]"
        numbers = _in_columns(name, _numbers(name, rows, own), COLUMNS)
        parts.append("\n".join([numbers, _indented(idea_at(name, rows)), _indented(here)]))
    notes = [
        _paragraph(f"[{i}] {reason}", subsequent_indent=INDENT)
        for i, reason in enumerate(reasons, 1)
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), _foot()])


def _numbers(name: str, rows: list[Row], dtype: str) -> list[str]:
    counts = reads_at(name, rows[0], dtype) if rows and RUNGS[name] == "cuda" else None
    cells = [f"{lines_of(name):,}"]
    cells += [f"{count:,.0f}" for count in counts] if counts else ["-", "-"]
    cells += [teraflops(rate_of(name, rows, product, dtype)) for product in PRODUCTS]
    return [*cells, ratio(gain_of(name, rows, dtype))]


def _in_columns(name: str, cells: list[str], columns: tuple[int, ...]) -> str:
    return f"{name:18}{''.join(map(str.rjust, cells, columns))}".rstrip()


def _foot() -> str:
    results = on_gpu()["ladder"]
    card, versions = (part.strip() for part in results["machine"].split(";", 1))
    cpu = card_of(on_cpu()["machine"])
    here = "the simulator of a GPU" if device.SIMULATED else "no GPU"
    if not device.SIMULATED and device.why_unavailable() is None:
        here = device.describe()
    return _paragraph(
        f"Measured on an {card} ({versions}), {shape_of(results['rows'][0])} unless said, by "
        f"`{results['command']}`; k0_cpu on an {cpu}. Here: {here}. The lessons are in "
        "numbsparse/kernels/README.md."
    )


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
        gain = "" if self.gain is None else ratio(self.gain)
        counts = [f"{count:,.0f}" for count in self.reads]
        roof = f"{teraflops(self.rate)} {self.roof.bound}"
        lines = [str(self.lines), "" if self.new is None else str(self.new)]
        return [*lines, *counts, *map(teraflops, self.speeds), gain, roof]


def figures_of_steps() -> Iterator[Figures]:
    """Of each step, in order."""
    before: Figures | None = None
    for name, module in STEPS.items():
        dtype = dtype_of(name)
        speeds = speeds_in_steps(name, dtype)
        (shape,) = in_section(on_gpu(), "steps", dtype=dtype, block_size=SIZES[0])
        reads, roof = reads_at(name, shape, dtype), roofline(name, shape)
        assert reads is not None
        assert roof is not None
        new = gain = None
        if before:
            new = new_lines(before.name, name)
            if dtype_of(before.name) == dtype and speeds[0] and before.speeds[0]:
                gain = speeds[0] / before.speeds[0]
        what = name, idea_of(module), lines_of(name), new
        before = Figures(*what, reads, speeds, gain, roof, shape["flops"] / roof.seconds)
        yield before


def speeds_in_steps(name: str, dtype: str) -> tuple[float | None, ...]:
    """Of a step, or of a rung that was timed beside them: operations a second for each of SIZES."""
    timed = (in_section(on_gpu(), "steps", dtype=dtype, block_size=B) for B in SIZES)
    return tuple(rate_of(name, rows, "forward", dtype) for rows in timed)


def dtype_of(name: str) -> str:
    """Of a step's numbers."""
    return "float32" if name < FIRST_IN_FLOAT16 else "float16"


@cache
def new_lines(before: str, after: str) -> int:
    """Lines of a step, docstring aside, that the step before has not."""
    matcher = SequenceMatcher(None, body_of(before), body_of(after), autojunk=False)
    return sum(end - begin for what, _, _, begin, end in matcher.get_opcodes() if what != "equal")


def file_of(name: str) -> Path:
    """Of a step or a rung."""
    return Path((STEPS[name] if name in NAMES else LADDER[name]).__file__ or "")


def source_of(name: str) -> str:
    return file_of(name).read_text(encoding="utf-8")


def body_of(name: str) -> list[str]:
    """The lines after the docstring."""
    return source_of(name).split('"""', 2)[2].splitlines(keepends=True)


def table_of_steps() -> str:
    """What stands below the rungs: two lines for each step."""
    head = _paragraph(
        "The taught ladder, kernels/ladder: only y = x @ w, in files to be read one after another "
        "for what each adds. Float32 to s07, then float16; new lines are those that the step "
        "before has not; the roofline is what the card's limits allow, and which one does."
    )
    lines = [
        f"{_in_columns(found.name, found.numbers, STEP_COLUMNS)}\n{_indented(found.idea)}"
        for found in figures_of_steps()
    ]
    return "\n\n".join([head, STEP_HEADINGS, *lines])
