"""Who is ahead when models have learned what they can: dense or small-world LSTMs, by size.

    python examples/scaling.py --device cuda --minutes 8   # the next runs, as many as fit
    python examples/scaling.py --list                      # which there are, and which are done
    python examples/scaling.py --collect examples/results/scaling.json   # table and picture

The work is hundreds of runs of seconds to minutes, in an order of their own. A call does the next
ones, each leaves one JSON file in --runs, and a run that was interrupted goes on from its
checkpoint. Processes with one --runs share the work: start one a GPU, each with its own
CUDA_VISIBLE_DEVICES. Runs that the file of --results has are not done again, so a sitting on
another machine goes on where the last one was, if it finds the same text.
examples/results/README.md has the protocol and what came of it.

The question of S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017,
section 4.1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import IO, Any

from char_options import make_folder, positive, positive_number, settle
from char_text import Text, check_length
from ranks import alone
from scaling_plan import GROUPS, MAIN, Group, Plan, Run, missing, runs_of, seconds_for
from scaling_report import draw, table
from scaling_run import Result, train
from scaling_text import Manifest, gather

from numbsparse import files

RESULTS = Path(__file__).parent / "results" / "scaling.json"
MOST_FAILED = 3  # runs, and a process gives up
Store = dict[str, Any]  # {"texts": {hash: manifest}, "runs": [result]}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    began = time.monotonic()
    options.until = began + 60 * options.minutes
    alone()  # ranks share out the runs, as other processes do
    try:
        make_folder(options.runs)
        if options.collect:
            collect(options)
            return
        text, manifest = gather(options.text)
        plan = plan_of(options, manifest)
        check_length(text, plan.batch, plan.length)
        sizes = ", ".join(f"{n:,} {part}" for part, n in manifest["characters"].items())
        print(f"text {plan.text}: characters {sizes}; {time.monotonic() - began:.1f} s", flush=True)
        write(options.runs / f"text-{plan.text}.json", manifest)
        if options.list:
            show(plan, known(options))
        else:
            settle(options)
            work(options, plan, text)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"scaling: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nscaling: stopped; what is done is in {options.runs}")


def work(options: Namespace, plan: Plan, text: Text) -> None:
    """Do the next runs until none is left, or none that the time allows."""
    failed: set[str] = set()  # of this process
    while len(failed) < MOST_FAILED:
        results = known(options)
        left = options.until - time.monotonic()
        fitting = [
            run
            for run in missing(plan, results)
            if run.name(plan) not in failed and seconds_for(run, results) < left
        ]
        if not any(do(run, options, plan, text, failed) for run in fitting):
            if left < 1 or not others_at_work(options.runs):
                break
            time.sleep(1.0)  # what they find may open the way for more
        gc.collect()  # graphs and their memory
    results = known(options)
    waiting = sum(run.lr is None for run in runs_of(plan, results))
    begun = len(list(missing(plan, results)))
    print(f"{begun} runs can be begun, {waiting} wait for others" if begun else "all is done")
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed")


def do(run: Run, options: Namespace, plan: Plan, text: Text, failed: set[str]) -> bool:
    """Do a run, unless another process does or has done it; says whether it was done here.

    One that ends in an error has no result and is begun again by the next call.
    """
    name = run.name(plan)
    file, checkpoint = (options.runs / f"run-{name}.{ending}" for ending in ("json", "npz"))
    with claimed(options.runs / f"run-{name}.lock") as ours:
        if not ours or file.exists():
            return False
        try:
            result = train(run, plan, text, options.device, checkpoint, options.until)
        except Exception as error:
            failed.add(name)
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            return True
        if result is None:
            return True
        write(file, result)
        checkpoint.unlink(missing_ok=True)
    bits = {part: result[part] for part in ("validation", "test") if result[part] is not None}
    said = " ".join(f"{part} {value:.4f}" for part, value in bits.items())
    speed = run.characters / max(result["train_seconds"], 1e-9) / 1e6
    took = f"{speed:.2f} million characters/s, {result['wall_seconds']:.1f} s"
    outcome = said or result["diverged"]
    print(f"{name}: {outcome}; {result['parameters']:,} parameters, {took}", flush=True)
    return True


def lock_now(file: IO[str]) -> None:
    """Lock an open file until it is closed; OSError where another process has it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether no other process has it. It is let go when the process ends, however it does."""
    with open(file, "w", encoding="utf-8") as lock:
        try:
            lock_now(lock)
        except OSError:
            yield False
        else:
            yield True


def others_at_work(folder: Path) -> bool:
    """Whether another process has a run now."""
    for file in folder.glob("*.lock"):
        with claimed(file) as free:
            if not free:
                return True
    return False


def known(options: Namespace) -> dict[str, Result]:
    """All results, of --results and of --runs, by name."""
    runs = [run for file in options.results if file.exists() for run in load(file)["runs"]]
    paths = sorted(options.runs.glob("run-*.json"))
    runs += [json.loads(file.read_text(encoding="utf-8")) for file in paths]
    return {run["name"]: run for run in reversed(runs)}


def load(file: Path) -> Store:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {"texts": content["texts"], "runs": content["runs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of this program: {error!r}") from error


def collect(options: Namespace) -> None:
    """All results in one file, with a table and a picture beside it."""
    texts: dict[str, Manifest] = {}
    for file in options.results:
        texts |= load(file)["texts"] if file.exists() else {}
    for file in options.runs.glob("text-*.json"):
        texts[file.stem.removeprefix("text-")] = json.loads(file.read_text(encoding="utf-8"))
    runs = sorted(known(options).values(), key=lambda run: run["finished"])
    write(options.collect, {"texts": texts, "runs": runs})
    print("\n".join(table(runs)))
    draw(options.collect.with_suffix(".png"), runs)


def show(plan: Plan, results: dict[str, Result]) -> None:
    runs = runs_of(plan, results)
    for run in runs:
        name = run.name(plan)
        state = "done" if name in results else "waits" if run.lr is None else "open"
        print(f"{state:5} {name}")
    print(f"{sum(run.name(plan) in results for run in runs)} of {len(runs)} runs are done")


def write(file: Path, content: Any) -> None:
    files.write_bytes(file, (json.dumps(content) + "\n").encode())


def plan_of(options: Namespace, manifest: Manifest) -> Plan:
    """The plan, with what the arguments change of it."""
    names = {field.name for field in fields(Plan)}
    given = {key: value for key, value in vars(options).items() if key in names and value}
    return Plan(**{"groups": GROUPS} | given | {"text": manifest["sha256"][:16]})


def group_of(word: str) -> Group:
    size, _, characters = word.partition(":")
    try:
        return Group(positive(size), MAIN, round(positive_number(characters)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes HIDDEN:CHARACTERS, got {word}") from None


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="say which runs there are, and do none")
    add("--collect", type=Path, metavar="FILE", help="write all results to one file, and draw them")
    add("--minutes", type=positive_number, default=inf, help="begin no run that would take longer")
    add("--text", nargs="*", default=[], metavar="PATH",
        help="a file such as enwik8, or folders; default: the installed packages")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    add("--runs", type=Path, default=Path("scaling_run"),
        help="folder of new results (%(default)s)")  # fmt: skip
    add("--results", type=Path, nargs="*", default=[RESULTS], help="files of earlier ones")
    plan = parser.add_argument_group("plan", "A change of these makes other runs.")
    add = plan.add_argument
    add("--groups", type=group_of, nargs="+", metavar="HIDDEN:CHARACTERS",
        help="a dense model's units, and what it and small worlds as large read")  # fmt: skip
    add("--rates", type=positive_number, nargs="+", help="learning rates that are tried first")
    add("--search-characters", type=positive, help="that the search for a learning rate reads")
    add("--seeds", type=positive, help="of weights and wiring (3)")
    add("--batch", type=positive, help="sequences side by side (128)")
    add("--length", type=positive, help="characters per step (64)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the models (float16)")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or Plan().dtype
    return options


if __name__ == "__main__":
    main()
