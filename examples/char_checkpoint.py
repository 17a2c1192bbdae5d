"""Checkpoints of a Training: everything that its next step depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from char_text import Text

import numbsparse as ns

if TYPE_CHECKING:
    from char_training import Training

# Options that a checkpoint's numbers belong to, which a resumed run must share.
SHAPE = (
    *("cell", "internal_steps", "hidden", "layers", "embedding", "pattern", "density"),
    *("block_size", "dtype", "precision", "batch", "length", "seed", "clip"),
)
COURSE = ("steps", "lr")  # options that it may change


def save(training: Training, file: Path) -> None:
    """Write it, whole or not at all: a kill leaves the file that stood there before."""
    state = zip("hc", training.state or (), strict=True)
    checkpoint = {
        "text": training.text.identity,
        "alphabet": np.frombuffer(training.text.alphabet, np.uint8),
        "settings": {key: getattr(training.options, key) for key in (*SHAPE, *COURSE)},
        "step": training.step,
        "curve": np.array(training.curve),
        "state": {name: part.numpy() for name, part in state},
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict() if training.scaler else {},
    }
    ns.save(file, checkpoint)


def resume(training: Training, file: Path) -> None:
    """Go on where `save` was. ValueError where text or model are others, and nothing is changed."""
    checkpoint = ns.load(file)
    check_fits(file, checkpoint, training)
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    if training.scaler:
        training.scaler.load_state_dict(checkpoint["scaler"])
    h, c = (training.placed(checkpoint["state"][name]) for name in "hc")
    training.state = (h, c)
    training.step = checkpoint["step"]
    training.curve = [tuple(row) for row in checkpoint["curve"].tolist()]
    for unfinished in file.parent.glob(f".{file.name}.*"):  # left where a kill met the writing
        unfinished.unlink()


def check_fits(file: Path, checkpoint: dict[str, Any], training: Training) -> None:
    """Refuse a checkpoint of another program, text or model; say what else is new."""
    missing = [key for key in ("text", "alphabet", "settings", "step") if key not in checkpoint]
    if missing:
        raise ValueError(f"{file} is no checkpoint of this program: it lacks {missing}")
    check_text(file, checkpoint, training.text)
    for key, theirs in checkpoint["settings"].items():
        ours, option = getattr(training.options, key), f"--{key.replace('_', '-')}"
        if theirs == ours:
            continue
        if key in SHAPE:
            raise ValueError(f"{file} was made with {option} {theirs}; this run has {ours}")
        print(f"{file} was made with {option} {theirs}; it goes on with {ours}")


def check_text(file: Path, checkpoint: dict[str, Any], text: Text) -> None:
    """Refuse a checkpoint of another text, whose numbers mean other characters."""
    strangers = set(text.alphabet) - set(checkpoint["alphabet"].tolist())
    if strangers:
        raise ValueError(
            f"{text.name} holds {bytes(sorted(strangers))!r}, outside the vocabulary of {file}"
        )
    if checkpoint["text"] != text.identity:
        raise ValueError(f"{file} has read {checkpoint['text']}; this run has {text.identity}")
