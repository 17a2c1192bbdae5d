"""A progress bar: tqdm's where it is installed, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Bar:
    """Shows how far a training is, its loss, and how fast it reads."""

    def __init__(self, name: str, steps: int, first: int):
        self.name, self.steps, self.first = name, steps, first
        self.began = self.spoke = time.perf_counter()
        self.bar = tqdm(total=steps, initial=first, desc=name, unit="step") if tqdm else None

    def show(self, step: int, point: tuple[float, float, float], characters: int) -> None:
        """`point` is (step, bits per character in training, held-out bits or NaN)."""
        _, bits, held_out = point
        speed = (step - self.first) * characters / (time.perf_counter() - self.began)
        line = f"loss {bits * 0.6931:.3f}, {bits:.3f} bits/char, {speed:,.0f} chars/s"
        if held_out == held_out:  # not NaN
            message = f"{self.name} step {step}: {held_out:.3f} bits/char held out"
            self.bar.write(message) if self.bar else print(f"{message}; {line}", flush=True)
        if self.bar:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(step - self.bar.n)


@contextmanager
def progress_bar(name: str, steps: int, first: int = 0) -> Iterator[Bar]:
    bar = Bar(name, steps, first)
    try:
        yield bar
    finally:
        if bar.bar:
            bar.bar.close()
