"""What is said of runs of any plan: what diverged, mean and spread over seeds, what was tried."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from numbsparse import files

Result = Mapping[str, Any]


def has_diverged(run: Result) -> bool:
    """Whether it broke off, or ended with more validation bits than its first measurement had."""
    return run["diverged"] is not None or run["curve"][-1][3] > run["curve"][0][3]


def test_of(run: Result) -> float | None:
    """Bits of the test: None of a run that diverged."""
    return None if run["test"] is None or has_diverged(run) else float(run["test"])


def bits_of_all(runs: Iterable[Result]) -> list[float]:
    return [bits for bits in map(test_of, runs) if bits is not None]


def chosen(results: Iterable[Result], kind: Callable[[Any], Any]) -> dict[Any, list[Result]]:
    """The long runs of each kind at one learning rate: by validation, the first seed's best."""
    found: dict[Any, dict[float, list[Result]]] = {}
    for run in results:
        c = run["config"]
        if c["purpose"] == "final":
            found.setdefault(kind(c), {}).setdefault(c["lr"], []).append(run)

    def first_seed(runs: list[Result]) -> float:
        bits = {run["config"]["seed"]: run["validation"] for run in runs if not has_diverged(run)}
        return bits.get(0, inf)

    return {of: min(rates.values(), key=first_seed) for of, rates in found.items()}


def mean_and_spread(bits: list[float]) -> str:
    """Mean and sample standard deviation."""
    spread = f" ± {stdev(bits):.4f}" if len(bits) > 1 else ""
    return f"{mean(bits):.4f}{spread}" if bits else "diverged"


def line(row: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(row)} |"


def tried(
    results: Iterable[Result], kind: Callable[[Any], Any], purpose: str = "search"
) -> dict[Any, str]:
    """By kind, of a run's configuration: each learning rate, and validation bits.

    Of the search; or of the long runs of the first seed, of those kinds that have several rates.
    """
    found: dict[Any, dict[float, float | None]] = {}
    for run in results:
        c = run["config"]
        if c["purpose"] == purpose and (purpose == "search" or c["seed"] == 0):
            bits = None if has_diverged(run) else run["validation"]
            found.setdefault(kind(c), {})[c["lr"]] = bits
    if purpose != "search":
        found = {of: rates for of, rates in found.items() if len(rates) > 1}
    return {
        of: ", ".join(
            f"{lr:g}: {'diverged' if b is None else f'{b:.4f}'}" for lr, b in sorted(rates.items())
        )
        for of, rates in sorted(found.items())
    }


def counted(results: list[Result]) -> str:
    finals = sum(run["config"]["purpose"] == "final" for run in results)
    diverged = sum(map(has_diverged, results))
    return f"{finals} long runs and {len(results) - finals} short ones; {diverged} diverged"


def write_between(file: Path, mark: str, lines: list[str]) -> None:
    """Lines in the place of those between `<!-- mark -->` and `<!-- /mark -->`, if it has these."""
    if not file.exists():
        return
    said, text = "\n".join(lines), file.read_text(encoding="utf-8")
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    new = marked.sub(lambda found: f"{found[1]}{said}\n{found[2]}", text)
    if new != text:
        files.write_bytes(file, new.encode())
