"""k6_strips: rows that are found in images, and boxes of pixels that taps share."""

import inspect
import re

import numpy as np
import pytest
from conv_helpers import ConvCase, ConvProblem, needs_cuda, run, skip_unless_served, why_not

from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.conv import PRODUCTS, costs, rung
from numbsparse.kernels.parts import pixels, swizzle
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
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("product", PRODUCTS[:2])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_taps_that_share_boxes(case, product, dtype, monkeypatch):
    """However few tiles there are."""
    check_shared(case, product, dtype, True, monkeypatch)


@needs_cuda
@pytest.mark.parametrize(("dtype", "product", "case"), NO_ROOM, ids=str)
def test_taps_share_no_boxes_of_which_a_stage_has_no_room(dtype, product, case, monkeypatch):
    check_shared(case, product, dtype, False, monkeypatch)


def check_shared(case, product, dtype, has_room, monkeypatch):
    skip_unless_served("k6_strips", product, case, dtype)
    room, has_steps = [], rung("k6_strips").has_steps
    monkeypatch.setattr(
        rung("k6_strips"), "has_steps", lambda *of: room.append(has_steps(*of)) or room[-1]
    )
    rung("k6_strips").tile_and_boxes.cache_clear()
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, dtype)).all()
    assert room[0] == has_room
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
def test_taps_share_boxes_in_weight_gradients(case, dtype, boxes_always):
    skip_unless_served("k6_strips", "weight_grad", case, dtype)
    problem = ConvProblem(case, dtype)
    tile, boxes = boxes_always(weight_gradient(case, dtype, 96, problem.layout.n_blocks))
    assert boxes is not None
    assert np.prod(tile) == 32
    got = run("k6_strips", "weight_grad", problem, "cuda").astype(np.float64)
    error = abs(got - problem.exact("weight_grad"))
    assert (error <= problem.bound("weight_grad", dtype)).all()


@pytest.fixture
def boxes_always(monkeypatch):
    """`boxes_of_weight_grad`, wherever there are any: small products load little for a slot."""
    k6 = rung("k6_strips")
    monkeypatch.setattr(k6, "LOADS_OF_A_SLOT", dict.fromkeys(k6.BLOCK_SIZES, 0.0))
    k6.boxes_of_weight_grad.cache_clear()
    yield k6.boxes_of_weight_grad
    k6.boxes_of_weight_grad.cache_clear()


def weight_gradient(case, dtype, features, n_blocks):
    of = case.batch, case.window, features, features, n_blocks
    return costs.sizes_of("weight_grad", case.block_size, as_dtype(dtype), *of)


@needs_cuda
def test_taps_share_no_boxes_where_rows_of_a_tile_would_share_banks(boxes_always):
    """Or at a stride, or of float32, or where a box is no smaller than what its taps see."""
    for image, taps, stride, dtype, shared in (
        *(((56, 56), 3, 1, "float16", True), ((28, 28), 3, 1, "float16", False)),
        *(((14, 14), 3, 1, "float16", False), ((56, 56), 3, 2, "float16", False)),
        *(((56, 56), 3, 1, "float32", False), ((56, 56), 1, 1, "float16", False)),
    ):
        case = ConvCase(8, image, 16, 16, 8, (taps, taps), stride, taps // 2)
        assert (boxes_always(weight_gradient(case, dtype, 64, 9))[1] is not None) == shared
        assert boxes_always(weight_gradient(case, dtype, 1032, 9)) == (None, None)
    apart = ConvCase(8, (64, 64), 16, 16, 8, (2, 2), 1, 8, dilation=16)
    assert boxes_always(weight_gradient(apart, "float16", 64, 9)) == (None, None)


@needs_cuda
def test_taps_share_no_boxes_where_a_slot_loads_little():
    """Of many kept blocks: then regions, which are smaller in boxes, take longer."""
    k6 = rung("k6_strips")
    case = ConvCase(8, (56, 56), 16, 16, 16, (3, 3), 1, 1)
    loads = []
    for density in (0.02, 0.05, 0.2, 0.8):
        sizes = weight_gradient(case, "float16", 512, round(density * 9 * 32**2))
        loads.append(k6.loads_of_a_slot(sizes))
        shared = k6.boxes_of_weight_grad(sizes)[1] is not None
        assert shared == (loads[-1] >= k6.LOADS_OF_A_SLOT[16])
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] < loads[0] / 3


def test_rows_that_are_read_at_once_share_no_banks():
    for tile, box, turns in (
        ((1, 1, 7, 7), (1, 1, 9, 9), 1),
        ((3, 1, 5, 4), (3, 1, 6, 5), 1),
        ((1, 1, 8, 8), (1, 1, 10, 10), 1),
        ((1, 1, 1, 5), (1, 1, 1, 7), 1),
        ((2, 2, 3, 3), (2, 3, 5, 5), 1),
        ((1, 1, 8, 1), (1, 1, 8, 8), 8),  # all in the same banks
    ):
        order, lines = pixels.spread_rows(tile, box), pixels.lines_in_box(tile, box)
        assert sorted(order) == list(range(np.prod(tile)))
        eights = [lines[order[at : at + 8]] % 8 for at in range(0, order.size, 8)]
        assert max(np.bincount(each).max() for each in eights) == turns
    natural = pixels.lines_in_box((1, 1, 7, 7), (1, 1, 9, 9))[:8] % 8
    assert np.bincount(natural).max() == 2


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
