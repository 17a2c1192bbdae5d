"""How long each rung is expected to take on an H200: the basis of `chosen`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches, and what waits for them; products of kept values;
terms of the longest sum; bytes of what is read of x, through all taps where they are unfolded; and
those of the result and w. `costs.json` has the factors, which fit some hundred convolutions that
were drawn and timed. What counts is the order of the rungs.
"""

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Any

from numbsparse.kernels import matmul

FILE = Path(__file__).with_name("costs.json")
UNFOLDED = "k2_unfolded"
MULTIPLIERS = ("k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch")
LARGEST = 64  # block that was measured: larger ones are taken as several
MOST_OUTPUTS = {"k8_small_batch": 4096}  # for which it was measured: it takes them 64 at a time


@cache
def measured() -> dict[str, list[float]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def microseconds(rung: str, *of: Any, passes: int = 1) -> float:
    """Of so many outputs, the features that each sees of a pixel, and has, and the kept blocks.

    rung : of k2, which sees those of all taps, with a slash and the rung that multiplies
    of : product, block size, dtype, precision, and these four numbers
    passes : launches, in each of which other outputs see other taps
    """
    product, block_size, dtype, precision, outputs, seen, features, n_blocks = of
    numbers, itemsize = "float16", 2  # bfloat16 takes as long
    if str(dtype) == "float32":
        numbers, itemsize = f"float32 {precision}", 4
    kind = "weight_grad" if product == "weight_grad" else "lines"
    factors = measured().get(f"{rung} {kind} {numbers} {min(block_size, LARGEST)}")
    if factors is None:
        return inf
    kept = n_blocks * block_size**2
    counts = (
        passes,
        outputs * kept / passes / 1e9,
        (outputs if product == "weight_grad" else kept / max(features, 1)) / 1e3,
        itemsize * outputs * seen / 1e6,
        itemsize * (outputs * features + kept) / 1e6,
    )
    return sum(factor * count for factor, count in zip(factors, counts, strict=True))


def multipliers(*of: Any) -> Iterator[tuple[float, str]]:
    """The rungs of `matmul` that multiply what is unfolded, on this card: (microseconds, name)."""
    product, block_size, dtype, precision, outputs, *_ = of
    for time, name in _multipliers(*of):
        case = product, block_size, dtype, "cuda", outputs, precision
        if matmul.rung(name).unsupported(*case) is None:
            yield time, name


@lru_cache(1024)
def _multipliers(*of: Any) -> list[tuple[float, str]]:
    """Whatever the card, the fastest first."""
    return sorted(
        (microseconds(f"{UNFOLDED}/{name}", *of), name)
        for name in MULTIPLIERS
        if of[4] <= MOST_OUTPUTS.get(name, of[4])
    )
