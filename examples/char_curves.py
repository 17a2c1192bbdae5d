"""The pictures of char_lm.py, where matplotlib is installed."""

from pathlib import Path

import numpy as np

import numbsparse as ns


def write_pictures(folder: Path, curves: dict[str, list], pattern: np.ndarray) -> None:
    """The learning curves and the layout."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no pictures: pip install matplotlib")
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        step, training, held_out = np.array(curve).T
        seen = np.isfinite(held_out)
        (line,) = axes.plot(step, training, alpha=0.35, label=f"{name}, training")
        colour = line.get_color()
        axes.plot(step[seen], held_out[seen], "o-", color=colour, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per character", title="Learning curve")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "learning_curve.png", dpi=150)
    ns.draw(pattern).save(folder / "layout.png")
