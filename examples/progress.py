"""A progress bar: tqdm's where it is installed, else a line now and then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Bar:
    """Shows how far a training is, its loss, and how fast it reads.

    `unit` is what bits are counted for and `read` what is read: characters, unless said.
    """

    def __init__(self, name: str, steps: int, first: int, unit: str = "char", read: str = "chars"):
        self.name, self.steps, self.first, self.unit, self.read = name, steps, first, unit, read
        self.began = self.spoke = time.perf_counter()
        self.bar = tqdm(total=steps, initial=first, desc=name, unit="step") if tqdm else None

    def show(self, step: int, point: tuple[float, float, float], size: int) -> None:
        """`point` is (step, bits in training, held-out bits or NaN); a step reads `size`."""
        _, bits, held_out = point
        speed = (step - self.first) * size / (time.perf_counter() - self.began)
        loss = f"loss {bits * 0.6931:.3f}, {bits:.3f} bits/{self.unit}"
        line = f"{loss}, {speed:,.0f} {self.read}/s"
        if held_out == held_out:  # not NaN
            message = f"{self.name} step {step}: {held_out:.3f} bits/{self.unit} held out"
            self.bar.write(message) if self.bar else print(f"{message}; {line}", flush=True)
        if self.bar:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(step - self.bar.n)


@contextmanager
def progress_bar(name: str, steps: int, first: int = 0, **what: str) -> Iterator[Bar]:
    """`what` is the bar's unit and what is read, where it is not text."""
    bar = Bar(name, steps, first, **what)
    try:
        yield bar
    finally:
        if bar.bar:
            bar.bar.close()
