"""Results as text: a line a row while they are measured, and tables of Markdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from numbsparse.bench.contestants import FEATURE_MAJOR, OURS
from numbsparse.bench.peers import CUBLAS, CUDNN
from numbsparse.bench.results import Row, first, rate_of
from numbsparse.kernels.matmul import PRODUCTS

HEADINGS = {
    "limits": "the card's own limits",
    "headline": "the launch post's figure; in brackets, times as fast as cuBLAS, dense",
    "float16": "every block size; in brackets, times as fast as cuBLAS, dense",
    "float32": "every block size; in brackets, times as fast as cuBLAS, dense",
    "ladder": "in brackets, how many times as fast as the rung before",
    "steps": "the taught ladder; in brackets, how many times as fast as the one before",
    "layouts": "in brackets, the time a block against as many random blocks",
    "sweep": "in brackets, the time a block and row of the batch against the unchanged case",
    "feature_major": "activations as `w @ x` has them; in brackets, the time against batch-major",
    "lstm": "forward and backward over a sequence; in brackets, how many times ours",
    "conv": "beside cuDNN, dense and channels last; in brackets, times as fast",
    "host": "what the host's side costs",
    "cpu": "median time per call; in brackets, how many times as fast the first column is",
}
SAME: tuple[str, ...] = ("product", "dtype", "precision", "features", "batch")
IMAGES = ("side", "taps_along")
PASSES = {"forward": "forward", "input_grad": "input-gradient", "weight_grad": "weight-gradient"}
CELLS = "A line: features x batch, B, density; of each contestant time and TFLOP/s over kept blocks"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def teraflops(rate: float | None) -> str:
    """Three digits at most, and no more than two behind the point."""
    if rate is None:
        return "-"
    rate /= 1e12
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def speeds_of(name: str, rows: list[Row], product: str) -> str:
    """TFLOP/s in float32 / float16."""
    rates = [rate_of(name, rows, product, dtype) for dtype in ("float32", "float16")]
    return " / ".join(map(teraflops, rates))


def ratio(number: float | None) -> str:
    """How many times, to a tenth."""
    return f"{number:.1f}" if number else "-"


def line(section: str, row: Row, rows: list[Row]) -> str:
    """One row of a section; `rows` are those before it, which it may be compared with."""
    if section == "limits":
        return f"  {row['limit']:40} {row['rate'] / 1e12:8.2f} T{row['unit']}"
    if section == "host":
        cells = [f"{name} {_time(seconds)}" for name, seconds in row["seconds"].items()]
        cache = f", {row['cache']} cache" if "cache" in row else ""
        return f"  {row['host']}{cache}: " + ", ".join(cells)
    if section == "cpu":
        return _cpu(row)
    what = f"{row['dtype']} {row['precision']}" if row["dtype"] == "float32" else row["dtype"]
    if section == "lstm":
        return f"  {what:15} {_lstm(row)}"
    more = partial(_gain if section in ("ladder", "steps") else _beside, row, rows)
    cells = _cells(row, more)
    size, density = f"B {row['block_size']:<3}", f"{row['density']:<6.2g}"
    if section == "conv":
        label, size = "", f"{row['taps_along']} x {row['taps_along']} {size}"
        if "workspace" in row:
            cells.append(f"memory {row['workspace'] / row['input_bytes']:.1%} of the input")
    else:
        label = str(row.get("layout", row.get("changed", "")))
        size = f"{row['features']:5} x {row['batch']:<4} {size}"
    what = f"{what:15} {size} {density} {label}{label and ' '}{row['product']:11}"
    return f"  {what} {'; '.join(cells)}"


def speed_up(row: Row, name: str, rows: list[Row]) -> float | None:
    """How many times as fast as the dense product of that shape and dtype: cuBLAS's, cuDNN's."""
    dense, same = (CUDNN, (*SAME, *IMAGES)) if "side" in row else (CUBLAS, SAME)
    timed = [other for other in rows if dense in other["seconds"]]
    other = first(timed, **{key: row[key] for key in same})
    return other["seconds"][dense] / row["seconds"][name] if other else None


def per_block(row: Row) -> float | None:
    """Seconds of our rung for a block and a row of the batch."""
    seconds = row["seconds"].get(row["auto"])
    return seconds and seconds / row["flops"]


def relative(row: Row, rows: list[Row]) -> float | None:
    """Time a block, against the random layout of the section or the unchanged case."""
    if "layout" in row:
        same, wanted = SAME, {"layout": f"random for {row['layout']}"}
    elif "changed" in row:
        same, wanted = SAME[:3], {"changed": ""}
    else:
        return None
    other = first(rows, **wanted, **{key: row[key] for key in same})
    one, base = per_block(row), per_block(other) if other else None
    return one / base if one and base else None


def beside_batch_major(row: Row, name: str) -> float | None:
    """Time of a rung feature-major, against its time batch-major."""
    rung, seconds = name.removesuffix(f" {FEATURE_MAJOR}"), row["seconds"]
    if rung == name or not {name, rung} <= seconds.keys():
        return None
    return seconds[name] / seconds[rung]


def _cells(row: Row, more: Callable[[str, float], str]) -> list[str]:
    """Time of each contestant, and what `more` says of it; what is wrong with others."""
    timed = [f"{name} {_time(s)}{more(name, s)}" for name, s in row["seconds"].items()]
    return timed + [f"{name} {why}" for name, why in row["not_timed"].items()]


def _beside(row: Row, rows: list[Row], name: str, seconds: float) -> str:
    """TFLOP/s; beside the dense product, and beside the row that this is to be compared with."""
    text = f" {row['flops'] / seconds / 1e12:.1f}"
    if (times := speed_up(row, name, rows)) is not None:
        text += f" ({times:.2g}x)" if times < 10 else f" ({times:.0f}x)"
    ratio = relative(row, rows) if name == row.get("auto") else beside_batch_major(row, name)
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _gain(row: Row, rows: list[Row], name: str, seconds: float) -> str:
    """And how many times as fast as the rung before."""
    names = list(row["seconds"])
    before = names[: names.index(name)][-1:]
    gain = "".join(f" ({row['seconds'][other] / seconds:.2g}x)" for other in before)
    return _beside(row, rows, name, seconds) + gain


def _lstm(row: Row) -> str:
    """Time and memory of each contestant, and what one recurrent step of ours takes."""
    ours = row["seconds"].get(OURS), row["bytes"].get(OURS)

    def more(name: str, seconds: float) -> str:
        memory = row["bytes"][name]
        text = f" {memory / 2**30:.2f} GiB"
        if name == OURS or None in ours:
            return text
        return f"{text} ({seconds / ours[0]:.1f}x, {memory / ours[1]:.1f}x)"

    cells = _cells(row, more)
    cells += [f"{name} {_time(seconds)}" for name, seconds in row["step"].items()]
    shape = f"{row['hidden']:5} hidden, {row['batch']} x {row['steps']} steps {row['density']:.2g}"
    return f"{shape}: " + "; ".join(cells)


def _cpu(row: Row) -> str:
    """Time of each, and ours in GFLOP/s; a line says what is multiplied, before the first."""
    cells: list[str] = []
    for name, seconds in row["seconds"].items():
        cell = f"{name} {seconds * 1e3:8.3f} ms "
        if cells:
            cell += f"({seconds / next(iter(row['seconds'].values())):5.1f}x)"
        else:
            cell += f"{row['flops'] / seconds / 1e9:7.0f} GFLOP/s"
        cells.append(cell)
    cells += [f"{name} {why}" for name, why in row["not_timed"].items()]
    text = f"  {row['product']:12} " + "   ".join(cells)
    if row["product"] != PRODUCTS[0]:
        return text
    shape = f"{row['features']} x {row['features']}, batch {row['batch']}"
    return f"\n{shape}, density {row['density']}, B {row['block_size']}, {row['dtype']}\n{text}"


def _time(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"
