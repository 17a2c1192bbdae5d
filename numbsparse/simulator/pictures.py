"""A trace as an SVG picture, written as text."""

from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from math import prod

from numbsparse.simulator.actions import LATENCY
from numbsparse.simulator.clocks import COPY_ENGINE
from numbsparse.simulator.counting import BANK, BANKS, SECTOR, WARP, parts_of, words_of
from numbsparse.simulator.tracing import Request, Span, Stage, Trace

WIDTH, MARGIN, LEFT, LINE = 1200, 20, 185, 20
WHAT = {  # of a warp: colour, and what it does
    "load": ("#f2a33a", "loads from global memory"),
    "copy": ("#d1561f", "starts a copy to shared memory"),
    "store": ("#e9c46a", "stores to shared memory"),
    "wait": ("#d4d9e0", "waits"),
    "read": ("#3b76b5", "reads shared memory"),
    "multiply": ("#1c4e80", "multiplies from shared memory (wgmma)"),
    "signal": ("#222222", "signals at a barrier of the ring"),
    "write": ("#3f9b62", "writes to global memory"),
    "copy out": ("#87c796", "starts a copy to global memory"),
}
STATES = {
    "filled": ("#f2a33a", "is being filled"),
    "full": ("#fbe3bf", "is full, not read yet"),
    "read": ("#3b76b5", "is read"),
}
RANKS = ("#3b76b5", "#f2a33a", "#d1561f", "#8c1c13")  # of words that wait for a bank
ENGINE = WHAT["copy"][0]
MOST_SECTORS, MOST_TICKS = 32, 20
COLUMNS, FEW_SECTORS, FEW_LETTERS = 3, 4, 52  # requests that stand side by side
PER_ROW = 5  # grids of banks


def picture(trace: Trace) -> str:
    """The whole picture: warps, stages, sectors, banks, one below the other."""
    page = Page()
    blocks = prod(trace.grid)
    which = f"the first of {blocks} blocks" if blocks > 1 else "one block"
    page.label(MARGIN, page.y, f"{trace.kernel}: {which} of {trace.threads} threads", "t")
    end = max((span.end for row in trace.warps for span in row), default=1)
    _warps(page, trace, end)
    if trace.stages:
        _stages(page, trace.stages, end)
    _sectors(page, trace.sectors)
    _banks(page, trace.banks)
    return page.svg()


class Page:
    """Shapes, from top to bottom."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.y = 24

    def section(self, title: str, *lines: str) -> None:
        """A heading and lines of text, below all that is there."""
        self.y += 34
        self.label(MARGIN, self.y - 6, title, "h")
        for words in lines:
            self.y += LINE
            self.label(MARGIN, self.y - 6, words)

    def label(self, x: float, y: float, words: str, kind: str = "n") -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, said: str = "", edge: str = ""
    ) -> None:
        line = f' stroke="{edge}"' if edge else ""
        place = f'x="{x:.4g}" y="{y:.5g}" width="{w:.4g}" height="{h:.4g}"'
        title = f"<title>{escape(said)}</title>" if said else ""
        self.shapes.append(f'<rect {place} fill="{fill}"{line}>{title}</rect>')

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        x: float = MARGIN
        for colour, words in entries:
            wide = 34 + 7 * len(words)
            if x == MARGIN or x + wide > WIDTH:
                x, self.y = MARGIN, self.y + LINE
            self.box(x, self.y - 16, 12, 12, colour, edge="#777777")
            self.label(x + 18, self.y - 6, words)
            x += wide

    def svg(self) -> str:
        style = (
            "text{font:12px sans-serif;fill:#222222}.t{font:bold 17px sans-serif}"
            ".h{font:bold 14px sans-serif}.c{font:11px monospace}"
            ".e{text-anchor:end}.w{font:10px sans-serif;fill:white;text-anchor:middle}"
            ".d{font:10px sans-serif;text-anchor:middle}"
        )
        size = f'width="{WIDTH}" height="{self.y + 20}" viewBox="0 0 {WIDTH} {self.y + 20}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        back = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join([head, back, *self.shapes, "</svg>\n"])


def _warps(page: Page, trace: Trace, end: int) -> None:
    page.section(
        "Warps over time",
        "A step is one thing that a warp does, as early as what it waits for allows; a copy, wgmma "
        f"and a load that is new to it take {LATENCY}. So it shows who waits for whom, not a GPU's "
        "time.",
        *(["A number is that of a stage below."] if trace.stages else []),
    )
    used = {span.what for row in trace.warps for span in row}
    page.legend(shown for what, shown in WHAT.items() if what in used)
    page.y += 6
    number = 0
    for row, alike in groupby(trace.warps):
        count = len([*alike])
        name = f"warp {number}" if count == 1 else f"warps {number} to {number + count - 1}"
        _row(page, name + _role(row, trace.warps), row, end, WHAT)
        number += count
    _axis(page, end)


def _role(row: list[Span], rows: list[list[Span]]) -> str:
    """What a warp is, where some fetch for others."""
    kinds = [{span.what for span in each} for each in rows]
    if not any("copy" in kind and not kind & {"read", "multiply"} for kind in kinds):
        return ""
    own = {span.what for span in row}
    return ", consumer" if own & {"read", "multiply"} else ", producer" if "copy" in own else ""


def _stages(page: Page, stages: list[Stage], end: int) -> None:
    page.section(
        "Stages of shared memory over time",
        "Bytes that are filled together are a stage. A number counts its fillings.",
    )
    page.legend(STATES.values())
    page.y += 6
    for number, stage in enumerate(stages):
        _row(page, f"stage {number}, {_bytes(stage.nbytes)}", stage.spans, end, STATES)
    _axis(page, end)


def _bytes(n: int) -> str:
    return f"{n / 1024:g} KB" if n % 128 == 0 and n >= 1024 else f"{n} bytes"


def _row(
    page: Page, name: str, spans: Iterable[Span], end: int, known: dict[str, tuple[str, str]]
) -> None:
    scale = (WIDTH - LEFT - MARGIN) / end
    page.label(LEFT - 8, page.y + 13, name, "e")
    for span in spans:
        colour, words = known[span.what]
        x, wide = LEFT + scale * span.begin, scale * (span.end - span.begin)
        which = "" if span.number is None else f", {span.number}"
        said = f"{words}{which}: steps {span.begin} to {span.end}"
        page.box(x, page.y, max(wide, 0.6), 18, colour, said)
        if span.number is not None and wide >= 7 * len(str(span.number)) + 2:
            dark = span.what in ("wait", "store", "full", "filled", "load", "copy out")
            page.label(x + wide / 2, page.y + 13, str(span.number), "d" if dark else "w")
    page.y += 22


def _axis(page: Page, end: int) -> None:
    scale = (WIDTH - LEFT - MARGIN) / end
    step = next(n * 10**k for k in range(9) for n in (1, 2, 5) if end / (n * 10**k) <= MOST_TICKS)
    for at in range(0, end + 1, step):
        page.box(LEFT + scale * at, page.y, 1, 4, "#777777")
        page.label(LEFT + scale * at, page.y + 14, str(at), "d")
    page.label(LEFT - 8, page.y + 14, "steps", "e")
    page.y += 18


def _sectors(page: Page, requests: list[Request]) -> None:
    page.section(
        "Sectors of global memory that a warp's request touches",
        f"A box is a sector of {SECTOR} bytes; the colour says which lane takes the bytes first. "
        "Of each place in the code, the request with most sectors to spare.",
    )
    lanes = [(_shade(lane), f"lane {lane}") for lane in (0, 8, 16, 24, 31)]
    page.legend([*lanes, (ENGINE, COPY_ENGINE)])
    column, wide = 0, (WIDTH - MARGIN) // COLUMNS
    for request in requests:
        narrow = request.units <= FEW_SECTORS and len(request.place + request.text) <= FEW_LETTERS
        if column == 0 or column == COLUMNS or not narrow:
            page.y, column = page.y + 42, 0
        _memory(page, MARGIN + column * wide, request)
        column = column + 1 if narrow else COLUMNS


def _cost(request: Request, unit: str) -> str:
    does = "writes" if request.writes else "reads"
    over = f", {request.least} would do" if request.units > request.least else ""
    those = f"{request.units} {unit}{'s' * (request.units != 1)}{over}"
    one, more = ("copy", "copies") if _engine(request) else ("request", "requests")
    return f"{does} {those}; {request.times:,} {one if request.times == 1 else more}"


def _engine(request: Request) -> bool:
    return request.accesses[0].unit == COPY_ENGINE


def _memory(page: Page, x: float, request: Request) -> None:
    """The touched sectors, and who touches each of their words; upwards from where the page is."""
    engine, y = _engine(request), page.y - 16
    page.label(x, y - 6, f"{request.place}  {request.text[:150]}", "c")
    who: dict[int, int] = {}  # the first lane, of each word
    for access, lane in zip(request.accesses, request.lanes, strict=True):
        for word in words_of(access):
            who.setdefault(word, lane)
    words, side = SECTOR // BANK, 3
    last = -1
    sectors = sorted({word // words for word in who})
    for sector in sectors[:MOST_SECTORS]:
        x += 6 if last >= 0 and sector != last + 1 else 0
        first = sector * words
        for own, run in groupby(range(first, first + words), key=who.get):
            if own is not None:
                at, colour = [*run], ENGINE if engine else _shade(own)
                said = COPY_ENGINE if engine else f"lane {own}"
                page.box(x + side * (at[0] - first), y, side * len(at), 14, colour, said)
        page.box(x, y, side * words, 14, "none", edge="#555555")
        x, last = x + side * words, sector
    more = f"and {len(sectors) - MOST_SECTORS} more: " if len(sectors) > MOST_SECTORS else ""
    page.label(x + 8, y + 11, more + _cost(request, "sector"))


def _shade(lane: int) -> str:
    """From light to dark, by the number of a lane."""
    light, dark = (253, 212, 158), (94, 30, 110)
    mixed = (a + (b - a) * lane // (WARP - 1) for a, b in zip(light, dark, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _banks(page: Page, requests: list[Request]) -> None:
    if not requests:
        page.section("Banks of shared memory", "No lane reads or writes shared memory itself.")
        return
    page.section(
        "Banks of shared memory that the lanes of a warp use",
        "Down: lanes; across: the 32 banks. A bank serves one word at a time: words of another "
        "colour than the first wait for a later wavefront. Of each place, the dearest request.",
    )
    waits = ("first", "second", "third", "later")
    page.legend((colour, f"{at} in its bank") for colour, at in zip(RANKS, waits, strict=True))
    for start in range(0, len(requests), PER_ROW):
        page.y += 10
        for i, request in enumerate(requests[start : start + PER_ROW]):
            x = MARGIN + i * (WIDTH - MARGIN) / PER_ROW
            page.label(x, page.y + 12, request.place, "c")
            page.label(x, page.y + 26, request.text[:32], "c")
            for down, words in enumerate(_cost(request, "wavefront").split("; ")):
                page.label(x, page.y + 40 + 14 * down, words)
            _grid(page, x, page.y + 62, request)
        page.y += 62 + BANKS * 5 + 8


def _grid(page: Page, x: float, y: float, request: Request) -> None:
    """A cell for each lane and bank."""
    side = 5
    page.box(x, y, side * BANKS, side * WARP, "#f4f5f7", edge="#aaaaaa")
    for lane, bank, rank in _ranks(request):
        colour = RANKS[min(rank, len(RANKS) - 1)]
        said = f"lane {lane}, bank {bank}"
        page.box(x + side * bank, y + side * lane, side, side, colour, said)


def _ranks(request: Request) -> Iterator[tuple[int, int, int]]:
    """(lane, bank, how many words of the bank come before) of what each lane accesses."""
    lanes = iter(request.lanes)
    for part in parts_of(request.accesses):
        ranks: dict[int, int] = {}
        seen: Counter[int] = Counter()
        for access in part:
            lane = next(lanes)
            for word in words_of(access):
                if word not in ranks:
                    ranks[word] = seen[word % BANKS]
                    seen[word % BANKS] += 1
                yield lane, word % BANKS, ranks[word]
