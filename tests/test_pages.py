"""What pages say: the commands that they name are taken, and figures of the maps are the maps'."""

import json
import pkgutil
import re
import shlex
from pathlib import Path
from statistics import mean, median, stdev

import pytest
from examples_helpers import EXAMPLES, imported

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device, distributed
from numbsparse.bench.contestants import CUBLAS, NUMPY, SCIPY, TRITON
from numbsparse.bench.plane import known, point_of, points
from numbsparse.pages import mapped
from numbsparse.pages.committed import RESULTS, on_changing

ROOT = Path(__file__).parents[1]
FOLDERS = "numbsparse", "examples", ".github"
FILES = [
    *ROOT.glob("*.md"),
    *(file for of in FOLDERS for kind in ("md", "py") for file in (ROOT / of).rglob(f"*.{kind}")),
]
PLACEHOLDERS = {
    **dict.fromkeys(("FILE", "PHOTOGRAPHS"), "README.md"),
    **dict.fromkeys(("N", "S", "M"), "1"),
    "RUNG": "k5_tensor_core",
    "COMMAND": "info",
}


def commands():
    """(where, the words after `python`) of all commands in code spans and on lines of their own."""
    for file in sorted(FILES):
        text = re.sub(r"\\+\n\s*", " ", file.read_text(encoding="utf-8"))
        command = r"(?:\w+=\S+ )?python (-m numbsparse|examples/)"
        spans = re.findall(rf"`{command}([^`{{}}]*)`", text)
        lines = re.findall(rf"^ *(?:\$ )?{command}([^`{{}}\n]*)$", text, re.MULTILINE)
        for begin, end in (*spans, *lines):
            words = shlex.split(begin + end.partition("|")[0], comments=True)
            yield file.relative_to(ROOT).as_posix(), words


def of_program(words):
    """(the program, its words) of an example, started by itself or by our launcher."""
    first = next(at for at, word in enumerate(words) if word.endswith(".py"))
    return words[first], words[first + 1 :]


def options_of(example, seen=frozenset()):
    """Every option that a program or one of its own modules names."""
    text = example.read_text(encoding="utf-8")
    imported = {f"{name}.py" for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.M)}
    files = {example.parent / name for name in imported} - seen
    own = set(re.findall(r"\"(--[a-z][\w-]*)\"", text))
    inner = (options_of(file, seen | files) for file in files if file.exists())
    return own.union(*inner)


def test_commands_on_pages_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = [(where, words[2:]) for where, words in commands() if words[:2] == ["-m", "numbsparse"]]
    assert len(ours) > 60
    refused = []
    for where, words in ours:
        words = [PLACEHOLDERS.get(word, word) for word in words]
        words += ["--help"] * (len(words) == 1)  # a command that is only named may need arguments
        try:
            command_line._parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                refused.append((where, " ".join(words)))
    assert not refused


def test_examples_take_the_options_that_pages_name():
    runs = [
        (where, *of_program(words))
        for where, words in commands()
        if any(word.endswith(".py") for word in words) and "numbsparse" not in words
    ]
    assert len(runs) > 30
    unknown = {
        (where, program, word)
        for where, program, words in runs
        for word in words
        if word.startswith("--")
        and word.replace("--no-", "--").partition("=")[0] not in options_of(ROOT / program)
    }
    assert not unknown


def words_of(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def on_gpu():
    """{dtype: {point: {peer: times as fast}}} of the GPU's map, and all of its times in seconds."""
    rows = known("cuda", RESULTS / "plane_cuda.json")[1]
    beside = mapped.beside("cuda", rows)
    took = {point_of(row): row["microseconds"].get("numbsparse") for row in rows}
    return (
        {
            dtype: {point: of for point, of in beside.items() if point.dtype == dtype}
            for dtype in ("float16", "float32")
        },
        {point: microseconds * 1e-6 for point, microseconds in took.items() if microseconds},
    )


def in_range(point):
    """Where we mean to be ahead of dense products."""
    small = point.block_size == 8 and point.dtype == "float16"
    return point.density <= (0.1 if small else 0.25)


def of_many(good, ratios, median_of=None):
    """ "median; good of all", or "good of all", as tables say it."""
    share = f"{sum(map(good, ratios)):,} of {len(ratios):,}"
    return f"{median(ratios):.1f}; {share}" if median_of else share


def test_the_goals_on_the_gpu_are_those_of_the_map(on_gpu):
    by_dtype, took = on_gpu
    far = mapped.times_the_roofline(took)
    cells = []
    for dtype, beside in by_dtype.items():
        least = [min(of.values()) for point, of in beside.items() if in_range(point)]
        tenth = [of[CUBLAS] for p, of in beside.items() if p.density == 0.1 and CUBLAS in of]
        sparse = [of[TRITON] for of in beside.values() if TRITON in of]
        roofs = [ratio for point, ratio in far.items() if point.dtype == dtype]
        cells.append(
            (
                f"{of_many(lambda x: x >= 1, least)}; at worst {min(least):.2f}",
                of_many(lambda x: x >= 1.5, tenth, True),
                of_many(lambda x: x >= 1, sparse, True),
                of_many(lambda x: x <= mapped.FAR, roofs, True),
            )
        )
    benchmarks = words_of("BENCHMARKS.md")
    for float16, float32 in zip(*cells, strict=True):
        assert f"| {float16} | {float32} |" in benchmarks
    n_float16, n_float32 = map(len, by_dtype.values())
    every = sum(point.density < 1 for point in points("cuda"))
    counts = f"{n_float16 + n_float32:,} products of {every:,}, {n_float16:,} in float16, which "
    assert f"{counts}bfloat16 is as fast as, and {n_float32:,} in float32" in benchmarks
    assert f"in {cells[0][0].partition(';')[0]} products;" in words_of("README.md")
    worst = [
        min(of.values()) for beside in by_dtype.values() for p, of in beside.items() if in_range(p)
    ]
    slower, much = (sum(ratio < least for ratio in worst) for least in (1, 0.8))
    assert f"Of the {slower} that are slower {much} take more than 1.25 times as long" in benchmarks


def test_how_far_rooflines_are_is_what_the_map_says(on_gpu):
    far = mapped.times_the_roofline(on_gpu[1])
    lines = []
    for size in (8, 16, 32, 64, 128):
        cells = [
            [
                ratio
                for point, ratio in far.items()
                if (point.dtype, point.block_size) == (dtype, size)
            ]
            for dtype in ("float16", "float32")
        ]
        said = (f"{median(of):.1f} | {of_many(lambda x: x > mapped.FAR, of)}" for of in cells)
        lines.append(f"| {size} | {' | '.join(said)} |\n")
    assert "".join(lines) in (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")


def test_cliffs_are_those_of_the_map(on_gpu):
    found = list(mapped.changes(on_gpu[1]))
    falls = [each for each in found if each.times < mapped.FALL]
    steps = [each for each in found if each.batch == each.point.batch + 1]
    high = sum(each.times > mapped.STEP for each in steps)
    benchmarks = words_of("BENCHMARKS.md")
    assert f"Of {len(steps)} products of the map that were timed with 64 and with 65" in benchmarks
    assert f"more than 1.3 times as long at {high}," in benchmarks
    of_pairs = f"Of {len(found):,} pairs of batches it takes less than 0.9 of the time at"
    assert f"{of_pairs} {len(falls)}, down to {min(falls).times:.2f}." in benchmarks


def test_the_goals_on_the_cpu_are_those_of_the_map():
    beside = mapped.beside("cpu", known("cpu", RESULTS / "plane_cpu.json")[1])
    kinds = {
        "a fifth or fewer, 8 to 64": lambda p: p.density <= 0.2 and p.block_size >= 8,
        "a twentieth, 4": lambda p: p.density == 0.05 and p.block_size == 4,
        "a fifth, 4": lambda p: p.density == 0.2 and p.block_size == 4,
        "half, 8 to 64": lambda p: p.density == 0.5 and p.block_size >= 8,
        "half, 4": lambda p: p.density == 0.5 and p.block_size == 4,
    }
    lines = []
    for name, belongs in kinds.items():
        products = [of for point, of in beside.items() if belongs(point)]
        cells = []
        for peer in (NUMPY, SCIPY, TRITON):
            ratios = [of[peer] for of in products if peer in of]
            slower = sum(ratio < 1 for ratio in ratios)
            said = f"; slower at {slower}" if slower else ""
            cells.append(f"{median(ratios):.1f}, {min(ratios):.2f}{said}")
        lines.append(f"| {name} | {len(products)} | {' | '.join(cells)} |\n")
    assert "".join(lines) in (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    few, fewest, _, half, halves = (
        [of[NUMPY] for point, of in beside.items() if belongs(point)] for belongs in kinds.values()
    )
    readme, ahead = words_of("README.md"), few + fewest
    assert f"in {of_many(lambda x: x >= 1, ahead)} products measured, " in readme
    assert f"{median(ahead):.1f} times at the median" in readme
    behind = (of_many(lambda x: x < 1, of) for of in (half, halves))
    assert "at half of the blocks in {}, in blocks of 4 in {}.".format(*behind) in readme


def test_the_goals_of_gates_are_those_of_the_table():
    rows = [row for row in on_changing()["changing"]["rows"] if row["layout"] == "gates:"]
    times = [[s / row["seconds"]["none"] for s in row["seconds"].values()] for row in rows]
    _, all_one, half_zero, known_half = zip(*times, strict=True)
    benchmarks = words_of("BENCHMARKS.md")
    met = of_many(lambda x: x <= 1.05, all_one)
    assert f"all gates one: 1.05 times as long | {met} products of the table |" in benchmarks
    met = of_many(lambda x: x <= 0.6, known_half)
    assert f"0.6 times | {met} where the host knows them, none where it does not |" in benchmarks
    assert min(half_zero) > 0.6


@pytest.mark.parametrize(
    ("mark", "file", "program", "table"),
    [
        ("text", "scaling", "scaling_report", "report"),
        ("images", "pixel_scaling", "pixel_scaling_report", "table"),
        ("features", "sentiment", "sentiment", "table"),
    ],
)
def test_the_report_is_of_the_committed_runs(monkeypatch, mark, file, program, table):
    results = json.loads((EXAMPLES / "results" / f"{file}.json").read_text(encoding="utf-8"))
    runs = results["runs"] if isinstance(results, dict) else results
    lines = "\n".join(getattr(imported(monkeypatch, program), table)(runs))
    report = (EXAMPLES / "results" / "README.md").read_text(encoding="utf-8")
    assert f"<!-- {mark} -->\n{lines}\n<!-- /{mark} -->" in report


def bits_of(runs, kind, step):
    """Mean and spread over the seeds, as tables say it."""
    curves = [dict(map(tuple, (mark[:2] for mark in run["curve"]))) for run in runs[kind]]
    bits = [curve[step] for curve in curves]
    return f"{mean(bits):.3f} ± {stdev(bits):.3f}"


@pytest.mark.parametrize("file", ["prune", "prune_gpu", "grow", "grow_gpu"])
def test_layouts_that_change_are_told_as_they_ran(file):
    results = json.loads((EXAMPLES / "results" / f"{file}.json").read_text(encoding="utf-8"))
    runs = {}
    for run in results["runs"]:
        runs.setdefault(run["kind"], []).append(run)
    page = words_of("examples/README.md")
    for kind, of in runs.items():
        ends = [mark[0] for mark in of[0]["curve"]][-1:]
        if file.startswith("prune"):
            ends = [240, 360, 480, 600, 720] if file == "prune" else [533, 799, 1066, 1333, 1600]
        for step in ends:
            assert bits_of(runs, kind, step) in page, (kind, step)
    for kept in (0.5, 0.2, 0.1, 0.05) if "pruned 0.5" in results["times"] else ():
        share = f"{results['times'][f'pruned {kept}'] / results['times']['dense']:.0%}"
        assert f"| {share.replace('%', ' %')} |" in page


def headings(page):
    """As GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page",
    [page for page in FILES if page.suffix == ".md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_to_headings_lead_to_one(page):
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    lost = [
        (file, anchor)
        for file, anchor in links
        if anchor not in headings((page.parent / file) if file else page)
    ]
    assert not lost


@pytest.mark.skipif(not device.is_available(), reason="some names are of GPU kernels")
def test_names_on_pages_exist():
    """`ns.matmul`, `nn.utils.prune` and the like; of CHANGELOG, which tells what was, too."""
    roots = {"ns": ns, "numbsparse": ns, "nn": ns.nn, "dist": distributed}
    unknown = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for name in set(re.findall(r"`((?:ns|numbsparse|nn|dist)(?:\.[A-Za-z_]\w*)+)\b", text)):
            first, *path = name.split(".")
            if not (path[-1] in ("json", "py") or path[0] in ("torch", "jax")):
                try:
                    pkgutil.resolve_name(".".join([roots[first].__name__, *path]))
                except (ImportError, AttributeError):
                    unknown.append((file.relative_to(ROOT).as_posix(), name))
    former = {("CHANGELOG.md", f"numbsparse.bench.{place}") for place in ("cpu", "gpu")}
    assert set(unknown) <= former
