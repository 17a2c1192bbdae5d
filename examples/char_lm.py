"""Train a small-world LSTM to write text, character by character, beside a dense one as large.

    python examples/char_lm.py                     # the standard library's sources, on this CPU
    python examples/char_lm.py --text enwik8 --device cuda --hidden 4096 --density 0.03

A hidden layer wired like a small world (neighbours, and a few far jumps) has room for many more
units than a dense one of as many parameters. The program trains both on the same characters and
says how many bits per character each needs on text it has not seen. What it makes lands in one
folder: checkpoints, the learning curve, the layout's picture and a sample of text.

After S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
from char_model import CharModel, Training
from char_text import Text, check_length, file_text, standard_library

import numbsparse as ns
from numbsparse import device, patterns

PATTERNS = ("watts_strogatz", "barabasi_albert", "random", "dense")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, compare, write; gives the held-out bits per character by model."""
    options = parse(arguments)
    began = time.perf_counter()
    try:
        if options.device == "auto":
            options.device = "cuda" if device.is_available() else "cpu"
        if options.device == "cuda":
            device.require()
        text = file_text(options.text) if options.text else standard_library()
        check_length(text, options.batch, options.length)
        pattern = make_pattern(options)
        options.out.mkdir(parents=True, exist_ok=True)
        return train_all(options, text, pattern, began)
    except (ValueError, RuntimeError, FloatingPointError, FileNotFoundError) as error:
        sys.exit(f"char_lm: {error}")


def train_all(
    options: Namespace, text: Text, pattern: np.ndarray, began: float
) -> dict[str, float]:
    symbols = len(text.alphabet)
    print(f"text: {text.name}, {len(text.train):,} characters, {symbols} different, "
          f"{len(text.held_out):,} held out")  # fmt: skip
    common = {
        "embedding": options.embedding,
        "block_size": options.block_size,
        "seed": options.seed,
    }
    models = {"sparse": CharModel(symbols, options.hidden, layout=pattern, **common)}
    if options.compare:
        hidden = dense_twin(models["sparse"].n_parameters(), symbols, options)
        models["dense"] = CharModel(symbols, hidden, layout=None, **common)
    print(f"layout: {options.pattern}\n{ns.draw(pattern)}")

    bits, curves = {}, {}
    for name, model in models.items():
        print(f"{name}: {model.lstm.hidden_size} hidden units, {model.n_parameters():,} parameters")
        training = Training(name, model, text, options)
        if options.resume and training.file.exists():
            training.resume()
        training.run()
        curves[name], bits[name] = training.curve, training.curve[-1][2]
        (options.out / f"{name}.txt").write_text(training.sample(text, options.sample))
    write_pictures(options.out, curves, pattern)

    print(f"\nsample of the sparse model:\n{(options.out / 'sparse.txt').read_text()}\n")
    for name, model in models.items():
        print(f"{name:6} {model.lstm.hidden_size:6} hidden units {model.n_parameters():12,} "
              f"parameters   {bits[name]:.3f} bits per character held out")  # fmt: skip
    print(f"everything is in {options.out}; {time.perf_counter() - began:.0f} s")
    return bits


def make_pattern(options: Namespace) -> np.ndarray:
    """The recurrent weight's kept blocks, (n, n), of about the density that was asked for."""
    n = -(-options.hidden // options.block_size)
    if not 0 < options.density <= 1:
        raise ValueError(f"--density takes a number above 0 and up to 1, got {options.density}")
    if options.pattern == "dense":
        return patterns.dense(n, n)
    if options.pattern == "random":
        return patterns.random(n, n, options.density, seed=options.seed)
    if options.pattern == "barabasi_albert":  # about 2 * m * n of the n * n blocks
        m = min(max(round(options.density * n / 2), 1), n - 1)
        return patterns.barabasi_albert(n, m, seed=options.seed)
    m = min(max(round((options.density * n - 1) / 2), 1), (n - 1) // 2)  # n * (2 * m + 1) blocks
    return patterns.watts_strogatz(n, m, 0.2, seed=options.seed)


def dense_twin(n_parameters: int, symbols: int, options: Namespace) -> int:
    """The hidden size of the dense model with as many parameters, in whole blocks.

    4 h^2 (recurrent) + 4 h e (input) + 4 h + h s + s (output) + s e (embedding) parameters.
    """
    e, s = options.embedding, symbols
    linear = 4 * e + 4 + s
    rest = n_parameters - s - s * e
    h = (-linear + math.sqrt(linear**2 + 16 * rest)) / 8
    return max(round(h / options.block_size), 1) * options.block_size


def write_pictures(folder: Path, curves: dict[str, list], pattern: np.ndarray) -> None:
    """The learning curves and the layout, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no pictures: pip install matplotlib")
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        step, training, held_out = np.array(curve).T
        seen = np.isfinite(held_out)
        (line,) = axes.plot(step, training, alpha=0.35, label=f"{name}, training")
        axes.plot(
            step[seen], held_out[seen], "o-", color=line.get_color(), label=f"{name}, held out"
        )
    axes.set(xlabel="step", ylabel="bits per character", title="Learning curve")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "learning_curve.png", dpi=150)
    ns.draw(pattern).save(folder / "layout.png")


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", help="any text file, such as enwik8; default: Python's standard library")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--hidden", type=positive, default=1024, help="hidden units (%(default)s)")
    add("--pattern", choices=PATTERNS, default=PATTERNS[0])
    add("--density", type=float, default=0.15, help="kept blocks, about (%(default)s)")
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64, 128), default=32)
    add("--embedding", type=positive, default=64)
    add("--batch", type=positive, default=32, help="sequences side by side (%(default)s)")
    add("--length", type=positive, default=64, help="characters per step (%(default)s)")
    add("--steps", type=positive, default=300, help="updates (%(default)s)")
    add("--lr", type=float, default=4e-3, help="highest learning rate (%(default)s)")
    add("--seed", type=int, default=0)
    add("--held-out-batches", type=positive, default=10, help="read at each mark (%(default)s)")
    add("--sample", type=positive, default=400, help="characters to write (%(default)s)")
    add("--compare", action=argparse.BooleanOptionalAction, default=True,
        help="also train a dense model with as many parameters")  # fmt: skip
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--out", type=Path, default=Path("char_lm_run"), help="folder (%(default)s)")
    return parser.parse_args(arguments)


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number from 1 on, got {word}")
    return number


if __name__ == "__main__":
    main()
