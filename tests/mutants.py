"""Break the kernels and list what no test notices: `python tests/mutants.py [FILE ...]`.

Every kernel file is broken in some ten ways that a programmer might: one mutant of each kind, drawn
by --seed, or all with --all. A mutant is run against the tests that execute its line, quick ones
first, until one fails; an endless one is caught too. The first run finds out which tests execute
which lines: from Python 3.12 on it takes as long as the tests do, before several times as long.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mutants_code import (
    ROOT,
    Mutant,
    Tree,
    kernel_files,
    mutants_of,
    null_of,
    one_of_each,
    sample,
    source_of,
)
from mutants_forked import enter, forked, outcome, run_pytest, warm_up
from mutants_lines import Lines, recorder

# Without a GPU nothing executes these; test_ptx_emitted.py compiles them.
ON_A_GPU = ("*_emitted.py", "*/ptx/assembly.py", "*/kernels/card.py")
# They start processes, which no line is known of, or run no kernel.
LEFT_OUT = (
    "test_bench.py", "test_conv_bench*", "test_docstrings*", "test_examples*", "test_import*",
    "test_kernel_cache*", "test_lessons*", "test_lint*",
    "test_lstm_bench*", "test_mutants*", "test_patterns*", "test_profile*", "test_ptx_emitted*",
    "test_readme*", "test_cpu_upgrade*", "test_interop*", "test_sentiment*",
)  # fmt: skip

_trees: list[Tree] = []


def main() -> None:
    args = arguments()
    mutants = chosen(args)
    if args.list:
        for mutant in mutants:
            print(told(mutant))
        print(f"{len(mutants)} mutants")
        return
    with tempfile.TemporaryDirectory(prefix="numbsparse-mutants-") as folder:
        warm_up()
        lines = Lines(args.cache / "lines")
        find_lines(lines, test_files(), args, Path(folder))
        results = list(progress(run_all(mutants, lines, args, Path(folder)), len(mutants)))
    report(results)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    say = parser.add_argument
    say("files", nargs="*", help="names or patterns of files in numbsparse/kernels; else all")
    say("--all", action="store_true", help="all mutants, not one of each kind in each file")
    say("--sample", type=int, help="so many of them, drawn")
    say("--seed", type=int, default=0, help="draws the mutants")
    say("--resume", type=Path, metavar="FILE", help="results go here; what is there stays")
    say("--null", action="store_true", help="break nothing: no test may fail")
    say("--list", action="store_true", help="only say which mutants there are")
    say("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    say("--timeout", type=float, default=60, help="seconds that a test may take beyond its own")
    say("--budget", type=float, default=120, help="seconds of tests for a mutant")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "numbsparse"
    say("--cache", type=Path, default=cache / "mutants", help="folder of what is found once")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Mutant]:
    mutants: list[Mutant] = []
    for file in kernel_files():
        if args.files:
            wanted = any(fnmatch(file, f"*{pattern}") for pattern in args.files)
        else:
            wanted = not any(fnmatch(file, pattern) for pattern in ON_A_GPU)
        if wanted and args.null:
            mutants.append(null_of(file))
        elif wanted:
            mutants += mutants_of(file, (ROOT / file).read_text())
    if not args.all:
        mutants = one_of_each(mutants, args.seed)
    return mutants if args.sample is None else sample(mutants, args.sample, args.seed)


def test_files() -> list[str]:
    files = sorted((ROOT / "tests").glob("test_*.py"))
    kept = (file for file in files if not any(fnmatch(file.name, p) for p in LEFT_OUT))
    return [file.relative_to(ROOT).as_posix() for file in kept]


def find_lines(lines: Lines, files: list[str], args: argparse.Namespace, folder: Path) -> None:
    """Run the tests of files that are not known, and see which lines they execute."""
    if missing := lines.missing(files):
        print(f"{len(missing)} test files are run once, to see what they execute", flush=True)
        tree = Tree(folder / "traced")
        with get_context("fork").Pool(min(args.jobs, len(missing))) as pool:
            work = [(file, tree.root, args.cache) for file in missing]
            done = pool.imap_unordered(_record, work)
            for _ in progress(done, len(missing)):
                pass
    lines.read(files)


def _record(work: tuple[str, Path, Path]) -> str:
    file, tree, cache = work

    def run(say: Any) -> None:
        enter(tree, cache, bytecode=True)
        found = recorder(tree)
        run_pytest([file, "--maxfail=1000000"], found)
        Lines(cache / "lines").keep(file, found.tests)

    for _ in forked(run, 3600):
        pass
    return file


def run_all(
    mutants: list[Mutant], lines: Lines, args: argparse.Namespace, folder: Path
) -> Iterator[dict]:
    """Results, those of earlier runs first; each with the fields of its mutant.

    What no test caught is run again where there are other tests now.
    """
    known = {}
    if args.resume is not None and args.resume.exists():
        for line in args.resume.read_text().splitlines():
            result = json.loads(line)
            if result["caught"] or result["known"] == lines.known:
                known[result["name"]] = result
    yield from (known[m.name] for m in mutants if m.name in known)
    work = []
    for mutant in mutants:
        if mutant.name not in known:
            tests = lines.tests_of(mutant, (ROOT / mutant.file).read_text())
            work.append((mutant, within(tests, args.budget), len(tests), args))
    trees = get_context("fork").SimpleQueue()
    for number in range(args.jobs):
        trees.put(str(folder / str(number)))
    with get_context("fork").Pool(args.jobs, _begin, (trees,)) as pool:
        for result in pool.imap_unordered(_result, work):
            if args.resume is not None:
                with open(args.resume, "a") as file:
                    file.write(json.dumps({**result, "known": lines.known}) + "\n")
            yield result


def within(tests: list[tuple[str, float]], budget: float) -> list[tuple[str, float]]:
    """The first ones, of so many seconds together."""
    total, kept = 0.0, []
    for test, seconds in tests:
        if kept and total + seconds > budget:
            continue
        total += seconds
        kept.append((test, seconds))
    return kept


def _begin(trees: Any) -> None:
    _trees.append(Tree(Path(trees.get())))


def _result(work: tuple[Mutant, list[tuple[str, float]], int, argparse.Namespace]) -> dict:
    mutant, tests, of, args = work
    (tree,) = _trees
    source = source_of(mutant, (tree.root / mutant.file).read_text())
    start = time.time()
    with tree.broken(mutant.file, source):
        result = outcome(tests, tree.root, args.cache, args.timeout)
    seconds = round(time.time() - start, 1)
    return {"name": mutant.name, **mutant.as_json(), **result, "of": of, "seconds": seconds}


def progress(results: Iterable, total: int) -> Iterator:
    with suppress(ImportError):
        from tqdm import tqdm

        results = tqdm(results, total=total, mininterval=5)
    yield from results


def told(mutant: Any) -> str:
    fields = mutant if isinstance(mutant, dict) else mutant.as_json()
    return "{file}:{line}: {mistake}: {what}".format(**fields)


def report(results: list[dict]) -> None:
    left = sorted((r for r in results if not r["caught"]), key=told)
    for result in left:
        print(f"{told(result)}   (passes {result['run']} of {result['of']} tests)")
    width = shutil.get_terminal_size().columns
    print("-" * min(width, 79))
    caught = len(results) - len(left)
    print(f"{caught} of {len(results)} mutants are caught, {caught / max(1, len(results)):.1%}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
