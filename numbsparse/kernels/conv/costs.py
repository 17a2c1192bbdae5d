"""How long each rung is expected to take on an H200: the basis of `chosen`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches; products of kept values; terms of the longest
sum; bytes of what all taps see of x; and those of the result and w. An output of an input-gradient
at a stride is a square of pixels. `costs.json` has the factors, which fit convolutions that were
drawn and timed; `python -m numbsparse times --conv` makes it. What counts is the order of the
rungs.
"""

import json
from functools import cache, lru_cache
from math import ceil, inf, prod
from pathlib import Path
from typing import Any

from numbsparse.kernels import matmul
from numbsparse.kernels.conv.window import SIDE, Window, even_chunks, spread_of

FILE = Path(__file__).with_name("costs.json")
UNFOLDED = "k2_unfolded"
MULTIPLIERS = ("k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch")
LARGEST = 64  # block that was measured: larger ones are taken as several
STRIPS = ("k6_strips", f"{UNFOLDED}/k7_small_blocks")  # whose tiles, where few, are shared
TILE, SHARES, PLACES = (64, 512), 8, 132  # outputs and features; at most; multiprocessors
SHARED_UP_TO = 256  # columns
MOST_OUTPUTS = {"k8_small_batch": 4096}  # for which it was measured: it takes them 64 at a time


@cache
def measured() -> dict[str, list[float]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["factors"]


def microseconds(
    rung: str, product: str, block_size: int, dtype: Any, precision: str, *sizes: int
) -> float:
    """Of a product of so many outputs, and more that `counts` takes; inf where none was timed.

    rung : of k2 with a slash and the rung that multiplies
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
    outputs, seen, features, n_blocks, square, *in_boxes = sizes
    if rung == STRIPS[0] and product != "weight_grad" and is_shared(outputs, features):
        seen = min(seen, *in_boxes)
    kept, itemsize = n_blocks * block_size**2, 4 if str(dtype) == "float32" else 2
    terms, copies = float(outputs), square > 0 and rung.partition("/")[0] == UNFOLDED
    if product != "weight_grad":
        terms = kept / max(features, 1) / shares(rung, outputs, features)
    written = features + square if copies else max(features, square)
    return (
        1 + copies / 2,  # of pixels into their places, which begins early
        outputs * kept / 1e9,
        terms / 1e3,
        itemsize * outputs * seen / 1e6,
        itemsize * (outputs * written + kept) / 1e6,
    )


def is_shared(outputs: int, features: int, places: int = PLACES) -> bool:
    """Whether taps share boxes of pixels in `k6_strips`: for few columns, and enough tiles."""
    return features <= SHARED_UP_TO and 2 * outputs > TILE[0] * places


def shares(rung: str, outputs: int, features: int) -> float:
    """How many blocks of threads share a sum."""
    rows, columns = TILE
    tiles = ceil(outputs / rows) * ceil(features / columns)
    return min(max(PLACES / max(tiles, 1), 1), SHARES) if rung in STRIPS else 1.0


def sizes_of(
    product: str, batch: int, window: Window, in_features: int, out_features: int, n_blocks: int
) -> tuple[int, int, int, int, int, int]:
    """Outputs; features that each sees, and computes; kept blocks; features of a square, if any;
    features that are loaded for each where taps share boxes."""
    of, seen = window.whole(product), window.seeing(product)
    chunks = even_chunks(seen)
    each = prod(1 + s / SIDE for s in spread_of(chunks)) * len(chunks)
    outputs, offsets, square = batch * prod(of.view.counts), len(of.seen[0]), prod(of.view.residues)
    if product != "input_grad":
        return outputs, in_features * offsets, out_features, n_blocks, 0, int(in_features * each)
    computed, square = in_features * len(of.reached[0]), in_features * square if square > 1 else 0
    return outputs, out_features * offsets, computed, n_blocks, square, int(out_features * each)


def multipliers(
    product: str, block_size: int, dtype: Any, precision: str, outputs: int, *sizes: int
) -> list[tuple[float, str]]:
    """The rungs of `matmul` that multiply what is unfolded, the fastest first; their times."""
    case = product, block_size, dtype, "cuda", outputs, precision
    return [
        (time, name)
        for time, name in _multipliers(product, block_size, dtype, precision, outputs, *sizes)
        if matmul.rung(name).unsupported(*case) is None  # on this card
    ]


@lru_cache(1024)
def _multipliers(*of: Any) -> list[tuple[float, str]]:
    return sorted(
        (microseconds(f"{UNFOLDED}/{name}", *of), name)
        for name in MULTIPLIERS
        if of[4] <= MOST_OUTPUTS.get(name, of[4])
    )
