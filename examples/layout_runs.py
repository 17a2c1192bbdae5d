"""What prune.py and grow.py share: arguments, the file of results, and strips of layouts."""

import argparse
import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from char_options import from_0, make_folder, positive, positive_number, settle
from char_text import check_length, open_text
from letter_model import Windows
from ranks import ranks

import numbsparse.distributed as dist
from numbsparse import device, files

SAME = ("window", "features", "block_size", "batch", "lr", "steps", "dtype", "mark_every")
COLOURS = {"dense": "C7", "pruned": "C0", "grown": "C0", "random": "C1", "small world": "C2"}
Run = dict[str, Any]


def parser_of(description: str | None, name: str, *, steps: int, marks: int) -> ArgumentParser:
    """The arguments that both programs take."""
    parser = ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", help="a file or a folder; default: Python's standard library")
    add("--window", type=positive, default=32, help="letters that are seen (%(default)s)")
    add("--features", type=positive, default=32, help="of each letter (%(default)s)")
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64, 128), default=32)
    add("--batch", type=positive, default=64, help="windows in a step (%(default)s)")
    add("--lr", type=positive_number, default=1e-3, help="Adam's learning rate (%(default)s)")
    add("--steps", type=positive, default=steps, help="of training in all (%(default)s)")
    add("--mark-every", type=positive, default=steps // marks, metavar="STEPS",
        help="how often held-out text is read, and a checkpoint written (%(default)s)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16 takes a GPU")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=from_0, default=0, help="the first (%(default)s)")
    add("--seeds", type=positive, default=3, help="how many (%(default)s)")
    add("--out", type=Path, default=Path(f"{name}_run"), help="folder (%(default)s)")
    add("--checkpoints", action=argparse.BooleanOptionalAction, default=True,
        help="whether a run can be stopped, and goes on")  # fmt: skip
    add("--draw", type=Path, metavar="JSON", help="only draw the picture of these results")
    return parser


def opened(options: Namespace, given: Sequence[str], name: str) -> Windows:
    """The text; settles the device, and makes the folder. Raises ValueError, RuntimeError."""
    settle(options)
    options.name = name
    options.command = shlex.join(["python", f"examples/{name}.py", *given])
    text = open_text(options.text)
    check_length(text, options.batch, options.window)
    make_folder(options.out)
    options.text = text.identity
    print(f"text: {text.identity}")
    return Windows(text, options.window)


class Results:
    """The runs that are done, in a JSON file; a second call does those that it lacks."""

    def __init__(self, options: Namespace, more: Iterable[str] = ()):
        self.file = options.out / f"{options.name}.json"
        self.settings = {key: getattr(options, key) for key in ("text", *SAME, *more)}
        self.command = options.command
        self.place = device.card() if options.device == "cuda" else "CPU"
        self.runs: list[Run] = []
        self.times: Run = {}
        if self.file.exists():
            content = read(self.file)
            if content["settings"] != self.settings:
                raise ValueError(f"{self.file} has runs with other settings: take another --out")
            self.runs, self.times = content["runs"], content["times"]

    def lacks(self, **key: Any) -> bool:
        return not any(key.items() <= run.items() for run in self.runs)

    def write(self) -> None:
        if dist.init().rank:  # the first one writes
            return
        names = "place", "command", "settings", "times", "runs"
        content = {name: getattr(self, name) for name in names}
        files.write_bytes(self.file, (json.dumps(content) + "\n").encode())


def check_stages(ends: list[int]) -> None:
    """Refuse steps too few for stages of one at least, whose results the picture would lack."""
    if len({*ends}) < len(ends):
        raise ValueError(
            f"--steps takes enough for {len(ends)} stages, got ones that end at {ends}"
        )


def read(file: Path) -> dict[str, Any]:
    """A file of results; ValueError where it is none."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = [content[name] for name in ("settings", "times", "runs", "place")]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of this program: {error!r}") from error
    return content


def unpacked(stored: Any) -> np.ndarray:
    """The pattern of a layout that `letter_training.packed` stored."""
    shape, digits = stored
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8), count=shape[0] * shape[1])
    return bits.reshape(shape).astype(bool)


def spread(numbers: Sequence[float]) -> str:
    """Mean and sample standard deviation, in words."""
    return f"{mean(numbers):.3f} +- {stdev(numbers) if len(numbers) > 1 else 0:.3f}"


def draw_curves(axes: Any, label: str, curves: Sequence[Any]) -> None:
    """Held-out bits by step: the mean over the seeds, and their range."""
    steps, bits, _ = np.moveaxis(np.array(curves), 2, 0)  # (seeds, marks) each
    colour = COLOURS[label]
    axes.plot(steps[0], bits.mean(0), "o-", markersize=3, label=label, color=colour)
    axes.fill_between(steps[0], bits.min(0), bits.max(0), alpha=0.25, color=colour)
    axes.grid(alpha=0.3)


def strip(figure: Any, cell: Any, layouts: Sequence[Any], titles: Sequence[str]) -> None:
    """Layouts side by side, in a cell of a grid: blocks that came since the one before are red."""
    cells, before = cell.subgridspec(1, len(titles), wspace=0.08), None
    for nth, (stored, title) in enumerate(zip(layouts, titles, strict=True)):
        axes, pattern = figure.add_subplot(cells[0, nth]), unpacked(stored)
        picture = np.full((*pattern.shape, 3), 255, np.uint8)
        picture[pattern] = (31, 58, 95)
        if before is not None:
            picture[pattern & ~before] = (200, 60, 40)
        axes.imshow(picture, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=9)
        if before is None:
            axes.set_ylabel("blocks of the\nsecond wide layer", fontsize=9)
        before = pattern


def figure_of(width: float, height: float) -> Any:
    """An empty figure; None, and a word about it, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def done(
    name: str,
    options: Namespace,
    run_all: Callable[[], Results],
    tell: Callable[[Results], None],
    draw: Callable[[Path], None],
) -> list[Run]:
    """All runs, on all ranks; the first one tells and draws. Errors are the last words."""
    try:
        if options.draw:
            draw(options.draw)
            return []
        with ranks() as group:
            results = run_all()
            tell(results)
            if group.rank == 0:
                draw(results.file)
            return results.runs
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\n{name}: stopped; a second call goes on from the last checkpoint")
