"""This machine: its name, and which rungs compute what on it."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from numbsparse import device
from numbsparse.kernels.matmul import RUNGS, rung

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")


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
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
