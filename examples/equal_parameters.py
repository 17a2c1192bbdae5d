"""Small-world against dense LSTMs: equal parameters, equal text, several sizes and seeds.

    python examples/equal_parameters.py --device cuda --dtype float16 --text enwik8

For each size HIDDEN:DENSITY and seed it trains the sparse model and the dense one with as many
parameters on the same characters, and reads all of the held-out text at the end. Each run is
written to NAME.json in --out as soon as it is done, curve and all, and a second call does the runs
that are missing; NAME.png shows the curves, mean and spread over the seeds.

scaling.py asks the same at scale: each model with a learning rate of its own, in pieces that any
process, on any machine, adds to.

The question of S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017,
section 4.1.
"""

import argparse
import json
import sys
import time
from argparse import Namespace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from char_model import CharModel, dense_twin, sparse_model
from char_options import (
    add_model,
    add_training,
    make_folder,
    positive,
    positive_number,
    settle,
    share,
)
from char_text import Text, check_length, open_text
from char_training import Training
from ranks import ranks

from numbsparse import device, files
from numbsparse.distributed import Group

KINDS = ("sparse", "dense")
SAME = (
    *("text", "steps", "batch", "length", "embedding", "block_size", "dtype", "precision"),
    *("pattern", "cell", "internal_steps", "layers", "clip", "mark_every"),
)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Do the runs that are missing; gives the table, a row for each size and kind."""
    options = parse(arguments)
    file = options.out / f"{options.name}.json"
    try:
        with ranks() as group:
            settle(options)
            runs = run_all(options, file, group)
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        sys.exit(f"equal_parameters: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nequal_parameters: stopped; a second call does the runs that {file} lacks")
    rows = table(runs)
    for row in rows if group.rank == 0 else ():
        print("{size:12} {kind:6} {hidden:6} hidden units {parameters:12,} parameters  "
              "{mean:.4f} +- {spread:.4f} bits per character, {seeds} seeds, "
              "{seconds:.1f} s each".format(**row))  # fmt: skip
    if group.rank == 0:
        draw(options.out / f"{options.name}.png", runs)
    return rows


def run_all(options: Namespace, file: Path, group: Group) -> list[dict[str, Any]]:
    """The runs that the file held, and those that it lacked, which are written there."""
    text = open_text(options.text)
    check_length(text, options.batch, options.length)
    options.text = text.identity
    runs = earlier_runs(file, options)
    make_folder(options.out)
    seeds = range(options.seed, options.seed + options.seeds)
    for seed, (hidden, density), kind in product(seeds, options.sizes, KINDS):
        one = Namespace(**vars(options) | {"hidden": hidden, "density": density, "seed": seed})
        if kind == "dense":
            one.lr = options.dense_lr or options.lr
        key = {"size": f"{hidden}:{density}", "kind": kind, "seed": seed, "lr": one.lr}
        if not any(key.items() <= run.items() for run in runs):
            runs.append(key | train(one, kind, text))
            if group.rank == 0:
                write(file, options, runs)
    return runs


def train(options: Namespace, kind: str, text: Text) -> dict[str, Any]:
    """One run: what it is, its curve, and the bits per character on all of the held-out text."""
    symbols, began = len(text.alphabet), time.perf_counter()
    model: CharModel = sparse_model(symbols, options)[0]
    if kind == "dense":
        model = dense_twin(model, symbols, options)
    training = Training(f"{kind} {options.hidden}, seed {options.seed}", model, text, options)
    training.run()
    return {
        "hidden": model.hidden_size,
        "parameters": model.n_parameters(),
        "characters": options.steps * options.batch * options.length,
        "bits": training.bits(training.held_out_text, whole=True),
        "seconds": time.perf_counter() - began,
        "curve": [
            [int(s), round(t, 5), round(h, 5) if h == h else None] for s, t, h in training.curve
        ],
    }


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over the seeds, by size and kind."""
    rows = []
    for size, kind in dict.fromkeys((run["size"], run["kind"]) for run in runs):
        alike = [run for run in runs if (run["size"], run["kind"]) == (size, kind)]
        bits = [run["bits"] for run in alike]
        row = {key: alike[0][key] for key in ("size", "kind", "hidden", "parameters", "lr")}
        row |= {"mean": mean(bits), "spread": stdev(bits) if len(bits) > 1 else 0.0}
        rows.append(row | {"seeds": len(bits), "seconds": mean(run["seconds"] for run in alike)})
    return rows


def earlier_runs(file: Path, options: Namespace) -> list[dict[str, Any]]:
    """The runs that the file holds; ValueError where they were of another text or length."""
    if not file.exists():
        return []
    ours = settings(options)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["settings"].keys() != ours.keys():
            raise KeyError("settings")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no runs of this program: {error!r}") from error
    for key, theirs in content["settings"].items():
        if theirs != ours[key]:
            raise ValueError(f"{file} has runs with {key} {theirs}; these would have {ours[key]}")
    return content["runs"]


def settings(options: Namespace) -> dict[str, Any]:
    return {key: getattr(options, key) for key in SAME}


def write(file: Path, options: Namespace, runs: list[dict[str, Any]]) -> None:
    place = device.card() if options.device == "cuda" else "CPU"
    content = {"place": place, "settings": settings(options), "table": table(runs), "runs": runs}
    files.write_bytes(file, (json.dumps(content) + "\n").encode())


def draw(file: Path, runs: list[dict[str, Any]]) -> None:
    """Held-out curves by characters read, a panel for each size: the mean, and all seeds' range."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    sizes = list(dict.fromkeys(run["size"] for run in runs))
    figure = Figure(figsize=(4.5 * len(sizes), 4), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for kind in KINDS:
            alike = [run for run in runs if (run["size"], run["kind"]) == (size, kind)]
            if not alike:
                continue
            marks = [[(s, h) for s, _, h in run["curve"] if h is not None] for run in alike]
            steps, held_out = np.moveaxis(np.array(marks), 2, 0)  # (seeds, marks) each
            read = steps[0] * alike[0]["characters"] / steps[0, -1] / 1e6
            parameters = alike[0]["parameters"]
            label = f"{kind}, {alike[0]['hidden']} hidden"
            axes.plot(read, held_out.mean(0), "o-", markersize=3, label=label)
            axes.fill_between(read, held_out.min(0), held_out.max(0), alpha=0.25)
        axes.set(
            xlabel="million characters read", title=f"{parameters / 1e6:.1f} million parameters"
        )
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("bits per character, held out")
    figure.savefig(file, dpi=150)


def size_of(word: str) -> tuple[int, float]:
    hidden, colon, density = word.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"takes HIDDEN:DENSITY, got {word}")
    return positive(hidden), share(density)


def file_name(word: str) -> str:
    if word != Path(word).name:
        raise argparse.ArgumentTypeError(f"takes a name without folders, got {word}")
    return word


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", help="a file or a folder; default: Python's standard library")
    add("--sizes", type=size_of, nargs="+", default=[(2048, 0.08), (4096, 0.055)],
        metavar="HIDDEN:DENSITY", help="of the sparse models (2048:0.08 4096:0.055)")  # fmt: skip
    add("--seeds", type=positive, default=3, help="of weights and wiring (%(default)s)")
    add("--dense-lr", type=positive_number, help="the dense models' learning rate, if another")
    add("--name", type=file_name, default="equal_parameters", help="of the files (%(default)s)")
    add("--out", type=Path, default=Path("equal_parameters_run"), help="folder (%(default)s)")
    add_model(parser)
    add_training(parser, batch=128, length=64, steps=1100, lr=8e-3, held_out=40)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
