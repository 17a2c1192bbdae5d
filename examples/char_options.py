"""The arguments that the programs of this folder share: those of a model and of its training."""

import argparse
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from char_model import PATTERNS

from numbsparse import device


def add_size(parser: ArgumentParser, *, hidden: int, density: float) -> None:
    """Arguments of the sparse model's size. The dense one has as many parameters."""
    add = parser.add_argument
    add("--hidden", type=positive, default=hidden, help="hidden units (%(default)s)")
    add("--density", type=share, default=density, help="kept blocks, about (%(default)s)")


def add_model(parser: ArgumentParser) -> None:
    """Arguments of both models, but for their size."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--cell", choices=("lstm", "mlstm"), default="lstm",
        help="an LSTM, or a multiplicative one with several internal steps")  # fmt: skip
    add("--internal-steps", type=positive, default=4, help="of an mlstm (%(default)s)")
    add("--layers", type=positive, default=1, help="of an lstm (%(default)s)")
    add("--pattern", choices=PATTERNS, default=PATTERNS[0], help="of the wiring (%(default)s)")
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64, 128), default=32,
        help="of the layouts (%(default)s)")  # fmt: skip
    add("--embedding", type=positive, default=64, help="features of a character (%(default)s)")
    add("--precision", choices=("highest", "high"), default="highest",
        help="of float32 products: high may round operands to tf32 on a GPU")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="of the model; its optimizer keeps float32. 16 bits take a GPU")  # fmt: skip


def add_training(
    parser: ArgumentParser, *, batch: int, length: int, steps: int, lr: float, held_out: int
) -> None:
    """Arguments of the training, and where it runs."""
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    add("--batch", type=positive, default=batch, help="sequences side by side (%(default)s)")
    add("--length", type=positive, default=length, help="characters per step (%(default)s)")
    add("--steps", type=positive, default=steps, help="updates (%(default)s)")
    add("--lr", type=positive_number, default=lr, help="highest learning rate (%(default)s)")
    add("--clip", type=positive_number, default=1.0, help="longest gradient (%(default)s)")
    add("--seed", type=from_0, default=0, help="of weights, wiring and sample (%(default)s)")
    add("--mark-every", type=positive, metavar="STEPS",
        help="how often the held-out text is read (a tenth of the steps)")  # fmt: skip
    add("--held-out-batches", type=positive, default=held_out, help="of them at each mark"
        " (%(default)s)")  # fmt: skip


def add_output(parser: ArgumentParser, folder: str) -> None:
    """Arguments of what is trained, and where it is kept."""
    add = parser.add_argument
    add("--compare", action=argparse.BooleanOptionalAction, default=True,
        help="also train a dense model with as many parameters")  # fmt: skip
    add("--resume", action="store_true", help="go on from the checkpoints in --out")
    add("--out", type=Path, default=Path(folder), help="folder (%(default)s)")


def settle(options: Namespace) -> None:
    """Choose the device; RuntimeError where the one that was asked for is not there.

    ValueError for a dtype that is not trained in on the device.
    """
    if options.device == "auto":
        options.device = "cuda" if device.is_available() else "cpu"
    if options.device == "cuda":
        device.require()
    elif options.dtype != "float32":
        raise ValueError(f"--dtype {options.dtype} takes a GPU, got --device {options.device}")


def make_folder(folder: Path) -> None:
    """Make --out before anything is trained; ValueError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"--out takes a folder to write to, got {folder}: {error.strerror}"
        ) from error


def number_of(
    kind: Callable[[str], Any], takes: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Reads a number of a kind, and says what it takes where it is another, or none."""

    def read(word: str) -> Any:
        with suppress(ValueError):
            if fits(number := kind(word)):
                return number
        raise argparse.ArgumentTypeError(f"takes a {takes}, got {word}")

    return read


positive = number_of(int, "whole number from 1 on", lambda n: n >= 1)
from_0 = number_of(int, "whole number from 0 on", lambda n: n >= 0)
positive_number = number_of(float, "number above 0", lambda n: 0 < n < inf)
share = number_of(float, "number above 0 and up to 1", lambda n: 0 < n <= 1)
