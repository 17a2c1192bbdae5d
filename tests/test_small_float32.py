"""float32 in k7_small_blocks, where a layout takes several strips, stages, regions and boxes."""

from __future__ import annotations

import numpy as np
import pytest

from numbsparse import device
from numbsparse.kernels.matmul import PRODUCTS, rung
from numbsparse.kernels.matmul.k7_small_blocks import single_boxes, strip_plan
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import Region, plan_regions
from numbsparse.layout import Layout
from numbsparse.testing import Case, check_rung

needs_a_gpu = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")

CASES = [
    Case(batch=3, in_features=300, out_features=40, block_size=16, density=0.9),
    Case(batch=3, in_features=150, out_features=36, block_size=8, density=0.5),
    Case(batch=66, in_features=40, out_features=60, block_size=8, density=0.2),
]


@needs_a_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, case):
    check_rung(rung("k7_small_blocks"), product, case, "float32", "cuda")


@needs_a_gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_feature_major_activations(product, size, precision):
    case = Case(batch=5, in_features=43, out_features=30, block_size=size)
    kernels = rung("k7_small_blocks")
    check_rung(kernels, product, case, "float32", "cuda", 0, precision, feature_major=True)


@pytest.mark.parametrize("widths", [(960, 704), (950, 700)], ids=["whole", "ragged"])
@pytest.mark.parametrize("B", [8, 16])
def test_boxes_bring_every_group_to_its_place(rng, B, widths):
    sides = tuple(-(-width // B) for width in widths)
    pattern = rng.random(sides) < 0.1
    pattern[10:20] = False  # so that neighbours in a stage are none in x
    index = Layout(pattern).index
    region = Region(4, 16, 14, 16, 2, ITEM=4)
    _, groups, *_ = plan_regions(index, B, sides, region, 4)
    _, boxes, *_ = single_boxes.plan_boxes(index, B, widths, region, 4)
    found, sizes = np.full(boxes.shape, -1), set()
    for own, row in zip(boxes, found, strict=True):
        for box in own[own >= 0]:
            first, place = box >> single_boxes.GROUP_AT, box >> single_boxes.PLACE_AT & 0xFF
            size = single_boxes.WIDE if box & single_boxes.IS_WIDE else 1
            assert size == 1 or (first + size) * region.FEATURES <= widths[box & 1]
            assert (row[place : place + size] < 0).all()
            row[place : place + size] = 2 * np.arange(first, first + size) + (box & 1)
            sizes.add(size)
    np.testing.assert_array_equal(found.reshape(-1), groups)
    assert sizes == {1, single_boxes.WIDE}


def test_an_even_order_keeps_warps_together(rng):
    lengths = np.array([100, 80, 1])
    loads = rng.poisson(0.4, (3, 100, 5)) * (np.arange(100) < lengths[:, None])[:, :, None]
    places = strip_plan._evened(loads, lengths)
    for own, load, n in zip(places, loads, lengths, strict=True):
        np.testing.assert_array_equal(np.sort(own[:n]), np.arange(n))
        ahead = np.cumsum(load[np.argsort(own[:n])] - load[:n].mean(0), axis=0)
        as_it_was = np.cumsum(load[:n] - load[:n].mean(0), axis=0)
        assert n == 1 or np.abs(ahead).mean() < 0.5 * np.abs(as_it_was).mean()
