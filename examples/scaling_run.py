"""One run of scaling.py: trained, judged on the validation text as it goes, tested at its end."""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import char_checkpoint
import numpy as np
from char_text import Text
from char_training import Training
from ranks import alone
from runs import Result
from runs_plan import Run
from runs_training import Timed, forget_peak, where
from scaling_models import EMBEDDING, Model, Width, build, n_parameters, width_of
from scaling_plan import Plan

from numbsparse import patterns

MARKS = {"search": 4, "final": 20}  # points of a curve
HELD_OUT_BATCHES = 40  # read at each mark; at the end all
FLOP_OF_A_WEIGHT = 6  # a character: a product and a sum, forward, and twice that backward
MOST_MEASURED = 400  # blocks on a side: the paths of larger patterns take long


class TimedTraining(Training, Timed):
    """A Training of the file's checkpoint, if there is one."""

    def __init__(self, model: Any, text: Text, options: Namespace, file: Path):
        super().__init__(options.name, model, text, options, file, alone())
        self.begin_clock()
        if file.exists():
            char_checkpoint.resume(self, file)

    def judge(self) -> float:
        return self.bits(self.held_out_text)

    def save(self) -> None:
        assert self.file is not None
        char_checkpoint.save(self, self.file)


def train(run: Run, plan: Plan, text: Text, place: str, file: Path, until: float) -> Result | None:
    """The run's result; None where the clock `until` came first, and `file` has what is done.

    A run that diverges is a result, too: one without bits. The test text is read once, at the end
    of a long run.
    """
    began, symbols = time.monotonic(), len(text.alphabet)
    wanted = n_parameters(Model(), Width(run.size), symbols)
    width = width_of(run.model, wanted, symbols)
    model, wiring = build(run.model, width, symbols, dtype=plan.dtype, seed=run.seed)
    forget_peak(place)
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
        "validation": validation,
        "test": test,
        "diverged": diverged,
        "curve": training.curve_of(plan.batch * plan.length),
        **training.costs(began),
        **where(place),
    }


def options_of(run: Run, plan: Plan, hidden: int, place: str) -> Namespace:
    """What a Training and its checkpoints want to know."""
    model = run.model
    steps = max(round(run.amount / (plan.batch * plan.length)), 1)
    return Namespace(
        name=run.purpose, device=place, marks=MARKS[run.purpose], steps=steps, lr=run.lr,
        batch=plan.batch, length=plan.length, clip=plan.clip, dtype=plan.dtype, seed=run.seed,
        hidden=hidden, cell=model.cell, internal_steps=model.internal_steps, layers=1,
        embedding=EMBEDDING, pattern=model.wiring, density=model.density,
        block_size=model.block_size, precision="highest", mark_every=None,
        held_out_batches=HELD_OUT_BATCHES,
    )  # fmt: skip


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
