"""Results as text: a line a row while they are measured, and tables of Markdown."""

from collections.abc import Callable

from numbsparse.bench.contestants import FEATURE_MAJOR, OURS
from numbsparse.bench.peers import CUBLAS, CUDNN
from numbsparse.bench.results import Row, first

SAME: tuple[str, ...] = ("product", "dtype", "precision", "features", "batch")
IMAGES = ("side", "taps_along")
PASSES = {"forward": "forward", "input_grad": "input-gradient", "weight_grad": "weight-gradient"}
CELLS = "A line: features x batch, B, density; of each contestant time and TFLOP/s over kept blocks"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def line(section: str, row: Row, rows: list[Row]) -> str:
    """One row of a section; `rows` are those before it, which it may be compared with."""
    if section == "limits":
        return f"  {row['limit']:40} {row['rate'] / 1e12:8.2f} T{row['unit']}"
    remark = REMARKS.get(section, _beside)
    cells = [f"{name} {_time(s)}{remark(row, rows, name)}" for name, s in row["seconds"].items()]
    cells += [f"{name} {why}" for name, why in row.get("not_timed", {}).items()]
    if "workspace" in row:
        cells.append(f"memory {row['workspace'] / row['input_bytes']:.1%} of the input")
    cells += [f"{name} {_time(seconds)}" for name, seconds in row.get("step", {}).items()]
    return f"  {_label(row)} {'; '.join(cells)}"


def _label(row: Row) -> str:
    """What was measured."""
    if "host" in row:
        return row["host"] + (f", {row['cache']} cache:" if "cache" in row else ":")
    what = f"{row['dtype']} {row['precision']}" if row["dtype"] == "float32" else row["dtype"]
    if "hidden" in row:
        shape = f"{row['hidden']:5} hidden, {row['batch']} x {row['steps']} steps"
        return f"{what:15} {shape} {row['density']:.2g}:"
    shape = f"B {row['block_size']:<3} {row['density']:<6.2g}"
    if "side" in row:
        shape = f"{row['taps_along']} x {row['taps_along']} {shape}"
    else:
        shape = f"{row['features']:5} x {row['batch']:<4} {shape}"
    label = row.get("layout", "")
    return f"{what:15} {shape} {label}{label and ' '}{row['product']:11}"


def speed_up(row: Row, name: str, rows: list[Row]) -> float | None:
    """How many times as fast as the dense product of that shape and dtype: cuBLAS's, cuDNN's."""
    dense, same = (CUDNN, (*SAME, *IMAGES)) if "side" in row else (CUBLAS, SAME)
    timed = [other for other in rows if dense in other["seconds"]]
    other = first(timed, **{key: row[key] for key in same})
    return other["seconds"][dense] / row["seconds"][name] if other else None


def relative(row: Row, rows: list[Row]) -> float | None:
    """Time a block of our rung, against the random layout that stands beside an uneven one."""
    wanted = {"layout": f"random for {row.get('layout')}", **{key: row[key] for key in SAME}}
    both = [each for each in (row, first(rows, **wanted)) if each]
    times = [r["seconds"][r["auto"]] / r["flops"] for r in both if r["auto"] in r["seconds"]]
    return times[0] / times[1] if len(times) == 2 else None


def beside_batch_major(row: Row, name: str) -> float | None:
    """Time of a rung feature-major, against its time batch-major."""
    rung, seconds = name.removesuffix(f" {FEATURE_MAJOR}"), row["seconds"]
    if rung == name or not {name, rung} <= seconds.keys():
        return None
    return seconds[name] / seconds[rung]


def _beside(row: Row, rows: list[Row], name: str) -> str:
    """TFLOP/s; beside the dense product, and beside the row that this is to be compared with."""
    text = f" {row['flops'] / row['seconds'][name] / 1e12:.1f}"
    if (times := speed_up(row, name, rows)) is not None:
        text += f" ({times:.2g}x)" if times < 10 else f" ({times:.0f}x)"
    ratio = relative(row, rows) if name == row.get("auto") else beside_batch_major(row, name)
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _gain(row: Row, rows: list[Row], name: str) -> str:
    """And how many times as fast as the rung before."""
    names, seconds = list(row["seconds"]), row["seconds"]
    before = names[: names.index(name)][-1:]
    gain = "".join(f" ({seconds[other] / seconds[name]:.2g}x)" for other in before)
    return _beside(row, rows, name) + gain


def _times_ours(row: Row, rows: list[Row], name: str) -> str:
    """On the CPU: GFLOP/s of the first, which is ours; how many times as long another takes."""
    own = _first(row)
    if name == next(iter(row["seconds"])):
        return f" {row['flops'] / own / 1e9:.0f} GFLOP/s"
    return f" ({row['seconds'][name] / own:.1f}x)"


def _first(row: Row) -> float:
    return next(iter(row["seconds"].values()))


def _memory(row: Row, rows: list[Row], name: str) -> str:
    """Memory of an LSTM; how many times ours its time and its memory are."""
    seconds, nbytes = row["seconds"], row["bytes"]
    text = f" {nbytes[name] / 2**30:.2f} GiB"
    if name == OURS or not (OURS in seconds and OURS in nbytes):
        return text
    return f"{text} ({seconds[name] / seconds[OURS]:.1f}x, {nbytes[name] / nbytes[OURS]:.1f}x)"


REMARKS: dict[str, Callable[[Row, list[Row], str], str]] = {
    "changing": lambda row, rows, name: f" ({row['seconds'][name] / _first(row):.2f})",
    "ladder": _gain,
    "steps": _gain,
    "cpu": _times_ours,
    "lstm": _memory,
    "host": lambda row, rows, name: "",
}
"""What a section says of a contestant, behind its time; the others TFLOP/s."""


def _time(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"
