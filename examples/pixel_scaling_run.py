"""One run of pixel_scaling.py: trained, judged on validation images as it goes, then tested."""

import time
import zlib
from argparse import Namespace
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pixel_checkpoint
from pixel_images import SIZE
from pixel_model import PixelCNN, make_model
from pixel_photographs import Split
from pixel_sample import sample
from pixel_scaling_plan import DENSE, Plan
from pixel_training import Training
from ranks import alone
from runs import Result
from runs_plan import Run
from runs_training import Timed, forget_peak, where

MARKS = {"search": 4, "final": 16}  # points of a curve
SAMPLES_SEED = 0  # of the long runs that draw
HELD_OUT_BATCHES = 18  # judged at each mark; at the end all
STAGES = 3


class TimedTraining(Training, Timed):
    """A Training of the file's checkpoint, if there is one."""

    def __init__(self, model: PixelCNN, images: Split, options: Namespace, file: Path):
        super().__init__(options.name, model, images, options, file, alone())
        self.begin_clock()
        if file.exists():
            pixel_checkpoint.resume(self, file)

    def judge(self) -> float:
        return self.bits()

    def save(self) -> None:
        assert self.file is not None
        pixel_checkpoint.save(self, self.file)


def train(
    run: Run, plan: Plan, images: Split, place: str, file: Path, until: float
) -> Result | None:
    """The run's result; None where the clock `until` came first, and `file` has what is done.

    A run that diverges is a result, too: one without bits. The test images are judged once, at the
    end of a long run.
    """
    began = time.monotonic()
    options = options_of(run, plan, place)
    model = make_model(options, "dense" if run.model == DENSE else "sparse")
    forget_peak(place)
    training, diverged = TimedTraining(model, images, options, file), None
    validation = test = None
    by_photograph: dict[str, float] = {}
    samples = ""
    try:
        if not training.go_on(until):
            return None
        validation = training.bits(whole=True)
        if run.purpose == "final":
            test, by_photograph = tested(training, images)
            if options.samples and run.seed == SAMPLES_SEED:
                samples = drawn(training)
    except FloatingPointError as error:
        diverged = str(error)
    return {
        "name": run.name(plan),
        "config": run.config(plan),
        "filters": model.filters,
        "blocks": model.blocks,
        "density": model.wiring.kept / model.wiring.weights,
        "parameters": model.n_parameters(),
        "validation": validation,
        "test": test,
        "by_photograph": by_photograph,
        "samples": samples,
        "diverged": diverged,
        "curve": training.curve_of(plan.batch),
        **training.costs(began),
        **where(place),
    }


def tested(training: Training, images: Split) -> tuple[float, dict[str, float]]:
    """Of all test images, and of those of each photograph."""
    rows = images.test_of or {"": slice(0, len(images.test))}
    bits = {name: training.bits_of(images.test[part]) for name, part in rows.items()}
    counts = {name: part.stop - part.start for name, part in rows.items()}
    whole = sum(bits[name] * counts[name] for name in rows) / sum(counts.values())
    return whole, bits if images.test_of else {}


def drawn(training: Training) -> str:
    """Images that the averaged weights draw, in letters: `samples_of` reads them."""
    with training.average.applied():
        images = sample(training.model, training.options)
    return b64encode(zlib.compress(images.tobytes())).decode()


def samples_of(letters: str) -> np.ndarray:
    """(n, 32, 32, 3) of bytes."""
    content = zlib.decompress(b64decode(letters))
    return np.frombuffer(content, np.uint8).reshape(-1, SIZE, SIZE, 3)


def options_of(run: Run, plan: Plan, place: str) -> Namespace:
    """What a Training and its checkpoints want to know."""
    size, model = run.size, run.model
    known: dict[str, Any] = {"deeper": model.deeper, "wider": model.wider, "stages": STAGES}
    return Namespace(
        name=run.purpose, device=place, samples=plan.samples, marks=MARKS[run.purpose],
        lr=run.lr, seed=run.seed,
        steps=max(round(run.amount / plan.batch), 1), batch=plan.batch, mixtures=plan.mixtures,
        average=plan.average, clip=plan.clip, dtype=plan.dtype, filters=size.filters,
        blocks=size.blocks, block_size=size.block_size, dropout=0.0, precision="highest",
        mark_every=None, held_out_batches=HELD_OUT_BATCHES, **known,
    )  # fmt: skip
