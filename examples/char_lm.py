"""Train a small-world LSTM to write text, character by character, beside a dense one as large.

    python examples/char_lm.py                     # the standard library's sources, on this CPU
    python examples/char_lm.py --text enwik8 --device cuda --hidden 12288 --density 0.03 \\
        --batch 64 --steps 20000 --lr 1e-3
    torchrun --nproc-per-node 2 examples/char_lm.py --device cuda --batch 128    # two cards

A hidden layer wired like a small world (neighbours, and a few long-range connections) has many more
units than a dense one with as many parameters. The program trains both on the same characters and
says how many bits per character each needs on text it has not seen. Its results are in one folder:
checkpoints, the learning curve, the layout's picture and a sample of text. Stopped at any moment,
it resumes with --resume from its last checkpoint, bit for bit.

The text is read from disk as it is needed, so it may be larger than memory. enwik8 and text8 are
split as usual: 90 million bytes to learn from, 5 held out, 5 for the test at the end.

After S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
"""

import argparse
import sys
import time
from argparse import Namespace

import numpy as np
from char_curves import write_pictures
from char_options import (
    add_model,
    add_output,
    add_size,
    add_training,
    positive,
    positive_number,
    settle,
)
from char_sample import sample
from char_text import Text, check_length, open_text
from char_training import Training, prepare
from ranks import ranks

import numbsparse as ns


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, compare, write; gives the held-out bits per character by model."""
    options = parse(arguments)
    began = time.perf_counter()
    try:
        with ranks() as group:
            settle(options)
            text = open_text(options.text, options.alphabet)
            check_length(text, options.batch, options.length)
            text.encode(options.prompt)
            trainings, wiring = prepare(options, text)
            bits = train_all(options, text, trainings, wiring)
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        sys.exit(f"char_lm: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nchar_lm: stopped; --resume goes on from the last mark, in {options.out}")
    if group.rank == 0:
        print(f"everything is in {options.out}; {time.perf_counter() - began:.0f} s")
    return bits


def train_all(
    options: Namespace, text: Text, trainings: list[Training], wiring: list[np.ndarray]
) -> dict[str, float]:
    print(f"text: {text.name}, {text.train.size:,} characters, {len(text.alphabet)} different, "
          f"{text.held_out.size:,} held out")  # fmt: skip
    print(f"layout: {options.pattern}\n{ns.draw(wiring[0])}")
    bits, curves, lines = {}, {}, []
    while trainings:
        training = trainings.pop(0)  # and let go of its memory after its turn
        name, model = training.name, training.model
        size = f"{model.hidden_size:6} hidden units {model.n_parameters():12,} parameters"
        print(f"{name}: {' '.join(size.split())}")
        bits[name], curves[name] = training.run(), training.curve
        test = training.test_bits()
        lines.append(f"{name:6} {size}   {bits[name]:.3f} bits per character held out"
                     + (f", {test:.3f} in the test" if test else ""))  # fmt: skip
        if training.group.rank == 0:
            (options.out / f"{name}.txt").write_text(sample(model, text, options), "utf-8")
    if training.group.rank:
        return bits
    write_pictures(options.out, curves, wiring[0])
    print(f"\nsample of the sparse model:\n{(options.out / 'sparse.txt').read_text('utf-8')}\n")
    print("\n".join(lines))
    return bits


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", help="a file such as enwik8, or a folder; default: Python's standard library")
    add("--alphabet", choices=("occurring", "bytes"), default="occurring",
        help="the bytes that occur, for which the text is read once, or all 256")  # fmt: skip
    add_output(parser, "char_lm_run")
    add("--sample", type=positive, default=400, help="characters to write (%(default)s)")
    add("--prompt", default="", help="what the sample begins with")
    add("--temperature", type=positive_number, default=1.0, help="of the sample (%(default)s)")
    add_size(parser, hidden=1024, density=0.15)
    add_model(parser)
    add_training(parser, batch=32, length=64, steps=300, lr=4e-3, held_out=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
