"""This machine: its name, what runs where, what is missing for more: in words or JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from numbsparse import device
from numbsparse.device import runtime
from numbsparse.files import cache_folder
from numbsparse.kernels.matmul import RUNGS, rung

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")
NEEDED = ("numba", "numpy", "scipy")
MORE = {  # what a package is good for, and the extra that brings it
    "numba-cuda": ("a GPU", "cu13"),
    "greenlet": ("the simulator", "simulator"),
    "ml_dtypes": ("bfloat16", "bfloat16"),
    "matplotlib": ("pictures", "examples"),
    "tqdm": ("progress", "examples"),
}
PEERS = ("torch", "jax", "cupy-cuda13x", "cupy-cuda12x")  # whose arrays are taken
KEPT = {".cpu": "CPU kernels", ".cubin": "GPU kernels"}


def describe(place: str) -> str:
    """Processor or GPU, cores, and the versions that matter."""
    if place == "cuda":
        what = device.describe()
    else:
        what = f"{processor()}, {device.CPU_THREADS} of {os.cpu_count()} cores"
    versions = versions_of("numba", "numba-cuda", "numpy", "scipy", "torch")
    return f"{what}; Python {platform.python_version()}, {in_a_list(versions)}"


def versions_of(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def in_a_list(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def processor() -> str:
    """Its name, as far as the system tells."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def info(own: str) -> dict[str, Any]:
    """Of this machine and installation, numbsparse's `own` version.

    `gpu` is None where there is none, and `why` says what is missing. `rungs` are those of the
    ladder that can run here, by place; `missing` says of a package what for, and the extra that
    brings it; `kept` counts the files of compiled kernels, and their bytes.
    """
    why, here = runtime.why_unavailable(), versions_of(*NEEDED, *MORE, *PEERS)
    return {
        "numbsparse": own,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": device.CPU_THREADS,
        "gpu": _gpu() if why is None else None,
        "why": why,
        "simulated": runtime.SIMULATED,
        "rungs": {place: _rungs(place) for place in ("cpu", "cuda") if place == "cpu" or not why},
        "packages": here,
        "missing": {name: MORE[name] for name in MORE if name not in here},
        "cache": str(cache_folder()),
        "kept": _kept(),
    }


def _gpu() -> dict[str, Any]:
    if runtime.SIMULATED:
        return {"name": "Numba's simulator"}
    major, minor = runtime.compute_capability()
    return {"name": runtime.describe(), "compute_capability": f"{major}.{minor}"}


class Reach(NamedTuple):
    """What a rung computes on this machine, and why not more."""

    takes: str  # block sizes and dtypes: here, or where it runs
    why_not: str  # empty: all that it takes anywhere it takes here


def reach_of(name: str) -> Reach:
    """What `unsupported` of a rung answers here, for a forward product of one row."""
    module, place = rung(name), RUNGS[name]
    sizes = getattr(module, "BLOCK_SIZES", BLOCK_SIZES)
    dtypes = getattr(module, "DTYPES", DTYPES)
    if place == "cuda" and (reason := device.why_unavailable()) is not None:
        return Reach(f"takes {_takes(sizes, dtypes)}", reason)
    refused = {
        (size, dtype): module.unsupported("forward", size, dtype, place)
        for size in sizes
        for dtype in dtypes
    }
    served = [case for case, reason in refused.items() if reason is None]
    reasons = "; ".join(dict.fromkeys(filter(None, refused.values())))
    if not served:
        return Reach(f"takes {_takes(sizes, dtypes)}", reasons)
    own_sizes, own_dtypes = (dict.fromkeys(part) for part in zip(*served, strict=True))
    return Reach(f"here: {_takes(own_sizes, own_dtypes)}", reasons)


def _takes(sizes: Iterable[int], dtypes: Iterable[str]) -> str:
    return f"B = {', '.join(map(str, sizes))} in {', '.join(dtypes)}"


def _rungs(place: str) -> list[str]:
    """Those that compute something here."""
    here = [name for name, home in RUNGS.items() if home == place]
    return [name for name in here if reach_of(name).takes.startswith("here")]


def _kept() -> dict[str, dict[str, int]]:
    sizes: dict[str, list[int]] = {what: [] for what in KEPT.values()}
    with suppress(OSError):
        for file in (cache_folder() / "kernels").iterdir():
            if file.suffix in KEPT:
                sizes[KEPT[file.suffix]].append(file.stat().st_size)
    return {what: {"files": len(found), "bytes": sum(found)} for what, found in sizes.items()}


def in_words(found: dict[str, Any]) -> str:
    """A line for each matter."""
    gpu = found["gpu"]
    if gpu is None:
        on_gpu = f"nothing: {found['why']}"
    else:
        capability = gpu.get("compute_capability")
        what = f", compute capability {capability}" if capability else ""
        on_gpu = f"{', '.join(found['rungs']['cuda'])}, on {gpu['name']}{what}"
    kept = ", ".join(
        f"{of['files']} {what} ({of['bytes'] / 1e6:.1f} MB)" for what, of in found["kept"].items()
    )
    on_cpu = f"{', '.join(found['rungs']['cpu'])}, {found['threads']} threads"
    lines = [
        f"numbsparse {found['numbsparse']}, Python {found['python']}, {found['system']}",
        f"CPU   {on_cpu} on {found['processor']}",
        f"GPU   {on_gpu}",
        f"with  {in_a_list(found['packages'])}",
        f"kept  {kept}, in {found['cache']}",
    ]
    for name, (purpose, extra) in found["missing"].items():
        lines.append(f"more  {purpose}, with {name}: pip install 'numbsparse[{extra}]'")
    return "\n".join(lines)


def write(own: str, as_json: bool) -> None:
    """Print it."""
    found = info(own)
    print(json.dumps(found, indent=1) if as_json else in_words(found))
