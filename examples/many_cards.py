"""What several cards of a host are worth: training steps and collectives, timed on all of them.

    python -m numbsparse.distributed --ranks 2 examples/many_cards.py --json many_cards.json

Sections: what NCCL takes for sums and copies; data parallel training of a small-world LSTM, beside
the same layer of `numbsparse.torch` under torch's DDP, and of PixelCNN++; LSTMs that are split over
two cards. "One card" is measured on all of them at once, by ranks that do not wait for each other.
--tables FILE writes the guide to many cards from examples/results/many_cards.json.
"""

import argparse
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_cards_tables as tables
from many_cards_ddp import ddp
from many_cards_lstm import data_parallel, split
from many_cards_pixels import pixelcnn
from many_cards_times import collectives
from ranks import ranks

import numbsparse.distributed as dist
from numbsparse import device
from numbsparse.bench import results
from numbsparse.machine import in_a_list, versions_of

Section = Callable[[dist.Group, Namespace], list[dict[str, Any]]]
SECTIONS: dict[str, Section] = {
    "collectives": collectives,
    "data_parallel": data_parallel,
    "ddp": ddp,
    "split": split,
    "pixelcnn": pixelcnn,
}


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Measure; gives the rows of each section."""
    options = parse(arguments)
    if options.tables:
        tables.fill(options.tables, results.load(tables.RESULTS))
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    with ranks() as group:
        options.device = "cuda" if device.is_available() and not options.cpu else "cpu"
        cards = group.share(device.card() if options.device == "cuda" else "CPU")
        machine = f"{group.size} x {cards[0]}; {in_a_list(versions_of(*PACKAGES))}"
        given = sys.argv[1:] if arguments is None else arguments
        command = f"python -m numbsparse.distributed --ranks {group.size} examples/many_cards.py "
        for name in options.only or SECTIONS:
            began = time.perf_counter()
            found[name] = SECTIONS[name](group, options)
            took = time.perf_counter() - began
            about = {"machine": machine, "command": command + shlex.join(given), "took": took}
            print(f"\n{name}, {took:.0f} s:\n{tables.MAKERS[name](found[name])}", flush=True)
            if options.json and group.rank == 0:
                key = tables.key(name, group.size)
                results.save(options.json, {key: about | {"rows": found[name]}})
            group.barrier()
    return found


PACKAGES = ("numbsparse", "numba", "numba-cuda", "nccl4py", "torch")


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, help="sections; default: all")
    add("--json", type=Path, help="file to put them into; its other sections stay")
    add("--units", type=int, default=18432, help="of the data parallel LSTM (%(default)s)")
    add("--split-units", type=int, nargs="+", default=[18432, 36864, 73728],
        help="of the LSTMs that are split (%(default)s)")  # fmt: skip
    add("--steps", type=int, default=64, help="of time (%(default)s)")
    add("--batch", type=int, default=64, help="sequences of a card (%(default)s)")
    add("--filters", type=int, default=160, help="of PixelCNN++ (%(default)s, the paper's)")
    add("--blocks", type=int, default=5, help="of PixelCNN++ a stage (%(default)s, the paper's)")
    add("--images", type=int, default=16, help="of a card (%(default)s)")
    add("--repeats", type=int, default=20, help="of what is timed, in each of 3 rounds")
    add("--cpu", action="store_true", help="without GPUs, to see that it runs")
    add("--tables", type=Path, metavar="FILE", help="write the tables of this file, and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
