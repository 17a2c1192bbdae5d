"""Time several calls side by side: in turn, again and again, the median of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

SAMPLES_IN_A_TURN = 5
PAUSE = 0.25  # seconds


def times(calls: dict[str, Callable[[], Any]], *, seconds: float = 1.0) -> dict[str, float]:
    """Median seconds per call. In turn, so that a slow moment of the machine meets them all.

    A turn begins with a pause, because the threads of other libraries spin on for a while, and a
    call that is not timed.
    """
    pause = min(PAUSE, seconds)
    for call in calls.values():
        call()  # compiles, and warms the caches
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 10:
        for name, call in calls.items():
            time.sleep(pause)
            call()
            samples[name] += [_sample(call) for _ in range(SAMPLES_IN_A_TURN)]
    return {name: median(taken) for name, taken in samples.items()}


def _sample(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
