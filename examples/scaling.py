"""Who is ahead when models have learned what they can: dense or small-world LSTMs, by size.

    python examples/scaling.py --device cuda --minutes 8   # the next runs, as many as fit
    python examples/scaling.py --list                      # which there are, and which are done
    python examples/scaling.py --collect examples/results/scaling.json   # table and picture

The work is hundreds of runs of seconds to minutes, in an order of their own. A call does the next
ones, each leaves one JSON file in --runs, and a run that was interrupted goes on from its
checkpoint. Processes with one --runs share the work: start one a GPU, each with its own
CUDA_VISIBLE_DEVICES. Runs that the file of --results has are not done again, so
another machine goes on where the last one was, if it finds the same text.
--collect also writes the table of the README beside its file, examples/results/README.md, which
has the protocol and what came of it.

The question of S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017,
section 4.1.
"""

import argparse
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from char_options import positive, positive_number
from char_text import check_length
from runs import Manifest, Result, Work, add_plan, add_runs, keep_manifest, serve
from runs_plan import Group
from runs_report import write_between
from scaling_plan import GROUPS, MAIN, Plan
from scaling_report import draw, report, table
from scaling_run import train
from scaling_text import gather

RESULTS = Path(__file__).parent / "results" / "scaling.json"


def main(arguments: list[str] | None = None) -> None:
    serve("scaling", parse(arguments), begin, show)


def show(file: Path, runs: list[Result]) -> None:
    """Print the results of all runs, draw them, and write their table into the README."""
    print("\n".join(table(runs)))
    draw(file.with_suffix(".png"), runs)
    write_between(file.with_name("README.md"), "text", report(runs))


def begin(options: Namespace) -> Work:
    """The runs over the text that is there."""
    began = time.monotonic()
    text, manifest = gather(options.text)
    plan = plan_of(options, manifest)
    check_length(text, plan.batch, plan.length)
    sizes = ", ".join(f"{n:,} {part}" for part, n in manifest["characters"].items())
    print(f"text {plan.text}: characters {sizes}; {time.monotonic() - began:.1f} s", flush=True)
    keep_manifest(options, manifest)
    return Work(plan, options, lambda run, file: train(
        run, plan, text, options.device, file, options.until))  # fmt: skip


def plan_of(options: Namespace, manifest: Manifest) -> Plan:
    """The plan, with what the arguments change of it."""
    names = {field.name for field in fields(Plan)}
    given = {key: value for key, value in vars(options).items() if key in names and value}
    return Plan(**{"groups": GROUPS} | given | {"text": manifest["sha256"][:16]})


def group_of(word: str) -> Group:
    size, colon, characters = word.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"takes HIDDEN:CHARACTERS, got {word}")
    return Group(positive(size), MAIN, round(positive_number(characters)))


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_runs(parser, runs="scaling_run", results=RESULTS)
    parser.add_argument("--text", nargs="*", default=[], metavar="PATH",
        help="a file such as enwik8, or folders; default: the installed packages")  # fmt: skip
    plan = parser.add_argument_group("plan", "A change of these makes other runs.")
    add = plan.add_argument
    add("--groups", type=group_of, nargs="+", metavar="HIDDEN:CHARACTERS",
        help="a dense model's units, and what it and small worlds as large read")  # fmt: skip
    add_plan(plan, Plan())
    add("--search-characters", type=positive, help="that the search for a learning rate reads")
    add("--batch", type=positive, help="sequences side by side (128)")
    add("--length", type=positive, help="characters per step (64)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
