"""Who is ahead on photographs: a dense PixelCNN++, or a sparse and deeper or wider one as large.

    python examples/pixel_scaling.py --images FOLDER --device cuda --minutes 8   # the next runs
    python examples/pixel_scaling.py --images FOLDER --list
    python examples/pixel_scaling.py --collect examples/results/pixel_scaling.json

The runs take seconds to minutes each, and are shared and resumed as those of scaling.py. --images
takes photographs, and folders, wheels and archives that carry some; or the folder of CIFAR-10's
binary version. --collect also writes the table and the rates tried into the README beside its file,
and draws the picture. examples/results/README.md has the protocol and what came of it.

The question of S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
"""

import argparse
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from char_options import from_0, positive
from pixel_photographs import gather
from pixel_scaling_plan import GROUPS, Plan
from pixel_scaling_report import draw, draw_samples, table
from pixel_scaling_run import train
from runs import Manifest, Result, Work, add_plan, add_runs, keep_manifest, serve
from runs_report import write_between

RESULTS = Path(__file__).parent / "results" / "pixel_scaling.json"
SIZES = list(dict.fromkeys(str(group.size) for group in GROUPS))


def main(arguments: list[str] | None = None) -> None:
    serve("pixel_scaling", parse(arguments), begin, show)


def show(file: Path, runs: list[Result]) -> None:
    """Print the results of all runs, draw them, and write their table into the README."""
    print("\n".join(table(runs)))
    draw(file.with_suffix(".png"), runs)
    draw_samples(file.with_name(f"{file.stem}_samples.png"), runs)
    write_between(file.with_name("README.md"), "images", table(runs))


def begin(options: Namespace) -> Work:
    """The runs over the photographs that are there."""
    began = time.monotonic()
    images, manifest = gather(options.images)
    plan = plan_of(options, manifest)
    sizes = ", ".join(f"{n:,} {part}" for part, n in manifest["images"].items())
    print(f"{images.name} {plan.data}: {sizes}; {time.monotonic() - began:.1f} s", flush=True)
    keep_manifest(options, manifest)
    return Work(plan, options, lambda run, file: train(
        run, plan, images, options.device, file, options.until))  # fmt: skip


def plan_of(options: Namespace, manifest: Manifest) -> Plan:
    """The plan, with what the arguments change of it."""
    names = {field.name for field in fields(Plan)}
    given = {key: value for key, value in vars(options).items() if key in names and value}
    groups = tuple(g for g in GROUPS if not options.sizes or str(g.size) in options.sizes)
    return Plan(**given | {"groups": groups, "data": manifest["sha256"][:16]})


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_runs(parser, runs="pixel_scaling_run", results=RESULTS)
    parser.add_argument("--images", nargs="*", default=[], metavar="PATH",
        help="photographs, and what carries some; default: installed packages")  # fmt: skip
    parser.add_argument("--samples", type=from_0, default=0, metavar="N",
        help="that the first long run of a model draws at its end (%(default)s)")  # fmt: skip
    plan = parser.add_argument_group("plan", "A change of these makes other runs.")
    plan.add_argument("--sizes", choices=SIZES, nargs="+", help="of the dense model (all)")
    add_plan(plan, Plan())
    plan.add_argument("--search-images", type=positive, metavar="N",
        help="that the search for a learning rate sees")  # fmt: skip
    plan.add_argument("--batch", type=positive, help="images of a step (32)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
