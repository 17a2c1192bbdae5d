"""What this machine can run, how fast it is, and how the kernels work."""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from numbsparse import __version__, device, info
from numbsparse.bench import plane
from numbsparse.bench.measure import Options, processes_here
from numbsparse.bench.results import load
from numbsparse.bench.sections import SECTIONS, run
from numbsparse.device import runtime
from numbsparse.draw import matplotlib_figure
from numbsparse.files import check_writable, module_of, write_bytes
from numbsparse.kernels.matmul import OWN, RUNGS, add_rung
from numbsparse.machine_code import gate
from numbsparse.pages import mapped
from numbsparse.pages.figure import draw_headline, draw_map, draw_roofline
from numbsparse.puzzles import course as puzzles

Number = TypeVar("Number", int, float)


def _from(least: Number) -> Callable[[str], Number]:
    """Reads a number of the same type, at least so large."""

    kind = "whole number" if isinstance(least, int) else "number"

    def number(word: str) -> Number:
        with suppress(ValueError):
            if (value := type(least)(word)) >= least:  # NaN is none
                return value
        raise argparse.ArgumentTypeError(f"takes a {kind} of at least {least}, got {word}")

    return number


def _some_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Reads a list with commas of these names."""

    def names(words: str) -> tuple[str, ...]:
        if unknown := [name for name in words.split(",") if name not in known]:
            takes = f"takes some of {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"{takes}, got {unknown[0]!r}")
        return tuple(words.split(","))

    return names


def _capability(word: str) -> tuple[int, int]:
    major, _, minor = word.partition(".")
    if not (major.isdecimal() and minor.isdecimal()) or (int(major), int(minor)) < (7, 0):
        raise argparse.ArgumentTypeError(f"takes one of 7.0 and up, such as 8.6, got {word!r}")
    return int(major), int(minor)


def _output(word: str) -> Path:
    """A file to be written, refused before the work where it cannot be."""
    try:
        check_writable(word)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"takes a file that can be written: {error}") from error
    return Path(word)


def _picture(word: str) -> Path:
    if not word.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"takes a name ending in .png, .svg or .pdf, got {word}")
    return _output(word)


WHOLE, TIME = _from(0), _from(0.0)
Run = Callable[[argparse.Namespace], Any]  # gives whether all was well, if that is to be told
COUNT: Any = {"type": _from(1), "default": 1}
JOBS: Any = {"type": _from(1)}
MANY = "one for two cores, up to 8"  # of JOBS
FILE: Any = {"type": _output, "metavar": "FILE"}
PICTURE: Any = FILE | {"type": _picture}


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        done = options.run(options)
        print(end="", flush=True)  # stdout may be None, as of `>&-`
    except BrokenPipeError:  # who reads has seen enough, as `| head`; nothing is written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, RuntimeError, TypeError, ValueError, OSError) as error:
        sys.exit(f"numbsparse: {error}")
    if done is not None:
        sys.exit(0 if done else 1)


def _parser() -> argparse.ArgumentParser:
    """What it parses has the command's function as `run`, and what refuses its words as `error`."""
    parser = argparse.ArgumentParser(
        prog="python -m numbsparse",
        description=f"{__doc__}\n\nStart with: python -m numbsparse info",
        epilog="`python -m numbsparse COMMAND --help` says more of each.\n\n"
        "Products are computed by a choice of kernels, called rungs, from the plainest (k1_naive)\n"
        "to that for Hopper's tensor cores (k6_hopper) and beyond; together they are the ladder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Run, short: str, more: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=short,
            description=f"{short[0].upper()}{short[1:]}.\n\n{more}",
            epilog=f"example:\n  python -m numbsparse {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, error=command.error)
        return command

    command = add(
        "info",
        lambda of: info.write(__version__, of.json),
        "show what runs on this machine, and what is missing for more",
        "Lists the processor, the GPU and its driver, what runs on each and in which dtypes, the\n"
        "packages that are installed, and the folder of compiled kernels.",
        "info --json",
    )
    command.add_argument("--json", action="store_true", help="print JSON, for a program to read")
    command = add(
        "bench",
        _bench,
        "time block-sparse products on this machine",
        "Times forward products and both gradients over a range of sizes and densities, beside\n"
        "the dense product and other libraries where they are installed (SciPy, torch, CuPy).\n"
        "Every result is checked against SciPy before it is timed.",
        "bench --place cpu --quick",
    )
    _add_bench(command)
    command = add(
        "ladder",
        _of_kernels("pages.ladder", _ladder),
        "list the GPU kernels: the idea of each, what it reads, its speed, whether it runs here",
        "Prints a table of the kernels that compute products, then one of the fifteen small ones\n"
        "that teach them. Speeds are those of the H100 or H200 that the project measured on.",
        "ladder --dtype float32",
    )
    command.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        default="float16",
        help="of the weights and activations; default: float16",
    )
    command = add(
        "puzzle",
        lambda of: puzzles.run(of.number, of.folder, hint=of.hint),
        "learn to write GPU kernels: five small ones, checked as you go",
        "Without a number, lists the puzzles. With one, writes a file for you to complete; once\n"
        "it is there, checks it in the simulator: the result, races between threads, and how\n"
        "much is read from memory. Needs no GPU, but pip install 'numbsparse[simulator]'.",
        "puzzle 1",
    )
    command.add_argument("number", type=int, nargs="?", help="which puzzle, from 1 on")
    command.add_argument("--hint", action="store_true", help="show one more hint for it")
    command.add_argument(
        "--folder",
        type=Path,
        default=Path("puzzles"),
        help="where your files and your progress are kept; default: puzzles",
    )
    command = add(
        "profile",
        _of_kernels("pages.profile", lambda profile, of: profile.profile(of.json)),
        "count what the GPU kernels request of memory",
        "On a GPU the counts are those of NVIDIA's profiler, Nsight Compute (ncu), which must be\n"
        "installed. In the simulator (NUMBA_ENABLE_CUDASIM=1) they are counted one by one.",
        "profile --json profile.json",
    )
    command.add_argument("--json", **FILE, help="write the counts there too")
    command = add(
        "trace",
        _of_kernels("pages.trace", lambda trace, of: trace.run(of.rung, of.svg)),
        "draw what a GPU kernel does: who waits for whom, stages, sectors, banks",
        "Runs the forward product of a rung or of a taught step in the simulator, and draws when\n"
        "its warps load, wait and compute, when each stage of shared memory is filled and read,\n"
        "and which sectors and banks its requests touch. Needs no GPU, but\n"
        "pip install 'numbsparse[simulator]'. `python -m numbsparse ladder` lists the names.",
        "trace s11_producer --svg producer.svg",
    )
    command.add_argument("rung", metavar="RUNG", help="k1_naive to k9_dense_tiles, or s01_naive on")
    command.add_argument("--svg", **FILE, help="default: RUNG.svg")
    command = add(
        "notebook",
        _of_kernels("pages.notebook", lambda notebook, of: notebook.run(of.names, of.folder)),
        "write lessons as Jupyter notebooks that run in the simulator",
        "A lesson's text, its kernel in cells to be changed, and cells that check the result,\n"
        "count what is read, find races and draw a trace. Running one needs no GPU, but\n"
        "pip install 'numbsparse[simulator]'. Without a name, writes all lessons.",
        "notebook s03_shared --folder lessons",
    )
    command.add_argument(
        "names", metavar="RUNG", nargs="*", help="s01_naive to s15_store, k1_naive on"
    )
    command.add_argument("--folder", type=Path, default=Path(), help="default: the current")
    command = add(
        "machine-code",
        lambda of: gate.run(of.words, json_file=of.json, jobs=of.jobs, capability=of.capability),
        "check whether a change to the source changed the GPU's machine code",
        "For those who work on the kernels. Compiles them for compute capability 9.0, which needs\n"
        "no GPU but the compilers (pip install 'numbsparse[cu13]'), and compares instructions,\n"
        "registers and stack with what was recorded. The exit status is 1 where they differ. For\n"
        "another capability it is 1 where a kernel does not compile, or fit on such a card.",
        'machine-code k6_hopper "LSTM float16"',
    )
    command.add_argument(
        "words", nargs="*", help="compile, and show, only calls whose names have one of these words"
    )
    command.add_argument("--json", **FILE, help="record what was found there")
    command.add_argument(
        "--jobs", type=WHOLE, default=0, help="processes at once; default: one for each core"
    )
    command.add_argument(
        "--capability", type=_capability, help="of another card, such as 8.6; nothing is compared"
    )
    command = add(
        "times",
        _of_kernels("bench.times", _times),
        "check how good the automatic choice of a kernel is on this GPU",
        "Draws products of random size, and times each by every kernel that can compute it, by\n"
        "other libraries, and with one row more. Prints where these cost most.",
        "times --points 20",
    )
    command.add_argument("--points", type=WHOLE, default=100, help="products to draw; default: 100")
    command.add_argument(
        "--minutes", type=TIME, default=inf, help="stop after so many; default: at the last point"
    )
    command.add_argument("--jobs", **JOBS, help=f"processes that compile ahead; default: {MANY}")
    command.add_argument("--seed", type=WHOLE, default=0, help="of the points; default: 0")
    command.add_argument(
        "--json",
        **FILE,
        help="before that, fit what the choice follows to drawn products, and write it there",
    )
    command.add_argument(
        "--only", metavar="RUNG", choices=RUNGS, help="measure this rung alone, as on older cards"
    )
    command.add_argument(
        "--conv",
        action="store_true",
        help="draw convolutions; --json fits factors to their times, and writes those there",
    )
    command = add(
        "plane",
        _plane,
        "map how fast products are, beside other libraries, at every size, batch and density",
        "Times products in a fixed random order for some minutes, and says where another library\n"
        "is faster. Started again with the same file, it goes on where it ended. Maps of one kind\n"
        "of card can be joined.",
        "plane --place cpu --json map.json --png map.png --minutes 10",
    )
    command.add_argument("--place", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    command.add_argument("--minutes", type=TIME, default=5, help="to measure; default: 5; 0: none")
    command.add_argument("--jobs", **JOBS, help=f"compilers for each GPU; default: {MANY}")
    command.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="measure this one alone"
    )
    command.add_argument("--cards", **COUNT, help="GPUs to use; default: 1")
    command.add_argument("--json", **FILE, help="the map to read and extend")
    command.add_argument(
        "--kernels",
        type=_some_of("auto", *RUNGS),
        default="auto",
        metavar="RUNGS",
        help="ours is the fastest of these, with commas between; default: auto, the one chosen",
    )
    command.add_argument(
        "--join",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="add what the map lacks of another one; may be given several times",
    )
    command.add_argument("--png", **PICTURE, help="draw the map there")
    command.add_argument(
        "--csv", **FILE, help="write a line a product there, on a GPU with its roofline beside it"
    )
    command.add_argument(
        "--roofline-png", **PICTURE, help="draw how many times as long as its roofline each takes"
    )
    command = add(
        "tables",
        _of_kernels("pages.tables", lambda tables, of: tables.fill(of.file)),
        "write the recorded benchmark results into a Markdown file",
        "For those who work on the project. Fills the lines between comments such as <!-- cpu -->\n"
        "and <!-- /cpu --> with tables of the results in numbsparse/bench/results.",
        "tables BENCHMARKS.md",
    )
    command.add_argument("file", type=Path, help="the Markdown file, changed in place")
    return parser


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--place",
        choices=("cpu", "cuda"),
        help="time on the CPU or on the GPU; default: on the CPU, and on a GPU if there is one",
    )
    command.add_argument("--quick", action="store_true", help="two small sizes, in seconds")
    command.add_argument("--json", **FILE, help="write the results there too")
    command.add_argument(
        "--rung",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="also time a kernel of your own, from a Python file as examples/07_your_own_rung.py",
    )
    on_gpu = command.add_argument_group("on a GPU")
    on_gpu.add_argument(
        "--only",
        type=_some_of(*SECTIONS),
        default=(),
        metavar="SECTIONS",
        help=f"run only some parts, with commas between: {', '.join(SECTIONS)}. Results of the "
        "other parts stay in the file of --json",
    )
    on_gpu.add_argument(
        "--kernels",
        default="auto",
        metavar="RUNGS",
        help="which kernels to time: auto (the one that is chosen; default), all, or names with "
        "commas between, such as k1_naive,k6_hopper",
    )
    on_gpu.add_argument("--png", **PICTURE, help="draw the results there")


def _of_kernels(module: str, run: Callable[[Any, argparse.Namespace], Any]) -> Run:
    """A command of a module that reads the GPU's kernels, and so loads numba.cuda."""

    def load(of: argparse.Namespace) -> None:
        runtime.require_numba_cuda(of.command)
        run(import_module(f"numbsparse.{module}"), of)

    return load


def _ladder(ladder: Any, of: argparse.Namespace) -> None:
    print(ladder.table(of.dtype), ladder.table_of_steps(), sep="\n\n\n")


def _times(times: Any, of: argparse.Namespace) -> None:
    if of.conv and of.only:
        of.error("--only takes a rung of products of matrices: give no --conv")
    jobs = of.jobs or processes_here()
    times.run(of.json, of.points, of.only, of.minutes, jobs, of.seed, of.conv)


def _bench(options: argparse.Namespace) -> None:
    try:
        for file in options.rung:
            sys.path.append(str(file.resolve().parent))  # where it finds its neighbours
            add_rung(file.stem, module_of(file, f"own_rung.{file.stem}"))
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"--rung {file}: {error}") from error
    known = ["auto", "all", *RUNGS, *OWN]
    if unknown := [name for name in options.kernels.split(",") if name not in known]:
        options.error(f"--kernels takes some of {', '.join(known)}, got {unknown[0]!r}")
    of_gpu = bool(options.only) or options.png is not None or options.kernels != "auto"
    if of_gpu and options.place == "cpu":
        options.error("--only, --kernels and --png are of the GPU's benchmark: give --place cuda")
    places = [options.place] if options.place else ["cuda"] if of_gpu else ["cpu"]
    if options.place is None and not of_gpu and device.is_available() and not device.SIMULATED:
        places.append("cuda")
    if options.json is not None and len(places) > 1:
        options.error("--json takes one place: give --place cpu or --place cuda")
    results: dict[str, Any] = {}
    if "cpu" in places:
        results |= run((), Options(quick=options.quick), json_file=options.json, place="cpu")
    if "cuda" in places:
        how = Options(options.kernels, options.quick)
        if options.png is not None:  # before the measuring
            matplotlib_figure()
            before = {} if options.json is None else load(options.json)
            if options.only and "headline" not in {*options.only, *before}:
                options.error("--png draws the section headline: add it to --only")
        results |= run(options.only, how, json_file=options.json)
        if options.png is not None:
            draw_headline(results, options.png)
            print(f"the figure is in {options.png}")
    timed = [row.get("seconds", ()) for of in results.values() for row in of["rows"]]
    for name in [name for name in OWN if not any(name in row for row in timed)]:
        print(f"{name} was not timed: it serves none of these products, or --kernels leaves it out")


def _plane(options: argparse.Namespace) -> None:
    if options.roofline_png is not None and options.place == "cpu":
        options.error("--roofline-png is of the GPU's map: give --place cuda")
    if options.png is not None or options.roofline_png is not None:
        matplotlib_figure()
    kernels = ",".join(options.kernels)
    jobs = options.jobs or (processes_here() if options.place == "cuda" else 1)
    how = options.minutes, jobs, options.dtype, options.cards, kernels, options.join
    machine, rows = plane.run(options.place, options.json, *how)
    print(mapped.beside_peers(options.place, rows))
    if options.place == "cuda":
        print(mapped.summary(rows))
    if options.csv is not None:
        write_bytes(options.csv, mapped.lines(options.place, rows).encode())
        print(f"a line a product is in {options.csv}")
    for file, draw in ((options.png, draw_map), (options.roofline_png, draw_roofline)):
        if file is not None:
            draw(options.place, machine, rows, file)
            print(f"the picture is in {file}")


if __name__ == "__main__":
    main()
