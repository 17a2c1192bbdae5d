"""What was measured on: one line that every table begins with."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from numbsparse import device


def describe(place: str) -> str:
    """Processor or GPU, cores, and the versions that matter."""
    if place == "cuda":
        what = device.describe()
    else:
        what = f"{processor()}, {device.CPU_THREADS} of {os.cpu_count()} cores"
    packages = ("numba", "numba-cuda", "numpy", "scipy", "torch")
    versions = [f"{name} {number}" for name in packages if (number := version_of(name))]
    return f"{what}; Python {sys.version.split()[0]}, {', '.join(versions)}"


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
