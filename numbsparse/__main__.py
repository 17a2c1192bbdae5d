"""The ladder of kernels, its benchmarks on this machine, and tables of their results."""

from __future__ import annotations

import argparse
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from numbsparse import __version__, device
from numbsparse.bench import machine, machine_code
from numbsparse.bench.measure import Options
from numbsparse.bench.run import run, run_cpu
from numbsparse.bench.sections import SECTIONS
from numbsparse.kernels.matmul import OWN, RUNGS, add_rung


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m numbsparse", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "info", help="say what runs where on this machine, and what is missing for more"
    )
    command.add_argument("--json", action="store_true", help="for programs, not in words")
    bench_parser = command = commands.add_parser(
        "bench", help="time the products beside the peers installed here"
    )
    command.add_argument(
        "--place",
        choices=("cpu", "cuda"),
        help="where to run; default: the CPU, and the GPU if there is one",
    )
    command.add_argument(
        "--quick", action="store_true", help="two small shapes, in a second or two"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    command.add_argument(
        "--rung",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="a rung of your own, a Python file: timed wherever all rungs are (ladder)",
    )
    on_gpu = command.add_argument_group("on a GPU")
    on_gpu.add_argument(
        "--only",
        type=_sections,
        default=(),
        metavar="SECTIONS",
        help=f"of {','.join(SECTIONS)}; what --json FILE holds of the others is kept",
    )
    on_gpu.add_argument(
        "--kernels",
        default="auto",
        metavar="RUNGS",
        help="time the rung that is chosen (auto), all that serve (all), or these, with commas",
    )
    on_gpu.add_argument("--png", type=Path, metavar="FILE", help="draw the figure there")
    command = commands.add_parser(
        "ladder", help="print the rungs and the taught steps: idea, reads, speed, what runs here"
    )
    command.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16", help="default: float16"
    )
    command = commands.add_parser(
        "profile",
        help="read what NVIDIA's profiler counts of the rungs; in the simulator, count it",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the readings there too")
    command = commands.add_parser(
        "machine-code",
        help="compile kernels for compute capability 9.0, without a GPU; say which have changed",
    )
    command.add_argument("words", nargs="*", help="only calls with one of these in their names")
    command.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    command.add_argument("--jobs", type=int, default=0, help="processes; default: one a core")
    command = commands.add_parser(
        "times", help="time products drawn at random: what the choice of a rung costs"
    )
    command.add_argument("--points", type=int, default=100, help="how many; default: 100")
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="first measure anew what the choice goes by"
    )
    command = commands.add_parser("tables", help="write the committed results into a README")
    command.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "bench":
            _bench(options, bench_parser)
        elif options.command == "info":
            machine.write(__version__, options.json)
        elif options.command == "machine-code":
            same = machine_code.run(options.words, json_file=options.json, jobs=options.jobs)
            sys.exit(0 if same else 1)
        else:
            _read_kernels(options)
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        sys.exit(f"numbsparse: {error}")


def _read_kernels(options: argparse.Namespace) -> None:
    """The commands that read the GPU's kernels, and so load numba.cuda."""
    try:
        from numbsparse.bench import times
        from numbsparse.bench.ladder import table, table_of_steps
        from numbsparse.bench.profile import profile
        from numbsparse.bench.tables import fill
    except ImportError as error:
        raise RuntimeError(
            f"{options.command} takes numba-cuda: pip install 'numbsparse[simulator]', or "
            f"'numbsparse[cu13]' for a GPU ({error})"
        ) from error
    if options.command == "tables":
        fill(options.file)
    elif options.command == "times":
        times.run(options.json, options.points)
    elif options.command == "ladder":
        print(f"{table(options.dtype)}\n\n\n{table_of_steps()}")
    else:
        profile(options.json)


def _bench(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for file in options.rung:
        add_rung(file.stem, _module_of(file))
    known = ["auto", "all", *RUNGS, *OWN]
    if unknown := [name for name in options.kernels.split(",") if name not in known]:
        parser.error(f"--kernels takes some of {', '.join(known)}, got {unknown[0]!r}")
    of_gpu = bool(options.only) or options.png is not None or options.kernels != "auto"
    if of_gpu and options.place == "cpu":
        parser.error("--only, --kernels and --png are of the GPU's benchmark: give --place cuda")
    places = [options.place] if options.place else ["cuda"] if of_gpu else ["cpu"]
    if options.place is None and not of_gpu and device.is_available() and not device.SIMULATED:
        places.append("cuda")
    if options.json is not None and len(places) > 1:
        parser.error("--json takes one place: give --place cpu or --place cuda")
    for name, file in (("--json", options.json), ("--png", options.png)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            parser.error(f"{name} takes a file in a folder that exists, got {file}")
    if "cpu" in places:
        run_cpu(Options(quick=options.quick), json_file=options.json)
    if "cuda" in places:
        how = Options(options.kernels, options.quick)
        run(options.only, how, json_file=options.json, png=options.png)


def _module_of(file: Path) -> ModuleType:
    """A Python file as a module, which finds its neighbours as if it were run."""
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--rung takes a Python file, got {file}")
    sys.path.insert(0, str(file.resolve().parent))
    module = sys.modules[file.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sections(names: str) -> tuple[str, ...]:
    """The sections of a list with commas."""
    chosen = tuple(names.split(","))
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}")
    return chosen


if __name__ == "__main__":
    main()
