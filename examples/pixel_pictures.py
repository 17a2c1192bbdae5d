"""The pictures of pixelcnn.py, where matplotlib is installed."""

from pathlib import Path
from typing import Any

import numpy as np

MOST = 8  # images in a row


def write_samples(file: Path, rows: dict[str, np.ndarray]) -> bool:
    """Images (n, 32, 32, 3) of bytes, a titled grid for each kind. Whether it was drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no pictures: pip install matplotlib")
        return False
    grids = {title: grid(images) for title, images in rows.items()}
    height = sum(g.shape[0] for g in grids.values())
    width = max(g.shape[1] for g in grids.values())
    figure = Figure(figsize=(7, 7 * height / width + 0.4 * len(grids)), layout="constrained")
    ratios = [g.shape[0] for g in grids.values()]
    panels = figure.subplots(len(grids), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (title, picture) in zip(panels, grids.items(), strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_axis_off()
    figure.savefig(file, dpi=150)
    return True


def grid(images: np.ndarray) -> np.ndarray:
    """Images side by side, white between them, `MOST` in a row."""
    count, height, width, _ = images.shape
    across = min(count, MOST)
    down = -(-count // across)
    picture = np.full((down * (height + 2) - 2, across * (width + 2) - 2, 3), 255, np.uint8)
    for k, image in enumerate(images):
        i, j = k // across * (height + 2), k % across * (width + 2)
        picture[i : i + height, j : j + width] = image
    return picture


def write_curves(file: Path, runs: list[dict[str, Any]]) -> None:
    """Held-out bits by images seen: the mean over the seeds, and the range of all of them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind in dict.fromkeys(run["kind"] for run in runs):
        alike = [run for run in runs if run["kind"] == kind]
        marks = [[(s, h) for s, _, h in run["curve"] if h is not None] for run in alike]
        steps, held_out = np.moveaxis(np.array(marks), 2, 0)  # (seeds, marks) each
        seen = steps[0] * alike[0]["images"] / steps[0, -1]
        label = f"{kind}: {size_of(alike[0])}"
        axes.plot(seen, held_out.mean(0), "o-", markersize=3, label=label)
        axes.fill_between(seen, held_out.min(0), held_out.max(0), alpha=0.25)
    seeds, kinds = (len({run[key] for run in runs}) for key in ("seed", "kind"))
    title = "PixelCNN++" + (" at equal parameters" if kinds > 1 else "")
    axes.set(xlabel="images seen", ylabel="bits per dimension, held out",
        title=title + (f", {seeds} seeds: mean and range" if seeds > 1 else ""))  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def size_of(run: dict[str, Any]) -> str:
    """What tells the sizes of two models apart, in a line."""
    blocks = f"{run['blocks']} block{'s' if run['blocks'] > 1 else ''} a stage"
    size = f"{blocks}, {run['filters']} filters, density {run['density']:.2f}"
    return f"{size}, {run['parameters']:,} parameters"
