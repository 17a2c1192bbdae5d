"""Independent runs of a plan, shared by any number of processes and machines.

A run leaves one JSON file in a folder. One that was interrupted goes on from its checkpoint. All
results together are one file, which a later process, on any machine, goes on from.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any

from char_options import make_folder, positive, positive_number, settle
from ranks import alone
from runs_plan import Plan, Run, missing, runs_of, seconds_for

from numbsparse import files

MOST_FAILED = 3  # runs, and a process gives up

Result = dict[str, Any]
Manifest = dict[str, Any]  # of what was read: its counts, and its hash
Store = dict[str, Any]  # {"manifests": {hash: manifest}, "runs": [result]}
Train = Callable[[Run, Path], Result | None]  # None where time is up, and the file has what is done


@dataclass(frozen=True)
class Work:
    """The runs of a plan, and how one is done. `options` are those of `add_runs`."""

    plan: Plan
    options: Namespace
    train: Train

    def go_on(self) -> None:
        """Do the next runs until none is left, or none that the time allows."""
        options, plan = self.options, self.plan
        failed: set[str] = set()  # of this process
        first = True
        while len(failed) < MOST_FAILED:
            results = known(options)
            left = options.until - time.monotonic()
            fitting = [
                run
                for run in missing(plan, results)
                if run.name(plan) not in failed and seconds_for(run, plan, results, first) < left
            ]
            fitting.sort(key=lambda run: not all(word in run.name(plan) for word in options.first))
            if any(self.do(run, failed) for run in fitting):
                first = False
            elif left < 1 or not others_at_work(options.runs):
                break
            else:
                time.sleep(1.0)  # what others find may open the way for more
            gc.collect()  # graphs and their memory
        results = known(options)
        waiting = sum(run.lr is None for run in runs_of(plan, results))
        begun = len(list(missing(plan, results)))
        print(f"{begun} runs can be begun, {waiting} wait for others" if begun else "all is done")
        if failed:
            raise RuntimeError(f"{len(failed)} runs failed")

    def do(self, run: Run, failed: set[str]) -> bool:
        """Do a run, unless another process does or has done it; says whether it was done here.

        One that ends in an error has no result and is begun again by the next call.
        """
        plan, name = self.plan, run.name(self.plan)
        file, checkpoint = (
            self.options.runs / f"run-{name}.{ending}" for ending in ("json", "npz")
        )
        with claimed(self.options.runs / f"run-{name}.lock") as ours:
            if not ours or file.exists():
                return False
            try:
                result = self.train(run, checkpoint)
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
        speed = run.amount / max(result["train_seconds"], 1e-9)
        took = f"{speed:,.0f} {plan.UNIT}/s, {result['wall_seconds']:.1f} s"
        outcome = said or result["diverged"]
        print(f"{name}: {outcome}; {result['parameters']:,} parameters, {took}", flush=True)
        return True

    def show(self) -> None:
        """Say which runs there are, and which are done."""
        results = known(self.options)
        runs = runs_of(self.plan, results)
        for run in runs:
            name = run.name(self.plan)
            state = "done" if name in results else "waits" if run.lr is None else "open"
            print(f"{state:5} {name}")
        print(f"{sum(run.name(self.plan) in results for run in runs)} of {len(runs)} runs are done")


def serve(
    name: str,
    options: Namespace,
    begin: Callable[[Namespace], Work],
    show: Callable[[Path, list[Result]], None],
) -> None:
    """The program `name`: collect results and show them, list the runs, or do the next ones."""
    options.until = time.monotonic() + 60 * options.minutes
    alone()  # ranks share out the runs, as other processes do
    try:
        make_folder(options.runs)
        if options.collect:
            show(options.collect, collect(options))
            return
        work = begin(options)
        if options.list:
            work.show()
        else:
            settle(options)
            work.go_on()
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\n{name}: stopped; what is done is in {options.runs}")


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
        return {"manifests": content["manifests"], "runs": content["runs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of this program: {error!r}") from error


def collect(options: Namespace) -> list[Result]:
    """All results, which are written to the one file of --collect."""
    manifests: dict[str, Manifest] = {}
    for file in options.results:
        manifests |= load(file)["manifests"] if file.exists() else {}
    for file in options.runs.glob("manifest-*.json"):
        key = file.stem.removeprefix("manifest-")
        manifests[key] = json.loads(file.read_text(encoding="utf-8"))
    runs = sorted(known(options).values(), key=lambda run: (run["finished"], run["name"]))
    write(options.collect, {"manifests": manifests, "runs": runs})
    return runs


def keep_manifest(options: Namespace, manifest: Manifest) -> None:
    """Beside the results, for `collect`."""
    write(options.runs / f"manifest-{manifest['sha256'][:16]}.json", manifest)


def write(file: Path, content: Any) -> None:
    files.write_bytes(file, (json.dumps(content) + "\n").encode())


def add_runs(parser: argparse.ArgumentParser, *, runs: str, results: Path) -> None:
    """Arguments of what is done now, and where its results are."""
    add = parser.add_argument
    add("--list", action="store_true", help="say which runs there are, and do none")
    add("--collect", type=Path, metavar="FILE", help="write all results to one file, and draw them")
    add("--minutes", type=positive_number, default=inf, help="begin no run that would take longer")
    add("--first", nargs="+", default=[], metavar="WORD",
        help="runs with all of these in their names are done before others")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    add("--runs", type=Path, default=Path(runs), help="folder of new results (%(default)s)")
    add("--results", type=Path, nargs="*", default=[results], help="files of earlier ones")


def add_plan(group: Any, plan: Plan) -> None:
    """Arguments that change the plan, and so make other runs."""
    add = group.add_argument
    add("--rates", type=positive_number, nargs="+", help="learning rates that are tried first")
    add("--seeds", type=positive, help=f"of weights and wiring ({plan.seeds})")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default=plan.dtype,
        help="of the models (%(default)s)")  # fmt: skip
