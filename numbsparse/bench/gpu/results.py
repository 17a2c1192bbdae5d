"""The benchmark's JSON: each section with the machine and the command that it was made with.

Sections may be run one at a time: what a file holds of the others is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from numbsparse import files

Results = dict[str, dict[str, Any]]


def load(path: Path) -> Results:
    """Sections by name: {"machine", "command", "took": seconds, "rows"}.

    ValueError where the file holds something else, as the CPU's results.
    """
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))["sections"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of the GPU's benchmark: {error!r}") from error


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names; written whole."""
    merged = load(path) | sections
    text = ",\n".join(f"{json.dumps(name)}: {_section(merged[name])}" for name in sorted(merged))
    files.write_bytes(path, f'{{"sections": {{\n{text}\n}}}}\n'.encode())


def _section(section: dict[str, Any]) -> str:
    """A line for each row, so that a change of one is a change of one line."""
    head = "".join(
        f"\n {json.dumps(key)}: {json.dumps(value)},"
        for key, value in section.items()
        if key != "rows"
    )
    rows = ",\n".join("  " + json.dumps(_rounded(row)) for row in section["rows"])
    return f'{{{head}\n "rows": [\n{rows}\n ]}}'


def _rounded(value: Any) -> Any:
    """Numbers to the five digits that a measurement has at most; sizes as they are."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
