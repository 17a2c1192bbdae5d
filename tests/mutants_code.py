"""The library's source: which files are broken, and a copied tree in which one of them is."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from mutants_mistakes import MISTAKES

ROOT = Path(__file__).parents[1]
KERNELS = "numbsparse/kernels"
NOT_COPIED = (".git", ".venv", "build", "dist", "*_run", ".*_cache", "*.egg-info")


@dataclass(frozen=True)
class Mutant:
    """A file of the library with one mistake.

    Attributes
    ----------
    file : path from the root of the repository
    line, text : where the mistake begins, and what stands there in the right file
    mistake : name of the kind, in `mutants_mistakes`
    what : what was there and what is there now
    number : of those of this line, kind and text, counted in each file
    """

    file: str
    line: int
    text: str
    mistake: str
    what: str
    number: int = 0

    @cached_property
    def name(self) -> str:
        """The same where other lines of the file change."""
        return f"{self.file}: {self.text}: {self.mistake} {self.what} ({self.number})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kernel_files(root: Path = ROOT) -> list[str]:
    files = (root / KERNELS).rglob("*.py")
    return sorted(file.relative_to(root).as_posix() for file in files)


def mutants_of(file: str, source: str) -> dict[Mutant, str]:
    """Each mutant of a file, and its source."""
    found: dict[Mutant, str] = {}
    lines, counted = source.splitlines(), dict[str, int]()
    for mistake in MISTAKES:
        for line, what, new in mistake(source):
            mutant = Mutant(file, line, lines[line - 1].strip(), mistake.__name__, what)
            number = counted[mutant.name] = counted.get(mutant.name, -1) + 1
            found[Mutant(*list(asdict(mutant).values())[:-1], number)] = new
    return found


def null_of(file: str) -> Mutant:
    """No mistake: the file with a line more, which no test may notice."""
    return Mutant(file, 1, "", "null", "nothing")


def source_of(mutant: Mutant, source: str) -> str:
    """The mutant's source, of that of the right file."""
    if mutant.mistake == "null":
        return source + "\n"
    return mutants_of(mutant.file, source)[mutant]


def one_of_each(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """For each file and kind of mistake one mutant, drawn."""
    places: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((mutant.file, mutant.mistake), []).append(mutant)
    return [_random(seed, place).choice(those) for place, those in places.items()]


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    return _random(seed, "sample").sample(mutants, min(count, len(mutants)))


def _random(seed: int, name: Any) -> Random:
    return Random(crc32(repr((seed, name)).encode()))


class Tree:
    """A copy of the repository, for one process, in which files can be broken."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))

    @contextmanager
    def broken(self, file: str, source: str) -> Iterator[None]:
        """With `source` in the place of the file.

        No old bytecode is taken for it: that is known by the file's time and size alone.
        """
        path = self.root / file
        before, times = path.read_bytes(), path.stat()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(source)
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
