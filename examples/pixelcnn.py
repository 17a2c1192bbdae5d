"""Train PixelCNN++ to draw images, with sparse convolutions made deeper, and a dense one beside it.

    python examples/pixelcnn.py                    # patches of two photographs, on this CPU
    python examples/pixelcnn.py --data cifar-10-batches-bin --device cuda --dtype bfloat16 \\
        --filters 160 --blocks 5 --mixtures 10 --dropout 0.5 --block-size 32 --compare

It says how many bits per dimension the model needs for images that it has not seen: a dimension is
one colour of one pixel, 8 bits uncompressed. With --compare a dense model of as many parameters
learns from the same images, with --seeds 3 three times each. Its results are in one folder:
checkpoints, the learning curves, a picture of samples, and all numbers with the command in a JSON
file. Stopped at any moment, it resumes with --resume from its last checkpoint, bit for bit.

The images are CIFAR-10's in their binary version, or without --data patches of the two photographs
that come with scikit-learn, a fifth of whose columns is held out.

Salimans, Karpathy, Chen and Kingma, "PixelCNN++: Improving the PixelCNN with Discretized Logistic
Mixture Likelihood and Other Modifications", 2017.
"""

import argparse
import gc
import json
import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pixel_checkpoint
from char_options import from_0, make_folder, number_of, positive, positive_number, settle
from pixel_images import SIZE, Images, open_images
from pixel_model import PixelCNN, make_model
from pixel_pictures import size_of, write_curves, write_samples
from pixel_sample import sample
from pixel_training import Training
from ranks import ranks

from numbsparse import device, files


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, compare, write; gives the table, a row for each kind of model."""
    options = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.command = shlex.join(["python", "examples/pixelcnn.py", *given])
    began = time.perf_counter()
    try:
        with ranks() as group:
            settle(options)
            images = open_images(options.data)
            check_sizes(options)
            make_folder(options.out)
            rows = train_all(options, images)
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        sys.exit(f"pixelcnn: {error}")
    except KeyboardInterrupt:
        further = f"; --resume goes on from the last mark, in {options.out}"
        sys.exit(f"\npixelcnn: stopped{further if options.checkpoints else ''}")
    if group.rank:
        return rows
    for row in rows:
        bits = "{mean:.3f} +- {spread:.3f} bits per dimension held out".format(**row)
        print(f"{row['kind']:6} {size_of(row)}: {bits}, {row['seeds']} seeds, "
              f"{row['seconds']:.0f} s each")  # fmt: skip
    print(f"everything is in {options.out}; {time.perf_counter() - began:.0f} s")
    return rows


def train_all(options: Namespace, images: Images) -> list[dict[str, Any]]:
    """The runs, one after the other; each is written to the file of results when it is done."""
    print(f"images: {images.identity}")
    runs: list[dict[str, Any]] = []
    shown = min(options.samples, len(images.held_out))
    pictures = {
        "held out": images.held_out[np.arange(shown) * len(images.held_out) // (shown or 1)]
    }
    for seed in range(options.seed, options.seed + options.seeds):
        for kind in ("sparse", "dense")[: 1 + options.compare]:
            one = Namespace(**vars(options) | {"seed": seed})
            training = prepared(one, kind, images)
            runs.append(run(training, kind))
            first = training.group.rank == 0  # which writes what there is to see
            if first:
                write_results(options, images, runs)
            if seed == options.seed and options.samples and first:
                with training.average.applied():
                    pictures[f"drawn by the {kind} model"] = sample(training.model, one)
                write_samples(options.out / f"{options.name}_samples.png", pictures)
            del training
            gc.collect()  # a training and its captured step know each other, and all their memory
    if first:
        write_curves(options.out / f"{options.name}.png", runs)
    return table(runs)


def prepared(options: Namespace, kind: str, images: Images) -> Training:
    """A training of one kind of model, resumed where that was asked for."""
    model = make_model(options, kind)
    file = options.out / f"{kind}_{options.seed}.npz"
    name = f"{kind}, seed {options.seed}"
    training = Training(name, model, images, options, file if options.checkpoints else None)
    print(f"{training.name}: {size_of(size(model))}")
    if options.resume and file.exists():
        pixel_checkpoint.resume(training, file)
    elif options.resume:
        print(f"there is no {file}: this model begins anew")
    return training


def run(training: Training, kind: str) -> dict[str, Any]:
    """Train to the end: what the model is, what it needs, and its curve."""
    began, model, options = time.perf_counter(), training.model, training.options
    training.run()
    bits = training.bits(whole=True)
    return {
        "kind": kind,
        "seed": options.seed,
        **size(model),
        "images": options.steps * options.batch,
        "bits": bits,
        "seconds": time.perf_counter() - began,
        "curve": [
            [int(s), round(t, 5), round(h, 5) if h == h else None] for s, t, h in training.curve
        ],
    }


def size(model: PixelCNN) -> dict[str, Any]:
    return {
        "filters": model.filters,
        "blocks": model.blocks,
        "density": model.wiring.kept / model.wiring.weights,
        "parameters": model.n_parameters(),
    }


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over the seeds, by kind of model."""
    rows = []
    for kind in dict.fromkeys(run["kind"] for run in runs):
        alike = [run for run in runs if run["kind"] == kind]
        bits = [run["bits"] for run in alike]
        row = {key: alike[0][key] for key in ("kind", "filters", "blocks", "density", "parameters")}
        row |= {"mean": mean(bits), "spread": stdev(bits) if len(bits) > 1 else 0.0}
        rows.append(row | {"seeds": len(bits), "seconds": mean(run["seconds"] for run in alike)})
    return rows


def write_results(options: Namespace, images: Images, runs: list[dict[str, Any]]) -> None:
    content = {
        "command": options.command,
        "place": device.card() if options.device == "cuda" else "CPU",
        "images": images.identity,
        "settings": {key: getattr(options, key) for key in pixel_checkpoint.SHAPE},
        "table": table(runs),
        "runs": runs,
    }
    text = json.dumps(content) + "\n"
    files.write_bytes(options.out / f"{options.name}.json", text.encode())


def check_sizes(options: Namespace) -> None:
    """Refuse sizes that no network has, before anything is made."""
    if options.filters % options.block_size:
        raise ValueError(
            f"--filters takes whole blocks, a multiple of --block-size {options.block_size}, "
            f"got {options.filters}"
        )
    most = SIZE.bit_length()
    if options.stages > most:
        raise ValueError(
            f"--stages takes up to {most}, where an image of {SIZE} x {SIZE} is one pixel, "
            f"got {options.stages}"
        )


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="CIFAR-10's binary version; default: two photographs")
    add("--compare", action="store_true", help="also train a dense model with as many parameters")
    add("--seeds", type=positive, default=1, help="of weights, wiring and batches (%(default)s)")
    add("--checkpoints", action=argparse.BooleanOptionalAction, default=True,
        help="write one at each mark")  # fmt: skip
    add("--resume", action="store_true", help="go on from the checkpoints in --out")
    add("--out", type=Path, default=Path("pixelcnn_run"), help="folder (%(default)s)")
    add("--name", default="pixelcnn", help="of the files of results (%(default)s)")
    add("--samples", type=from_0, default=8, help="images to draw with a model (%(default)s)")
    add_model(parser)
    add_training(parser)
    return parser.parse_args(arguments)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Arguments of the networks."""
    group = parser.add_argument_group("model; sizes are the dense one's")
    add = group.add_argument
    add("--filters", type=positive, default=24, help="features of each stream (%(default)s)")
    add("--blocks", type=positive, default=1, help="residual blocks a stage (%(default)s)")
    add("--stages", type=positive, default=3, help="sizes of images within (%(default)s)")
    add("--mixtures", type=positive, default=5, help="logistics of a colour (%(default)s)")
    add("--deeper", type=positive_number, default=2.0,
        help="how many times the blocks the sparse model has (%(default)s)")  # fmt: skip
    add("--wider", type=positive_number, default=1.0,
        help="how many times the filters it has (%(default)s)")  # fmt: skip
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64), default=8,
        help="of the layouts (%(default)s)")  # fmt: skip
    add("--dropout", type=below_one, default=0.0, help="within a block (%(default)s)")
    add("--precision", choices=("highest", "high"), default="highest",
        help="of float32 products: high may round operands to tf32 on a GPU")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="of the model; its optimizer keeps float32. 16 bits take a GPU")  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """Arguments of the training, and where it runs."""
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    add("--batch", type=positive, default=8, help="images of a step (%(default)s)")
    add("--steps", type=positive, default=250, help="updates (%(default)s)")
    add("--lr", type=positive_number, default=8e-3, help="highest learning rate (%(default)s)")
    add("--clip", type=positive_number, default=1.0, help="longest gradient (%(default)s)")
    add("--average", type=below_one, default=0.9995,
        help="what stays in a step of the averaged weights, which judge and draw"
        " (%(default)s)")  # fmt: skip
    add("--seed", type=from_0, default=0, help="the first (%(default)s)")
    add("--mark-every", type=positive, metavar="STEPS",
        help="how often held-out images are judged (a tenth of the steps)")  # fmt: skip
    add("--held-out-batches", type=positive, default=13,
        help="of them at each mark; all at the end (%(default)s)")  # fmt: skip


below_one = number_of(float, "number from 0 to below 1", lambda n: 0 <= n < 1)


if __name__ == "__main__":
    main()
