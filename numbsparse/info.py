"""What runs where on this machine, what is missing for more, what was kept: in words or JSON."""

import json
import platform
import sys
import textwrap
from contextlib import suppress
from typing import Any

from numbsparse import device
from numbsparse.device import runtime
from numbsparse.files import cache_folder
from numbsparse.kernels.matmul import RUNGS
from numbsparse.machine import processor, reach_of, versions_of

NEEDED = ("numba", "numpy", "scipy")
EXTRAS = {  # what each is for, and the packages that it installs
    "cu13": ("an NVIDIA GPU", ("numba-cuda", "nvidia-nvvm")),
    "cu12": ("an NVIDIA GPU with a driver of CUDA 12", ("numba-cuda", "nvidia-cuda-nvcc-cu12")),
    "simulator": ("GPU kernels without a GPU", ("numba-cuda", "greenlet")),
    "torch": ("numbsparse.torch", ("torch", "ml_dtypes")),
    "jax": ("numbsparse.jax", ("jax",)),
    "dist": ("several GPUs, by NCCL", ("nccl4py",)),
    "bfloat16": ("the dtype bfloat16", ("ml_dtypes",)),
    "safetensors": ("checkpoints that other libraries open", ("safetensors",)),
    "examples": ("pictures, progress bars, images", ("matplotlib", "tqdm", "scikit-learn")),
}
PEERS = ("cupy-cuda13x", "cupy-cuda12x")  # whose arrays are taken too
DOES = {  # what users do there, in which dtypes
    "cpu": "products in float16, bfloat16, float32 and float64; layers and training in float32 and "
    "float64",
    "cuda": "products, layers and training in float16, bfloat16 and float32",
}
LINES = textwrap.TextWrapper(
    100, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
)
KEPT = {".cpu": "CPU kernels", ".cubin": "GPU kernels"}


def info(own: str) -> dict[str, Any]:
    """Of this machine and installation, numbsparse's `own` version.

    `gpus` is empty where there is none, and `why` says what is missing. `does` says what runs, by
    place, and `rungs` by which kernels; `simulator` whether GPU kernels can run on the CPU.
    `extras` are those whose packages are installed, `missing` what the others are for. `kept`
    counts the files of compiled kernels in the folder `cache`, their bytes, and the tunings that
    `ns.tune` left.
    """
    why = runtime.why_unavailable()
    listed = dict.fromkeys(package for _, packages in EXTRAS.values() for package in packages)
    places, here = ("cpu",) if why else ("cpu", "cuda"), versions_of(*NEEDED, *listed, *PEERS)
    hidden = ("", "") if "ml_dtypes" in here else (", bfloat16", "")
    extras = [name for name, (_, packages) in EXTRAS.items() if here.keys() >= set(packages)]
    return {
        "numbsparse": own,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": device.CPU_THREADS,
        "gpus": _gpus() if why is None else [],
        "why": why,
        "simulated": runtime.SIMULATED,
        "simulator": "numba-cuda" in here,
        "does": {place: DOES[place].replace(*hidden) for place in places},
        "rungs": {place: _rungs(place) for place in places},
        "packages": here,
        "extras": extras,
        "missing": {name: EXTRAS[name][0] for name in _missing(extras)},
        "cache": _folder(),
        "kept": _kept(),
    }


def _missing(extras: list[str]) -> list[str]:
    """The extras that would add something: one of CUDA's two will do, and macOS has no GPU."""
    cuda = "cu13", "cu12"
    useless = set(extras)
    if sys.platform == "darwin":
        useless |= {*cuda, "simulator", "dist"}
    elif useless.intersection(cuda):
        useless |= set(cuda)
    return [name for name in EXTRAS if name not in useless]


def _gpus() -> list[dict[str, Any]]:
    if runtime.SIMULATED:
        return [{"name": "Numba's simulator"}]
    return [runtime.figures(number) for number in range(runtime.n_devices())]


def _rungs(place: str) -> list[str]:
    """Those that compute something here."""
    here = [name for name, home in RUNGS.items() if home == place]
    return [name for name in here if reach_of(name).takes.startswith("here")]


def _folder() -> str | None:
    """None where the user has none."""
    with suppress(OSError):
        return str(cache_folder())
    return None


def _kept() -> dict[str, dict[str, int]]:
    sizes: dict[str, list[int]] = {what: [] for what in (*KEPT.values(), "tunings")}
    with suppress(OSError):
        folder = cache_folder()
        sizes["tunings"] += [file.stat().st_size for file in folder.glob("fastest_*.json")]
        for file in (folder / "kernels").iterdir():
            if file.suffix in KEPT:
                sizes[KEPT[file.suffix]].append(file.stat().st_size)
    return {what: {"files": len(found), "bytes": sum(found)} for what, found in sizes.items()}


def in_words(found: dict[str, Any]) -> str:
    """A line for each matter."""
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    lines = [
        f"numbsparse {found['numbsparse']}, Python {found['python']}, {found['system']}",
        f"CPU        {found['processor']}, {found['threads']} threads",
        *_on("cpu", found),
        *(f"GPU        {words}" for words in _gpus_in_words(found)),
        *_on("cuda", found),
        f"simulator  {_simulator_in_words(found)}",
        f"packages   {packages}",
        f"extras     {', '.join(found['extras']) or 'none is installed'}",
        f"cache      {_cache_in_words(found)}",
    ]
    for extra, purpose in found["missing"].items():
        lines.append(f"missing    {extra}, for {purpose}: pip install 'numbsparse[{extra}]'")
    return "\n".join(lines)


def _on(place: str, found: dict[str, Any]) -> list[str]:
    """What runs in a place, and by which kernels."""
    if place not in found["does"]:
        return []
    return [
        f"  runs     {found['does'][place]}",
        f"  kernels  {', '.join(found['rungs'][place])}",
    ]


def _gpus_in_words(found: dict[str, Any]) -> list[str]:
    gpus = found["gpus"]
    if not gpus:
        return [f"nothing runs there: {found['why']}"]
    words = [
        gpu["name"]
        if (capability := gpu.get("compute_capability")) is None
        else f"{gpu['name']}, compute capability {capability}, {gpu['memory'] / 2**30:.0f} GiB"
        for gpu in gpus
    ]
    return words if len(words) == 1 else [f"{i}: {gpu}" for i, gpu in enumerate(words)]


def _simulator_in_words(found: dict[str, Any]) -> str:
    if found["simulated"]:
        return "on: GPU kernels run on the CPU, slowly, for tests and for learning"
    if found["simulator"]:
        return "off; with NUMBA_ENABLE_CUDASIM=1 set, GPU kernels run on the CPU, for learning"
    return f"not installed: {runtime.install('simulator')}"


def _cache_in_words(found: dict[str, Any]) -> str:
    if found["cache"] is None:
        return "none: set NUMBSPARSE_CACHE_DIR to a folder, or kernels compile in every process"
    kept = ", ".join(
        f"{of['files']} {what} ({of['bytes'] / 1e6:.1f} MB)" for what, of in found["kept"].items()
    )
    return f"{found['cache']} holds {kept}; NUMBSPARSE_CACHE_DIR sets another folder"


def write(own: str, as_json: bool) -> None:
    """Print it."""
    found = info(own)
    lines = map(LINES.fill, in_words(found).splitlines())
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines))
