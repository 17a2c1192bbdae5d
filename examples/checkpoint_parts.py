"""What the checkpoints of every Training in this folder share."""

import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

HOUR = 3600.0  # seconds


def parts_of(training: Any, shape: tuple[str, ...], course: tuple[str, ...]) -> dict[str, Any]:
    """Settings, step, curve, and the states of model, optimizer and scaler.

    `shape` names the options that the numbers belong to, `course` those that a resumed run may
    change.
    """
    return {
        "settings": {key: getattr(training.options, key) for key in (*shape, *course)},
        "step": training.step,
        "curve": np.array(training.curve),
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict() if training.scaler else {},
    }


def take_parts(training: Any, checkpoint: dict[str, Any], file: Path) -> None:
    """The way back."""
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    if training.scaler:
        training.scaler.load_state_dict(checkpoint["scaler"])
    training.step = checkpoint["step"]
    training.curve = [tuple(row) for row in checkpoint["curve"].tolist()]
    remove_unfinished(file)


def remove_unfinished(file: Path) -> None:
    """What a kill left where it met the writing: not touched for an hour, so no process writes it.

    Another training with the same folder may be writing its own at this very moment.
    """
    for unfinished in file.parent.glob(f".{file.name}.*"):
        with suppress(FileNotFoundError):  # finished, or removed by another
            if time.time() - unfinished.stat().st_mtime > HOUR:
                unfinished.unlink()


def check_keys(file: Path, checkpoint: dict[str, Any], *keys: str) -> None:
    """Refuse a checkpoint of another program."""
    missing = [key for key in keys if key not in checkpoint]
    if missing:
        raise ValueError(f"{file} is not a checkpoint of this program: it lacks {missing}")


def check_settings(
    file: Path, checkpoint: dict[str, Any], options: Namespace, shape: tuple[str, ...]
) -> None:
    """Refuse other settings of the shape; say what else is new."""
    for key, theirs in checkpoint["settings"].items():
        ours, option = getattr(options, key), f"--{key.replace('_', '-')}"
        if theirs == ours:
            continue
        if key in shape:
            raise ValueError(f"{file} was made with {option} {theirs}; this run has {ours}")
        print(f"{file} was made with {option} {theirs}; it goes on with {ours}")
