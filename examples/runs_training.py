"""What a run adds to a Training: its own clock, marks to be judged at, and the machine."""

import hashlib
import platform
import subprocess
import time
from argparse import Namespace
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import numpy as np
from char_training import BITS
from runs import Result

import numbsparse as ns
from numbsparse import device
from numbsparse.device import memory
from numbsparse.device.runtime import current_device

CHECK = 50  # steps until the loss is waited for, and the clock is read
SETTLED = 3  # steps that compile and capture, and are not timed
SAVE_EVERY = 120.0  # seconds between checkpoints


class Timed:
    """Times the steps of a Training, and stops it when a clock says so: its second base class.

    What it is mixed with says how it is judged and saved, by `judge` and `save`.
    """

    step: int
    options: Namespace
    file: Path | None
    curve: list[tuple[float, float, float]]

    def begin_clock(self) -> None:
        self.seconds, self.timed = 0.0, 0  # of steps, and of how many
        self.settled = time.monotonic()  # when all was compiled and captured

    def judge(self) -> float:
        """Bits on what is held out for validation."""
        raise NotImplementedError

    def save(self) -> None:
        """Write a checkpoint to the file."""
        raise NotImplementedError

    def train_step(self) -> ns.Tensor:
        raise NotImplementedError

    def _note(self, training_bits: float, held_out_bits: float | None) -> None:
        raise NotImplementedError

    def go_on(self, until: float) -> bool:
        """Train to the last step; False where the clock came first, and a checkpoint has all."""
        steps, settled = self.options.steps, self.step + SETTLED
        marks = set(np.linspace(0, steps, self.options.marks + 1).round().astype(int).tolist())
        saved = began = time.monotonic()
        since = self.step
        while self.step < steps:
            loss = self.train_step()
            if self.step not in marks and self.step % CHECK and self.step != settled:
                continue
            bits, now = loss.item() * BITS, time.monotonic()
            if self.step == settled:
                self.settled = now
            elif self.step > settled:
                self.seconds += now - began
                self.timed += self.step - since
            if self.step in marks or not np.isfinite(bits):
                self._note(bits, self.judge())
            late = now > until
            if self.file and self.step < steps and (late or now - saved > SAVE_EVERY):
                self.save()
                saved = now
            if late and self.step < steps:
                return False
            since, began = self.step, time.monotonic()
        return True

    def seconds_of(self, steps: float) -> float:
        return steps * self.seconds / max(self.timed, 1)

    def curve_of(self, size: int) -> list[list[float | None]]:
        """[amount read, seconds of training, bits of the last step, validation bits] at marks."""
        return [
            [int(step) * size, round(self.seconds_of(step), 3), round(own, 5), round(held_out, 5)]
            for step, own, held_out in self.curve
        ]

    def costs(self, began: float) -> Result:
        """Steps, seconds and memory, of a run that began then."""
        return {
            "steps": self.step,
            "train_seconds": self.seconds_of(self.step),
            "setup_seconds": self.settled - began,
            "wall_seconds": time.monotonic() - began,
            "peak_bytes": peak_bytes() if self.options.device == "cuda" else None,
        }


def forget_peak(place: str) -> None:
    """Count memory anew."""
    if place == "cuda":
        memory.forget_peak()


def peak_bytes() -> int | None:
    return None if device.SIMULATED else current_device().memory_resource.attributes.used_mem_high


def where(place: str) -> Result:
    """The machine, the code and the time."""
    name = device.describe() if place == "cuda" else f"CPU, {device.CPU_THREADS} threads"
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"place": name, "versions": versions, "code": code(), "finished": now}


@cache
def code() -> str:
    """The commit, where there is a repository; else a hash of the sources."""
    root = Path(ns.__file__).parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
        if (root / ".git").exists():
            return f"commit {done.stdout.strip()}"
    whole = hashlib.sha256()
    for folder in ("numbsparse", "examples"):
        for source in sorted((root / folder).rglob("*.py")):
            whole.update(source.read_bytes())
    return f"sources {whole.hexdigest()[:12]}"
