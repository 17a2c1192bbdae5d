"""k6_strips: rows that are found in images, and boxes of pixels that taps share."""

import inspect
import re
from itertools import product as every

import numpy as np
import pytest
from conv_helpers import ConvCase, ConvProblem, needs_cuda, run, skip_unless_served, why_not

from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.conv import PRODUCTS, rung
from numbsparse.kernels.parts import swizzle
from numbsparse.testing import races

PIXELS = [
    ConvCase(2, (5, 13), 16, 24, 8, (2, 3), padding=1),  # a tile of 64 ends within an image
    ConvCase(5, (4, 4), 24, 40, 8, (2, 3), padding=((0, 1), (2, 0))),  # and holds several
    ConvCase(1, (2, 3, 6), 48, 16, 16, (3, 1, 2), padding=1, dilation=(1, 2, 1)),
    ConvCase(1, (70,), 16, 16, 8, (3,), padding="same"),  # and is a part of a line
    ConvCase(7, (3,), 32, 16, 8, (5,), padding=2),  # the last stage of images is not full
    ConvCase(1, (19, 17), 16, 8, 8, (2, 2), stride=2, padding=1),
    ConvCase(2, (4, 3), 64, 72, 8, (2, 1), padding=((1, 0), (0, 0))),  # in groups of 64, and of 32
    ConvCase(2, (3, 5), 22, 16, 8, (3, 1), stride=(2, 1), padding=1),  # pixels that none sees
    ConvCase(1, (4, 8), 8, 136, 8, (1, 1), density=0.2),  # more groups of dy than of x
]


@needs_cuda
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", PIXELS, ids=str)
def test_rows_that_are_found_in_images(case, product, dtype):
    skip_unless_served("k6_strips", product, case, dtype)
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, dtype)).all()


SHARED = [
    ConvCase(2, (9, 8), 40, 24, 8, (4, 4), stride=2, padding=(2, 1)),  # a box for four taps
    ConvCase(1, (4, 5, 9), 32, 16, 16, (3, 2, 3), padding=1),  # two for 18
    ConvCase(1, (10, 9), 128, 24, 8, (5, 1), padding=1, dilation=(2, 1)),
]
NO_ROOM = [  # for so many steps
    ("float16", "forward", ConvCase(1, (4, 4), 64, 64, 8, (3, 3), padding=1, density=1)),
    ("float32", "forward", ConvCase(1, (4, 4), 32, 72, 8, (3, 3), padding=1, density=1)),
]


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "product", "case"),
    [*every(["float16", "float32"], PRODUCTS[:2], SHARED), *NO_ROOM],
    ids=str,
)
def test_taps_that_share_boxes(dtype, product, case, monkeypatch):
    """However few tiles there are."""
    skip_unless_served("k6_strips", product, case, dtype)
    room, has_steps = [], rung("k6_strips").has_steps
    monkeypatch.setattr(
        rung("k6_strips"), "has_steps", lambda *of: room.append(has_steps(*of)) or room[-1]
    )
    rung("k6_strips").tile_and_boxes.cache_clear()
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, dtype)).all()
    assert room[0] == ((dtype, product, case) not in NO_ROOM)
    rung("k6_strips").tile_and_boxes.cache_clear()


@pytest.mark.simulator
def test_only_what_float32_reads_ahead_of_boxes_races():
    """Behind the last step of a stage a place may be anything: then it is read, and not used."""
    if not device.SIMULATED:
        pytest.skip("takes the simulator")
    problem, got = ConvProblem(SHARED[0], "float32"), list[np.ndarray]()
    rung("k6_strips").tile_and_boxes.cache_clear()
    found = races(lambda: got.append(run("k6_strips", "forward", problem, "cuda")))
    lines, first = inspect.getsourcelines(swizzle._in_boxes)
    assert found
    for race in found:
        file, _, line = race.others_at.partition(":")
        assert (file, race.space, race.others_write) == ("swizzle.py", "shared", False)
        assert first <= int(line) < first + len(lines)
        assert race.units[0]  # a copy into the stage behind
    error = abs(got[0].astype(np.float64) - problem.exact("forward"))
    assert (error <= problem.bound("forward", "float32")).all()


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        ConvCase(1, (8, 8), 64, 40, 8, (3, 3), padding=1, density=0.9),  # tiles of 4 x 8
        ConvCase(1, (4, 16), 72, 72, 8, (3, 3), padding=1),  # two groups of features
        ConvCase(4, (2, 8), 40, 24, 8, (3, 2), padding=((1, 1), (1, 0))),  # of two images
        ConvCase(1, (8, 8), 80, 32, 16, (5, 5), padding=2),  # three boxes
        ConvCase(1, (2, 2, 8), 32, 16, 16, (2, 3, 3), padding=((0, 1), (1, 1), (1, 1))),
        ConvCase(1, (4, 10), 16, 48, 16, (3, 3), padding=((1, 1), (0, 0))),  # none beyond the sides
        ConvCase(1, (4, 8), 32, 32, 8, (3, 3), padding=2, dilation=2),
    ],
    ids=str,
)
def test_taps_share_boxes_in_weight_gradients(case, dtype):
    skip_unless_served("k6_strips", "weight_grad", case, dtype)
    of = case.window.whole("weight_grad")
    tile, boxes = rung("k6_strips").boxes_of_weight_grad(of, case.batch, 2, 96)
    assert boxes is not None
    assert np.prod(tile) == 32
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", "weight_grad", problem, "cuda").astype(np.float64)
    error = abs(got - problem.exact("weight_grad"))
    assert (error <= problem.bound("weight_grad", dtype)).all()


def test_taps_share_no_boxes_where_rows_of_a_tile_would_share_banks():
    """Or at a stride, or of float32, or where a box is no smaller than what its taps see."""
    found = rung("k6_strips").boxes_of_weight_grad
    for image, taps, stride, item, shared in (
        *(((56, 56), 3, 1, 2, True), ((28, 28), 3, 1, 2, False), ((14, 14), 3, 1, 2, False)),
        *(((56, 56), 3, 2, 2, False), ((56, 56), 3, 1, 4, False), ((56, 56), 1, 1, 2, False)),
    ):
        case = ConvCase(1, image, 16, 16, 8, (taps, taps), stride, taps // 2)
        assert (found(case.window.whole("weight_grad"), 8, item, 64)[1] is not None) == shared
        assert found(case.window.whole("weight_grad"), 8, item, 1032) == (None, None)
    apart = ConvCase(1, (64, 64), 16, 16, 8, (2, 2), 1, 8, dilation=16)
    assert found(apart.window.whole("weight_grad"), 8, 2, 64) == (None, None)


@needs_cuda
@pytest.mark.parametrize(
    ("product", "case", "says"),
    [
        ("input_grad", ConvCase(1, (9,), 16, 16, 8, (3,), stride=3), "a stride of 1 or 2"),
        ("forward", ConvCase(1, (9, 9), 16, 16, 8, (3, 3), stride=(1, 2)), "a stride of 1 or 2"),
        ("input_grad", ConvCase(1, (9,), 16, 20, 8, (3,)), r"multiples of 8 features in \w+, got"),
        ("forward", ConvCase(1, (9,), 16, 20, 8, (3,)), r"got \(16, 20\)"),
        ("forward", ConvCase(1, (200,), 16, 16, 8, (3,), dilation=65), "less far apart"),
    ],
)
def test_images_whose_rows_are_not_found(product, case, says):
    if reason := rung("k6_strips").unsupported(product, 8, as_dtype("float16"), "cuda"):
        pytest.skip(reason)
    assert re.search(says, why_not("k6_strips", product, case, "float16"))
