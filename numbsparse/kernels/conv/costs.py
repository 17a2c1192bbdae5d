"""How long each rung is expected to take on an H200: the basis of `chosen`.

Microseconds are a sum of what was found to count, each with a factor of the rung, the kind of
product, the numbers and the block size: launches; products of kept values; terms of a sum; bytes of
what all taps see of x, or of the boxes that they share; those of the result and w; and terms that
the busiest multiprocessor sums, where lines are as uneven as in a random layout. An output of an
input-gradient at a stride is a square of pixels; `k4_wgmma` multiplies whole squares of outputs.
`costs.json` has the factors, fitted to 497 products that were drawn and timed, of each by the rungs
that were near. Those of over 40 us, and input-gradients at a stride, counted three times; five
points of tests/test_conv_choice.py about ten times more, and rungs not timed there had the times
of the older factors. Six cases of blocks of 16, not weight-gradients, were moved to 107 times of
77 other products, held near those factors: half of them fitted, the others' choice took 1.07 and
1.01 times the best, before 1.12 and 1.03. `python -m numbsparse times --conv --json FILE` fits such
a file to what it measures, without such weights, and so not this very one. What counts is the order
of the rungs.
"""

import json
from functools import cache, lru_cache
from math import ceil, exp, inf, log, prod, sqrt
from pathlib import Path
from typing import Any

from numbsparse.kernels import matmul
from numbsparse.kernels.conv.window import PIXELS, SIDE, Window, even_chunks, spread_of

FILE = Path(__file__).with_name("costs.json")
UNFOLDED, STRIPS, SQUARES = "k2_unfolded", "k6_strips", "k4_wgmma"  # the last of 8 x 8 outputs
MULTIPLIERS = ("k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch")
LARGEST = 64  # block that was measured: larger ones are taken as several
TILE, PLACES = 64, 132  # outputs, and features; multiprocessors
SHARED_UP_TO, LEAST = 256, 1024  # columns; outputs of a part of a sum
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
    outputs, seen, features, n_blocks, square, *more = sizes
    lines, itemsize = product != "weight_grad", 4 if str(dtype) == "float32" else 2
    places = outputs  # which are multiplied
    kept, size = n_blocks * block_size**2, min(block_size, LARGEST)
    unfolds = rung.partition("/")[0] == UNFOLDED
    used = 1 - exp(-kept / size / max(seen, 1)) if unfolds else 1.0  # the rest is left out
    if more and rung == STRIPS and lines and is_shared(outputs, features):
        seen = min(seen, more[0])
    elif more and rung == SQUARES and (itemsize == 2 or not lines):
        places = more[1]
    blocks, copies = kept / size**2, square > 0 and unfolds
    if lines:
        n_lines = max(features / size, 1)
        terms, mean = kept / max(features, 1), blocks / n_lines
        longest = min(mean + sqrt(2 * mean * log(n_lines)), max(seen / size, 1))
        most = ceil(ceil(outputs / TILE) * ceil(features / TILE) / PLACES) * longest * size
    else:
        terms, parts = places, min(max(PLACES / max(blocks, 1), 1), max(outputs / LEAST, 1))
        most = ceil(blocks * parts / PLACES) * outputs / parts
    written = features + square if copies else max(features, square)
    return (
        1 + copies / 2,  # of pixels into their places, which begins early
        places * kept / 1e9,
        terms / 1e3,
        itemsize * places * seen * used / 1e6,
        itemsize * (outputs * written + kept) / 1e6,
        most / 1e3,
    )


def is_shared(outputs: int, features: int, places: int = PLACES) -> bool:
    """Whether what taps load is what limits `k6_strips`, so that the boxes that they share count:
    of few columns, and enough tiles. Of others the factors were fitted without boxes."""
    return features <= SHARED_UP_TO and outputs > TILE * places


def sizes_of(
    product: str, batch: int, window: Window, in_features: int, out_features: int, n_blocks: int
) -> tuple[int, ...]:
    """Outputs; features that each sees, and computes; kept blocks; features of a square, if any;
    features that are loaded for each where taps share boxes; places in squares of outputs."""
    of, chunks = window.whole(product), even_chunks(window.seeing(product))
    (depth, high, wide), n_read = of.view.counts, in_features
    outputs, offsets, square = batch * prod(of.view.counts), len(of.seen[0]), prod(of.view.residues)
    computed = out_features
    if product == "input_grad":
        n_read, computed = out_features, in_features * len(of.reached[0])
    pixels = prod(1 + s / SIDE for s in spread_of(chunks)) * len(chunks)
    across, down = (PIXELS, 1) if depth == high == 1 else (SIDE, SIDE)
    squares = batch * depth * (-(-high // down) * -(-wide // across) * PIXELS)
    of_square = in_features * square if square > 1 else 0
    more = int(n_read * pixels), squares
    return outputs, n_read * offsets, computed, n_blocks, of_square, *more


@lru_cache(1024)
def multipliers(
    product: str, block_size: int, dtype: Any, precision: str, outputs: int, *sizes: int
) -> list[tuple[float, str]]:
    """The rungs of `matmul` that multiply what is unfolded, the fastest first; their times."""
    of = product, block_size, dtype
    return sorted(
        (microseconds(f"{UNFOLDED}/{name}", *of, precision, outputs, *sizes), name)
        for name in MULTIPLIERS
        if outputs <= MOST_OUTPUTS.get(name, outputs)
        and matmul.rung(name).unsupported(*of, "cuda", outputs, precision) is None  # on this card
    )
