"""No room grows unnoticed: each has a budget of lines, and what is saved is not spent elsewhere."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LINES = {  # of all Python files there; those of a room within it count for that room alone
    "numbsparse": 3_328,
    "numbsparse/autograd": 825,
    "numbsparse/bench": 2_960,
    "numbsparse/compat": 408,
    "numbsparse/device": 4_178,
    "numbsparse/distributed": 2_071,
    "numbsparse/jax": 737,
    "numbsparse/kernels": 3_989,
    "numbsparse/kernels/conv": 4_093,
    "numbsparse/kernels/ladder": 1_943,
    "numbsparse/kernels/lstm": 2_384,
    "numbsparse/kernels/matmul": 10_762,
    "numbsparse/kernels/parts": 6_901,
    "numbsparse/kernels/ptx": 2_530,
    "numbsparse/machine_code": 463,
    "numbsparse/nn": 7_938,
    "numbsparse/ops": 5_426,
    "numbsparse/pages": 1_955,
    "numbsparse/patterns": 996,
    "numbsparse/puzzles": 425,
    "numbsparse/simulator": 2_518,
    "numbsparse/torch": 2_052,
}
SLACK = 0.05  # of a budget: more than that is to be given back


def lines_of(room: str) -> int:
    inner = [ROOT / other for other in LINES if other.startswith(f"{room}/")]
    files = [
        file
        for file in (ROOT / room).rglob("*.py")
        if not any(file.is_relative_to(other) for other in inner)
    ]
    return sum(file.read_text().count("\n") for file in files)


@pytest.mark.parametrize("room", LINES)
def test_a_room_keeps_to_its_budget(room):
    lines, budget = lines_of(room), LINES[room]
    assert lines <= budget, f"{room} has {lines} lines, {lines - budget} more than its budget"
    spare = f"{room} has {lines} lines: lower its budget of {budget}"
    assert lines >= (1 - SLACK) * budget - 50, spare


def test_every_room_has_a_budget():
    rooms = [path.parent for path in ROOT.glob("numbsparse/*/__init__.py")]
    assert {path.relative_to(ROOT).as_posix() for path in rooms} <= LINES.keys()
