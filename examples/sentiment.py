"""What a small-world LSTM knows about a text that it has read: sentiment from its last state.

    python examples/sentiment.py                            # Python's own prose, on this CPU
    pip download --no-deps --no-binary :all: vaderSentiment  # 20,000 texts rated by people
    python examples/sentiment.py --reviews vaderSentiment-3.3.2.tar.gz --seeds 3
    python examples/sentiment.py --collect examples/results/sentiment.json   # --out's results
    python examples/sentiment.py --reviews aclImdb --device cuda --hidden 4096 --density 0.05 \\
        --batch 128 --steps 20000 --lr 1e-3 --longest 1000 --train 25000 --test 25000

It trains language models on reviews without their labels, a sparse one and a dense one with as many
parameters, lets each read labelled reviews, and fits a linear classifier to the state at the end of
each review. Accuracies are of reviews that neither has seen, beside that of the more frequent class
and that of the same classifier on how often each byte occurs. With several seeds, of weights,
wiring and what is drawn, each in a folder of its own, the last words are means and spreads.
--collect adds these to the file, and writes a row for each model, number of steps and learning rate
into the README beside it; a rate is to be chosen by the bits on text held out of that to learn
from.

Without --reviews nothing is downloaded: the labelled text is the comments and docstrings of
Python's standard library, and the question is which of the two a paragraph is. That is no
sentiment, but the same work on real text.

After A. Radford, R. Jozefowicz, I. Sutskever, "Learning to Generate Reviews and Discovering
Sentiment", 2017, and S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights",
2017.
"""

import argparse
import json
import shlex
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import labelled_text
import numpy as np
from char_model import CharModel, State
from char_options import add_model, add_output, add_size, add_training, positive, settle
from char_text import check_length
from char_training import Training, prepare
from labelled_text import Labelled
from linear_classifier import fit_best
from ranks import ranks
from runs_report import line, write_between

import numbsparse as ns
from numbsparse import device, files


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, read, classify; gives the mean accuracies by the kind of feature."""
    options = parse(arguments)
    began = time.perf_counter()
    try:
        if options.collect:
            return collect(options)
        with ranks() as group:
            settle(options)
            found = [one_seed(options, seed) for seed in range(options.seeds)]
            runs, bits = ([of_seed[i] for of_seed in found] for i in range(2))
            accuracies = {key: mean(run[key] for run in runs) for key in runs[0]}
            if options.seeds > 1 and group.rank == 0:
                print(f"accuracy in the test, over {options.seeds} seeds:")
                print("\n".join(f"{name:12} {spread(runs, name)}" for name in runs[0]))
                keep(options, arguments, {"accuracy": runs, "bits": bits})
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        sys.exit(f"sentiment: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nsentiment: stopped; --resume goes on from the last mark, in {options.out}")
    if group.rank == 0:
        print(f"checkpoints are in {options.out}; {time.perf_counter() - began:.0f} s")
    return accuracies


def one_seed(options: Namespace, nth: int) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracies and bits of the nth seed, whose checkpoints are in a folder of their own."""
    options = Namespace(**vars(options))
    options.seed += nth
    if options.seeds > 1:
        options.out = options.out / f"seed-{options.seed}"
    data = labelled_text.read(options.reviews, options.train, options.test, options.seed)
    check_length(data.text, options.batch, options.length)
    return compare(options, data)


def spread(runs: Sequence[dict[str, float]], name: str, form: str = ".1%") -> str:
    """The mean over the seeds, and the sample standard deviation."""
    values = [run[name] for run in runs]
    return f"{mean(values):{form}} ± {stdev(values):{form}}"


def keep(options: Namespace, given: list[str] | None, found: dict[str, Any]) -> None:
    """What all seeds had, as JSON."""
    words = without_places(sys.argv[1:] if given is None else given)
    command = shlex.join(["python", "examples/sentiment.py", *words])
    place = device.card() if options.device == "cuda" else "CPU"
    write(
        options.out / "sentiment.json",
        {"command": command, "steps": options.steps, "lr": options.lr, "place": place} | found,
    )


def without_places(given: Sequence[str]) -> Iterator[str]:
    """The words of a command, reviews by their name and without --out: the same run anywhere."""
    parts = (word.split("=", 1) if word.startswith("--") else [word] for word in given)
    words = chain.from_iterable(parts)
    for word in words:
        if word == "--out":
            next(words)
        else:
            yield word
        if word == "--reviews":
            yield Path(next(words)).name


def write(file: Path, content: Any) -> None:
    files.write_bytes(file, (json.dumps(content) + "\n").encode())


def collect(options: Namespace) -> dict[str, float]:
    """Add what is in --out to the file, and say it: what was done again counts once, the latest."""
    own = options.collect
    earlier = json.loads(own.read_text(encoding="utf-8")) if own.exists() else []
    new = [json.loads(f.read_text(encoding="utf-8")) for f in options.out.rglob("sentiment.json")]
    runs = sorted(
        {run["command"]: run for run in earlier + new}.values(),
        key=lambda run: (run["steps"], run["lr"]),
    )
    write(own, runs)
    lines = list(table(runs))
    print("\n".join(lines))
    write_between(own.with_name("README.md"), "features", lines)
    return {}


def table(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: a row for each kind of feature, number of steps and learning rate."""
    yield line(("features", "steps", "learning rate", "bits a character held out", "accuracy"))
    yield line(("---",) * 5)
    for name in ("majority", "byte counts"):  # the same in all
        yield line((name, "", "", "", spread(runs[0]["accuracy"], name)))
    for name in ("dense", "sparse"):
        for run in (run for run in runs if name in run["accuracy"][0]):
            bits = spread(run["bits"], name, ".3f") if run["bits"] else ""
            rate, accuracy = f"{run['lr']:g}", spread(run["accuracy"], name)
            yield line((name, f"{run['steps']:,}", rate, bits, accuracy))


def compare(options: Namespace, data: Labelled) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracies by the kind of feature, and bits of the models on what is held out of the text."""
    text, (no, yes) = data.text, data.classes
    print(f"text: {text.name}, {text.train.size:,} characters to learn from")
    print(f"question: {no} or {yes}; {len(data.train):,} to fit, {len(data.test):,} to test")
    parts = [data.train, data.test]
    y, y_test = (np.array([label for _, label in part]) for part in parts)
    accuracies = {"majority": float(max(y_test.mean(), 1 - y_test.mean()))}
    x, x_test = (np.log1p([np.bincount(u8(t), minlength=256) for t, _ in part]) for part in parts)
    accuracies["byte counts"] = fit_best(x, y).accuracy(x_test, y_test)
    lines = [f"{name:12} {value:.1%}" for name, value in accuracies.items()]
    trainings, bits = prepare(options, text)[0], {}
    while trainings:
        training = trainings.pop(0)
        name = training.name
        bits[name] = training.run()
        x, x_test = (final_states(training, [t for t, _ in part]) for part in parts)
        accuracies[name] = fit_best(x, y).accuracy(x_test, y_test)
        size = f"{training.model.hidden_size} hidden units, {training.model.n_parameters():,}"
        size += f" parameters, {bits[name]:.3f} bits per character held out"
        lines.append(f"{name:12} {accuracies[name]:.1%} ({size})")
    print("accuracy in the test:\n" + "\n".join(lines))
    return accuracies, bits


def final_states(training: Training, texts: Sequence[str]) -> np.ndarray:
    """(n, hidden): tanh of the last layer's cell after each text, from only its own bytes.

    A text begins with line ends, as the texts that it was trained on are divided, so many that it
    fills a whole number of `--length`s; texts of as many of these are read side by side.
    """
    options, model = training.options, training.model
    read = reader(model, options)
    filled = [fill(u8(text)[-options.longest :], options.length) for text in texts]
    alike = defaultdict(list)
    for i, codes in enumerate(filled):
        alike[codes.size].append(i)
    features = np.empty((len(texts), model.hidden_size), np.float32)
    for size, group in alike.items():
        for first in range(0, len(group), options.batch):
            rows = group[first : first + options.batch]
            codes = np.zeros((size, options.batch), np.int32)  # columns to spare: not looked at
            codes[:, : len(rows)] = np.transpose([filled[i] for i in rows])
            state = model.zero_state(options.batch)
            for start in range(0, size, options.length):
                state = read(codes[start : start + options.length], state)
            features[rows] = np.tanh(last_layer(state)[: len(rows)])
    return features


def reader(model: CharModel, options: Namespace) -> Any:
    def read(codes: Any, state: State) -> State:
        with ns.no_grad():
            return model.read(codes, state)[1]

    return ns.graph(read) if options.device == "cuda" else read


def last_layer(state: State) -> np.ndarray:
    """Its cell, (batch, hidden) float32, of a state with or without an axis of layers."""
    cells = state[1].numpy().astype(np.float32)
    return cells.reshape(-1, *cells.shape[-2:])[-1]


def fill(codes: np.ndarray, length: int) -> np.ndarray:
    """At least one line end before the codes, up to a multiple of `length`."""
    size = -(-(codes.size + 1) // length) * length
    return np.concatenate([np.full(size - codes.size, ord("\n"), np.uint8), codes])


def u8(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--reviews", help="aclImdb, Amazon's JSON lines, or vaderSentiment's source archive;"
        " default: Python's own prose")  # fmt: skip
    add("--train", type=positive, default=4000, help="reviews to fit (%(default)s)")
    add("--test", type=positive, default=1000, help="reviews to test (%(default)s)")
    add("--longest", type=positive, default=256, help="bytes read of a review, its last"
        " (%(default)s)")  # fmt: skip
    add("--seeds", type=positive, default=1, help="how many, from --seed on (%(default)s)")
    add("--collect", type=Path, metavar="FILE", help="add --out's results to it, and show all")
    add_output(parser, "sentiment_run")
    add_size(parser, hidden=1024, density=0.15)
    add_model(parser)
    add_training(parser, batch=32, length=64, steps=300, lr=4e-3, held_out=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
