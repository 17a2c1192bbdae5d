"""Trainings of prune.py and grow.py: steps, marks, checkpoints, and how long a step takes."""

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_parts import remove_unfinished
from letter_model import LetterModel, Windows
from progress import progress_bar
from ranks import mean, part_of

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import device, nn

F = nn.functional
BITS = 1 / log(2)  # a nat in bits
ROUNDS = 25  # of timing; the least counts, as what else a machine does only adds to it
Schedule = Any  # a GradualPruning, a Rewiring, or None


class Training:
    """A model on its way through a text, while a schedule may change its layouts.

    Each rank has its rows of the batch. At each mark the held-out text is read, and a checkpoint
    is written to `file`.
    """

    def __init__(
        self, name: str, model: LetterModel, windows: Windows, options: Namespace, file: Path
    ):
        self.name, self.model, self.windows, self.options = name, model, windows, options
        self.file = file
        self.group = dist.init()
        self.rows = part_of(options.batch, self.group)
        dist.DataParallel(model.to(options.device), self.group)
        self.optimizer = nn.optim.Adam(model.parameters(), lr=options.lr)
        on_gpu = options.device == "cuda"
        self.update = ns.graph(self._update) if on_gpu else self._update
        self.step, self.seconds = 0, 0.0
        self.curve: list[list[float]] = []  # step, held-out bits, density
        self.stages: list[dict[str, Any]] = []  # what it was at the end of each run

    def run(self, until: int, schedule: Schedule = None) -> None:
        """Train up to a step; the schedule takes one after each of the optimizer.

        Raises FloatingPointError where the loss is not finite; the checkpoint stays as it is.
        """
        options = self.options
        with progress_bar(self.name, until, self.step) as bar:
            while self.step < until:
                began = time.perf_counter()
                loss = self.train_step()
                if schedule is not None:
                    schedule.step()
                mark = self.step % options.mark_every == 0 or self.step == until
                if mark or self.step % 10 == 0:
                    bits = mean(loss.item(), self.group) * BITS  # which waits for a GPU
                    if not np.isfinite(bits):
                        raise FloatingPointError(f"{self.name}: the loss is {bits}")
                self.seconds += time.perf_counter() - began
                if mark:
                    self._mark(at_end=self.step == until)
                    self.save(schedule)
                if mark or self.step % 10 == 0:
                    held_out = self.curve[-1][1] if mark else np.nan
                    bar.show(self.step, (self.step, bits, held_out), options.batch)

    def train_step(self) -> ns.Tensor:
        """One update. The loss stays a Tensor, so that nothing waits for a GPU."""
        drawn = self.windows.drawn(self.options.batch, self.options.seed, self.step)
        loss = self.update(*(a[self.rows] for a in drawn))
        self.step += 1
        return loss

    def _update(self, letters: Any, targets: Any) -> ns.Tensor:
        loss = F.cross_entropy(self.model(letters), targets)
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def bits(self) -> float:
        """Bits per letter on held-out text."""
        letters, targets = self.windows.held_out()
        losses = []
        with ns.no_grad():
            for first in range(0, len(targets), 512):
                parts = [a[first : first + 512] for a in (letters, targets)]
                x, target = map(ns.to_device, parts) if self.options.device == "cuda" else parts
                losses.append(F.cross_entropy(self.model(x), target).item())
        return float(np.mean(losses)) * BITS

    def _mark(self, at_end: bool) -> None:
        bits, density = self.bits(), self.model.density
        self.curve.append([self.step, round(bits, 5), round(density, 5)])
        if at_end:
            layouts = [packed(weight.data.layout) for weight in self.model.wide]
            self.stages.append({"bits": bits, "density": density, "layouts": layouts})

    def result(self) -> dict[str, Any]:
        """For a file of results."""
        parameters = self.model.n_parameters()
        own = {name: getattr(self, name) for name in ("curve", "stages", "seconds")}
        return own | {"parameters": parameters}

    def save(self, schedule: Schedule) -> None:
        """All that it needs to go on, whole or not at all."""
        if not self.options.checkpoints:
            return
        state = {
            "schedule": {} if schedule is None else schedule.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": np.array(self.curve),
            "stages": self.stages,
        }
        dist.save(self.file, state, self.group)

    def resume(self, state: Mapping[str, Any], schedule: Schedule = None) -> None:
        """The way back: the schedule first, since it gives the weights their layouts."""
        if schedule is not None:
            schedule.load_state_dict(state["schedule"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve, self.stages = state["curve"].tolist(), state["stages"]
        remove_unfinished(self.file)


def packed(layout: ns.Layout) -> list[Any]:
    """A layout for a file: its shape, and its pattern as hexadecimal digits."""
    return [list(layout.shape), np.packbits(layout.pattern).tobytes().hex()]


def step_times(
    windows: Windows, options: Namespace, networks: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """Milliseconds of a training step with each pair of layouts, measured in turns.

    A name that begins with "pruned" is of a dense network that was given the layouts; others are
    made with them.
    """
    steps = 20 if options.device == "cuda" else 2
    symbols, trainings = len(windows.text.alphabet), {}
    for name, layouts in networks.items():
        was_dense = name.startswith("pruned")
        model = LetterModel(symbols, options, (None, None) if was_dense else layouts)
        training = Training(name, model, windows, options, Path())
        if was_dense:
            for weight, layout in zip(model.wide, layouts, strict=True):
                weight.data = weight.data.remap(layout)
        for _ in range(4):  # compile, plan, capture
            training.train_step()
        trainings[name] = training
    times: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(ROUNDS):
        for name, training in trainings.items():
            synchronize(options)
            began = time.perf_counter()
            for _ in range(steps):
                training.train_step()
            synchronize(options)
            times[name].append((time.perf_counter() - began) / steps * 1e3)
    return {name: min(values) for name, values in times.items()}


def synchronize(options: Namespace) -> None:
    if options.device == "cuda":
        device.synchronize()
