"""Time several calls side by side: in turn, again and again, the median of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from numbsparse.device import is_available, synchronize

SAMPLES_IN_A_TURN = 5
PAUSE = 0.25  # seconds


def times(
    calls: dict[str, Callable[[], Any]], *, seconds: float = 1.0, on_gpu: bool = False
) -> dict[str, float]:
    """Median seconds per call. In turn, so that a slow moment of the machine meets them all.

    A turn begins with a pause, because the threads of other libraries spin on for a while, and a
    call that is not timed. On a GPU a sample is as many calls as take about 5 ms, and a wait.
    """
    wait = _wait_for_gpu if on_gpu else _no_wait
    pause = 0.0 if on_gpu else min(PAUSE, seconds)
    counts = {}
    for name, call in calls.items():
        call()  # compiles, and warms the caches
        wait()
        counts[name] = max(1, round(5e-3 / _sample(call, 1, wait))) if on_gpu else 1
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 10:
        for name, call in calls.items():
            time.sleep(pause)
            call()
            samples[name] += [_sample(call, counts[name], wait) for _ in range(SAMPLES_IN_A_TURN)]
    return {name: median(taken) for name, taken in samples.items()}


def _sample(call: Callable[[], Any], count: int, wait: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - began) / count


def _no_wait() -> None:
    pass


def _wait_for_gpu() -> None:
    if is_available():
        synchronize()
