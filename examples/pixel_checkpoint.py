"""Checkpoints of a Training: everything that its next step depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_parts import check_keys, check_settings, parts_of, take_parts

import numbsparse as ns
import numbsparse.distributed as dist

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
        "average": training.average.state_dict(),
    }
    dist.save(file, checkpoint | parts_of(training, SHAPE, COURSE), training.group)


def resume(training: Training, file: Path) -> None:
    """Go on where `save` was. ValueError where images or model are others; nothing is changed."""
    checkpoint = ns.load(file)
    check_fits(file, checkpoint, training)
    take_parts(training, checkpoint, file)
    training.average.load_state_dict(checkpoint["average"])


def check_fits(file: Path, checkpoint: dict[str, Any], training: Training) -> None:
    """Refuse a checkpoint of another program, of other images or another model; say what is new."""
    check_keys(file, checkpoint, "images", "settings", "step", "average")
    if checkpoint["images"] != training.images.identity:
        theirs, ours = checkpoint["images"], training.images.identity
        raise ValueError(f"{file} has seen {theirs}; this run has {ours}")
    check_settings(file, checkpoint, training.options, SHAPE)
