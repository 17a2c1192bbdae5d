"""Grow a sparse network while it learns, beside layouts that stay, and a dense one.

    python examples/grow.py                       # two minutes on two cores
    python examples/grow.py --device cuda --window 64 --features 64 --batch 512 --steps 1600 \\
        --every 80 --no-checkpoints

Networks with two wide layers guess the next letter of Python's standard library. One begins with
5 % of the blocks, drawn at random; `nn.utils.Rewiring` drops those of smallest norm now and then,
and adds those with the largest gradient (RigL), until at three quarters of the steps it has as many
as the next two have from the start: a random layout and a small world (Watts and Strogatz). The
fourth is dense. All see the same batches.

For each it says how many bits a held-out letter takes, how many blocks it computed on the way, and
how long a training step of its last layout takes. Results are in one folder: grow.json, written
after each run, and grow.png. Stopped at any moment, a second call goes on from the last checkpoint.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from char_options import positive, share
from layout_runs import (
    Results,
    Run,
    check_stages,
    done,
    draw_curves,
    figure_of,
    opened,
    parser_of,
    read,
    spread,
    strip,
    unpacked,
)
from letter_model import LetterModel, Windows
from letter_training import Training, step_times

import numbsparse as ns
from numbsparse.nn.utils import Rewiring

KINDS = ("grown", "random", "small world", "dense")
FIRST = 0.05  # the density that the grown one begins with
SHOWN = 5  # layouts in the picture
REWIRED = 0.2  # of the connections of a small world


def main(arguments: list[str] | None = None) -> list[Run]:
    """Do the runs that are missing; gives all of them."""
    parser = parser_of(__doc__, "grow", steps=400, marks=10)
    parser.add_argument("--density", type=share, default=0.2,
        help="of all sparse ones in the end, about (%(default)s)")  # fmt: skip
    parser.add_argument("--every", type=positive, default=25, metavar="STEPS",
        help="from one change of the layout to the next (%(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    return done("grow", options, lambda: run_all(options, given), tell, draw)


def run_all(options: Namespace, given: list[str]) -> Results:
    check_stages(ends(options.steps))
    windows = opened(options, given, "grow")
    results = Results(options, ("density", "every"))
    for seed in range(options.seed, options.seed + options.seeds):
        one = Namespace(**vars(options) | {"seed": seed})
        for kind in KINDS:
            if results.lacks(kind=kind, seed=seed):
                results.runs.append({"kind": kind, "seed": seed, **train(one, windows, kind)})
                results.write()
    if not results.times:
        networks = {
            run["kind"]: [ns.Layout(unpacked(one)) for one in run["stages"][-1]["layouts"]]
            for run in reversed(results.runs)
        }
        results.times = step_times(windows, options, {kind: networks[kind] for kind in KINDS})
        results.write()
    return results


def layouts_of(options: Namespace, kind: str) -> list[Any]:
    """Those of both wide layers at first."""
    n = -(-options.window * options.features // options.block_size)
    neighbours = max(round((options.density * n - 1) / 2), 1)
    density = {"grown": FIRST, "random": (2 * neighbours + 1) / n}  # as many as the small world
    if 2 * neighbours + 1 > n:
        takes = f"less, where {neighbours} neighbours on both sides are all of {n} blocks or more"
        raise ValueError(f"--density takes {takes}, got {options.density}")
    rng = np.random.default_rng([options.seed, KINDS.index(kind)])
    if kind == "dense":
        return [None, None]
    if kind == "small world":
        make = ns.patterns.watts_strogatz
        return [make(n, neighbours, REWIRED, seed=rng) for _ in range(2)]
    return [ns.patterns.random(n, n, density[kind], seed=rng) for _ in range(2)]


def train(options: Namespace, windows: Windows, kind: str) -> Run:
    """One run: its curve, and its layouts after one step and at the end of each quarter."""
    layouts = layouts_of(options, kind)
    model = LetterModel(len(windows.text.alphabet), options, layouts)
    file = options.out / f"{kind.replace(' ', '_')}_{options.seed}.npz"
    training = Training(f"{kind}, seed {options.seed}", model, windows, options, file)
    schedule = None
    if kind == "grown":
        end = ns.Layout(layouts_of(options, "random")[0]).density
        how = {"every": options.every, "stop": max(options.steps * 3 // 4, 2), "density": end}
        schedule = Rewiring(model.wide, seed=options.seed, remap=training.optimizer, **how)
    if file.exists():
        training.resume(ns.load(file), schedule)
    for end in ends(options.steps):
        training.run(end, schedule)
    return training.result()


def ends(steps: int) -> list[int]:
    """The steps whose layouts are in the picture."""
    return [max(steps * nth // (SHOWN - 1), 1) for nth in range(SHOWN)]


def cost(run: Run) -> list[float]:
    """Steps of a dense network in which as many blocks are computed, up to each mark."""
    steps, _, density = np.array([[0, 0, run["curve"][0][2]], *run["curve"]]).T
    return np.cumsum(np.diff(steps) * (density[1:] + density[:-1]) / 2).tolist()


def tell(results: Results) -> None:
    """A line for each kind."""
    print(f"{'':12} {'parameters':>11} {'bits held out':>16} {'cost':>6} {'ms a step':>10}")
    for kind in KINDS:
        runs = [run for run in results.runs if run["kind"] == kind]
        bits = spread([run["stages"][-1]["bits"] for run in runs])
        dense_steps = np.mean([cost(run)[-1] for run in runs])
        print(f"{kind:12} {runs[0]['parameters']:11,} {bits:>16} {dense_steps:6.0f} "
              f"{results.times[kind]:10.1f}")  # fmt: skip
    print(f"cost: dense steps with as many blocks of the wide layers; times: {results.place}")


def draw(file: Path) -> None:
    """Held-out bits by step and by cost, and the second wide layer as it grows."""
    content = read(file)
    if (figure := figure_of(9, 6)) is None:
        return
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 1.6))
    left, right = (figure.add_subplot(cell) for cell in grid[0].subgridspec(1, 2))
    for kind in KINDS:
        runs = [run for run in content["runs"] if run["kind"] == kind]
        draw_curves(left, kind, [run["curve"][1:] for run in runs])  # not that of step 1
        by_cost = [
            [[x, *row[1:]] for x, row in zip(cost(run), run["curve"], strict=True)] for run in runs
        ]
        draw_curves(right, kind, [curve[1:] for curve in by_cost])
    left.set(xlabel="step", ylabel="bits per letter, held out", title="After as many steps")
    right.set(xlabel="steps of a dense network with as many blocks", xscale="log")
    right.set(title="After as much work in the wide layers")
    right.xaxis.set_major_formatter("{x:g}")
    left.legend()
    grown = next(run for run in content["runs"] if run["kind"] == "grown")["stages"]
    steps = ends(content["settings"]["steps"])
    titles = [f"step {end}: {s['density']:.0%}" for end, s in zip(steps, grown, strict=True)]
    strip(figure, grid[1], [stage["layouts"][1] for stage in grown], titles)
    picture = file.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    print(f"everything is in {picture.parent}")


if __name__ == "__main__":
    main()
