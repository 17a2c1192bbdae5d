"""The benchmark's rows, and the files of JSON that keep them.

Each section of a file stands with the machine and the command that it was made with. Sections
may be run one at a time: what a file holds of the others is kept.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent
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
    try:
        return json.loads(path.read_text(encoding="utf-8"))["sections"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of the benchmark: {error!r}") from error


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names."""
    merged = load(path) | sections
    write(path, {"sections": {name: merged[name] for name in sorted(merged)}}, 4)


def write(path: Path, content: Any, depth: int) -> None:
    """A file of JSON, written whole: a line for each item, and for theirs, down to `depth`.

    So a change of one row is a change of one line. Numbers keep the five digits that a measurement
    has at most; sizes stay as they are.
    """
    files.write_bytes(path, f"{_lines(_rounded(content), depth)}\n".encode())


def _lines(value: Any, depth: int) -> str:
    if depth == 0 or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        items = [_lines(item, depth - 1) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_lines(item, depth - 1)}" for key, item in value.items()]
    (begin, end), body = "[]" if isinstance(value, list) else "{}", ",\n".join(items)
    return f"{begin}\n{indent(body, ' ')}\n{end}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that say this."""
    return [row for row in rows if wanted.items() <= row.items()]


def first(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first of them."""
    return next(iter(where(rows, **wanted)), None)
