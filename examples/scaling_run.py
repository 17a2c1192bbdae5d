"""One run of scaling.py: trained, judged on the validation text as it goes, tested at its end."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from argparse import Namespace
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import char_checkpoint
import numpy as np
from char_text import Text
from char_training import BITS, Training
from ranks import alone
from scaling_models import EMBEDDING, Model, Width, build, n_parameters, width_of
from scaling_plan import Plan, Run

import numbsparse as ns
from numbsparse import device, patterns
from numbsparse.device import memory
from numbsparse.device.runtime import current_device

MARKS = {"search": 4, "final": 20}  # points of a curve
CHECK = 50  # steps until the loss is waited for, and the clock is read
SETTLED = 3  # steps that compile and capture, and are not timed
SAVE_EVERY = 120.0  # seconds between checkpoints
HELD_OUT_BATCHES = 40  # read at each mark; at the end all
FLOP_OF_A_WEIGHT = 6  # a character: a product and a sum, forward, and twice that backward
MOST_MEASURED = 400  # blocks on a side: the paths of larger patterns take long

Result = dict[str, Any]


class TimedTraining(Training):
    """A Training that times its own steps, and stops when a clock says so."""

    def __init__(self, model: Any, text: Text, options: Namespace, file: Path):
        super().__init__(options.name, model, text, options, file, alone())
        self.seconds, self.timed = 0.0, 0  # of steps, and of how many
        self.settled = time.monotonic()  # when all was compiled and captured
        if file.exists():
            char_checkpoint.resume(self, file)

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
                self.seconds, self.timed = (
                    self.seconds + now - began,
                    self.timed + self.step - since,
                )
            if self.step in marks or not np.isfinite(bits):
                self._note(bits, self.bits(self.held_out_text))
            late = now > until
            if self.file and self.step < steps and (late or now - saved > SAVE_EVERY):
                char_checkpoint.save(self, self.file)
                saved = now
            if late and self.step < steps:
                return False
            since, began = self.step, time.monotonic()
        return True

    def seconds_of(self, steps: float) -> float:
        return steps * self.seconds / max(self.timed, 1)


def train(run: Run, plan: Plan, text: Text, place: str, file: Path, until: float) -> Result | None:
    """The run's result; None where the clock `until` came first, and `file` has what is done.

    A run that diverges is a result, too: one without bits. The test text is read once, at the end
    of a long run.
    """
    began, symbols = time.monotonic(), len(text.alphabet)
    wanted = n_parameters(Model(), Width(run.size), symbols)
    width = width_of(run.model, wanted, symbols)
    model, wiring = build(run.model, width, symbols, dtype=plan.dtype, seed=run.seed)
    if place == "cuda":
        memory.forget_peak()
    options = options_of(run, plan, width.hidden, place)
    training, diverged = TimedTraining(model, text, options, file), None
    validation = test = None
    try:
        if not training.go_on(until):
            return None
        validation = training.bits(training.held_out_text, whole=True)
        test = training.test_bits() if run.purpose == "final" else None
    except FloatingPointError as error:
        diverged = str(error)
    weights = model.n_parameters() - model.embedding.n_parameters()
    return {
        "name": run.name(plan),
        "config": run.config(plan),
        **described(wiring, width),
        "parameters": model.n_parameters(),
        "flop_per_character": FLOP_OF_A_WEIGHT * weights,
        "steps": training.step,
        "validation": validation,
        "test": test,
        "diverged": diverged,
        "curve": curve_of(training),
        "train_seconds": training.seconds_of(training.step),
        "setup_seconds": training.settled - began,
        "wall_seconds": time.monotonic() - began,
        "peak_bytes": peak_bytes() if place == "cuda" else None,
        **where(place),
    }


def options_of(run: Run, plan: Plan, hidden: int, place: str) -> Namespace:
    """What a Training and its checkpoints want to know."""
    model = run.model
    steps = max(round(run.characters / (plan.batch * plan.length)), 1)
    return Namespace(
        name=run.purpose, device=place, marks=MARKS[run.purpose], steps=steps, lr=run.lr,
        batch=plan.batch, length=plan.length, clip=plan.clip, dtype=plan.dtype, seed=run.seed,
        hidden=hidden, cell=model.cell, internal_steps=model.internal_steps, layers=1,
        embedding=EMBEDDING, pattern=model.wiring, density=model.density,
        block_size=model.block_size, precision="highest", mark_every=None,
        held_out_batches=HELD_OUT_BATCHES,
    )  # fmt: skip


def curve_of(training: TimedTraining) -> list[list[float | None]]:
    """[characters read, seconds of training, bits of the last step, validation bits] at marks."""
    size = training.options.batch * training.options.length
    return [
        [int(step) * size, round(training.seconds_of(step), 3), round(own, 5), round(held_out, 5)]
        for step, own, held_out in training.curve
    ]


def described(wiring: list[np.ndarray | None], width: Width) -> Result:
    """Of the first recurrent weight: how dense it is, and how fast a signal spreads in it."""
    result: Result = {"hidden": width.hidden, "degree": width.degree, "density": 1.0}
    pattern = wiring[0]
    if pattern is None:
        return result
    result["density"] = float(pattern.mean())
    if len(pattern) <= MOST_MEASURED:
        length, steps = patterns.mean_path_length(pattern), patterns.mixing_steps(pattern)
        result |= {"mean_path": length if np.isfinite(length) else None}
        result |= {"mixing_steps": steps if np.isfinite(steps) else None}
    return result


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


def peak_bytes() -> int | None:
    return None if device.SIMULATED else current_device().memory_resource.attributes.used_mem_high
