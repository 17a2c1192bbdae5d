"""Checkpoints of a Training: everything that its next step depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import numbsparse as ns

if TYPE_CHECKING:
    from pixel_training import Training

# Options that a checkpoint's numbers belong to, which a resumed run must share.
SHAPE = (
    *("filters", "blocks", "stages", "mixtures", "deeper", "wider", "block_size", "dropout"),
    *("dtype", "precision", "batch", "seed", "clip", "average"),
)
COURSE = ("steps", "lr")  # options that it may change


def save(training: Training, file: Path) -> None:
    """Write it, whole or not at all: a kill leaves the file that stood there before."""
    checkpoint = {
        "images": training.images.identity,
        "settings": {key: getattr(training.options, key) for key in (*SHAPE, *COURSE)},
        "step": training.step,
        "curve": np.array(training.curve),
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "average": training.average.state_dict(),
        "scaler": training.scaler.state_dict() if training.scaler else {},
    }
    ns.save(file, checkpoint)


def resume(training: Training, file: Path) -> None:
    """Go on where `save` was. ValueError where images or model are others; nothing is changed."""
    checkpoint = ns.load(file)
    check_fits(file, checkpoint, training)
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    training.average.load_state_dict(checkpoint["average"])
    if training.scaler:
        training.scaler.load_state_dict(checkpoint["scaler"])
    training.step = checkpoint["step"]
    training.curve = [tuple(row) for row in checkpoint["curve"].tolist()]
    for unfinished in file.parent.glob(f".{file.name}.*"):  # left where a kill met the writing
        unfinished.unlink()


def check_fits(file: Path, checkpoint: dict[str, Any], training: Training) -> None:
    """Refuse a checkpoint of another program, of other images or another model; say what is new."""
    missing = [key for key in ("images", "settings", "step", "average") if key not in checkpoint]
    if missing:
        raise ValueError(f"{file} is no checkpoint of this program: it lacks {missing}")
    if checkpoint["images"] != training.images.identity:
        theirs, ours = checkpoint["images"], training.images.identity
        raise ValueError(f"{file} has seen {theirs}; this run has {ours}")
    for key, theirs in checkpoint["settings"].items():
        ours, option = getattr(training.options, key), f"--{key.replace('_', '-')}"
        if theirs == ours:
            continue
        if key in SHAPE:
            raise ValueError(f"{file} was made with {option} {theirs}; this run has {ours}")
        print(f"{file} was made with {option} {theirs}; it goes on with {ours}")
