"""The puzzles in order: files to be filled in, hints in steps, and how far one has come."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from numbsparse import device
from numbsparse.files import write_bytes

LEVELS = ("guard", "neighbours", "halo", "tiles", "block_sparse")
PROGRESS = "progress.json"  # beside the learner's files
CHECKERS = "\n\n# The checker's part."
SOLUTION = re.compile(r"^( *)# your code\n.*?^ *# end\n", re.MULTILINE | re.DOTALL)


def run(number: int | None, folder: Path, *, hint: bool) -> bool:
    """What `python -m numbsparse puzzle` does; whether nothing is left to be repaired.

    Without a number, list the puzzles; with one, write its file where there is none, and check it
    where there is. `hint` shows one more hint instead.
    """
    if number is None:
        print(listed(folder))
        return True
    if not 1 <= number <= len(LEVELS):
        raise ValueError(f"puzzle takes a number from 1 to {len(LEVELS)}, got {number}")
    if not device.SIMULATED:  # which is decided when Numba is imported
        words = [str(number), "--folder", str(folder), *(["--hint"] if hint else [])]
        command = [sys.executable, "-m", "numbsparse", "puzzle", *words]
        return not subprocess.run(
            command, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
        ).returncode
    if (why := device.why_unavailable()) is not None:
        raise RuntimeError(why)
    level = import_module(f"numbsparse.puzzles.levels.{LEVELS[number - 1]}")
    file = file_of(number, folder)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(file, stub(number).encode())
        print(f"{file} is written: complete its kernel, then run this command again to check it")
        return True
    if hint:
        print(_next_hint(number, folder, level.HINTS))
        return True
    return _checked(number, folder, level)


def _checked(number: int, folder: Path, level: Any) -> bool:
    from numbsparse.puzzles.checker import faults

    file = file_of(number, folder)
    if found := faults(level, file):
        print("\n".join(found))
        print(f"\nnot yet; for a hint: python -m numbsparse puzzle {number} --hint")
        return False
    state = progress(folder)
    state["solved"] = sorted({*state["solved"], number})
    _keep(folder, state)
    following = f"next: python -m numbsparse puzzle {number + 1}" if number < len(LEVELS) else ""
    print(
        f"puzzle {number} is solved: right, without a race, within its reads. {following}".strip()
    )
    return True


def stub(number: int) -> str:
    """The file that a learner begins with."""
    text = (Path(__file__).parent / "levels" / f"{LEVELS[number - 1]}.py").read_text("utf-8")
    return SOLUTION.sub(r"\1pass  # your code\n", text.partition(CHECKERS)[0] + "\n")


def file_of(number: int, folder: Path) -> Path:
    return folder / f"{number}_{LEVELS[number - 1]}.py"


def listed(folder: Path) -> str:
    """The puzzles, and which of them are solved."""
    state = progress(folder)
    lines = []
    for number in range(1, len(LEVELS) + 1):
        title = stub(number).splitlines()[0].partition(": ")[2].rstrip(".")
        begun = "begun" if file_of(number, folder).exists() else ""
        lines.append(f"{number}  {title:42} {'solved' if number in state['solved'] else begun}")
    left = [n for n in range(1, len(LEVELS) + 1) if n not in state["solved"]]
    word = "next" if state["solved"] else "begin with"
    then = f"{word}: python -m numbsparse puzzle {left[0]}" if left else "all are solved"
    return "\n".join([*(line.rstrip() for line in lines), f"\n{then}; files are in {folder}"])


def _next_hint(number: int, folder: Path, hints: tuple[str, ...]) -> str:
    """One more than last time, with those before."""
    state = progress(folder)
    shown = min(state["hints"].get(str(number), 0) + 1, len(hints))
    state["hints"][str(number)] = shown
    _keep(folder, state)
    lines = [f"{i + 1} of {len(hints)}: {hint}" for i, hint in enumerate(hints[:shown])]
    return "\n".join(lines)


def progress(folder: Path) -> dict[str, Any]:
    """{"solved": numbers, "hints": how many were shown, by number}; a damaged file is none."""
    with suppress(OSError, ValueError, LookupError, AttributeError, TypeError, OverflowError):
        state = json.loads((folder / PROGRESS).read_text("utf-8"))
        solved = [int(number) for number in state["solved"]]
        return {"solved": solved, "hints": {str(k): int(n) for k, n in state["hints"].items()}}
    return {"solved": [], "hints": {}}


def _keep(folder: Path, state: dict[str, Any]) -> None:
    write_bytes(folder / PROGRESS, json.dumps(state).encode())
