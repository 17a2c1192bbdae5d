"""The command line: python -m numbsparse bench, python -m numbsparse tables README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from numbsparse import __version__, bench, device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m numbsparse", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("bench", help="time the products beside the peers installed here")
    command.add_argument(
        "--place",
        choices=("cpu", "cuda"),
        help="where to run; default: the CPU, and the GPU if there is one",
    )
    command.add_argument(
        "--quick", action="store_true", help="two small shapes, in a second or two"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    command = commands.add_parser("tables", help="write the committed results into a README")
    command.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "tables":
        bench.fill(options.file)
        return
    places = [options.place] if options.place else ["cpu"]
    if options.place is None and device.is_available() and not device.SIMULATED:
        places.append("cuda")
    if options.json is not None and len(places) > 1:
        parser.error("--json takes one place: give --place cpu or --place cuda")
    try:
        for place in places:
            bench.run(place, quick=options.quick, json_file=options.json)
    except RuntimeError as error:
        sys.exit(f"numbsparse: {error}")


if __name__ == "__main__":
    main()
