"""Checkpoints of a Training: everything that its next step depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from char_text import Text
from checkpoint_parts import check_keys, check_settings, parts_of, take_parts
from ranks import whole

import numbsparse as ns
import numbsparse.distributed as dist

if TYPE_CHECKING:
    from char_training import Training

# Options that a checkpoint's numbers belong to, which a resumed run must share.
SHAPE = (
    *("cell", "internal_steps", "hidden", "layers", "embedding", "pattern", "density"),
    *("block_size", "dtype", "precision", "batch", "length", "seed", "clip"),
)
COURSE = ("steps", "lr")  # options that it may change
BATCH_AXIS = -2  # of h and c, (layers, batch, hidden) or (batch, hidden)


def save(training: Training, file: Path) -> None:
    """Write it, whole or not at all: a kill leaves the file that stood there before."""
    state = zip("hc", training.state or (), strict=True)
    checkpoint = {
        "text": training.text.identity,
        "alphabet": np.frombuffer(training.text.alphabet, np.uint8),
        "state": {name: whole(part, BATCH_AXIS, training.group) for name, part in state},
    }
    dist.save(file, checkpoint | parts_of(training, SHAPE, COURSE), training.group)


def resume(training: Training, file: Path) -> None:
    """Go on where `save` was. ValueError where text or model are others, and nothing is changed."""
    checkpoint = ns.load(file)
    check_fits(file, checkpoint, training)
    take_parts(training, checkpoint, file)
    h, c = (training.placed(checkpoint["state"][name][..., training.rows, :]) for name in "hc")
    training.state = (h, c)


def check_fits(file: Path, checkpoint: dict[str, Any], training: Training) -> None:
    """Refuse a checkpoint of another program, text or model; say what else is new."""
    check_keys(file, checkpoint, "text", "alphabet", "settings", "step")
    check_text(file, checkpoint, training.text)
    check_settings(file, checkpoint, training.options, SHAPE)


def check_text(file: Path, checkpoint: dict[str, Any], text: Text) -> None:
    """Refuse a checkpoint of another text, whose numbers mean other characters."""
    strangers = set(text.alphabet) - set(checkpoint["alphabet"].tolist())
    if strangers:
        raise ValueError(
            f"{text.name} holds {bytes(sorted(strangers))!r}, outside the vocabulary of {file}"
        )
    if checkpoint["text"] != text.identity:
        raise ValueError(f"{file} has read {checkpoint['text']}; this run has {text.identity}")
