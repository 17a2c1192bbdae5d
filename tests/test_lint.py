"""The linters pass: style, format, types, and which room may import from which."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    ["ruff check --output-format concise", "ruff format --check", "mypy", "lint-imports"],
    ids=["style", "format", "types", "rooms"],
)
def test_lint(command: str) -> None:
    tool, *arguments = command.split()
    path = shutil.which(tool, path=sysconfig.get_path("scripts")) or shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed; it is in pip install '.[test]'")
    run = subprocess.run(
        [path, *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
