"""The tables of the guide to many cards, from results."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from many_cards_cost import step_seconds

from numbsparse.bench.results import table

RESULTS = Path(__file__).parent / "results" / "many_cards.json"
BEFORE = {
    "pixelcnn": "A whole update of PixelCNN++, as wide as in its paper, in bfloat16, on ",
    "collectives": "Each collective alone, several captured at a time, on ",
}
Rows = list[dict[str, Any]]


def fill(path: Path, sections: dict[str, Any]) -> None:
    """Rewrite what stands between `<!-- collectives -->` and `<!-- /collectives -->`, and so on."""
    text = path.read_text(encoding="utf-8")
    texts = {name: "".join(written(name, s) for s in of_name(name, sections)) for name in MAKERS}
    for name, found in {"cost": f"\n{cost()}", **texts}.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = marked.sub(lambda at: f"{at[1]}{found}\n{at[2]}", text) if found else text  # noqa: B023
    path.write_text(text, encoding="utf-8")


def key(name: str, ranks: int) -> str:
    """Of a section, measured on so many cards."""
    return f"{name} {ranks}"


def of_name(name: str, sections: dict[str, Any]) -> list[Any]:
    """A section of each number of cards, fewest first."""
    found = {int(of[len(name) :]): of for of in sections if of.rpartition(" ")[0] == name}
    return [sections[found[ranks]] for ranks in sorted(found)]


def written(name: str, section: dict[str, Any]) -> str:
    """A section's table, below the machine and above the command."""
    where = BEFORE.get(name, "") + section["machine"].partition(";")[0]
    return f"\n{where}:\n\n{MAKERS[name](section['rows'])}\n`{section['command']}`\n"


def cost() -> str:
    """By the model, of an LSTM of 18,432 units that keeps 3.3 % of its blocks."""
    cards, compute, nbytes = (2, 4, 8, 64, 1024), 6.4e-3, 90_000_000
    cases: dict[str, Any] = {
        "nothing is hidden": {"nbytes": nbytes},
        "0.4 ms are hidden": {"nbytes": nbytes, "overlapped": 0.4e-3},
        "8 times the gradients": {"nbytes": 8 * nbytes},
    }
    lines = [
        [name, *(f"{n * compute / step_seconds(compute, ranks=n, **how):.2f}" for n in cards)]
        for name, how in cases.items()
    ]
    return table(["as good as", *(f"{n:,} cards" for n in cards)], lines)


def collectives(rows: Rows) -> str:
    sizes = sorted({row["bytes"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        own = {row["bytes"]: row["seconds"] for row in rows if row["collective"] == name}
        cells = [f"{own[n] * 1e6:,.0f} us ({n / own[n] / 1e9:.3g} GB/s)" for n in sizes]
        lines.append([name, *cells])
    return table(["of a rank's", *map(_size, sizes)], lines)


def data_parallel(rows: Rows) -> str:
    n, first = rows[0]["ranks"], rows[0]
    lines = [[row["step"], *_scaling(row)] for row in rows]
    lines[1:1] = [["uncaptured", _ms(first["uncaptured"]), "", "", ""]]
    return table(["", *_header(n)], lines)


def ddp(rows: Rows) -> str:
    """Beside ours, and beside one card of the same library."""
    ours = {row["step"]: row["seconds"] for row in rows}
    lines = []
    for row in rows:
        seconds, in_torch = row["seconds"], "DDP" in row["step"]
        alone = ours["numbsparse.torch alone" if in_torch else "alone"]
        cards = in_torch or row["step"] == "DataParallel"
        beside = ours["DataParallel" if cards else "alone"]
        lines.append([row["step"], _ms(seconds)])
        lines[-1] += [f"{row['ranks'] * alone / seconds:.2f} cards" if cards else ""]
        lines[-1] += [f"{seconds / beside - 1:+.1%}" if seconds > beside / 4 else ""]
    return table(["forward and backward", "", "as good as", "beside ours"], lines)


def split(rows: Rows) -> str:
    names = [name for name in ("nccl", "sockets", "peer memory") if name in rows[0]]
    lines = []
    for row in rows:
        cells = [f"{row[n] * 1e6:,.0f} us ({row[n] / row['share']:.2f})" for n in names]
        lines.append([f"{row['units']:,}", f"{row['share'] * 1e6:,.0f} us", *cells])
    return table(["units", "share alone", *map(str.upper, names[:1]), *names[1:]], lines)


def pixelcnn(rows: Rows) -> str:
    lines = [
        [f"{row['filters']} filters, {row['parameters'] / 1e6:.0f} million parameters, "
         f"{row['images']} images a card", *_scaling(row)]
        for row in rows
    ]  # fmt: skip
    return table(["PixelCNN++", *_header(rows[0]["ranks"])], lines)


MAKERS: dict[str, Callable[[Rows], str]] = {
    make.__name__: make for make in (collectives, data_parallel, ddp, split, pixelcnn)
}


def _header(ranks: int) -> list[str]:
    return ["one card", f"{ranks} cards", "as good as", "the model says"]


def _scaling(row: dict[str, Any]) -> list[str]:
    """The model's first number is for a reduction that nothing hides, the last for a hidden one."""
    one, ranks, nbytes = row["one"], row["ranks"], row["gradients"]
    steps = row["all"], step_seconds(one, nbytes, ranks), step_seconds(one, 0, 1)
    cards, least, most = (f"{ranks * one / step:.2f}" for step in steps)
    return [_ms(one), _ms(row["all"]), f"{cards} cards", f"{least} to {most}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
