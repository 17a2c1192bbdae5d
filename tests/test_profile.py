"""What ncu writes is read right, and what fails is said."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench.problem import matrices
from numbsparse.bench.results import load
from numbsparse.pages import profile

SMALL = profile.SECTIONS["small"]
RUNGS = [kernel for rungs, _ in SMALL for kernel in rungs]


def log_of(launches: list[tuple[str, dict[str, str]]]) -> str:
    """What ncu writes: notes, the names of columns, their units, a line for each launch."""
    metrics = list(profile.METRICS.values())
    lines = ['==PROF== a note, "with a name"', quoted(["ID", "Kernel Name", *metrics])]
    lines.append(quoted(["", "", *["unit"] * len(metrics)]))
    for number, (name, values) in enumerate(launches):
        cells = [values.get(key, "1") for key in profile.METRICS]
        lines.append(quoted([str(number), name, *cells]))
    return "\n".join(lines)


def quoted(cells: list[str]) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


@pytest.fixture
def ncu(monkeypatch):
    """Makes a run of ncu write a log, print to stderr and end with a status."""

    def make(log, status=0, said=""):
        def run(command, **options):
            (file,) = (a.partition("=")[2] for a in command if a.startswith("--log-file="))
            assert command[-1] in profile.SECTIONS
            assert find_spec(command[-2]).origin == profile.__file__
            Path(file).write_text(log)
            return subprocess.CompletedProcess(command, status, "", said)

        monkeypatch.setattr(profile.subprocess, "run", run)
        monkeypatch.setattr(profile.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(profile, "SIMULATED", False)
        monkeypatch.setattr(profile, "require", lambda: None)
        monkeypatch.setattr(profile, "SECTIONS", {"small": SMALL})
        monkeypatch.setattr(profile, "processes_here", lambda: 3)
        monkeypatch.setattr(profile, "compile_ahead", lambda cases, *_: ahead.extend(cases))

    ahead = []
    make.ahead = ahead

    return make


def test_of_several_launches_the_longest_is_read(ncu, tmp_path, capsys):
    launches = [
        (f"_ZN6matmul{name}_first", {"seconds": "500", "registers": "7"}) for name in RUNGS
    ] + [
        (
            f"_ZN6matmul{name}_then",
            {"seconds": "15,168", "registers": "80", "issue": "65.5", "L2": "n/a"},
        )
        for name in RUNGS
    ]
    ncu(log_of(launches))
    command_line.main(["profile", "--json", str(tmp_path / "profile.json")])
    assert [(case.kernels, case.product) for case in ncu.ahead] == [(r, "forward") for r in RUNGS]
    rows = load(tmp_path / "profile.json")["small"]["rows"]
    assert [row["rung"] for row in rows] == RUNGS
    for row in rows:
        readings = row["readings"]
        assert readings["seconds"] == pytest.approx(15.168e-6)
        assert (readings["registers"], readings["issue"]) == (80, 65.5)
        assert "L2" not in readings  # the card has no such counter
        assert (row["product"], row["batch"], row["block_size"]) == ("forward", 64, 32)
    assert "small: ncu" in (out := capsys.readouterr().out).partition("small: k1_naive")[0]
    assert "small: k1_naive" in out
    assert re.search(r"seconds +1\.5168e-05\n", out)


@pytest.mark.parametrize(
    ("log", "status", "said", "error"),
    [
        (log_of([]), 1, "no permission", "failed: no permission"),
        ("==PROF== nothing was run", 0, "", "failed: ==PROF== nothing was run"),
        (log_of([("k1_naive", {})]), 0, "", "saw no launch of k3_registers"),
    ],
    ids=["failed", "no launches", "a rung missing"],
)
def test_a_failure_of_ncu_is_said(ncu, log, status, said, error):
    ncu(log, status, said)
    with pytest.raises(SystemExit, match=f"numbsparse: ncu {error}"):
        command_line.main(["profile"])


@pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")
@pytest.mark.parametrize("rung", ["k1_naive", "s01_naive"])
def test_what_ncu_looks_on_at_runs(rung):
    """Rungs and steps alike."""
    profile.forward(rung, matrices(32, 32, 1, 128, "float32"))


def test_ncu_is_asked_for(ncu, monkeypatch):
    ncu("")
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="numbsparse: ncu, NVIDIA's Nsight Compute, is not"):
        command_line.main(["profile"])
