"""The benchmark's rows, and the files of JSON that keep them.

Each section of a file stands with the machine and the command that it was made with. Sections
may be run one at a time: what a file holds of the others is kept.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numbsparse import files

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]


def load(path: Path) -> Results:
    """Sections by name: {"machine", "command", "took": seconds, "rows"}.

    ValueError where the file holds something else.
    """
    if not path.exists():
        return {}
    with files.known_as("file of the benchmark's results", path):
        return dict(json.loads(path.read_text(encoding="utf-8"))["sections"])


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names."""
    merged = load(path) | sections
    files.write_json(path, {"sections": {name: merged[name] for name in sorted(merged)}}, 4)


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that say this."""
    return [row for row in rows if wanted.items() <= row.items()]


def first(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first of them."""
    return next(iter(where(rows, **wanted)), None)
