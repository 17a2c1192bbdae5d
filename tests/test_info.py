"""What `python -m numbsparse info` says is so."""

from __future__ import annotations

import json

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench import machine as info
from numbsparse.device import runtime
from numbsparse.kernels.matmul import RUNGS


def test_json_holds_what_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))  # other processes write to the usual
    command_line.main(["info", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(info.info(ns.__version__)))
    assert found["numbsparse"] == ns.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert not found["packages"].keys() & found["missing"].keys()
    assert found["rungs"]["cpu"] == ["k0_reference", "k0_cpu"]
    assert (found["gpu"] is None) == (found["why"] is not None) == (not device.is_available())
    if device.SIMULATED:
        assert found["rungs"]["cuda"] == [name for name, home in RUNGS.items() if home == "cuda"]
    command_line.main(["info"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["numbsparse", "CPU", "GPU", "with", "kept"]
    assert len(lines) == 5 + len(found["missing"])


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(runtime, "why_unavailable", lambda: "no driver: install it")
    found = info.info(ns.__version__)
    assert found["rungs"].keys() == {"cpu"}
    assert "\nGPU   nothing: no driver: install it\n" in info.in_words(found)


def test_what_is_missing_names_the_extra_that_brings_it(monkeypatch):
    here = {"numba": "1", "numpy": "2", "scipy": "3", "torch": "4"}
    monkeypatch.setattr(
        info, "versions_of", lambda *names: {n: here[n] for n in names if n in here}
    )
    found = info.info(ns.__version__)
    assert found["packages"] == here
    assert found["missing"].keys() == info.MORE.keys()
    assert "more  bfloat16, with ml_dtypes: pip install 'numbsparse[bfloat16]'" in info.in_words(
        found
    )


@pytest.mark.parametrize("files", [{}, {"a.cpu": 3, "b.cpu": 4, "c.cubin": 5, "notes": 9}])
def test_kept_kernels_are_counted(files, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path))
    for name, size in files.items():
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / name).write_bytes(bytes(size))
    kept = info.info(ns.__version__)["kept"]
    assert kept["CPU kernels"] == {"files": 2 * bool(files), "bytes": 7 * bool(files)}
    assert kept["GPU kernels"] == {"files": bool(files), "bytes": 5 * bool(files)}
