"""The benchmark's JSON: each section with the machine and the command that it was made with.

Sections may be run one at a time: what a file holds of the others is kept.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


def load(path: Path) -> Results:
    """Sections by name: {"machine", "command", "took": seconds, "rows"}."""
    return json.loads(path.read_text(encoding="utf-8"))["sections"] if path.exists() else {}


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names; written whole."""
    merged = load(path) | sections
    text = ",\n".join(f"{json.dumps(name)}: {_section(merged[name])}" for name in sorted(merged))
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(f'{{"sections": {{\n{text}\n}}}}\n', encoding="utf-8")
    new.replace(path)


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
