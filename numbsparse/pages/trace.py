"""What a rung or a taught step does, drawn from the simulator: `python -m numbsparse trace`."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from numbsparse.bench.problem import Problem, matrices
from numbsparse.device import SIMULATED
from numbsparse.files import check_writable
from numbsparse.kernels import ladder
from numbsparse.pages.profile import forward
from numbsparse.simulator.tracing import Trace, trace

RUNGS = {  # dtype, inputs, outputs, batch, block size: small, and enough to go round a ring
    "k1_naive": ("float32", 32, 32, 8, 16),
    "k3_registers": ("float32", 64, 32, 32, 32),
    "k5_tensor_core": ("float16", 192, 32, 64, 32),
    "k6_hopper": ("float16", 384, 128, 512, 64),
    "k7_small_blocks": ("float16", 256, 128, 128, 16),
    "k8_small_batch": ("float16", 256, 64, 16, 32),
    "k9_dense_tiles": ("float16", 512, 128, 64, 16),
}
KEPT = {"k7_small_blocks": 0.3}  # of w
NAMES = (*ladder.NAMES, *RUNGS)


def run(name: str, file: Path | None) -> None:
    """What the command does: write the picture, by default beside the reader."""
    if name not in NAMES:
        raise ValueError(f"RUNG takes one of {', '.join(NAMES)}, got {name!r}")
    if not SIMULATED:  # which is decided when Numba is imported
        command = [sys.executable, "-m", "numbsparse", "trace", name]
        more = ["--svg", str(file)] if file else []
        done = subprocess.run([*command, *more], env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"})
        sys.exit(done.returncode)
    file = file or Path(f"{name}.svg")
    check_writable(file)
    traced = trace_of(name, problem_of(name))
    traced.save(file)
    parts = f"warps: {len(traced.warps)}, stages of shared memory: {len(traced.stages)}"
    print(f"{file}, to be opened in a browser: {traced.kernel}; {parts}")


def trace_of(name: str, problem: Problem) -> Trace:
    """Its forward product."""
    return trace(partial(forward, name, problem))[-1]  # those before it prepare w


def problem_of(name: str) -> Problem:
    """What is traced of a rung or a step: a small product, every block of w kept in most."""
    dtype, inputs, outputs, batch, size = RUNGS.get(name) or _of_step(name)
    return matrices((inputs, outputs), size, KEPT.get(name, 1), batch, dtype)


def _of_step(name: str) -> tuple[str, int, int, int, int]:
    """As few rows as it takes, and twice those where blocks of threads stay for two tiles."""
    step, number = ladder.step(name), ladder.NAMES.index(name) + 1
    rows = step.BM * getattr(step, "CLUSTER", 1)
    if number <= 7:
        return "float32", 128 if number == 7 else 64, 32, rows, 32
    if number <= 9:
        return "float16", 192, 32, rows, 32
    if number <= 12:
        return "float16", 6 * 64, 128 if number == 12 else 64, rows, 64
    return "float16", 5 * 64, 256, 512, 64
