"""How long each rung is expected to take on an H200: the basis of `chosen`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches; products of kept values; terms of the longest
sum; bytes of what is read of x, at all offsets where they are unfolded; and those of the result and
w. An output of an input-gradient at a stride is a square of pixels. `costs.json` has the factors,
which fit convolutions that were drawn and timed; `python -m numbsparse times --conv` makes it.
Those that are there fit 760 products of four runs, with 0.1 us at least for a megabyte of results.
What counts is the order of the rungs.
"""

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from math import inf, prod
from pathlib import Path
from typing import Any

from numbsparse.kernels import matmul
from numbsparse.kernels.conv.window import Window

FILE = Path(__file__).with_name("costs.json")
UNFOLDED = "k2_unfolded"
MULTIPLIERS = ("k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch")
LARGEST = 64  # block that was measured: larger ones are taken as several
BOXES, SEVERAL_BOXES = ("k4_wgmma", "k6_strips"), 1.7  # times as long, where taps have several
COPYING = (UNFOLDED, "k6_strips")  # pixels of such outputs into their places, by a launch
MOST_OUTPUTS = {"k8_small_batch": 4096}  # for which it was measured: it takes them 64 at a time


@cache
def measured() -> dict[str, list[float]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["factors"]


def microseconds(
    rung: str, product: str, block_size: int, dtype: Any, precision: str, *sizes: int
) -> float:
    """Of a product of so many outputs, and more that `counts` takes; inf where none was timed.

    rung : of k2, which sees the features of all taps, with a slash and the rung that multiplies
    """
    factors = measured().get(case_of(rung, product, block_size, dtype, precision))
    if factors is None:
        return inf
    found = counts(rung, product, block_size, dtype, *sizes)
    return sum(factor * count for factor, count in zip(factors, found, strict=True))


def case_of(rung: str, product: str, block_size: int, dtype: Any, precision: str) -> str:
    """What shares factors."""
    kind = "weight_grad" if product == "weight_grad" else "lines"
    numbers = f"float32 {precision}" if str(dtype) == "float32" else "float16"  # as bfloat16
    return f"{rung} {kind} {numbers} {min(block_size, LARGEST)}"


def counts(rung: str, product: str, block_size: int, dtype: Any, *sizes: int) -> tuple[float, ...]:
    """What takes time, of what `sizes_of` gives."""
    outputs, seen, features, n_blocks, residues = sizes
    kept, itemsize = n_blocks * block_size**2, 4 if str(dtype) == "float32" else 2
    copies = int(residues > 1 and rung.partition("/")[0] in COPYING)
    return (
        1 + copies / 2,  # which begins early
        outputs * kept / 1e9,
        (outputs if product == "weight_grad" else kept / max(features, 1)) / 1e3,
        itemsize * outputs * seen / 1e6,
        itemsize * (outputs * features * (1 + copies) + kept) / 1e6,
    )


def sizes_of(
    product: str, batch: int, window: Window, in_features: int, out_features: int, n_blocks: int
) -> tuple[int, int, int, int, int]:
    """Outputs, the features that each sees of a pixel, and has; kept blocks; residues of pixels."""
    view = window.whole(product).view
    outputs, residues = batch * prod(view.counts), prod(view.residues)
    if product == "input_grad":
        return outputs, out_features, in_features * residues, n_blocks, residues
    return outputs, in_features, out_features, n_blocks, residues


def boxes_time(rung: str, product: str, window: Window) -> float:
    """How many times as long it takes that boxes have every second pixel, and taps several."""
    strided = product == "weight_grad" and max(window.stride) > 1 and window.taps > 1
    return SEVERAL_BOXES if strided and rung in BOXES else 1.0


def unfolded(product: str, window: Window, outputs: int, seen: int, *sizes: int) -> tuple[int, ...]:
    """The same of the product of matrices that k2 makes of it."""
    return outputs, seen * len(window.whole(product).seen[0]), *sizes


def multipliers(
    product: str, block_size: int, dtype: Any, precision: str, outputs: int, *sizes: int
) -> Iterator[tuple[float, str]]:
    """The rungs of `matmul` that multiply what is unfolded, on this card: (microseconds, name)."""
    for time, name in _multipliers(product, block_size, dtype, precision, outputs, *sizes):
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
