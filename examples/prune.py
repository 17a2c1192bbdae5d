"""Train a dense network, prune it step by step, and see what it still knows and what it costs.

    python examples/prune.py                      # two minutes on two cores
    python examples/prune.py --device cuda --window 64 --features 64 --batch 512 --steps 2400 \\
        --mark-every 200 --no-checkpoints

A network with two wide layers guesses the next letter of Python's standard library. After a third
of the steps half of the blocks of its wide layers are pruned, then 80, 90 and 95 %, each time along
a cubic (Zhu and Gupta, 2017) with fine-tuning after it. Beside it the dense network trains on, with
the same batches. At each density it says how many bits a held-out letter takes, and how long a
training step takes: of the pruned network, and of one that was made with that layout, in turns.

Results are in one folder: prune.json, written after each run, and prune.png. Stopped at any moment,
a second call goes on from the last checkpoint, bit for bit.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

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
from numbsparse.nn.utils import GradualPruning

DENSITIES = (0.5, 0.2, 0.1, 0.05)
PRUNINGS = 6  # in a stage


def main(arguments: list[str] | None = None) -> list[Run]:
    """Do the runs that are missing; gives all of them."""
    options = parser_of(__doc__, "prune", steps=720, marks=12).parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    return done("prune", options, lambda: run_all(options, given), tell, draw)


def run_all(options: Namespace, given: list[str]) -> Results:
    check_stages(stages(options.steps))
    windows = opened(options, given, "prune")
    results = Results(options)
    for seed in range(options.seed, options.seed + options.seeds):
        one = Namespace(**vars(options) | {"seed": seed})
        for kind in ("dense", "pruned"):
            if results.lacks(kind=kind, seed=seed):
                results.runs.append({"kind": kind, "seed": seed, **train(one, windows, kind)})
                results.write()
    if not results.times:
        first = next(run for run in results.runs if run["kind"] == "pruned")
        networks: dict[str, Any] = {"dense": (None, None)}
        for density, stage in zip(DENSITIES, first["stages"][1:], strict=True):
            layouts = [ns.Layout(unpacked(one)) for one in stage["layouts"]]
            networks |= {f"pruned {density}": layouts, f"made {density}": layouts}
        results.times = step_times(windows, options, networks)
        results.write()
    return results


def stages(steps: int) -> list[int]:
    """The last step of each: dense first, then one for each density."""
    first, n = steps // 3, len(DENSITIES)
    return [first + (steps - first) * k // n for k in range(n + 1)]


def train(options: Namespace, windows: Windows, kind: str) -> Run:
    """One run: its curve, and the bits and layouts at the end of each stage."""
    model = LetterModel(len(windows.text.alphabet), options)
    own, start = (options.out / f"{name}_{options.seed}.npz" for name in (kind, "start"))
    training = Training(f"{kind}, seed {options.seed}", model, windows, options, own)
    ends = stages(options.steps)
    stored = next((ns.load(file) for file in (own, start) if file.exists()), None)
    for nth, end in enumerate(ends):
        if stored is not None and stored["step"] > end:
            continue  # the checkpoint is of a later stage
        schedule = None
        if nth and kind == "pruned":
            stop = max((end - ends[nth - 1]) // 2, 1)  # what is left is fine-tuning
            how: dict[str, Any] = {"stop": stop, "every": max(stop // PRUNINGS, 1)}
            how["remap"] = training.optimizer
            schedule = GradualPruning(model.wide, DENSITIES[nth - 1], **how)
        if stored is not None:
            training.resume(stored, schedule)
            stored = None
        training.file = own if nth else start  # both kinds begin with the same network
        training.run(end, schedule)
    return training.result()


def tell(results: Results) -> None:
    """A line for each density."""
    ends = stages(results.settings["steps"])
    heads = f"{'pruned':>16} {'dense, as long':>16}  a step, of dense: pruned, made so"
    print(f"{'density':>8} {'steps':>6} {heads}")
    for nth, density in enumerate((1.0, *DENSITIES)):
        bits = {}
        for kind in ("pruned", "dense"):
            runs = [run for run in results.runs if run["kind"] == kind]
            bits[kind] = spread([run["stages"][nth]["bits"] for run in runs])
        dense = results.times["dense"]
        times = [results.times.get(f"{how} {density}", dense) for how in ("pruned", "made")]
        of_dense = ", ".join(f"{t / dense:.2f}" for t in times)
        print(f"{density:8} {ends[nth]:6} {bits['pruned']:>16} {bits['dense']:>16}  {of_dense}")
    print(f"bits per held-out letter; a dense step takes {dense:.1f} ms ({results.place})")


def draw(file: Path) -> None:
    """Held-out bits and the time of a step by density, and the layouts of the second wide layer."""
    content = read(file)
    if (figure := figure_of(9, 6)) is None:
        return
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 1.6))
    left, right = (figure.add_subplot(cell) for cell in grid[0].subgridspec(1, 2))
    ends = stages(content["settings"]["steps"])
    for kind in ("dense", "pruned"):
        draw_curves(left, kind, [run["curve"] for run in content["runs"] if run["kind"] == kind])
    for begin, density in zip(ends, DENSITIES, strict=False):
        left.axvline(begin, color="gray", linewidth=0.8, linestyle=":")
        left.annotate(f"to {density:.0%}", (begin, 1), xycoords=("data", "axes fraction"),
                      xytext=(3, -10), textcoords="offset points", fontsize=8)  # fmt: skip
    left.set(xlabel="step", ylabel="bits per letter, held out", title="What it still knows")
    left.legend(loc="lower left")
    draw_times(right, content["times"])
    pruned = next(run for run in content["runs"] if run["kind"] == "pruned")
    titles = [f"{density:.0%}" for density in (1.0, *DENSITIES)]
    strip(figure, grid[1], [stage["layouts"][1] for stage in pruned["stages"]], titles)
    picture = file.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    print(f"everything is in {picture.parent}")


def draw_times(axes: Any, times: dict[str, float]) -> None:
    """Relative to the dense network, on two logarithmic axes."""
    densities = [1.0, *DENSITIES]
    for how, sign in (("pruned", "o-"), ("made", "x--")):
        label = "pruned from dense" if how == "pruned" else "made with that layout"
        shares = [times.get(f"{how} {d}", times["dense"]) / times["dense"] for d in densities]
        axes.plot(densities, shares, sign, label=label)
    axes.plot(densities, densities, ":", color="gray", label="in proportion")
    axes.set(xscale="log", yscale="log", xlabel="density of the wide layers")
    axes.set(ylabel="time of a step, of the dense one's", title="What it costs")
    axes.set_xticks(densities, [f"{d:.0%}" for d in densities])
    axes.set_yticks(densities, [f"{d:.0%}" for d in densities])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    main()
