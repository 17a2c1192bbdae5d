"""What a checkout holds at its top: folders and files of a project, and nothing that a run left."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"numbsparse", "tests", "examples"}
MADE = {"__pycache__", "build", "dist"}  # as .gitignore has them


def kept() -> list[Path]:
    """The files that git keeps, relative to the root; in a copy without git, all that are there."""
    if not (ROOT / ".git").exists():
        found = [path for path in ROOT.rglob("*") if path.is_file()]
        inside = [path.relative_to(ROOT) for path in found]
        return [path for path in inside if not MADE.intersection(path.parts)]
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines()]


def test_nothing_that_a_run_left_is_kept():
    shown = [path for path in kept() if not path.parts[0].startswith(".")]
    assert {path.parts[0] for path in shown if len(path.parts) > 1} == FOLDERS
    files = {path.name for path in shown if len(path.parts) == 1}
    assert {Path(name).suffix for name in files - {"LICENSE"}} <= {".md", ".toml", ".cff"}, files
