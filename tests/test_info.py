"""What `python -m numbsparse info` says is so."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device, info
from numbsparse.device import runtime
from numbsparse.kernels.matmul import RUNGS


def test_json_holds_what_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))  # other processes write to the usual
    command_line.main(["info", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(info.info(ns.__version__)))
    assert found["numbsparse"] == ns.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert not found["missing"].keys() & set(found["extras"])
    assert found["rungs"]["cpu"] == ["k0_reference", "k0_cpu"]
    assert (found["gpus"] == []) == (found["why"] is not None) == (not device.is_available())
    if device.SIMULATED:
        assert found["rungs"]["cuda"] == [name for name, home in RUNGS.items() if home == "cuda"]
    command_line.main(["info"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:11].strip()]
    runs, gpus = ["runs", "kernels"], max(len(found["gpus"]), 1)
    first = ["numbsparse", "CPU", *runs, *["GPU"] * gpus, *(runs if found["gpus"] else [])]
    then = ["simulator", "packages", "extras", "cache", *(["missing"] * len(found["missing"]))]
    assert [line.split()[0] for line in lines] == first + then
    assert found["does"].keys() == found["rungs"].keys()
    assert found["cache"] == str(tmp_path)


def test_without_a_gpu_none_is_described(monkeypatch):
    """The driver's own error, of any kind, would say less."""
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no driver: install it")
    for question in (runtime.describe, runtime.n_devices):
        with pytest.raises(RuntimeError, match="a GPU is needed here, but no driver: install it"):
            question()


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no driver: install it")
    found = info.info(ns.__version__)
    assert found["rungs"].keys() == {"cpu"}
    assert "\nGPU        nothing runs there: no driver: install it\n" in info.in_words(found)


@pytest.mark.simulator
def test_a_gpu_is_described(monkeypatch):
    card = {"name": "H100, driver for CUDA 13.0", "compute_capability": "9.0", "memory": 80 << 30}
    cards = [card]
    monkeypatch.setattr(info, "_gpus", lambda: cards)
    monkeypatch.setattr(runtime, "why_unavailable", lambda: None)
    said = info.in_words(info.info(ns.__version__))
    assert "GPU        H100, driver for CUDA 13.0, compute capability 9.0, 80 GiB\n  runs" in said
    cards.append({"name": "another"})
    lines = info.in_words(info.info(ns.__version__)).splitlines()
    assert [line[:20] for line in lines if line.startswith("GPU")] == [
        "GPU        0: H100, ",
        "GPU        1: anothe",
    ]


@pytest.mark.parametrize(
    ("simulated", "packages", "says"),
    [(True, {"numba-cuda": "1"}, "on: GPU"), (False, {"numba-cuda": "1"}, "off; with NUMBA"),
     (False, {}, "not installed: pip install")],
)  # fmt: skip
def test_whether_there_is_a_simulator(monkeypatch, simulated, packages, says):
    monkeypatch.setattr(runtime, "SIMULATED", simulated)
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no driver")
    monkeypatch.setattr(info, "versions_of", lambda *names: packages)
    assert f"\nsimulator  {says}" in info.in_words(info.info(ns.__version__))


def test_a_user_without_a_folder_is_warned(monkeypatch):
    def none():
        raise FileNotFoundError("no home")

    monkeypatch.setattr(info, "cache_folder", none)
    found = info.info(ns.__version__)
    assert found["cache"] is None
    assert "\ncache      none: set NUMBSPARSE_CACHE_DIR" in info.in_words(found)


def test_bfloat16_is_named_where_its_package_is(monkeypatch):
    for packages in ({}, {"ml_dtypes": "1"}):
        monkeypatch.setattr(info, "versions_of", lambda *names, packages=packages: packages)
        does = info.info(ns.__version__)["does"]["cpu"]
        assert ("bfloat16" in does) == bool(packages)
        assert does.startswith("products in float16, ")
        assert "float32 and float64; layers" in does


def test_long_lines_are_broken(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no driver, " * 20)
    info.write(ns.__version__, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 or " " not in line[11:] for line in lines)
    assert "".join(lines).replace(" ", "").count("nodriver,") == 20


ALL = [*info.EXTRAS]
BASE = {"numba": "1", "numpy": "2", "scipy": "3"}
CU12 = ["numba-cuda", "nvidia-cuda-nvcc-cu12"]


@pytest.mark.parametrize(
    ("system", "more", "extras", "missing"),
    [
        ("linux", [], [], ALL),
        ("win32", ["torch"], [], ALL),
        ("linux", ["torch", "ml_dtypes"], ["torch", "bfloat16"],
         ["cu13", "cu12", "simulator", "jax", "dist", "safetensors", "examples"]),
        ("linux", CU12, ["cu12"], ALL[2:]),
        ("darwin", ["jax"], ["jax"], ["torch", "bfloat16", "safetensors", "examples"]),
    ],
)  # fmt: skip
def test_extras_are_installed_or_missing(monkeypatch, system, more, extras, missing):
    here = BASE | dict.fromkeys(more, "4")
    versions = lambda *names: {n: here[n] for n in names if n in here}  # noqa: E731
    monkeypatch.setattr(info, "versions_of", versions)
    monkeypatch.setattr(sys, "platform", system)
    found = info.info(ns.__version__)
    assert found["packages"] == here
    assert found["extras"] == extras
    assert [*found["missing"]] == missing
    said = info.in_words(found)
    assert f"\nextras     {', '.join(extras) or 'none is installed'}\n" in said
    lines = [line for line in said.splitlines() if line.startswith("missing")]
    assert [re.search(r"pip install 'numbsparse\[(\w+)\]'$", line)[1] for line in lines] == missing


def test_extras_are_those_of_the_project():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    parts = re.split(r"^(\w+) = \[", listed, flags=re.MULTILINE)[1:]
    lines = dict(zip(parts[::2], parts[1::2], strict=True))
    assert lines.keys() - {"cuda", "test", "docs"} == info.EXTRAS.keys()
    for name, (_, packages) in info.EXTRAS.items():
        asked = lines[name] + (lines["cuda"] if "numbsparse[cuda]" in lines[name] else "")
        assert not [p for p in packages if p not in asked and not p.startswith("nvidia-")]


@pytest.mark.parametrize("files", [{}, {"a.cpu": 3, "b.cpu": 4, "c.cubin": 5, "notes": 9}])
def test_kept_kernels_are_counted(files, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    for name, size in files.items():
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / name).write_bytes(bytes(size))
    kept = info.info(ns.__version__)["kept"]
    assert kept["CPU kernels"] == {"files": 2 * bool(files), "bytes": 7 * bool(files)}
    assert kept["tunings"] == {"files": 0, "bytes": 0}
    (tmp_path / "fastest_H100.json").write_bytes(bytes(6))
    assert info.info(ns.__version__)["kept"]["tunings"] == {"files": 1, "bytes": 6}
    assert kept["GPU kernels"] == {"files": bool(files), "bytes": 5 * bool(files)}


COMMANDS = [
    "info",
    "bench",
    "ladder",
    "puzzle",
    "profile",
    "trace",
    "notebook",
    "machine-code",
    "times",
    "plane",
    "tables",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_each_option_and_shows_an_example_that_parses(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main([name, "--help"])
    said = capsys.readouterr().out
    example = said.split("example:\n  python -m numbsparse ")[1].strip()
    parser = command_line._parser()
    assert parser.parse_args(shlex.split(example)).command == name
    (commands,) = (a for a in parser._actions if isinstance(a.choices, dict))
    assert list(commands.choices) == COMMANDS
    assert all(action.help for action in commands.choices[name]._actions)
    assert max(map(len, said.splitlines())) <= 100


def test_without_a_command_it_says_which_there_are(capsys):
    command_line.main([])
    said = capsys.readouterr().out.split("positional arguments:")[1].splitlines()
    first = [line.split()[0] for line in said if line.startswith("    ") and line[4] != " "]
    assert first == COMMANDS


@pytest.mark.parametrize(
    "words",
    ["plane --jobs 0", "plane --minutes nan", "plane --cards 0", "times --points -1",
     "machine-code --jobs -1", "plane --jobs 1.5", "times --minutes soon"],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(words.split())
    option = words.split()[-2]
    kind = "number" if option == "--minutes" else "whole number"
    said = f"argument {option}: takes a {kind} of at least"
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_reader_who_has_seen_enough_is_no_error():
    """As `| head`."""
    command = [sys.executable, "-m", "numbsparse", "ladder"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert (run.stderr.read(), run.wait()) == (b"", 1)


def test_a_command_without_an_output_does_its_work(monkeypatch):
    """As of `>&-`, or of pythonw on Windows, where sys.stdout is None."""
    monkeypatch.setattr(sys, "stdout", None)
    command_line.main(["info"])


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "write", interrupted)
    with pytest.raises(SystemExit) as ended:
        command_line.main(["info"])
    assert ended.value.code == 130
